"""The part of a parameter that a rank computes with, where the ranks of a tensor-parallel axis share a layer.

parameter            at rest                  in a product         its gradient
-------------------  -----------------------  -------------------  ------------------------------------
of one process       plain                    whole                whole
cut                  DTensor, Shard(dim)      this rank's slice    that of the slice
read in parts        DTensor, Replicate()     this rank's spans    partial: summed over the ranks
whole                DTensor, Replicate()     whole                partial: summed over the ranks

A parameter is read in parts where this rank's rows are no slice of it: the fused projections of recurrences, and heads,
groups or tokens that do not divide by the number of ranks. Nothing is whole and has a gradient that every rank knows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from weft.fsdp.gradients.direct import local_part
from weft.fsdp.gradients.partial import whole

PARTS = "tensor_parallel_parts"
"""Where a module keeps the parts of its own parameters, by name."""


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut: along `dim`, each of its `sections`, (units, width of a unit), by itself."""

    dim: int
    sections: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """What a rank computes with of one parameter.

    `spans`: (start, length) along `dim` of a parameter that is cut, or read in parts. `share`: each rank adds an equal
    share of it to a sum over the ranks, as of the bias of a projection whose input is cut.
    """

    mesh: DeviceMesh
    is_cut: bool = False
    dim: int = 0
    spans: tuple[tuple[int, int], ...] | None = None
    share: bool = False

    def of(self, parameter: Any) -> Tensor:
        """The part, differentiable."""
        if self.is_cut:
            return local_part(parameter)
        full = whole(parameter, self.mesh)
        if self.spans is not None:
            found = [full.narrow(self.dim, start, length) for start, length in self.spans]
            return found[0] if len(found) == 1 else torch.cat(found, dim=self.dim)
        return full / self.mesh.size() if self.share else full


def part(module: nn.Module, name: str) -> Any:
    """What this rank computes with of the parameter `name` of `module`; None where there is none."""
    parameter = module._parameters[name] if name in module._parameters else getattr(module, name)
    how = vars(module).get(PARTS)
    if parameter is None or how is None:
        return parameter
    return how[name].of(parameter)


def place(module: nn.Module, name: str, mesh: DeviceMesh, cut: Cut | None, *, share: bool = False) -> None:
    """Turn the whole parameter `name` into a DTensor over the 1-D `mesh`; `cut`: None keeps it whole."""
    parameter = module._parameters[name]
    assert parameter is not None
    local, how = parameter.detach(), Part(mesh, share=share)
    if cut is not None:
        dim, size, rank = cut.dim % parameter.dim(), mesh.size(), mesh.get_local_rank()
        assert sum(units * width for units, width in cut.sections) == parameter.shape[dim], (name, cut)
        spans = spans_of(cut.sections, size, rank)
        if len(spans) == 1 and cut.sections[0][0] % size == 0:
            how = Part(mesh, is_cut=True, dim=dim, spans=tuple(spans))
            local = local.narrow(dim, *spans[0]).clone(memory_format=torch.contiguous_format)
        else:
            how = Part(mesh, dim=dim, spans=tuple(spans))
    placement = Shard(how.dim) if how.is_cut else Replicate()
    spread = nn.Parameter(DTensor.from_local(local, mesh, [placement], run_check=False), parameter.requires_grad)
    vars(spread).update(vars(parameter))
    module._parameters[name] = spread
    vars(module).setdefault(PARTS, {})[name] = how


def spans_of(sections: Sequence[tuple[int, int]], ranks: int, rank: int) -> list[tuple[int, int]]:
    """What of each section (units, width) is `rank`'s, as (start, length); fewer units than ranks are shared."""
    found, before = [], 0
    for units, width in sections:
        start, count = units_of(units, ranks, rank)
        found.append((before + start * width, count * width))
        before += units * width
    return found


def units_of(units: int, ranks: int, rank: int) -> tuple[int, int]:
    """The units of `rank`, (first, how many): equal parts, or one that ranks share; else the last ranks have fewer."""
    if ranks % units == 0:
        return rank * units // ranks, 1
    each = -(-units // ranks)
    start = min(rank * each, units)
    return start, min(each, units - start)
