"""The overhead of the pattern language: `[*E][*E]...` compared with a handwritten Transformer of the same layers.

    weft bench groups --ranks 2

The layers are attention (`*`) and experts (`E`). Both models have the same weights and losses, are fully sharded
(ZeRO-3), spread experts over all ranks, and run under the combined schedule. A step is forward and backward of all
microbatches. The CPU time of a step is printed too, because it varies less on a machine that runs other programs.

Finally, two patterns with the same symbols in different groups are compared.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import _link
import _report
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.models import HybridConfig, HybridModel
from weft.models.layers import RotaryEmbedding
from weft.moe import AllToAll, MoE
from weft.overlap import Crossing, forward_backward, run_stages

ROWS, SEQUENCE, MICROBATCHES, LAYERS = 2, 128, 4, 3
CONFIG = HybridConfig(
    pattern="[*E]" * LAYERS,
    hidden_size=256,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
)


class TransformerLayer(nn.Module):
    """Attention and experts, written without `weft.models`."""

    stages = ("attend", "dispatch", "experts", "combine", "finish")

    def __init__(self, rotary: RotaryEmbedding, dispatcher: AllToAll) -> None:
        super().__init__()
        width = CONFIG.hidden_size
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(width, CONFIG.rms_norm_eps) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.moe = MoE(width, CONFIG.moe_intermediate_size, CONFIG.num_experts, 2, dispatcher=dispatcher)
        self.rotary = rotary

    @property
    def dispatcher(self) -> Any:
        """The dispatcher of the experts' rows."""
        return self.moe.dispatcher

    def attend(self, x: Tensor) -> Crossing:
        """Run attention and the router, and sort the rows."""
        normed = self.attention_norm(x)
        q, k, v = (each(normed).unflatten(-1, (CONFIG.num_attention_heads, -1)) for each in (self.q, self.k, self.v))
        q, k, v = (each.transpose(1, 2) for each in (self.rotary(q), self.rotary(k), v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        rows, weights, _, loss, handle = self.moe.send(self.mlp_norm(x))
        return Crossing(rows, {"x": x, "weights": weights}, handle, loss)

    def experts(self, rows: Tensor, handle: Any) -> Tensor:
        """Run the experts of this rank."""
        return self.moe.run_experts(rows, handle)

    def finish(self, rows: Tensor, kept: dict[str, Tensor], handle: Any) -> Tensor:
        """Weight the rows and add the residual."""
        return kept["x"] + self.moe.receive(rows, kept["weights"], None, handle)

    def expert_modules(self) -> Sequence[nn.Module]:
        """Return the modules that only `experts` calls."""
        return [self.moe.experts]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run all stages."""
        return run_stages(self, x)


class Transformer(nn.Module):
    """An embedding, layers and a head."""

    def __init__(self, meshes: weft.Meshes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CONFIG.vocab_size, CONFIG.hidden_size)
        rotary = RotaryEmbedding(CONFIG.attention_head_dim, CONFIG.rope_theta)
        dispatcher = AllToAll(meshes.ep, CONFIG.num_experts)
        self.layers = nn.ModuleList(TransformerLayer(rotary, dispatcher) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(CONFIG.hidden_size, CONFIG.rms_norm_eps)
        self.head = nn.Linear(CONFIG.hidden_size, CONFIG.vocab_size, bias=False)

    @property
    def staged_layers(self) -> Sequence[Any]:
        """The layers."""
        return list(self.layers)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of the tokens."""
        return self.embedding(tokens)

    def loss(self, x: Tensor, tokens: Tensor, labels: Tensor, losses: Sequence[Tensor]) -> Tensor:
        """Return the mean cross-entropy."""
        return weft.models.loss.cross_entropy(self.head(self.norm(x)), labels)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        x = self.embed(tokens)
        for layer in self.layers:
            x, _ = layer(x)
        return self.loss(x, tokens, labels, [])


def by_hand(meshes: weft.Meshes, weights: Sequence[Tensor]) -> Transformer:
    """Return the Transformer with these weights, sharded as by `weft.models.shard`."""
    net = Transformer(meshes)
    with torch.no_grad():
        for parameter, weight in zip(in_order(net), weights, strict=True):
            parameter.copy_(weight)
    expert = {"mesh": meshes.expert, "gradient_divide_factor": dist.get_world_size()}
    for layer in net.layers:
        layer.moe.experts.spread(meshes.ep)
        weft.fully_shard(layer.moe.experts, **expert)
        weft.fully_shard(layer, mesh=meshes.dense)
    return weft.fully_shard(net, mesh=meshes.dense, runtime=weft.RuntimeOptions(separate_all_gather_group=True))


def in_order(net: Transformer) -> list[nn.Parameter]:
    """Return the model's parameters in the order in which a `HybridModel` has them."""
    ordered = [net.embedding.weight]
    for layer in net.layers:
        ordered += [layer.attention_norm.weight, *(each.weight for each in (layer.q, layer.k, layer.v, layer.o))]
        ordered += [*layer.moe.parameters(), layer.mlp_norm.weight]
    return [*ordered, net.norm.weight, net.head.weight]


def hybrid(pattern: str, meshes: weft.Meshes) -> HybridModel:
    """Return a model of this pattern, with the same weights for the same symbols."""
    torch.manual_seed(0)
    return HybridModel(replace(CONFIG, pattern=pattern), meshes=meshes)


def sharded(model: HybridModel, meshes: weft.Meshes) -> HybridModel:
    """Shard all parameters over all ranks."""
    return weft.models.shard(model, meshes, runtime=weft.RuntimeOptions(separate_all_gather_group=True))


def compare(name: str, sides: dict[str, Any], data: list, rounds: int) -> None:
    """Check that two models compute the same losses, measure them alternately, and print the ratios."""
    first, second = sides
    losses = [torch.stack(forward_backward(net, data)) for net in sides.values()]
    torch.testing.assert_close(*losses)
    used: dict[str, list[float]] = {side: [] for side in sides}

    def step(side: str) -> None:
        begin = time.process_time()
        forward_backward(sides[side], data)
        used[side].append(time.process_time() - begin)

    taken = _report.in_turn({side: partial(step, side) for side in sides}, rounds, 1)
    if dist.get_rank() == 0:
        print(f"\n{name}")
        _report.table(taken, first, "ms/step", 1e3)
        for what, seconds in (("time", taken), ("CPU time of rank 0", used)):
            ratios = [mine / theirs for mine, theirs in zip(seconds[first], seconds[second])]
            least = min(seconds[first]) / min(seconds[second])
            print(
                f"{first} / {second}, {what}: median of pairs {statistics.median(ratios):.3f}, of the least {least:.3f}"
            )


def main() -> None:
    """Measure and print, on rank 0."""
    options = _report.parser(__doc__, rounds=31, link="800mbit").parse_args()
    torch.set_num_threads(1)
    with _link.process_group(options.link):
        meshes = weft.init_meshes("cpu", ep=dist.get_world_size())
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = (2, ROWS, SEQUENCE)
        data = [torch.randint(CONFIG.vocab_size, shape, generator=generator).unbind() for _ in range(MICROBATCHES)]
        if dist.get_rank() == 0:
            print(f"{_report.machine()}, on {options.link or 'loopback'}; {MICROBATCHES} x {ROWS} x {SEQUENCE} tokens")
        grouped = hybrid(CONFIG.pattern, meshes)
        hand = by_hand(meshes, [weight.detach().clone() for weight in grouped.parameters()])
        sides: dict[str, Any] = {"[*E]": sharded(grouped, meshes), "by hand": hand}
        compare("the same Transformer", sides, data, options.rounds)
        spellings = ("[M*E]" * 2, "M[*E]" * 2)
        compare("in groups", {each: sharded(hybrid(each, meshes), meshes) for each in spellings}, data, options.rounds)


if __name__ == "__main__":
    main()
