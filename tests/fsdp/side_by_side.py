"""One script, run with torch's FSDP2 and with weft: what the two must have in common.

A script takes the namespace that the names come from, `torch.distributed.fsdp` or `weft`. What it returns must be
equal: numbers, and what kind of tensor is registered when.
"""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path

import weft
from tests.fsdp import nets
from weft.fsdp.parameter import is_ignored


class Net(nn.Module):
    """`nets.Net` without its 0-D parameter, which FSDP2 refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 13)
        self.blocks = nn.ModuleList(nets.Block(13, 29) for _ in range(3))
        self.norm = nn.LayerNorm(13)
        self.head = nn.Linear(13, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def mesh_of(*shape: int) -> DeviceMesh:
    """Over the ranks, on CPU; the default mesh would be the accelerator's, where there is one."""
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "shard")[-len(shape) :])


def make(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def bottom_up(fsdp: ModuleType, net: nn.Module, **options: Any) -> Any:
    options.setdefault("mesh", mesh_of())
    for block in net.blocks:
        fsdp.fully_shard(block, **options)
    return fsdp.fully_shard(net, **options)


def batches(steps: int = 3, rows: int = 8) -> list[torch.Tensor]:
    """This rank's rows of each step."""
    return [mine(batch) for batch in nets.data(steps, rows)]


def mine(batch: torch.Tensor) -> torch.Tensor:
    """This rank's rows."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def kinds(net: nn.Module) -> dict[str, tuple]:
    """What is registered under each name: DTensor or plain, its dtype and shape, and whether it trains."""
    return {
        name: ("DTensor" if isinstance(p, DTensor) else "plain", p.dtype, tuple(p.shape), p.requires_grad)
        for name, p in net.named_parameters()
    }


def kinds_between(net: nn.Module) -> dict[str, tuple]:
    """Likewise between passes, where torch registers what stays whole, and weft the sharded parameters."""
    if isinstance(net, weft.FSDPModule):
        assert all(isinstance(p, DTensor) or is_ignored(p) for p in net.parameters())
    return {name: (tuple(p.shape), p.requires_grad) for name, p in net.named_parameters()}


def with_gradients(net: nn.Module) -> list[str]:
    """The sharded parameters that have a gradient. A plain one tells too much: between backwards that do not reduce,
    torch keeps what it accumulates in `.grad` of the full parameter, weft in a buffer."""
    return sorted(name for name, p in net.named_parameters() if isinstance(p, DTensor) and p.grad is not None)


def whole(net: nn.Module) -> dict[str, dict]:
    """Full weights and gradients, by name; a parameter without gradient is left out."""
    found: dict[str, dict] = {"weights": {}, "gradients": {}}
    gradients = {("gradients", name): p.grad for name, p in net.named_parameters() if p.grad is not None}
    weights = {("weights", name): value for name, value in net.state_dict().items()}
    for (kind, name), value in nets.whole({**weights, **gradients}).items():
        found[kind][name] = value
    return found


def both(script: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """What the script returns with weft, and with FSDP2."""
    return script(weft, *args), script(torch_fsdp, *args)


def differences(actual: Any, expected: Any, where: str = "") -> Iterator[str]:
    """Where two trees of plain values differ."""
    if isinstance(expected, dict) and isinstance(actual, dict) and actual.keys() == expected.keys():
        for key, value in expected.items():
            yield from differences(actual[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, list) and isinstance(actual, list) and len(actual) == len(expected):
        for number, value in enumerate(expected):
            yield from differences(actual[number], value, f"{where}[{number}]")
    elif actual != expected:
        yield f"{where}: {actual}, with FSDP2 {expected}"


def assert_same(script: Callable[..., tuple[Any, Any]], *args: Any, **tolerance: float) -> None:
    """The script returns numbers, which must be close, and anything else, which must be equal."""
    (numbers, facts), (expected, expected_facts) = both(script, *args)
    assert not (found := list(differences(facts, expected_facts))), "\n".join(found[:8])
    torch.testing.assert_close(numbers, expected, **tolerance)


def steps(net, *, before=lambda number, last: None, micro=2, clip=None, seen=None, parameters=None):
    """Two steps of `micro` microbatches; returns the numbers on the way."""
    optimizer = torch.optim.AdamW(parameters or net.parameters(), lr=1e-2)
    numbers = []
    for batch in batches(2, 4 * micro):
        for number, part in enumerate(batch.chunk(micro)):
            before(number, number == micro - 1)
            (net.loss(part) / micro).backward()
            if seen is not None:
                own = [p for group in optimizer.param_groups for p in group["params"]]
                own = [number for number, p in enumerate(own) if isinstance(p, DTensor) and p.grad is not None]
                seen.append([kinds_between(net), own])
        if clip is not None:
            numbers.append(clip(net))
        for child in net.modules():
            if hasattr(child, "reshard"):
                child.reshard()
        numbers.append(whole(net))
        optimizer.step()
        optimizer.zero_grad()
    return [*numbers, whole(net)]


def trained_pair(fsdp, seed=0, count=2, mesh=None):
    """A sharded net and its optimizer after some steps."""
    net = make(seed)
    bottom_up(fsdp, net, mesh=mesh or mesh_of())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for batch in batches()[:count]:
        a_step(net, optimizer, batch)
    return net, optimizer


def a_step(net, optimizer, batch):
    net.loss(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def tensors(tree: Any) -> dict[str, torch.Tensor]:
    """The whole tensors of a tree, by path."""
    leaves = tree_flatten_with_path(tree)[0]
    return nets.whole({keystr(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)})


def facts_of(tree: Any) -> dict[str, Any]:
    """What is at each path of a tree: for a tensor, which kind it is of."""
    found = {}
    for path, leaf in tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, torch.Tensor):
            kind = "DTensor" if isinstance(leaf, DTensor) else "plain"
            leaf = (kind, leaf.dtype, tuple(leaf.shape), leaf.device.type)
        found[keystr(path)] = leaf
    return found
