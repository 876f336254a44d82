"""Small models, and the plain single-process run that every sharded run is compared with."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint

import weft
from weft.fsdp import UnevenDTensor


class Block(nn.Module):
    """A residual MLP block with odd sizes, so that cuts are uneven."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks, tied head. `recompute`: None, "reentrant" or "non-reentrant"."""

    def __init__(self, width: int = 13, hidden: int = 29, depth: int = 3, vocabulary: int = 11) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.recompute: str | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) * self.gain
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x)
        return self.head(self.norm(x))


def make(recompute: str | None = None, seed: int = 0, **sizes: int) -> Net:
    """The same net on every rank."""
    torch.manual_seed(seed)
    net = Net(**sizes)
    net.recompute = recompute
    return net


def shard(net: Net, **options) -> Net:
    """One unit per block, the root last."""
    for block in net.blocks:
        weft.fully_shard(block, **options)
    return weft.fully_shard(net, **options)


def data(steps: int, rows: int, seed: int = 1) -> torch.Tensor:
    """Tokens `[steps, rows, 8]`."""
    return torch.randint(0, 11, (steps, rows, 8), generator=torch.Generator().manual_seed(seed))


def loss_of(net: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of predicting the next token."""
    return F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class _Cast(torch.autograd.Function):
    """A weight in the dtype that computes; its gradient takes the dtype that travels."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor, compute: torch.dtype, travels: torch.dtype) -> torch.Tensor:
        ctx.dtypes = weight.dtype, travels
        return weight.to(compute)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        main, travels = ctx.dtypes
        return gradient.to(travels).to(main), None, None


def loss_as_cast(
    net: nn.Module,
    tokens: torch.Tensor,
    *,
    ranks: int,
    compute: torch.dtype = torch.bfloat16,
    travels: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`loss_of` a plain net whose weights and gradients are cast where a policy with fp32 outputs casts them.

    Each rank's rows on their own: their sums are rounded, those over ranks are not.
    """
    losses = []
    for rows in tokens.chunk(ranks):
        weights = {name: _Cast.apply(p, compute, travels) for name, p in net.named_parameters()}
        weights["head.weight"] = weights["embedding.weight"]
        outputs = torch.func.functional_call(net, weights, (rows[:, :-1],)).float()
        losses.append(F.cross_entropy(outputs.flatten(0, 1), rows[:, 1:].flatten()))
    return torch.stack(losses).mean()


def train(
    net: nn.Module,
    batches: torch.Tensor,
    *,
    rank: int = 0,
    ranks: int = 1,
    microbatches: int = 1,
    loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
    on_microbatch: Callable[[bool], None] = lambda last: None,
    optimizer: Callable = lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1, foreach=True),
    clip: Callable = lambda net, most: torch.nn.utils.clip_grad_norm_(net.parameters(), most),
) -> dict[str, list]:
    """AdamW with clipping over `batches` `[steps, rows, 8]`; each rank takes its rows of each microbatch.

    Returns this rank's losses per microbatch, the clipped norms, and full gradients and weights by name after the last
    step.
    """
    opt = optimizer(net)
    losses, norms = [], []
    for step, batch in enumerate(batches, 1):
        opt.zero_grad()
        for number, part in enumerate(batch.chunk(microbatches)):
            on_microbatch(number == microbatches - 1)
            loss = loss_of(net, part.chunk(ranks)[rank])
            (loss / microbatches).backward()
            losses.append(loss.detach())
        norms.append(full(clip(net, 0.5)))
        if step == len(batches):
            gradients = whole({name: p.grad for name, p in net.named_parameters() if p.grad is not None})
        opt.step()
    weights = whole(net.state_dict())
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def train_here(net: nn.Module, batches: torch.Tensor, **options) -> dict[str, list]:
    """`train` on this rank's rows."""
    return train(net, batches, rank=dist.get_rank(), ranks=dist.get_world_size(), **options)


def assert_same(
    actual: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor | None], **tolerance: float
) -> None:
    """`actual`, sharded or not, has the plain values of `expected`; None where that has None.

    Each rank compares what lies on it with the same part of the plain value. That takes no message, and it sees the
    copies of all replicas.
    """
    assert actual.keys() == expected.keys()
    here, there = {}, {}
    for name, value in actual.items():
        plain = expected[name] if expected[name] is None else expected[name].detach()
        if isinstance(value, UnevenDTensor) and plain is not None:
            assert value.shape == plain.shape, name
            here[name], there[name] = value.detach().to_local(), value.slice_of(plain)
        else:
            here[name], there[name] = value if value is None else full(value), plain
    torch.testing.assert_close(here, there, **tolerance)


def whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The whole tensors, detached. All ranks call it, and send one message for all tensors."""
    sharded = {name: value for name, value in tensors.items() if isinstance(value, DTensor)}
    parts = _parts_of_ranks(sharded) if sharded else []
    ranks: dict[int, list[int]] = {}
    found = {}
    for name, value in tensors.items():
        if name in sharded:
            mesh = value.device_mesh
            if id(mesh) not in ranks:
                ranks[id(mesh)] = mesh.mesh.flatten().tolist()
            flat = torch.full((value.numel(),), -1, dtype=value.dtype)
            known = torch.zeros(value.numel(), dtype=torch.bool)
            for rank in ranks[id(mesh)]:
                places, values = parts[rank][name]
                flat[places], known[places] = values, True
            assert known.all(), f"parts of {name} lie on no rank"
            found[name] = flat.view(value.shape).to(value.device)
        else:
            found[name] = value.detach().clone()
    return found


def _parts_of_ranks(tensors: dict[str, DTensor]) -> list[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Of each rank: the places and the values of its part of each tensor.

    They travel as one array for each dtype: to pickle every tensor takes longer than the steps of many tests.
    """
    arrays = {torch.int64: [_places_of(tensor).flatten() for tensor in tensors.values()]}
    for tensor in tensors.values():
        arrays.setdefault(tensor.dtype, []).append(tensor.detach().to_local().flatten())
    mine = {
        dtype: ([each.numel() for each in those], torch.cat(those).view(torch.uint8).cpu().numpy())
        for dtype, those in arrays.items()
    }
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, ({name: tensor.dtype for name, tensor in tensors.items()}, mine))
    found = []
    for dtypes, theirs in parts:  # ranks of other stages have other tensors
        left = {
            dtype: iter(torch.from_numpy(array).view(dtype).split(sizes)) for dtype, (sizes, array) in theirs.items()
        }
        places = [next(left[torch.int64]) for _ in dtypes]
        found.append({name: (at, next(left[dtype])) for at, (name, dtype) in zip(places, dtypes.items())})
    return found


def _places_of(tensor: DTensor) -> torch.Tensor:
    """The place in the whole tensor of each element of the part that lies here."""
    places = torch.arange(tensor.numel()).view(tensor.shape)
    if isinstance(tensor, UnevenDTensor):
        return tensor.slice_of(places)
    assert not any(each.is_partial() for each in tensor.placements), tensor.placements
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return places[tuple(slice(start, start + size) for start, size in zip(offsets, sizes))]


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, detached."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
