"""The part of each parameter that a rank uses in its computation under tensor parallelism.

parameter            at rest                  in a product         its gradient
-------------------  -----------------------  -------------------  ------------------------------------
without parallelism  plain                    whole                whole
cut                  DTensor, Shard(dim)      this rank's slice    the gradient of the slice
read in parts        DTensor, Replicate()     this rank's pieces   partial: summed over the ranks
whole                DTensor, Replicate()     whole                partial: summed over the ranks

A parameter is read in parts if it cannot be cut into one equal slice for each rank. Examples are the fused projections
of recurrences, and heads, groups or vocabularies that cannot be divided evenly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from weft.fsdp.gradients.direct import local_part, whole

PARTS = "tensor_parallel_parts"
"""The attribute of a module that maps the names of its own parameters to their `Part`."""


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut along `dim` over ranks.

    `sections`: the consecutive sections of `dim`, each as (number of units, width of a unit). Each section is cut
    separately, and only between units. A unit is, for example, an attention head.
    """

    dim: int
    sections: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """The part of one parameter that a rank uses in its computation.

    - `is_cut`: whether the parameter is sharded along `dim`, so that a rank stores only its slice.
    - `spans`: the (start, length) of each piece that the rank uses along `dim`. None: the rank uses the whole
      parameter.
    - `share`: whether each rank uses the parameter divided by the number of ranks, because the outputs of all ranks are
      summed. An example is the bias of a row-parallel projection.
    """

    mesh: DeviceMesh
    is_cut: bool = False
    dim: int = 0
    spans: tuple[tuple[int, int], ...] | None = None
    share: bool = False

    def of(self, parameter: Any) -> Tensor:
        """Return this rank's part of `parameter`, differentiable."""
        if self.is_cut:
            return local_part(parameter)
        full = whole(parameter, self.mesh)
        if self.spans is not None:
            found = [full.narrow(self.dim, start, length) for start, length in self.spans]
            return found[0] if len(found) == 1 else torch.cat(found, dim=self.dim)
        return full / self.mesh.size() if self.share else full


def part(module: nn.Module, name: str) -> Any:
    """Return the part of the parameter `name` of `module` that this rank uses, or None if the parameter is None."""
    parameter = module._parameters[name] if name in module._parameters else getattr(module, name)
    how = vars(module).get(PARTS)
    if parameter is None or how is None:
        return parameter
    return how[name].of(parameter)


def place(module: nn.Module, name: str, mesh: DeviceMesh, cut: Cut | None, *, share: bool = False) -> None:
    """Turn the parameter `name` of `module` into a DTensor over the 1-D `mesh`.

    `cut`: which part each rank uses; None for the whole parameter. The DTensor is sharded if `cut` has a single section
    and its units can be divided evenly over the ranks. Otherwise, the DTensor is replicated. `share`: see `Part`;
    ignored if `cut` is given.
    """
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
    """Return the span of `rank` in each section, as (start, length).

    `sections`: see `Cut`. Starts are counted from the beginning of the first section. `units_of` chooses the units of
    each rank.
    """
    found, before = [], 0
    for units, width in sections:
        start, count = units_of(units, ranks, rank)
        found.append((before + start * width, count * width))
        before += units * width
    return found


def units_of(units: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return which of the `units` units `rank` uses, as (index of the first unit, count).

    If `units` is a multiple of `ranks`, the parts are equal. If `ranks` is a multiple of `units`, several ranks share
    one unit. Otherwise the last ranks have fewer units, or none.
    """
    if ranks % units == 0:
        return rank * units // ranks, 1
    each = -(-units // ranks)
    start = min(rank * each, units)
    return start, min(each, units - start)
