"""Parameters that `parallelize_module` has placed on a tensor-parallel axis: the numbers of one process on two axes."""

import copy
import functools
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import weft
from tests.fsdp import nets
from tests.fsdp.side_by_side import assert_same
from tests.pool import distributed


def meshes(*shape: int) -> DeviceMesh:
    """Two data-parallel ranks times two tensor-parallel ones, unless `shape`, tensor parallelism last, is given."""
    shape = shape or (2, 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "dp", "tp")[-len(shape) :])


def make(*, sequence: bool = False, seed: int = 0) -> nets.Net:
    """A net without tied weights, which torch's plans cannot keep, and with sizes that two ranks can halve.

    `gain` is in no plan. Where ranks have half a sequence each, each would have half its gradient: there it is frozen.
    """
    net = nets.make(seed=seed, width=12, hidden=20)
    net.head.weight = nn.Parameter(net.head.weight.detach().clone())
    net.gain.requires_grad_(not sequence)
    return net


def parallelize(net: nets.Net, tp: DeviceMesh, *, sequence: bool = False) -> nets.Net:
    """Split blocks, embedding and head over `tp`; with `sequence`, activations between blocks too."""
    between = {"input_layouts": Shard(1)} if sequence else {}
    behind = {"output_layouts": Shard(1)} if sequence else {}
    for block in net.blocks:
        plan = {"up": ColwiseParallel(**between), "down": RowwiseParallel(**behind)}
        parallelize_module(block, tp, {**plan, "norm": SequenceParallel()} if sequence else plan)
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), **behind),
        "head": ColwiseParallel(output_layouts=Replicate(), **between),
    }
    return parallelize_module(net, tp, {**ends, "norm": SequenceParallel()} if sequence else ends)


def data(steps: int = 5, rows: int = 4) -> torch.Tensor:
    """Tokens `[steps, rows, 9]`: eight positions, which two ranks can halve."""
    return torch.randint(0, 11, (steps, rows, 9), generator=torch.Generator().manual_seed(1))


def compare(plain: dict, net: nets.Net, mesh: DeviceMesh, batches: torch.Tensor, **options: Any) -> None:
    """Train on this data-parallel rank's rows: the losses, averaged over those ranks, and all else are as plain."""
    dp = mesh["dp"] if mesh.ndim == 2 else mesh["outer"]
    actual = nets.train(net, batches, rank=dp.get_local_rank(), ranks=dp.size(), **options)
    mean = torch.stack(actual["losses"])
    dist.all_reduce(mean, group=dp.get_group())
    torch.testing.assert_close({**actual, "losses": list(mean / dp.size())}, plain)


ADAMW: Any = {"lr": 1e-2, "weight_decay": 0.1}


@pytest.mark.slow
@distributed(4)
def test_what_no_plan_slices_starts_alike_on_all_ranks_of_the_axis_whatever_their_seeds():
    mesh = meshes()
    net = make()
    torch.manual_seed(dist.get_rank())
    for block in net.blocks:
        nn.init.normal_(block.norm.weight)
    parallelize(net, mesh["tp"])
    for module in (*(block.norm for block in net.blocks), *net.blocks, net):
        weft.fully_shard(module, mesh=mesh["dp"])
    net(data(1)[0])
    net.reshard()
    for name, parameter in net.named_parameters():
        if parameter.device_mesh.ndim == 1:  # of the data-parallel axis alone
            whole = parameter.full_tensor().detach()
            everyone = [torch.empty_like(whole) for _ in range(4)]
            dist.all_gather(everyone, whole)
            assert all(torch.equal(each, whole) for each in everyone), name


@distributed(2)
def test_what_a_plan_does_not_slice_starts_alike_beside_what_it_slices():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    net = nn.Linear(4, 4)
    net.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["tp"], [Shard(0)]))
    nn.init.constant_(net.bias, 1.0 + dist.get_rank())
    weft.fully_shard(net, mesh=mesh["dp"])
    net.unshard()
    net.reshard()
    assert len(net._weft_unit.groups) == 1 and torch.equal(nets.full(net.bias), torch.ones(4))


@pytest.mark.slow
@distributed(4)
def test_norms_by_parameter_count_what_is_sliced_and_what_is_not_once():
    mesh, plain = meshes(), make()
    net = parallelize(make(), mesh["tp"])
    for module in (*net.blocks, net):
        weft.fully_shard(module, mesh=mesh["dp"])
    batch = data(1)[0]
    nets.loss_of(plain, batch).backward()
    nets.loss_of(net, batch).backward()
    norms = weft.parameter_norms(net)
    expected = {name: (p.detach().norm(), p.grad.norm()) for name, p in plain.named_parameters()}
    found = {name: (torch.tensor(each.weight), torch.tensor(each.gradient)) for name, each in norms.items()}
    torch.testing.assert_close(found, expected, check_dtype=False)


@pytest.mark.long
@distributed(4)
def test_five_clipped_adamw_steps_equal_one_process():
    mesh = meshes()
    ways: list[tuple[bool, bool | None, dict[str, Any]]] = [
        (False, None, {}),
        (True, True, {"optimizer": lambda net: torch.optim.AdamW(net.parameters(), fused=True, **ADAMW)}),
        (
            True,
            False,
            {
                "optimizer": lambda net: weft.optim.flat(torch.optim.AdamW, net, **ADAMW),
                "clip": weft.optim.clip_grad_norm_,
            },
        ),
    ]
    for sequence, reshard, options in ways:
        net = parallelize(make(sequence=sequence), mesh["tp"], sequence=sequence)
        nets.shard(net, mesh=mesh["dp"], reshard_after_forward=reshard)
        compare(nets.train(make(sequence=sequence), data()), net, mesh, data(), **options)


@pytest.mark.long
@distributed(4)
def test_every_strategy_microbatches_and_an_outer_axis():
    batches = data(2)
    plain = nets.train(make(), batches, microbatches=2)
    for strategy in ("no_shard", "optim", "optim_grads"):
        mesh = meshes()
        net = nets.shard(parallelize(make(), mesh["tp"]), mesh=mesh["dp"], strategy=strategy)
        compare(plain, net, mesh, batches, microbatches=2, on_microbatch=net.set_is_last_backward)
    for outer_strategy in ("no_shard", "optim"):
        mesh = meshes(2, 1, 2)
        net = parallelize(make(), mesh["tp"])
        nets.shard(net, mesh=mesh["outer", "dp"], outer_strategy=outer_strategy)
        compare(plain, net, mesh, batches, microbatches=2, on_microbatch=net.set_is_last_backward)


@pytest.mark.long
@distributed(4)
def test_bf16_computation_and_recomputation_run_on_the_slices():
    mesh = meshes()
    policy = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = parallelize(make(), mesh["tp"])
    net.recompute = "non-reentrant"
    nets.shard(net, mesh=mesh["dp"], mp_policy=policy)
    seen = []
    net.blocks[0].up.register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach()))
    for _ in range(2):
        nets.loss_of(net, data()[0].chunk(2)[mesh.get_local_rank("dp")]).backward()
    assert len(seen) == 4
    for weight in seen:
        assert type(weight) is DTensor and weight.dtype == torch.bfloat16
        assert (weight.device_mesh, weight.placements) == (mesh["tp"], (Shard(0),))
    plain = make()
    nets.loss_of(plain, data()[0]).backward()
    for name, parameter in plain.named_parameters():
        actual = net.get_parameter(name).grad
        assert actual.dtype == torch.float32
        difference = (nets.full(actual) / 2 - parameter.grad).norm() / parameter.grad.norm()
        assert difference < 2e-2, name  # bf16 keeps 8 bits, and the sums over tp are rounded once more


@pytest.mark.long
@distributed(4)
def test_compiled_blocks_are_one_graph_with_their_communication_over_tensor_parallel_ranks():
    mesh, graphs = meshes(), CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    plain = nets.train(make(sequence=True), data(3))
    net = nets.shard(parallelize(make(sequence=True), mesh["tp"], sequence=True), mesh=mesh["dp"])
    for block in net.blocks:
        block.compile(backend=graphs, fullgraph=True)
    compare(plain, net, mesh, data(3))
    assert graphs.frame_count == 1, "equal blocks share one graph, in every step"


# --- what a parameter is --------------------------------------------------------------------------------------------


class Bag(nn.Module):
    """Parameters of any shapes and placements; the loss weighs every element differently."""

    def __init__(self, seed: int = 0, tp: DeviceMesh | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        shapes = [(13, 29), (5, 7), (1, 4), (6, 2, 5)]
        places = [Shard(0), Shard(1), Replicate()]
        for number, (shape, place) in enumerate(itertools.product(shapes, places)):
            value = torch.randn(shape, generator=generator)
            made = distribute_tensor(value, tp, [place], src_data_rank=None) if tp else value
            self.register_parameter(f"p{number}", nn.Parameter(made))
        self.in_no_plan = nn.Parameter(torch.randn(3, 3, generator=generator))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        total = scale.sum() * 0
        for parameter in self.parameters():
            weights: Any = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)
            if isinstance(parameter, DTensor):
                weights = distribute_tensor(weights, parameter.device_mesh, parameter.placements, src_data_rank=None)
            some = (parameter * weights).sin().sum()
            total = total + (some.full_tensor() if isinstance(some, DTensor) else some) * scale.mean()
        return total


def bags(seed: int = 0, **options: Any) -> tuple[Bag, Bag]:
    """The same values plain, and sharded over both axes."""
    mesh = meshes()
    return Bag(seed), weft.fully_shard(Bag(seed, mesh["tp"]), mesh=mesh["dp"], **options)


def exactly(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(nets.full(actual), nets.full(expected), rtol=0, atol=0)


def pairs(sharded: nn.Module, plain: nn.Module) -> Any:
    return zip(sharded.parameters(), plain.parameters(), strict=True)


def tells_the_truth(**options: Any) -> None:
    plain, sharded = bags(**options)
    for parameter, original in pairs(sharded, plain):
        assert parameter.shape == original.shape and parameter.stride() == original.stride()
        exactly(parameter.full_tensor(), original)
        replicas = 1 if any(p.is_shard() for p in parameter.placements[1:]) else parameter.device_mesh.size() // 2
        held = torch.tensor(parameter.to_local().numel())
        dist.all_reduce(held)
        assert held == original.numel() * (2 if parameter.device_mesh.ndim == 1 else replicas)
        derived = (parameter.detach(), parameter.clone(), copy.deepcopy(parameter), parameter.data * 1.0)
        for tensor in derived:
            exactly(tensor, original)
            assert tensor.placements == parameter.placements
        exactly(parameter.redistribute(placements=[Replicate()] * parameter.device_mesh.ndim).to_local(), original)
        again = parameter.redistribute()
        exactly(again, original)
        assert again.placements == parameter.placements
        torch.testing.assert_close(nets.full(parameter.detach().mT @ parameter.detach()), (original.mT @ original).data)
        with torch.no_grad():
            torch.manual_seed(0)
            one = nn.init.normal_(parameter)
            torch.manual_seed(0)
            exactly(one, nn.init.normal_(original))
            assert torch.equal(one, original)
            parameter.copy_(torch.full_like(original, 3.0)).mul_(tensor)
            exactly(parameter, 3 * tensor.full_tensor())
            for weights in (parameter, original.copy_(nets.full(parameter))):
                weights[:, 1:].mul_(2)
                weights.mT[-1].zero_()
                weights.tril_()
            exactly(parameter, original)
    (sharded.p0.full_tensor() ** 2).sum().backward()
    exactly(sharded.p0.grad, 2 * sharded.p0.full_tensor())


def reduces() -> None:
    plain, sharded = bags()
    for parameter, original in pairs(sharded, plain):
        for reduction in (torch.sum, torch.mean, torch.max, torch.min, torch.norm):
            torch.testing.assert_close(nets.full(reduction(parameter.detach())), reduction(original.detach()))
        for order in (0, 1, 3, math.inf, -math.inf):
            expected = torch.linalg.vector_norm(original.detach(), order)
            torch.testing.assert_close(nets.full(torch.linalg.vector_norm(parameter.detach(), order)), expected)


def clips() -> None:
    for order in (1, 2, math.inf):
        for clip in (nn.utils.clip_grad_norm_, functools.partial(nn.utils.clip_grad_norm_, foreach=False), None):
            plain, sharded = bags()
            for model in (plain, sharded):
                model(torch.ones(1)).backward()
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.3, norm_type=order)
            if clip is None:
                norm = weft.optim.clip_grad_norm_(sharded, 0.3, norm_type=order)
            else:
                norm = clip(sharded.parameters(), 0.3, norm_type=order)
            torch.testing.assert_close(nets.full(norm), expected)
            for parameter, original in pairs(sharded, plain):
                if original.grad is not None:
                    torch.testing.assert_close(nets.full(parameter.grad), original.grad)


def tells_the_truth_of_other_dimensions() -> None:
    tells_the_truth(shard_placement_fn=lambda parameter: Shard(1))


def steps() -> None:
    ways = ({"foreach": True}, Shard(0)), ({"foreach": False}, Shard(1)), ({"fused": True}, Shard(1))
    for implementation, cut in ways:
        plain, sharded = bags(shard_placement_fn=lambda parameter, cut=cut: cut)
        for model in (plain, sharded):
            optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, **implementation)
            for step in range(2):
                optimizer.zero_grad()
                model(torch.full((1,), step + 1.0)).backward()
                optimizer.step()
        for parameter, original in pairs(sharded, plain):
            torch.testing.assert_close(nets.full(parameter), original.detach())
        state = optimizer.state[sharded.p0]["exp_avg"]
        assert state.placements == sharded.p0.placements and state.device_mesh.ndim == 2


def finds_infinite_gradients() -> None:
    _, sharded = bags()
    before = nets.full(sharded.p0)
    optimizer, scaler = torch.optim.SGD(sharded.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(sharded(torch.ones(1))).backward()
    if dist.get_rank() == 1:  # the first slice of p0 knows nothing of it, nor does the second data-parallel rank
        sharded.p0.grad.to_local().view(-1)[0] = torch.inf
    scaler.step(optimizer)
    exactly(sharded.p0, before)


def keeps_whole_slices_whole() -> None:
    plain, sharded = bags(shard_placement_fn=lambda parameter: weft.TensorAtomic())
    for parameter, original in pairs(sharded, plain):
        assert parameter.to_local().numel() in (0, math.prod(parameter._cuts.shape))
        exactly(parameter, original)
        torch.testing.assert_close(nets.full(parameter.detach().mT @ parameter.detach()), (original.mT @ original).data)
        torch.testing.assert_close(nets.full(parameter.detach().norm()), original.detach().norm())


@pytest.mark.long
@distributed(4)
def test_sharded_parameters_tell_the_truth_on_both_axes():
    checks = [tells_the_truth, tells_the_truth_of_other_dimensions, reduces, clips, steps, finds_infinite_gradients]
    for check in (*checks, keeps_whole_slices_whole):
        check()


# --- beside torch's FSDP2 -------------------------------------------------------------------------------------------


def script(fsdp, sequence):
    """Three clipped steps; what is registered when, on which mesh and how placed."""
    mesh = meshes()
    net = parallelize(make(sequence=sequence), mesh["tp"], sequence=sequence)
    net.gain = nn.Parameter(net.gain.detach().view(1), requires_grad=False)  # FSDP2 refuses 0-D parameters
    for module in (*net.blocks, net):
        fsdp.fully_shard(module, mesh=mesh["dp"])

    def kinds():
        dtensors = {name: p for name, p in net.named_parameters() if isinstance(p, DTensor)}
        return {name: (p.device_mesh.mesh_dim_names, p.placements, p.stride()) for name, p in dtensors.items()}

    seen = {"constructed": kinds()}
    net.blocks[1].up.register_forward_pre_hook(lambda *_: seen.update({"in a block's forward": kinds()}))
    # FSDP2 cannot clip parameters of different meshes together: those in plans, then those in none.
    planned = [p for p in net.parameters() if p.device_mesh.ndim == 2]
    numbers = []
    optimizer = torch.optim.AdamW(net.parameters(), **ADAMW)
    for batch in data(3):
        loss = nets.loss_of(net, batch.chunk(2)[mesh.get_local_rank("dp")])
        loss.backward()
        gradients = {name: p.grad.placements for name, p in net.named_parameters() if p.grad is not None}
        seen["after backward"] = [kinds(), gradients]
        numbers.append([loss.detach(), nets.full(nn.utils.clip_grad_norm_(planned, 0.3))])
        optimizer.step()
        optimizer.zero_grad()
    return [numbers, nets.whole(net.state_dict())], seen


@pytest.mark.long
@distributed(4)
def test_a_script_for_fsdp2_gives_the_same_numbers_and_registers_the_same_tensors():
    for sequence in (False, True):
        assert_same(script, sequence)


# --- checkpoints ----------------------------------------------------------------------------------------------------


def trained(tp: int, seed: int = 0) -> dict[str, Any]:
    """Weights and optimizer state by name after a step, on all ranks, with or without tensor parallelism."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // tp, tp), mesh_dim_names=("dp", "tp"))
    net = make(seed=seed)
    nets.shard(parallelize(net, mesh["tp"]) if tp > 1 else net, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    nets.loss_of(net, data()[seed][:2]).backward()
    optimizer.step()
    state = {f"model.{name}": value for name, value in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        state |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return state


def save(tp: int, folder: str) -> dict[str, torch.Tensor]:
    state = trained(tp)
    dcp.save(state, checkpoint_id=folder)
    return nets.whole(state)


def load(tp: int, folder: str) -> dict[str, torch.Tensor]:
    state = trained(tp, seed=3)
    dcp.load(state, checkpoint_id=folder)
    return nets.whole(state)


@pytest.mark.long
def test_checkpoints_move_between_meshes_with_and_without_tensor_parallelism(pool, tmp_path):
    for number, ((ranks, tp), targets) in enumerate(
        {(4, 2): [(4, 2), (4, 1), (2, 2), (2, 1)], (2, 1): [(4, 2), (2, 2)]}.items()
    ):
        folder = str(tmp_path / str(number))
        saved = pool.run(ranks, save, tp, folder)[0]
        for target_ranks, target_tp in targets:
            for loaded in pool.run(target_ranks, load, target_tp, folder):
                torch.testing.assert_close(loaded, saved, rtol=0, atol=0)


# --- construction ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_replicas_shards_and_slices_on_a_pretended_world_of_eight(world):
    for rank in (0, 5):
        world(rank, 8)
        of = weft.init_meshes("cpu", dp_replicate=2, tp=2)
        assert (of.dense.mesh_dim_names, of.tp.size()) == (("dp_replicate", "dp_shard"), 2)
        plain, net = make(), nets.shard(parallelize(make(), of.tp), mesh=of.dense, outer_strategy="optim")
        weight = net.blocks[0].up.weight
        assert weight.device_mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "tp")
        assert weight.placements[-1] == Shard(0) and not weight.placements[1].is_replicate()
        assert weight.shape == (20, 12) and weight._cuts.shape == (10, 12)
        replicas = nets.shard(parallelize(make(), of.tp), mesh=of.dense)
        assert replicas.blocks[0].down.weight.placements == (Replicate(), Shard(0), Shard(1))
        for name, original in plain.named_parameters():
            in_plan = name.startswith(("embedding", "head")) or ".up." in name or ".down." in name
            assert (net.get_parameter(name).device_mesh.ndim == 3) == in_plan
            assert net.get_parameter(name).shape == original.shape


def test_what_cannot_be_composed_is_refused_with_the_reason(world):
    world(0, 8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))

    def shard(mesh: DeviceMesh | None, over: DeviceMesh, *placements: Any) -> None:
        layer = nn.Linear(4, 4, bias=False)
        layer.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), over, placements, run_check=False))
        weft.fully_shard(layer, mesh=mesh)

    with pytest.raises(ValueError, match=r"'weight' of Linear is a DTensor over the 2 axes .*pass.*a 1-D mesh"):
        shard(mesh["dp"], mesh["cp", "tp"], Replicate(), Shard(0))
    with pytest.raises(ValueError, match=r"placed as Partial.*where its placement is Shard\(dim\) or Replicate"):
        shard(mesh["dp"], mesh["tp"], Partial())
    for data_parallel in (None, mesh["tp"], mesh["cp", "tp"], init_device_mesh("cpu", (8,))):
        with pytest.raises(
            ValueError, match=r"not another axis of the same mesh: pass two axes of one mesh, mesh\['dp'\]"
        ):
            shard(data_parallel, mesh["tp"], Shard(0))
