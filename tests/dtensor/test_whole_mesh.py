"""Parameters that are DTensors over the whole mesh, of which `dp_mesh_dims` names the data-parallel axes."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_init as torch_init
from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import weft
from tests.fsdp import nets
from tests.pool import distributed
from weft.dtensor.tensor_parallel import tensor_parallel_of


class Mlp(nn.Module):
    """Computes with plain tensors, or with DTensors over whole meshes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x))) * self.scale


PLAN = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1), "scale": Replicate()}


def on_whole_mesh(mesh: DeviceMesh) -> Mlp:
    model = Mlp()
    for name, placement in PLAN.items():
        owner, _, own = name.rpartition(".")
        placements = [placement if axis == "tp" else Replicate() for axis in mesh.mesh_dim_names]
        value = distribute_tensor(model.get_parameter(name).detach(), mesh, placements)
        setattr(model.get_submodule(owner), own, nn.Parameter(value))
    return model


def rows_on(mesh: DeviceMesh) -> list[Placement]:
    """Rows over the data-parallel axes."""
    return [Replicate() if axis == "tp" else Shard(0) for axis in mesh.mesh_dim_names]


def trained(model: nn.Module, rows: torch.Tensor, mesh: DeviceMesh | None = None) -> list[torch.Tensor]:
    """Two AdamW steps; with `mesh`, on the rows of this data-parallel rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in rows:
        if mesh is None:
            model(batch).square().mean().backward()
        else:
            split = rows_on(mesh)
            output = model(distribute_tensor(batch, mesh, split)).redistribute(mesh, split)
            output.to_local().square().mean().backward()
        gradients = [nets.full(parameter.grad) for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*gradients, *(nets.full(parameter) for parameter in model.parameters())]


@pytest.mark.long
@pytest.mark.parametrize(
    "axes",
    [
        {"dp": 2, "tp": 2},
        pytest.param({"outer": 2, "dp": 1, "tp": 2}, marks=pytest.mark.long),
        {"dp": 4},
        {"outer": 2, "dp": 2},
    ],
    ids="-".join,
)
@distributed(4)
def test_training_is_that_of_one_process_and_of_torch(axes):
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    rows = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1))
    expected = trained(Mlp(), rows)
    for fsdp in (torch_fsdp, weft):
        model = on_whole_mesh(mesh)
        dims = fsdp.DataParallelMeshDims(shard="dp", replicate="outer" if "outer" in axes else None)
        fsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
        torch.testing.assert_close(trained(model, rows, mesh), expected)
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append(module.up.weight))
    model(distribute_tensor(rows[0], mesh, rows_on(mesh)))
    assert seen[0].device_mesh == mesh
    assert seen[0].placements == tuple(Shard(0) if axis == "tp" else Replicate() for axis in axes)
    assert isinstance(model.up.weight, DTensor)


@pytest.mark.slow
@distributed(4)
def test_parameters_with_a_mesh_of_their_own_name_its_data_parallel_axes():
    dense = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    rows = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1))

    class Experts(nn.Module):
        """A weight that is spread over expert-parallel ranks, and one that is not."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(2)))
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight, scale = (p.full_tensor() if isinstance(p, DTensor) else p for p in (self.weight, self.scale))
            return F.linear(x, weight) @ torch.ones(4, 6) * scale

    def made(fsdp) -> Experts:
        model = Experts()
        for name, mesh, placements in (("weight", sparse, [Replicate(), Shard(0)]), ("scale", dense, [Replicate()])):
            value = distribute_tensor(model.get_parameter(name).detach(), mesh, placements)
            setattr(model, name, nn.Parameter(value))
        weight, dims = model.weight, fsdp.DataParallelMeshDims
        infos = {
            True: torch_init._get_mesh_info(sparse, torch_fsdp.DataParallelMeshDims(shard="edp")),
            False: torch_init._get_mesh_info(dense, torch_fsdp.DataParallelMeshDims(shard="data")),
        }
        fsdp.fully_shard(
            model,
            mesh=dense,
            dp_mesh_dims=dims(shard="data"),
            shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), infos[p is weight]),
        )
        return model

    expected = Experts()
    expected(rows[0]).square().mean().backward()
    for fsdp in (torch_fsdp, weft):
        model = made(fsdp)
        assert model.weight.device_mesh.mesh_dim_names == ("edp", "ep")
        assert model.scale.device_mesh.mesh_dim_names == ("data",)
        model(rows[0]).square().mean().backward()
        for mine, theirs in zip(model.parameters(), expected.parameters()):
            torch.testing.assert_close(nets.full(mine), theirs.detach())
            torch.testing.assert_close(nets.full(mine.grad), theirs.grad)


@distributed(2)
def test_a_gradient_is_added_up_over_tensor_parallel_ranks_and_not_over_data_parallel_ones():
    own = 1.0 + dist.get_rank()
    for shape, expected in (((1, 2), torch.full((2, 4), 3.0)), ((2, 1), torch.full((4, 4), own))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Shard(0)]))
        gradient = DTensor.from_local(torch.full((4, 4), own), mesh, [Partial(), Partial()])
        assert torch.equal(tensor_parallel_of(weight, mesh["dp"], "", ["dp"]).slice_of_gradient(gradient), expected)


@distributed(4)
def test_what_does_not_go_together_is_named():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    three = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()]))
    with pytest.raises(ValueError, match=r"'weight' of Linear .*Shard\(dim=0\) over the data-parallel axis 'dp'"):
        weft.fully_shard(model, mesh=mesh, dp_mesh_dims=weft.DataParallelMeshDims(shard="dp"))
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), three, [Replicate()] * 3))
    with pytest.raises(ValueError, match=r"of which \('cp', 'tp'\) are not data-parallel.*one tensor-parallel axis"):
        weft.fully_shard(model, mesh=three, dp_mesh_dims=weft.DataParallelMeshDims(shard="dp"))
    plain = nn.Linear(4, 4, bias=False)
    plain.weight._local_type = {"dp": "R", "tp": "R"}
    with pytest.raises(ValueError, match=r"'weight' of Linear is annotated by spmd_types.*'full_dtensor'"):
        weft.fully_shard(plain, mesh=mesh, dp_mesh_dims=weft.DataParallelMeshDims(shard="dp"))
    dist.barrier()
