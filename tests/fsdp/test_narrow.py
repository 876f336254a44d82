"""Weights that travel quantized: the bytes are those of the whole weight, and a step is that of one process that
quantizes and dequantizes in the same places."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import weft
from tests.fsdp import nets
from tests.pool import distributed
from weft.comm import collectives
from weft.comm.lanes import Lane
from weft.errors import WeightsWritten
from weft.fsdp.placement import Placements
from weft.fsdp.plan import GroupPlan
from weft.fsdp.precision import Recipe
from weft.layout.layout import plan_layout
from weft.quantize import blockwise, count_losses, dequantize, mx, nvfp4, quantize, rowwise, tensorwise
from weft.quantize.payload import Narrow

FP32, BF16 = torch.float32, torch.bfloat16
RECIPES = [tensorwise(), rowwise(), blockwise(128, 128), blockwise(8, 16), mx(32), nvfp4()]
SIZES = {"width": 32, "hidden": 64, "vocabulary": 11}
STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


class Weights(nn.Module):
    """A unit of weights with these shapes, which it only multiplies."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(len(shapes))
        self.weights = nn.ParameterList(torch.randn(shape) * 10.0**number for number, shape in enumerate(shapes, -3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum((each.float() ** 2).sum() for each in self.weights)


def policy(recipe, **options) -> weft.MixedPrecisionPolicy:
    return weft.MixedPrecisionPolicy(**{"param_dtype": BF16, "reduce_dtype": FP32} | options, param_quantization=recipe)


def travelling(group) -> list:
    """The payload and scales of each tensor, from all ranks of the shard axis."""
    own = group.model_weight.local
    parts = [torch.empty_like(own) for _ in range(group.model_weight.pieces)]
    if len(parts) > 1:
        dist.all_gather(parts, own, group.groups[-1])
    else:
        parts = [own]
    return list(group.payload.unpacked(torch.cat(parts)))


def assert_same(pieces: list, extents, weights: list[torch.Tensor], recipe, via=BF16) -> None:
    """The pieces that travel hold the bytes of each whole weight, quantized."""
    begin = 0
    for extent, weight in zip(extents, weights, strict=True):
        wanted, steps = quantize(weight.to(via), recipe)
        own = [piece for piece in pieces if extent.offset <= piece[0] < extent.end]
        begin += len(own)
        assert [place for place, *_ in own] == sorted(place for place, *_ in own)
        if not own:
            assert not weight.numel()
            continue
        assert torch.equal(torch.cat([codes.flatten() for _, codes, _ in own]), wanted.flatten())
        whole = steps[1] if recipe.kind == "nvfp4" else steps
        if recipe.shares_maximum:
            size = weight[-1].numel() if weight.ndim == 3 else weight.numel()
            for place, _, scales in own:
                found = scales[1] if recipe.kind == "nvfp4" else scales
                assert found == whole.flatten()[(place - extent.offset) // size]
        if recipe.kind != "tensorwise":
            blocks = [scales[0] if recipe.kind == "nvfp4" else scales for *_, scales in own]
            wanted_blocks = steps[0] if recipe.kind == "nvfp4" else steps
            assert torch.equal(torch.cat([each.flatten() for each in blocks]), wanted_blocks.flatten())
    assert begin == len(pieces)


def assert_same_bytes(net: nn.Module, whole: list[torch.Tensor], recipe) -> None:
    (group,) = net._weft_unit.groups
    assert group.recipe.quantization == recipe
    assert_same(travelling(group), group.layout.extents, whole, recipe)


@pytest.mark.slow
@distributed(2, 4)
def test_bytes_are_those_of_the_whole_weight():
    shapes = [(300, 32), (2, 8, 16 * 6), (0, 32), (3, 40, 32)]
    options = [{}]
    if dist.get_world_size() == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
        options += [{"mesh": mesh}, {"mesh": mesh, "outer_strategy": "optim"}]
    for number, recipe in enumerate(RECIPES):
        net = Weights(*shapes)
        whole = [each.detach().clone() for each in net.weights]
        weft.fully_shard(net, mp_policy=policy(recipe), **options[number % len(options)])
        for _ in range(2):
            net(torch.zeros(())).backward()
            assert_same_bytes(net, whole, recipe)
            with torch.no_grad():
                for weight, sharded in zip(whole, net.parameters()):
                    weight.mul_(1.7), sharded.mul_(1.7)


class Mesh(NamedTuple):
    """What a payload asks of a mesh."""

    ranks: int
    rank: int
    ndim: int = 1

    def size(self, axis: int) -> int:
        return self.ranks

    def get_local_rank(self, axis: int) -> int:
        return self.rank


rows = st.integers(0, 9) | st.integers(0, 300)
matrices = st.tuples(rows, st.integers(1, 3).map(lambda blocks: 32 * blocks))
stacks = st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(1, 2).map(lambda blocks: 32 * blocks))


@pytest.mark.slow
@settings(max_examples=40)
@example([(5, 96)], 2, tensorwise())  # the cut is in the middle of a row
@example([(3, 32)], 4, rowwise())  # some shards are empty
@given(st.lists(matrices | stacks, min_size=1, max_size=4), st.integers(1, 5), st.sampled_from(RECIPES))
def test_shards_of_any_shapes_have_the_bytes_of_the_whole_weight(shapes, ranks, recipe):
    torch.manual_seed(0)
    weights = [torch.randn(shape) * 10.0**number for number, shape in enumerate(shapes, -1)]
    steps = [recipe.cut_between(shape) for shape in shapes]
    layout = plan_layout(shapes, ranks, itemsize=1, granularities=steps)
    main = torch.zeros(layout.numel)
    for extent, weight in zip(layout.extents, weights):
        main[extent.offset : extent.end] = weight.flatten()
    payloads = []
    for rank in range(ranks):
        mesh, placed = Mesh(ranks, rank), Placements((Shard(0),), (Shard(0),), (Shard(0),))
        dtypes = Recipe(FP32, BF16, FP32, FP32, recipe)
        plan = GroupPlan(layout, mesh, placed, dtypes, torch.device("cpu"), None)  # type: ignore[arg-type]
        payloads.append(Narrow(plan))
    shards = main.view(ranks, -1)
    if recipe.shares_maximum:
        largest = torch.stack([each.local_maxima(shard) for each, shard in zip(payloads, shards)]).amax(0)
        for each in payloads:
            each.maxima.copy_(largest)
    sent = torch.empty(ranks, payloads[0].layout.shard_numel, dtype=torch.uint8)
    for each, own, shard in zip(payloads, sent, shards):
        each.write(own, shard, None)()
    assert_same(list(payloads[0].unpacked(sent.flatten())), layout.extents, weights, recipe)
    if shapes == [(5, 96)] and ranks == 2 and recipe == tensorwise():
        assert layout.cuts(0)[1] % 96
    if shapes == [(3, 32)] and ranks == 4:
        assert layout.cuts(0)[-2] == layout.cuts(0)[-1]


class _Narrowed(torch.autograd.Function):
    """What a weight is in forward, whose gradient takes the dtype that travels."""

    @staticmethod
    def forward(ctx, weight, recipe, compute, travels):
        ctx.dtypes = weight.dtype, travels
        if recipe is None:
            return weight.to(compute)
        return dequantize(*quantize(weight.to(compute), recipe), recipe, compute)

    @staticmethod
    def backward(ctx, gradient):
        main, travels = ctx.dtypes
        return gradient.to(travels).to(main), None, None, None


def plain_loss(net: nets.Net, tokens: torch.Tensor, recipe, ranks: int, compute=BF16, travels=FP32) -> torch.Tensor:
    """Each rank's rows by themselves, with the linear weights of blocks quantized."""
    losses = []
    for rows in tokens.chunk(ranks):
        weights = {
            name: _Narrowed.apply(p, recipe if p.ndim == 2 and "blocks" in name else None, compute, travels)
            for name, p in net.named_parameters()
        }
        weights["head.weight"] = weights["embedding.weight"]
        outputs = torch.func.functional_call(net, weights, (rows[:, :-1],)).float()
        losses.append(nn.functional.cross_entropy(outputs.flatten(0, 1), rows[:, 1:].flatten()))
    return torch.stack(losses).mean()


def mine(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def assert_trains(recipe, compute=BF16, **options) -> nets.Net:
    """Two steps of two microbatches equal one process, as those of weights that are not quantized do."""
    ranks = dist.get_world_size()
    plain, net = nets.make(**SIZES), nets.make(**SIZES)
    for block in net.blocks:
        weft.fully_shard(block, mp_policy=policy(recipe, param_dtype=compute), **options)
    weft.fully_shard(net, mp_policy=policy(recipe, param_dtype=compute, output_dtype=FP32), **options)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9) for model in (plain, net)]
    tolerance = {"rtol": 2**-7, "atol": 2**-7} if compute == BF16 else {}
    for batch in nets.data(2, 8):
        for last, rows in enumerate(batch.chunk(2)):
            net.set_is_last_backward(bool(last))
            wanted = plain_loss(plain, rows, recipe, ranks, compute)
            loss = nets.loss_of(net, mine(rows))
            wanted.backward(), loss.backward()
            dist.all_reduce(loss := loss.detach().clone())
            torch.testing.assert_close(loss / ranks, wanted.detach(), **tolerance)
        for one, other in zip(net.parameters(), plain.parameters()):
            torch.testing.assert_close(nets.full(one.grad), other.grad, **tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return net


@pytest.mark.slow
@distributed(2)
def test_a_step_equals_one_process_that_quantizes_in_the_same_places():
    assert_trains(tensorwise(), FP32)
    assert_trains(mx(32), BF16)


@pytest.mark.long
@distributed(2)
def test_every_recipe_equals_one_process():
    for recipe in RECIPES[1:]:
        assert_trains(recipe, FP32)


@pytest.mark.long
@distributed(2)
def test_every_option_equals_one_process():
    assert_trains(nvfp4(), FP32, reshard_after_forward=False)
    assert_trains(tensorwise(), FP32, offload_policy=weft.CPUOffloadPolicy(pin_memory=False))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_every_strategy_equals_one_process(strategy):
    """Scales of whole weights, which need maxima of all ranks, of blocks, and both."""
    kinds = [tensorwise(), mx(32), nvfp4()]
    some = {"no_shard": kinds[2:], "optim": kinds[1:2], "optim_grads": kinds[::2]}.get(strategy, kinds)
    for recipe in some:
        assert_trains(recipe, FP32, strategy=strategy)


@pytest.mark.long
@distributed(4)
def test_meshes_of_two_axes_equal_one_process():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    assert_trains(tensorwise(), FP32, mesh=mesh)
    assert_trains(blockwise(16, 32), FP32, mesh=mesh, outer_strategy="optim")
    assert_trains(nvfp4(), FP32, reshard_after_forward=2)


# --- what is sent -----------------------------------------------------------------------------------------------------


def spy_on_messages(monkeypatch) -> tuple[list, list]:
    """The bytes that each gather brings, and how many numbers each maximum is of, from now on."""
    gathers, maxima = [], []
    run, reduce_now = Lane.run, collectives.reduce_now

    def gather(lane, collective, *args, **options):
        if collective is collectives.all_gather:
            gathers.append(args[0].nbytes)
        return run(lane, collective, *args, **options)

    def reduce(tensor, op, group, what=""):
        maxima.append(tensor.numel())
        return reduce_now(tensor, op, group, what)

    monkeypatch.setattr(Lane, "run", gather)
    monkeypatch.setattr("weft.fsdp.runtime.freshness.reduce_now", reduce)
    return gathers, maxima


@pytest.mark.slow
@distributed(2)
def test_a_gather_brings_the_bytes_of_the_format_and_maxima_are_exchanged_once_in_a_step():
    for recipe, most, exchanges in (
        (mx(32), 1.04, 0),
        (nvfp4(), 0.57, 1),
        (rowwise(), 1.04, 0),
        (tensorwise(), 1.01, 1),
    ):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
        for each in net:
            weft.fully_shard(each, mp_policy=policy(recipe), reshard_after_forward=True)
        weft.fully_shard(net, mp_policy=policy(recipe))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with pytest.MonkeyPatch.context() as patches:
            for _ in range(3):
                gathers, maxima = spy_on_messages(patches)
                net(torch.ones(2, 256)).sum().backward()
                assert maxima == [3] * exchanges
                assert len(gathers) in (5, 6) and max(gathers) <= most * 256 * 256
                assert min(gathers) >= 256 * 256 / recipe.values_per_byte
                optimizer.step()
                patches.undo()
            gathers, maxima = spy_on_messages(patches)
            with torch.no_grad():
                net(torch.ones(2, 256))
                net(torch.ones(2, 256))
            assert len(maxima) <= exchanges, "the weights are the same"
        plan = weft.fsdp.plan_of(net)
        sizes = {each.nbytes for each in plan.collectives if each.operation == "all-gather"}
        assert sizes == {gathers[0]}
        transient = weft.memory_report(net)["transient"]
        assert plan.peak_bytes == {role: transient[role]["peak"] for role in plan.peak_bytes}


@pytest.mark.slow
@distributed(2)
def test_bytes_at_rest_and_the_peaks_of_a_plan_are_those_of_the_report():
    elements = 3 * 256 * 256
    for strategy, at_rest in (("optim_grads", 1.04), ("optim_grads_params", 1.04 / 2)):
        net = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
        for each in net:
            weft.fully_shard(each, mp_policy=policy(mx(32)), strategy=strategy)
        weft.fully_shard(net, mp_policy=policy(mx(32)), strategy=strategy)
        for _ in range(3):
            net(torch.ones(2, 256)).sum().backward()
        report = weft.memory_report(net)
        persistent = report["persistent"]
        assert persistent["weights"] == 4 * elements / 2
        assert 1.03 / 1.04 * at_rest * elements < persistent["quantized weights"] <= at_rest * elements
        transient, plan = report["transient"], weft.fsdp.plan_of(net)
        assert plan.peak_bytes == {role: transient[role]["peak"] for role in plan.peak_bytes}
        gathers = [each.nbytes for each in plan.collectives if each.operation == "all-gather"]
        assert len(gathers) == (3 if strategy == "optim_grads" else 5)  # the last stays for its backward
        assert max(gathers) <= 1.04 * 256 * 256


@distributed(2)
def test_shares_of_lost_elements_are_those_of_whole_weights():
    for recipe in (tensorwise(), mx(32)):
        net = nn.Sequential(Weights((64, 32), (3, 8, 32)), nn.LayerNorm(4), Weights((40, 32)))
        whole = [[each.detach().clone() for each in net[number].weights] for number in (0, 2)]
        whole[0][0][7, :5] = 1e-30
        with torch.no_grad():
            for one, other in zip([*net[0].weights, *net[2].weights], [*whole[0], *whole[1]]):
                one.copy_(other)
        for each in (net[0], net[2], net):
            weft.fully_shard(each, mp_policy=policy(recipe))
        found = weft.quantization_shares(net)
        assert list(found) == ["0", "2"]
        for name, weights in zip(found, whole):
            lost = torch.tensor([count_losses(each.to(BF16), recipe) for each in weights]).sum(0)
            assert found[name] == tuple(float(n) / sum(each.numel() for each in weights) for n in lost)
        assert found["0"].underflowed > 0 and (found["0"].saturated > 0 or recipe == tensorwise())


# --- what a user may do -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@distributed(2)
def test_writes_to_weights_and_evaluations_between_steps_are_seen():
    for strategy in ("optim_grads", "optim_grads_params"):
        net, plain = nets.make(**SIZES), nets.make(**SIZES)
        nets.shard(net, mp_policy=policy(tensorwise(), param_dtype=FP32), strategy=strategy)
        batch = nets.data(1, 4)[0]
        for _ in range(2):
            with torch.no_grad():
                for one, other in zip(net.parameters(), plain.parameters()):
                    one.mul_(1.5), other.mul_(1.5)
                found, wanted = nets.loss_of(net, batch), plain_loss(plain, batch, tensorwise(), 1, FP32)
            torch.testing.assert_close(found, wanted)
        nets.loss_of(net, batch).backward()


@distributed(2)
def test_main_weights_are_wide_and_the_rest_is_left_alone():
    net = nets.make(**SIZES).to(BF16)
    chosen = weft.MixedPrecisionPolicy(param_quantization=mx(32), quantize=lambda name, p: name == "up.weight")
    for block in net.blocks:
        weft.fully_shard(block, mp_policy=chosen)
    weft.fully_shard(net, mp_policy=weft.MixedPrecisionPolicy(param_quantization=mx(32)))
    main = {name.split(".", 2)[-1]: p.dtype for name, p in net.named_parameters() if name.startswith("blocks.0")}
    assert main == {"norm.weight": BF16, "norm.bias": BF16, "up.weight": FP32, "up.bias": BF16, "down.weight": BF16}
    recipes = [group.recipe.quantization for group in net._weft_unit.groups]
    assert recipes == [None], "the embedding and the norm of the root"
    assert "mx(32)" in weft.describe(net)
    nets.loss_of(net, nets.data(1, 4)[0]).backward()
    atomic = nn.Linear(32, 64)
    weft.fully_shard(atomic, mp_policy=chosen, shard_placement_fn=lambda p: weft.BlockAtomic(4))


@distributed(2)
def test_cuts_lie_between_blocks_of_the_recipe_and_of_the_user():
    def cuts(recipe, placed) -> list[int]:
        layer = nn.Linear(16, 96, bias=False)
        weft.fully_shard(layer, mp_policy=policy(recipe), shard_placement_fn=lambda p: placed)
        (group,) = layer._weft_unit.groups
        return [cut // 16 for cut in group.layout.cuts(0)]

    assert cuts(blockwise(8, 16), weft.BlockAtomic(12))[1] % 24 == 0
    assert cuts(mx(16, compute="scaled"), weft.BlockAtomic(24))[1] % 48 == 0, "its other copy has blocks along rows"
    assert cuts(mx(16), weft.BlockAtomic(12))[1] % 12 == 0
    assert cuts(tensorwise(), weft.TensorAtomic())[1] in (0, 96)


@distributed(2)
def test_a_write_to_gathered_weights_is_refused():
    class Clamping(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return super().forward(x)

    net = weft.fully_shard(Clamping(32, 32), mp_policy=policy(rowwise()))
    with pytest.raises(WeightsWritten, match=r"'weight'.*the write would be lost"):
        net(torch.ones(2, 32))
    net = weft.fully_shard(Clamping(32, 32), mp_policy=policy(rowwise(compute="scaled")))
    with pytest.raises(TypeError, match=r"clamp_ of 'weight'.*compute=\"scaled\""):
        net(torch.ones(2, 32))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)
        self.two.weight = self.one.weight


@distributed(2)
def test_what_does_not_fit_a_recipe_is_refused():
    def sharded(module, recipe, choose=None, **options):
        return weft.fully_shard(module, mp_policy=policy(recipe, quantize=choose, **options))

    every = lambda name, p: True  # noqa: E731
    refused = [
        (
            lambda: sharded(nn.Linear(31, 4), mx(32)),
            r"mx\(32\) for parameter 'weight' of shape \(4, 31\).*multiple of 32",
        ),
        (lambda: sharded(nn.Linear(24, 4), nvfp4()), "multiple of 16"),
        (lambda: sharded(nn.Linear(32, 4), rowwise(), every), "'bias'.*two dimensions"),
        (lambda: sharded(nn.Linear(32, 4), mx(32), param_dtype=torch.float16), "range of float16"),
        (lambda: weft.MixedPrecisionPolicy(quantize=every), "pass a recipe too"),
        (
            lambda: weft.fully_shard(
                nn.Linear(32, 4), mp_policy=policy(rowwise()), shard_placement_fn=lambda p: Shard(p.ndim - 1)
            ),
            r"Shard\(1\).*'weight'.*blocks lie along rows",
        ),
    ]
    for wrong, says in refused:
        with pytest.raises(ValueError, match=says):
            wrong()
    with pytest.raises(TypeError, match="param_quantization='fp8'"):
        weft.MixedPrecisionPolicy(param_quantization="fp8")
    net = Shared()
    sharded(net.one, mx(32))
    with pytest.raises(ValueError, match=r"is shared with 'weight'.*param_quantization=mx\(32\).*rowwise"):
        sharded(net.two, rowwise())


@pytest.mark.slow
@distributed(2)
def test_checkpoints_hold_main_weights_alone_and_go_to_any_recipe(tmp_path):
    def made(recipe):
        net = nets.make(**SIZES)
        nets.shard(net, mp_policy=policy(recipe, param_dtype=FP32))
        return net, torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)

    def step(net, optimizer, batch):
        nets.loss_of(net, mine(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()

    batches = nets.data(3, 4)
    (net, optimizer), (again, other) = made(mx(32)), made(mx(32))
    step(net, optimizer, batches[0])
    state = net.state_dict()
    assert list(state) == list(nets.make(**SIZES).state_dict())
    assert {each.dtype for each in state.values()} == {FP32}
    folder = tmp_path / "checkpoint"
    dist.barrier()
    dcp.save({"model": state, "momentum": optimizer.state_dict()}, checkpoint_id=folder)
    step(net, optimizer, batches[1])
    step(again, other, batches[0])
    dcp.load({"model": again.state_dict(), "momentum": other.state_dict()}, checkpoint_id=folder)
    step(again, other, batches[1])
    for one, another in zip(net.parameters(), again.parameters()):
        assert torch.equal(one.to_local(), another.to_local())
    for recipe in (rowwise(), None):
        elsewhere, _ = made(recipe)
        found = elsewhere.state_dict()
        dcp.load({"model": found}, checkpoint_id=folder)
        elsewhere.load_state_dict(found, strict=True)
        wanted = nets.make(**SIZES)
        wanted.load_state_dict({name: nets.full(each) for name, each in found.items()})
        loss = nets.loss_of(elsewhere, batches[1]).detach()
        torch.testing.assert_close(loss, plain_loss(wanted, batches[1], recipe, 1, FP32).detach())
