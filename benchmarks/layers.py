"""Forward and backward of single layers, compared with the torch path of the same layers in transformers.

    weft bench layers --ranks 1

Mamba-2 (chunked) is compared with Nemotron-H's, the gated delta net (chunked) with Qwen3-Next's, and the experts with
Mixtral's default path. The printed memory is the memory that autograd keeps from forward to backward.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _report import in_turn, machine, parser, table
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralForCausalLM
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHConfig, NemotronHMamba2Mixer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextConfig, Qwen3NextGatedDeltaNet

from weft.models import HybridConfig, HybridModel

BATCH, SEQUENCE, HIDDEN = 2, 1024, 256
CONFIG = HybridConfig(
    pattern="MG*E",
    hidden_size=HIDDEN,
    mamba_num_heads=8,
    mamba_head_dim=64,
    ssm_state_size=64,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    num_experts=8,
    moe_intermediate_size=512,
)


def theirs() -> dict[str, Callable[[Tensor], Tensor]]:
    """Return transformers' layers, by the names of weft's layers."""
    mamba = NemotronHConfig(
        hidden_size=HIDDEN,
        layers_block_type=["linear_attention"],
        mamba_num_heads=8,
        mamba_head_dim=64,
        ssm_state_size=64,
        n_groups=1,
        chunk_size=CONFIG.chunk_size,
    )
    delta = Qwen3NextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    )
    experts = MixtralConfig(
        vocab_size=8,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=1,
        num_local_experts=8,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return {
        "Mamba-2": NemotronHMamba2Mixer(mamba, 0),
        "gated delta net": Qwen3NextGatedDeltaNet(delta, 0),
        "experts": MixtralForCausalLM(experts).model.layers[0].mlp,
    }


def ours() -> dict[str, Callable[[Tensor], Tensor]]:
    """Return weft's layers without norm and residual, like those of transformers."""
    layers: Any = HybridModel(CONFIG).decoder.layers
    return {
        "Mamba-2": partial(layers[0].mixer.mix, state=None),
        "gated delta net": partial(layers[1].mixer.mix, state=None),
        "experts": lambda x: layers[3].mlp(x)[0],
    }


def step(layer: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Run forward and backward."""
    layer(x).sum().backward()


def kept(layer: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return the MiB that autograd keeps; storage that several tensors share counts once."""
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        sizes[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = layer(x)
    del output
    return sum(sizes.values()) / 2**20


def main() -> None:
    """Measure both sides alternately; print milliseconds per step, the ratio, and the memory of both."""
    options = parser(__doc__, steps=3).parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, requires_grad=True)
    of_both = {"weft": ours(), "transformers": theirs()}
    if dist.get_rank() == 0:
        print(f"{BATCH} x {SEQUENCE} x {HIDDEN}, fp32, forward and backward; {machine()}")
    for name in of_both["weft"]:
        sides = {side: partial(step, layers[name], x) for side, layers in of_both.items()}
        taken = in_turn(sides, options.rounds, options.steps)
        memory = {side: kept(layers[name], x) for side, layers in of_both.items()}
        if dist.get_rank() == 0:
            print(f"\n{name}: " + ", ".join(f"{side} keeps {size:.0f} MiB" for side, size in memory.items()))
            table(taken, "weft", "ms/step", 1e3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
