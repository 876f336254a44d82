"""What the checked order of streams says of the engine: what runs beside what, and where the host waits."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import weft
import weft.debug
from tests.fsdp import nets
from tests.overlap.test_events import CFG, build, data
from tests.pool import distributed
from weft.comm import collectives, streams
from weft.comm.lanes import Lane
from weft.debug import Ran, StreamChecker

CPU = torch.device("cpu")
STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
COMPUTATION = ("aten::mm", "aten::addmm", "aten::_grouped_mm", "aten::embedding", "aten::embedding_dense_backward")
MIXED = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def train(net, optimizer, checker: StreamChecker, steps: int = 4) -> dict[str, int]:
    """Some steps; the waits of the host in the last one."""
    for number, batch in enumerate(nets.data(steps, 4)):
        if number == steps - 1:
            checker.waits.clear()
            checker.work.clear()
        nets.loss_of(net, batch.chunk(dist.get_world_size())[dist.get_rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not checker.unawaited
    return dict(checker.waits)


def of(work: list[Ran], stream: str, operator: str, buffer: str) -> list[Ran]:
    """What ran on a stream that wrote to a buffer, or on any that read it."""
    return [
        each
        for each in work
        if each.stream.endswith(stream) and operator in each.operator and any(buffer in name for name in each.writes)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "mixed"),
    [
        ("no_shard", True),
        ("optim", True),
        ("optim_grads", False),
        ("optim_grads_params", False),
        ("optim_grads_params", True),
    ],
)
@distributed(2)
def test_a_steady_step_has_no_wait_of_the_host(strategy, mixed):
    with weft.debug.check_streams() as checker:
        net = nets.shard(nets.make(), strategy=strategy, mp_policy=MIXED if mixed else None)
        assert not train(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), checker)


@pytest.mark.slow
@distributed(2)
def test_units_that_share_messages_are_in_order_and_the_host_waits_for_none():
    with weft.debug.check_streams(record=True) as checker:
        net = nets.shard(nets.make(), runtime=weft.RuntimeOptions(bucket_bytes=1 << 20))
        assert not train(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), checker)
    assert {"the stream gathers", "the stream reductions"} <= {each.stream for each in checker.work}


@pytest.mark.slow
@distributed(2)
def test_offloaded_weights_and_gradients_are_awaited_by_the_host_where_the_page_says():
    with weft.debug.check_streams() as checker:
        net = nets.shard(nets.make(), offload_policy=weft.CPUOffloadPolicy(pin_memory=False))
        waits = train(net, torch.optim.SGD(net.parameters(), lr=0.1), checker)
    assert waits and all("finish_upload" in what or "offload.py" in what for what in waits), waits


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@distributed(2)
def test_weights_in_memory_of_the_host_may_be_written_after_an_evaluation(strategy):
    with weft.debug.check_streams() as checker, torch.no_grad():
        net = nets.shard(nets.make(), strategy=strategy, offload_policy=weft.CPUOffloadPolicy(pin_memory=False))
        for number in range(2):
            nets.loss_of(net, nets.data(1, 4, seed=number)[0])
            for parameter in net.parameters():
                parameter.mul_(0.9)
    assert checker.waits


@distributed(2)
def test_frozen_weights_in_memory_of_the_host_may_be_written_after_a_backward():
    """They have no gradient whose download the host would wait for."""
    with weft.debug.check_streams():
        policy = weft.CPUOffloadPolicy(pin_memory=False)
        net = nets.Block(13, 29).requires_grad_(False)
        weft.fully_shard(net, offload_policy=policy, reshard_after_forward=True)
        for _ in range(2):
            net(torch.ones(2, 13, requires_grad=True)).sum().backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.mul_(0.9)


@pytest.mark.slow
@pytest.mark.parametrize("separate", [False, True])
@distributed(2)
def test_gathers_and_reductions_overlap_with_the_computation_of_other_units(separate):
    with weft.debug.check_streams(record=True) as checker:
        runtime = weft.RuntimeOptions(separate_all_gather_group=separate)
        net = nets.shard(nets.make(depth=4), runtime=runtime)
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), checker)
    gathers = {n: of(checker.work, "gather", "allgather", f"weights of blocks.{n} ") for n in range(4)}
    computed = {
        n: [
            each
            for each in checker.work
            if each.stream.endswith("compute") and any(f"weights of blocks.{n} " in name for name in each.reads)
        ]
        for n in range(4)
    }
    assert all(len(each) == 2 for n, each in gathers.items() if n < 3), "forward and backward"
    for n in range(3):  # in forward the next one, in backward the one before
        assert all(gathers[n + 1][0].beside(each) for each in computed[n][:2])
        assert gathers[n][0].before(computed[n][0])
    for n in (1, 2):
        later = computed[n + 1][len(computed[n + 1]) // 2 :]
        assert any(gathers[n][1].beside(each) for each in later)
    reductions = [each for each in checker.work if each.stream.endswith("reduce") and "reduce_scatter" in each.operator]
    assert len(reductions) == 5
    for one in reductions[:-1]:
        following = [
            each
            for each in checker.work
            if each.stream.endswith("compute") and each.operator in COMPUTATION and one.beside(each)
        ]
        assert following, f"{one} stands alone"


@pytest.mark.slow
@distributed(4)
def test_outer_gathers_and_reductions_overlap_with_the_computation():
    with weft.debug.check_streams(record=True) as checker:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
        net = nets.shard(nets.make(depth=4), mesh=mesh, outer_strategy="optim")
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), checker)
    products = [each for each in checker.work if each.stream.endswith("compute") and each.operator in COMPUTATION]
    for operator in ("allgather", "reduce"):
        outer = [each for each in checker.work if each.stream.endswith("outer") and operator in each.operator]
        assert len(outer) == 5
        alone = [one for one in outer if not any(one.beside(each) for each in products)]
        assert len(alone) <= 1, (alone, "all but the first gather and the last reduction")


@pytest.mark.long
@distributed(2)
def test_the_exchange_of_a_schedule_overlaps_with_the_computation_and_the_host_waits_for_sizes_only():
    microbatches = 2
    with weft.debug.check_streams(record=True) as checker:
        model = build(CFG, weft.init_meshes("cpu", ep=2), strategy="optim_grads_params")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            checker.waits.clear()
            checker.work.clear()
            weft.overlap.forward_backward(model, data(microbatches), delay_wgrad=True)
            optimizer.step()
            optimizer.zero_grad()
    layers = sum("E" in layer.symbols for layer in model.staged_layers)
    assert sum(checker.waits.values()) == microbatches * layers, checker.waits
    assert all("ready" in what for what in checker.waits)
    assert not checker.unawaited
    exchanges = [each for each in checker.work if each.stream.endswith("exchange") and "alltoall" in each.operator]
    products = [each for each in checker.work if each.stream.endswith("compute") and each.operator in COMPUTATION]
    assert len(exchanges) == microbatches * layers * 4
    hidden = [one for one in exchanges if any(one.beside(each) for each in products)]
    assert len(hidden) >= (microbatches - 1) * layers * 4, "those of the pairs"


@pytest.mark.long
@pytest.mark.parametrize("early_release", [False, pytest.param(True, marks=pytest.mark.long)])
@distributed(2)
def test_the_sizes_of_an_exchange_come_while_the_other_microbatch_computes_beside_which_its_rows_travel(early_release):
    """The device has its backward of experts to compute when the host waits; what leaves then waits for none of it."""
    microbatches = 2
    with weft.debug.check_streams(record=True) as checker:
        model = build(CFG, weft.init_meshes("cpu", ep=2), strategy="optim_grads_params")
        for _ in range(2):
            checker.work.clear()
            weft.overlap.forward_backward(model, data(microbatches), early_release=early_release)
    layers = sum("E" in layer.symbols for layer in model.staged_layers)
    work = checker.work
    waits = [place for place, each in enumerate(work) if each.stream == "the host" and "wait" in each.operator]
    assert len(waits) == microbatches * layers
    beside, alone = 0, 0
    for place in waits:
        counts = next(e for e in reversed(work[:place]) if e.stream.endswith("counts") and "alltoall" in e.operator)
        rows = next(e for e in work[place:] if e.stream.endswith("exchange") and "alltoall" in e.operator)
        earlier = [e for e in work[: work.index(counts)] if e.stream.endswith("compute")]
        assert all(each.before(counts) for each in earlier), "and so who read the rows before: their memory is free"
        queued = [e for e in work[work.index(counts) : place] if e.stream.endswith("compute")]
        experts = [e for e in queued if e.operator == "aten::_grouped_mm"]
        assert all(each.beside(counts) for each in queued), "the sizes do not wait for what is queued"
        assert all(each.beside(rows) for each in experts), "and neither do the rows"
        assert all(each.before(rows) for each in queued if not experts), "those wait for what is sent"
        beside, alone = (beside + 1, alone) if experts else (beside, alone + 1)
    assert (beside, alone) == ((microbatches - 1) * layers, layers), "all but the first forward have one beside them"


@pytest.mark.long
@distributed(2)
def test_a_device_is_not_asked_by_a_rank_without_rows():
    """All tokens go to the experts of the first rank; those of the other have gradients of zeros."""
    with weft.debug.check_streams() as checker:
        model = build(CFG, weft.init_meshes("cpu", ep=2), strategy="optim_grads_params")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "router" in name:
                    parameter.zero_()
        for _ in range(3):
            checker.waits.clear()
            model.zero_grad()
            weft.overlap.forward_backward(model, data(2))
    assert checker.waits and all("ready" in what for what in checker.waits), checker.waits
    if dist.get_rank() == 1:
        experts = [p.grad.to_local() for name, p in model.named_parameters() if ".experts." in name]
        assert experts and not any(gradient.any() for gradient in experts)


@pytest.mark.slow
@distributed(2)
def test_weights_that_come_for_a_unit_that_does_not_run_are_awaited():
    with weft.debug.check_streams() as checker:
        net = nets.shard(nets.make(depth=3), strategy="optim")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        train(net, optimizer, checker, steps=2)
        every, net.blocks = net.blocks, net.blocks[:2]
        train(net, optimizer, checker, steps=2)
        net.blocks = every
        train(net, optimizer, checker, steps=2)


@pytest.mark.slow
@distributed(2)
def test_reductions_of_a_backward_that_fails_are_given_up_and_gradients_dropped():
    def fail(gradient):
        raise RuntimeError("no")

    with weft.debug.check_streams() as checker:
        net = nets.shard(nets.make(depth=4))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        train(net, optimizer, checker, steps=2)
        nets.loss_of(net, nets.data(1, 4)[0]).backward()
        handle = net.blocks[0].register_forward_hook(lambda block, args, output: output.register_hook(fail) and None)
        with pytest.raises(RuntimeError, match="no"):
            nets.loss_of(net, nets.data(1, 4)[0]).backward()
        handle.remove()
        assert all(parameter.grad is None for parameter in net.parameters())  # at once, also of the one before it
        train(net, optimizer, checker, steps=2)


@pytest.mark.slow
@distributed(2)
def test_a_hook_with_a_stream_of_its_own_comes_between_the_reduction_and_what_reads_it():
    with weft.debug.check_streams(record=True) as checker:
        net = nets.shard(nets.make())
        for module in (*net.blocks, net):
            module.set_all_reduce_hook(lambda gradients: gradients.mul_(2), stream=streams.new("hook", CPU))
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), checker)
    assert sum(each.stream.endswith("hook") for each in checker.work) == 4


@distributed(2)
def test_a_ticket_is_awaited_by_each_stream_that_needs_it_and_by_the_one_that_asked_when_it_dies():
    with weft.debug.check_streams() as checker:
        lane, side = Lane("gather", CPU), streams.new("side", CPU)
        full, rank = torch.zeros(4), dist.get_rank()
        own = full[2 * rank :][:2]
        ticket = lane.run(collectives.all_gather, full, own, dist.group.WORLD, prepare=lambda: own.fill_(rank + 1))
        ticket.wait()
        full.sum()
        with streams.on(side), pytest.raises(weft.debug.StreamOrderError):
            full.sum()
        with streams.on(side):
            ticket.wait()
            full.sum()
        streams.current(CPU).wait_stream(side)
        again = lane.run(collectives.all_gather, full, own, dist.group.WORLD)
        assert not checker.unawaited
        with streams.on(side):
            del again
        (what,) = checker.unawaited
        assert what.startswith("all_gather on gather, forgotten by ") and "debug/test_order_of_work.py:" in what
        full.sum()
        with streams.on(side), pytest.raises(weft.debug.StreamOrderError):
            full.sum()
    assert full.tolist() == [1, 1, 2, 2]


@distributed(2)
def test_a_model_that_has_run_unchecked_is_not_checked_by_half():
    net = nets.shard(nets.make())
    nets.loss_of(net, nets.data(1, 4)[0])
    with weft.debug.check_streams(), pytest.raises(RuntimeError, match=r"made outside of weft\.debug\.check_streams"):
        nets.loss_of(net, nets.data(1, 4)[0])
