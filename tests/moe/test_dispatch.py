"""Rows reach the ranks of their experts and come back."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.pool import distributed
from weft.comm import streams
from weft.comm.groups import exchange_objects
from weft.debug import check_streams
from weft.errors import CollectiveMismatch
from weft.moe import AllToAll, LocalDispatcher, MoE, exchange

LOCAL = 3
HIDDEN = 5


def some_counts(case, experts, ranks):
    """[ranks, experts]: what every rank sends to every expert, the same table on all ranks."""
    generator = torch.Generator().manual_seed(case)
    counts = torch.randint(0, 5, (ranks, experts), generator=generator)
    shape = case % 6
    if shape == 1:
        counts[case % ranks] = 0  # a rank sends nothing
    elif shape == 2:
        counts[:, :LOCAL] = 0  # a rank receives nothing
    elif shape == 3:
        counts[:, torch.arange(experts) != case % experts] = 0  # one expert receives all
    elif shape == 4:
        counts.zero_()
    return counts


def labeled(rank, counts):
    """One row per assignment, sorted by expert: (source rank, expert, number, ...)."""
    rows = [(rank, expert, number) for expert, count in enumerate(counts.tolist()) for number in range(count)]
    return torch.tensor(rows, dtype=torch.float32).reshape(-1, 3).repeat(1, 2)[:, :HIDDEN]


def expected_arrival(counts, experts):
    """Grouped by source rank, then expert."""
    everyone = [labeled(rank, row) for rank, row in enumerate(counts)]
    return torch.cat([rows[(rows[:, 1] >= experts.start) & (rows[:, 1] < experts.stop)] for rows in everyone])


@distributed(2, 4)
def test_rows_arrive_grouped_by_rank_and_expert_and_return_to_their_places():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dispatcher = AllToAll(init_device_mesh("cpu", (ranks,)), LOCAL * ranks, rows_per="expert")
    assert dispatcher.experts == range(rank * LOCAL, (rank + 1) * LOCAL)
    for case in range(24):
        counts = some_counts(case, dispatcher.num_experts, ranks)
        rows = labeled(rank, counts[rank])
        handle = dispatcher.plan(counts[rank])
        for _ in range(case % 3):  # whoever needs the sizes first waits for them, and again is free
            handle.ready()
        arrived = dispatcher.dispatch(rows, handle).wait()
        assert torch.equal(arrived, expected_arrival(counts, dispatcher.experts))
        assert (handle.sent, handle.received) == (len(rows), len(arrived))

        per_expert = arrived[handle.by_expert]
        assert per_expert[:, 1].tolist() == sorted(arrived[:, 1].tolist())
        assert torch.equal(per_expert[handle.by_arrival], arrived)
        ends = counts[:, list(dispatcher.experts)].sum(0).cumsum(0)
        assert handle.offsets.dtype == torch.int32 and handle.offsets.tolist() == ends.tolist()
        assert torch.equal(dispatcher.combine(arrived, handle).wait(), rows)


@distributed(2, 4)
def test_many_exchanges_under_way_do_not_mix():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dispatcher = AllToAll(dist.group.WORLD, LOCAL * ranks, rows_per="expert")
    tables = [some_counts(case, dispatcher.num_experts, ranks) for case in range(6)]
    first, later = tables[:3], tables[3:]

    handles = [dispatcher.plan(counts[rank]) for counts in first]
    for handle in reversed(handles):
        handle.ready()
    there = [dispatcher.dispatch(labeled(rank, counts[rank]), handle) for counts, handle in zip(first, handles)]
    handles += [dispatcher.plan(counts[rank]) for counts in later]  # counts of others beside rows on their way
    arrived = [arrival.wait() for arrival in reversed(there)][::-1]
    back = [dispatcher.combine(rows, handle) for rows, handle in zip(arrived, handles)]
    for handle in handles:
        handle.ready()
    there = [dispatcher.dispatch(labeled(rank, counts[rank]), handle) for counts, handle in zip(later, handles[3:])]
    for counts, rows in zip(first, arrived):
        assert torch.equal(rows, expected_arrival(counts, dispatcher.experts))
    for counts, arrival in zip(reversed(first), reversed(back)):
        assert torch.equal(arrival.wait(), labeled(rank, counts[rank]))
    for counts, arrival in zip(later, there):
        assert torch.equal(arrival.wait(), expected_arrival(counts, dispatcher.experts))
        assert arrival.wait() is arrival.wait()


@pytest.mark.slow
@distributed(2)
def test_exchanges_without_a_wait_leave_nothing_for_the_next():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dispatcher = AllToAll(dist.group.WORLD, LOCAL * ranks, rows_per="expert")
    for case in range(0, 18, 6):
        counts = some_counts(case, dispatcher.num_experts, ranks)
        abandoned = dispatcher.plan(counts.flip(1)[rank])
        handle = dispatcher.plan(counts[rank])
        del abandoned
        handle.ready()
        rows = labeled(rank, counts[rank])
        dispatcher.dispatch(rows + 100, handle)
        assert torch.equal(dispatcher.dispatch(rows, handle).wait(), expected_arrival(counts, dispatcher.experts))


@pytest.mark.slow
@distributed(2, 4)
def test_the_backward_of_an_exchange_is_the_reverse_exchange_once():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dispatcher = AllToAll(dist.group.WORLD, LOCAL * ranks, rows_per="expert")
    for case in range(6):
        counts = some_counts(case, dispatcher.num_experts, ranks)
        handle = dispatcher.plan(counts[rank])
        handle.ready()
        rows = labeled(rank, counts[rank]).requires_grad_()
        arrived = exchange(rows, dispatcher, handle, "dispatch")
        factor = arrived.detach().sum(-1, keepdim=True) + 1
        exchange(arrived * factor, dispatcher, handle, "combine").sum().backward()  # an expanded gradient
        own = rows.detach().sum(-1, keepdim=True) + 1
        assert torch.equal(rows.grad, own.expand_as(rows))

    rows = labeled(rank, counts[rank]).requires_grad_()
    again = exchange(rows, dispatcher, handle, "dispatch").square().sum()
    (gradient,) = torch.autograd.grad(again, rows, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.slow
@distributed(4)
def test_ranks_in_several_expert_groups_exchange_within_their_own():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "ep"))
    dispatcher = AllToAll(mesh["ep"], 2 * LOCAL, rows_per="expert")
    rank = dist.get_rank()
    counts = some_counts(rank // 2, dispatcher.num_experts, 2)
    handle = dispatcher.plan(counts[rank % 2])
    handle.ready()
    rows = labeled(rank % 2, counts[rank % 2]) + 10 * (rank // 2)
    arrived = dispatcher.dispatch(rows, handle).wait()
    assert torch.equal(arrived, expected_arrival(counts, dispatcher.experts) + 10 * (rank // 2))


@pytest.mark.slow
@distributed(2)
def test_one_dispatcher_serves_copies_of_a_model_and_wrong_numbers_of_experts_are_refused():
    dispatcher = AllToAll(dist.group.WORLD, 4, rows_per="expert")
    layer = MoE(8, 8, 4, 2, dispatcher=dispatcher)
    assert copy.deepcopy(layer).dispatcher is dispatcher
    with pytest.raises(ValueError, match=r"num_experts=6: num_experts must be the dispatcher's, 4"):
        MoE(8, 8, 6, 2, dispatcher=dispatcher)
    with pytest.raises(ValueError, match=r"num_experts=5 cannot be spread evenly over ep=2 ranks; choose a multiple"):
        AllToAll(dist.group.WORLD, 5)
    assert exchange_objects(list(dispatcher.experts), dist.group.WORLD) == [[0, 1], [2, 3]]


def layer_of_its_own():
    """On a communicator that does not survive, after a forward and a backward."""
    layer = MoE(8, 8, 4, 2, dispatcher=AllToAll(dist.new_group([0, 1]), 4))
    hidden = torch.randn(2, 3, 8, requires_grad=True)
    layer(hidden)[0].sum().backward()
    return layer, hidden


@pytest.mark.long
@distributed(2)
def test_a_rank_that_calls_fewer_layers_is_named_with_the_place_where_it_waits():
    layer, hidden = layer_of_its_own()
    if dist.get_rank() == 0:
        said = r"rank 0: counts.*, which rank 1 never began; rank 1: barrier at .*test_dispatch\.py"
        with pytest.raises(CollectiveMismatch, match=said):
            layer(hidden)
    dist.barrier()


@pytest.mark.slow
@distributed(2)
def test_ranks_that_wait_for_different_exchanges_raise():
    layer, hidden = layer_of_its_own()
    output = layer(hidden)[0].sum()
    said = r"rank 0: counts.*, which rank 1 never began; rank 1: exchange.*, which rank 0 never began"
    with pytest.raises(CollectiveMismatch, match=said):
        layer(hidden) if dist.get_rank() == 0 else output.backward()


@distributed(2)
def test_rows_that_must_be_copied_first_leave_after_the_copy():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with check_streams() as checker:
        dispatcher = AllToAll(dist.group.WORLD, LOCAL * ranks, rows_per="expert")
        counts = some_counts(0, dispatcher.num_experts, ranks)
        handle = dispatcher.plan(counts[rank])
        rows = labeled(rank, counts[rank]).t().contiguous().t()
        moment = streams.moment(rows.device)
        arrived = dispatcher.dispatch(rows, handle, moment).wait()
        assert torch.equal(arrived, expected_arrival(counts, dispatcher.experts))
        dispatcher.plan(counts[rank])  # a dropped handle waits before its memory is reused
    assert not checker.unawaited


@distributed(2)
def test_rows_leave_when_the_sizes_have_come_and_the_host_waits_for_neither():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dispatcher = AllToAll(dist.group.WORLD, LOCAL * ranks, rows_per="expert")
    tables = [some_counts(case, dispatcher.num_experts, ranks) for case in (0, 6)]

    def begin():
        handles = [dispatcher.plan(counts[rank]) for counts in tables]
        return [dispatcher.dispatch(labeled(rank, each[rank]), handle) for each, handle in zip(tables, handles)]

    there = begin() if rank == 0 else []
    dist.barrier()  # rank 1 has planned nothing when rank 0 comes here
    for counts, arrival in zip(tables, there or begin()):
        assert torch.equal(arrival.wait(), expected_arrival(counts, dispatcher.experts))


@distributed(2)
def test_rows_that_were_not_planned_are_refused():
    dispatcher = AllToAll(dist.group.WORLD, 2, rows_per="expert")
    handle = dispatcher.plan(torch.tensor([2, 1]))
    handle.ready()
    with pytest.raises(ValueError, match=r"4 rows to send, but this handle's plan counted 3"):
        dispatcher.dispatch(torch.ones(4, 8), handle)
    with pytest.raises(ValueError, match=rf"5 rows to send, but .* counted {handle.received}, .*pass plan"):
        dispatcher.combine(torch.ones(5, 8), handle)
    with pytest.raises(ValueError, match=r"plan\(\) got numbers of rows per rank, and rows_per='expert'"):
        dispatcher.plan(torch.tensor([2, 1]), torch.tensor([2, 1]))
    with pytest.raises(ValueError, match=r"rows_per='token': rows_per must be 'rank' or 'expert'"):
        AllToAll(dist.group.WORLD, 2, rows_per="token")
    per_rank = AllToAll(dist.group.WORLD, 2)
    with pytest.raises(ValueError, match=r"plan\(\) got no numbers of rows per rank, and rows_per='rank'"):
        per_rank.plan(torch.tensor([2, 1]))
    handle = per_rank.plan(torch.tensor([2, 1]), torch.tensor([2, 1]))
    with pytest.raises(ValueError, match=r"2 rows to send, but this handle's plan counted 3"):
        per_rank.dispatch(torch.ones(2, 8), handle)


@distributed(1)
def test_rows_behind_those_that_are_sent_come_back_as_zeros():
    dispatcher = AllToAll(dist.group.WORLD, 2)
    handle = dispatcher.plan(torch.tensor([2, 1]), torch.tensor([2]))
    dispatcher._memory = lambda rows, size, behind=None: rows.new_full((size, *rows.shape[1:]), torch.nan)
    there = dispatcher.dispatch(torch.ones(5, 3), handle).wait()  # two rows, and three that are not sent
    back = dispatcher.combine(there, handle).wait()
    assert back.tolist() == [[1.0] * 3] * 2 + [[0.0] * 3] * 3


def test_one_rank_moves_nothing_and_keeps_its_handle_on_the_device():
    dispatcher = LocalDispatcher(3)
    handle = dispatcher.plan(torch.tensor([2, 0, 1]))
    handle.ready()
    rows = torch.randn(3, HIDDEN)
    assert dispatcher.dispatch(rows, handle).wait().data_ptr() == rows.data_ptr()
    assert dispatcher.combine(rows, handle).wait().data_ptr() == rows.data_ptr()
    assert handle.offsets.tolist() == [2, 2, 3] and handle.by_expert is None
    assert (handle.sent, handle.received) == (3, 3)
    with pytest.raises(ValueError, match=r"num_experts=0: num_experts must be a positive integer"):
        LocalDispatcher(0)
