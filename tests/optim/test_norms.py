"""Norms sum over the ranks that have a model's elements, each element once."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import weft
from weft.optim.norms import ModelRanks


def test_units_over_ranks_that_the_largest_mesh_lacks_are_refused(world):
    world(0, 4)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for module, ranks in ((model[0], [0, 1]), (model, [0, 2])):
        weft.fully_shard(module, mesh=DeviceMesh("cpu", ranks))
    with pytest.raises(ValueError, match=r"lie on ranks \[0, 1\], which are not all among the ranks \[0, 2\] of"):
        weft.optim.grad_norm(model)


class Mesh:
    ndim = 1

    def __init__(self, *ranks: int) -> None:
        self.mesh = torch.tensor(ranks)

    def size(self) -> int:
        return self.mesh.numel()


def group_over(*ranks: int, tensor: Any = None, experts: Any = None) -> SimpleNamespace:
    """A parameter group as norms see it. `tensor`, `experts`: the ranks that have the slices of its parameter."""
    slices = tensor or experts
    parallel = SimpleNamespace(ranks=slices, is_expert=experts is not None) if slices is not None else None
    return SimpleNamespace(mesh=Mesh(*ranks), parameters=[SimpleNamespace(parallel=parallel, name="weight")])


def test_sums_of_slices_are_added_over_the_tensor_parallel_ranks_also_those_of_experts(monkeypatch):
    """Four ranks: (0, 2) and (1, 3) are data-parallel, (0, 1) and (2, 3) tensor-parallel."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group)
    tensor, across, inside = (0, 1), (0, 3), (0, 2)
    dense, experts = group_over(0, 2, tensor=tensor), group_over(0, 1, experts=across)
    ranks = ModelRanks([dense, experts])
    assert [ranks.beyond(slices) for slices in (None, tensor, across, inside)] == [None, tensor, tensor, None]
    assert ModelRanks([group_over(0, 2), group_over(0, 2, experts=across)]).beyond(across) == across
    for others in ([dense, group_over(0, 1)], [group_over(0, 2), experts]):
        with pytest.raises(ValueError, match=r"lie on ranks \[0, 1\]"):
            ModelRanks(others)
