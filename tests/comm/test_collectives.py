"""weft's collectives do what torch's do."""

import functools
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import weft.comm
from tests.pool import distributed
from weft.comm import backends, collectives
from weft.comm.builtin import BuiltIn
from weft.comm.gloo import Gloo, sends, transport
from weft.comm.gloo.copying import CopyingGloo
from weft.comm.gloo.transport import sum_into
from weft.comm.groups import exchange_objects, twin_group
from weft.comm.lanes import Lane, Ticket
from weft.comm.transport import Capabilities, Pending, Sum
from weft.errors import StorageError

SIZES = (1, 7, 64, 5000)
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def values(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Different on every rank."""
    generator = torch.Generator().manual_seed(seed * 100 + dist.get_rank())
    return (torch.randn(numel, generator=generator) * 10).to(dtype)


def lane(name: str = "gather") -> Lane:
    return Lane(name, torch.device("cpu"))


@distributed(2, 4)
def test_all_gather_equals_torch_s_in_place_and_not():
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    for dtype in DTYPES:
        for numel in SIZES:
            source = values(numel, dtype)
            expected = torch.empty(ranks * numel, dtype=dtype)
            dist.all_gather_into_tensor(expected, source)
            full = torch.zeros_like(expected)
            lane().run(collectives.all_gather, full, source, group).wait()
            assert torch.equal(full, expected)
            in_place = torch.zeros_like(expected)
            own = in_place.view(ranks, -1)[rank]
            own.copy_(source)
            lane().run(collectives.all_gather, in_place, own, group).wait()
            assert torch.equal(in_place, expected)


@distributed(1, 2, 4)
def test_reduce_scatter_equals_torch_s_scaled_and_accumulated():
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16):
        for numel in SIZES:
            partial = values(ranks * numel, dtype)
            expected = partial.to(torch.float32, copy=True)
            dist.all_reduce(expected)  # of exact copies: what bf16 terms add up to in fp32
            expected = expected.view(ranks, -1)[rank]
            for scale in (1.0, 1 / ranks, 0.3):
                for accumulate in (False, True):
                    output = torch.full((numel,), 2.0)
                    inbox = partial.new_empty(
                        collectives.inbox_numel(collectives.reduce_scatter, partial.numel(), group, partial.device)
                    )
                    before = partial.clone()
                    ticket = lane("reduce").run(
                        collectives.reduce_scatter,
                        output,
                        partial,
                        group,
                        scale=scale,
                        accumulate=accumulate,
                        inbox=inbox,
                    )
                    ticket.wait()
                    torch.testing.assert_close(output, scale * expected + 2.0 * accumulate, rtol=1e-5, atol=1e-4)
                    assert torch.equal(partial, before)


@distributed(2, 4)
def test_reductions_are_bit_equal_from_run_to_run():
    group, ranks = dist.group.WORLD, dist.get_world_size()
    partial = values(ranks * 999, torch.float32)
    runs = []
    for _ in range(3):
        output = torch.empty(999)
        inbox = torch.empty(collectives.inbox_numel(collectives.reduce_scatter, partial.numel(), group, partial.device))
        lane("reduce").run(
            collectives.reduce_scatter, output, partial, group, scale=0.7, accumulate=False, inbox=inbox
        ).wait()
        runs.append(output)
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])


def test_sums_of_narrow_terms_are_rounded_once():
    total = torch.empty(1, dtype=torch.bfloat16)
    sum_into(total, [torch.tensor([term], dtype=torch.bfloat16) for term in (256.0, 1.0, 1.0, 1.0, 1.0)], 1.0)
    assert total.item() == 260  # in bf16, 256 + 1 is 256


NARROW = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("accumulate", [False, True])
@distributed(1, 2)
def test_sums_of_wide_terms_in_a_narrow_output_are_rounded_once(accumulate):
    """Also where the sum itself would leave the range of the output."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    for collective, dtype in product((collectives.reduce_scatter, collectives.all_reduce), NARROW):
        whole = ranks if collective is collectives.reduce_scatter else 1
        output, partial = torch.full((3,), 8.0, dtype=dtype), torch.full((3 * whole,), 50001.0)
        inbox = partial.new_empty(collectives.inbox_numel(collective, partial.numel(), group, partial.device))
        options = {"scale": 0.3 / ranks, "accumulate": accumulate, "inbox": inbox}
        lane("reduce").run(collective, output, partial, group, **options).wait()
        expected = torch.full((3,), 50001.0).mul(0.3).add(8.0 * accumulate)
        torch.testing.assert_close(output, expected.to(dtype), rtol=0, atol=0)


@distributed(1, 2, 4)
def test_all_reduce_equals_torch_s_scaled_and_accumulated():
    group = dist.group.WORLD
    for dtype, tolerance in ((torch.float32, {}), (torch.bfloat16, {"rtol": 2e-2, "atol": 0.2})):
        for numel in SIZES:
            expected = values(numel, dtype).float()
            dist.all_reduce(expected)
            for scale in (1.0, 0.25):
                for accumulate in (False, True):
                    output, partial = torch.full((numel,), 2.0), values(numel, dtype)
                    inbox = partial.new_empty(
                        collectives.inbox_numel(collectives.all_reduce, numel, group, partial.device)
                    )
                    options = {"scale": scale, "accumulate": accumulate, "inbox": inbox}
                    ticket = lane("reduce").run(collectives.all_reduce, output, partial, group, **options)
                    ticket.wait()
                    torch.testing.assert_close(output, scale * expected + 2.0 * accumulate, **tolerance)


@distributed(2, 4)
def test_uneven_parts_are_gathered_empty_ones_too():
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for sizes in ([3, 0, 5, 1], [0, 4, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]):
        parts = [torch.zeros(size) for size in sizes[:ranks]]
        parts[rank].copy_(values(sizes[rank], torch.float32))
        expected = exchange_objects(parts[rank].clone(), dist.group.WORLD)
        collectives.all_gather_uneven(parts, rank, dist.group.WORLD)
        assert all(torch.equal(part, whole) for part, whole in zip(parts, expected))


@distributed(2, 4)
def test_all_to_all_equals_torch_s_empty_parts_too():
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    for case, dtype in enumerate((*DTYPES, *DTYPES)):
        table = torch.randint(0, 4, (ranks, ranks), generator=torch.Generator().manual_seed(case))
        if case >= len(DTYPES):
            table[case % ranks] = 0  # this rank sends nothing
            table[:, (case + 1) % ranks] = 0  # this one receives nothing
        leaving, arriving = table[rank].tolist(), table[:, rank].tolist()
        source = values(sum(leaving) * 7, dtype, case).view(-1, 7)
        expected = source.new_empty(sum(arriving), 7)
        dist.all_to_all_single(expected, source, arriving, leaving)
        output = torch.full_like(expected, 99)
        lane("exchange").run(collectives.all_to_all, output, source, arriving, leaving, group).wait()
        assert torch.equal(output, expected)


@distributed(2, 4)
def test_counts_reach_the_host_of_every_rank_while_rows_are_on_their_way():
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    table = torch.arange(ranks * 2 * ranks).view(ranks, 2 * ranks)
    rows = torch.empty(ranks, 5)
    each = [1] * ranks
    under_way = lane("exchange").run(
        collectives.all_to_all, rows, torch.full((ranks, 5), float(rank)), each, each, group
    )
    received, host = torch.empty(2 * ranks, dtype=torch.int64), torch.empty(2, 2 * ranks, dtype=torch.int64)
    ticket = lane("counts").run(collectives.all_to_all_counts, received, table[rank], host, group)
    ticket.synchronize()
    assert torch.equal(host[0], table[rank])
    assert torch.equal(host[1], table.view(ranks, ranks, 2)[:, rank].flatten())
    assert torch.equal(received, host[1])
    under_way.wait()
    assert rows.mean(1).tolist() == list(range(ranks))


@distributed(2, 4)
def test_a_broadcast_brings_rank_0_s_values():
    for dtype in DTYPES:
        tensor = values(9, dtype)
        first = exchange_objects(tensor.clone(), dist.group.WORLD)[0]
        collectives.broadcast(tensor, dist.group.WORLD)
        assert torch.equal(tensor, first)
        transposed = values(6, dtype, 1).view(2, 3).t()
        first = exchange_objects(transposed.clone(), dist.group.WORLD)[0]
        collectives.broadcast(transposed, dist.group.WORLD)
        assert torch.equal(transposed, first)


@distributed(2)
def test_what_the_backend_cannot_send_is_sent_as_a_copy():
    """As tensors in CPU memory are over NCCL alone."""
    rank, group, copied = dist.get_rank(), dist.group.WORLD, []

    def movable(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        copied.append(tensor.clone())
        return copied[-1]

    with mock.patch.object(collectives, "_movable", movable):
        parts = [torch.full((2 + peer,), float(rank)) for peer in range(2)]
        collectives.all_gather_uneven(parts, rank, group)
        first = torch.tensor([rank + 5])
        collectives.broadcast(first, group)
        total = collectives.reduce_now(torch.tensor(rank + 1.0), dist.ReduceOp.SUM, group)
        largest = collectives.reduce_now(torch.tensor(rank + 1.0), dist.ReduceOp.MAX, group)
    assert [part.tolist() for part in parts] == [[0.0] * 2, [1.0] * 3]
    assert (first.item(), total.item(), largest.item(), len(copied)) == (5, 3.0, 2.0, 5)


@distributed(2, 4)
def test_lanes_run_concurrently_and_their_tickets_can_be_waited_for_in_any_order():
    group, ranks = dist.group.WORLD, dist.get_world_size()
    gather, reduce = lane("gather"), lane("reduce")
    sources = [values(50, torch.float32, seed) for seed in range(3)]
    partials = [values(50 * ranks, torch.float32, seed) for seed in range(3)]
    fulls = [torch.empty(50 * ranks) for _ in range(3)]
    outputs = [torch.empty(50) for _ in range(3)]
    tickets: list[Ticket] = []
    for full, source, output, partial in zip(fulls, sources, outputs, partials):
        inbox = torch.empty(collectives.inbox_numel(collectives.reduce_scatter, partial.numel(), group, partial.device))
        tickets.append(gather.run(collectives.all_gather, full, source, group))
        tickets.append(
            reduce.run(collectives.reduce_scatter, output, partial, group, scale=1.0, accumulate=False, inbox=inbox)
        )
    for ticket in reversed(tickets):
        ticket.wait()
    for full, source, output, partial in zip(fulls, sources, outputs, partials):
        assert torch.equal(full, torch.cat(exchange_objects(source, group)))
        summed = torch.stack(exchange_objects(partial, group)).sum(0).view(ranks, -1)[dist.get_rank()]
        torch.testing.assert_close(output, summed)


class Noting:
    """A group of three that only notes what is posted."""

    def __init__(self) -> None:
        self.posted: list[str] = []

    def size(self) -> int:
        return 3

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.posted.append("send")

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.posted.append("receive")


def test_receives_are_posted_first_so_that_both_directions_of_a_link_are_used_at_once(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    whole, part, inbox = torch.zeros(3), torch.zeros(1), torch.zeros(2)
    starts = {
        "all-gather": lambda group: collectives.all_gather(whole, part, group, 0),
        "reduce-scatter": lambda group: collectives.reduce_scatter(
            part, whole, group, 0, scale=1.0, accumulate=False, inbox=inbox
        ),
        "all-to-all": lambda group: collectives.all_to_all(whole, whole, [1, 1, 1], [1, 1, 1], group, 0),
    }
    for name, start in starts.items():
        group = Noting()
        with mock.patch.object(backends, "INSTEAD", Gloo()):
            start(group)
        assert group.posted == ["receive"] * 2 + ["send"] * 2, name


def messages_of(bundle: Callable[..., Pending], *args: Any) -> list[int]:
    """Run `bundle` over the world; return the elements of the messages that go to each rank."""
    sizes: list[int] = []

    def noting(swaps: Any, *where: Any) -> list[Any]:
        sizes.extend(leaving[0].numel() for _, leaving in swaps if leaving[0].numel())
        return sends.swap(swaps, *where)

    with mock.patch.object(transport, "swap", noting):
        bundle(*args, dist.group.WORLD, 7).complete()
    return sizes


@distributed(2, 4)
def test_the_large_tensors_of_a_bundle_travel_uncopied_and_the_small_ones_in_one_message():
    ranks, rank = dist.get_world_size(), dist.get_rank()
    large = transport.ALONE_BYTES // 4
    for numels, messages in (([3, large, 5, large, 7], [large, large, 15]), ([large], [large]), ([3, 5], [8])):
        dtype = torch.float32 if rank else torch.bfloat16  # of its main weights: messages are alike all the same
        sources = [values(numel, dtype, seed) for seed, numel in enumerate(numels)]
        fulls = [None if seed == 3 else torch.empty(ranks * numel) for seed, numel in enumerate(numels)]
        gather = functools.partial(Gloo().all_gather_bundle, dtype=torch.float32)
        assert messages_of(gather, fulls, sources) == messages
        for full, source in zip(fulls, sources):
            expected = torch.empty(ranks * len(source))
            dist.all_gather_into_tensor(expected, source.float())
            assert full is None or torch.equal(full, expected)

        partials = [values(ranks * numel, torch.float32, seed) for seed, numel in enumerate(numels)]
        scales, adds = [1.0, 0.5, 0.5, 1.0, 1.0][: len(numels)], [False, True, True, False, False][: len(numels)]
        outputs, expected = [torch.ones(numel) for numel in numels], [torch.ones(numel) for numel in numels]
        for output, partial, scale, add in zip(expected, partials, scales, adds):
            how = Sum(scale, add, partial.new_empty((ranks - 1) * len(output)))
            Gloo().reduce_scatter(output, partial.clone(), dist.group.WORLD, 7, how).complete()
        assert messages_of(Gloo().reduce_scatter_bundle, outputs, partials, scales, adds) == messages
        assert all(map(torch.equal, outputs, expected)), rank


@distributed(2)
def test_waiting_again_for_a_ticket_changes_nothing():
    group, ranks = dist.group.WORLD, dist.get_world_size()
    output, partial = torch.ones(4), values(4 * ranks, torch.float32)
    inbox = torch.empty(collectives.inbox_numel(collectives.reduce_scatter, partial.numel(), group, partial.device))
    ticket = lane("reduce").run(
        collectives.reduce_scatter, output, partial, group, scale=1.0, accumulate=True, inbox=inbox
    )
    ticket.wait()
    once = output.clone()
    ticket.wait()
    assert torch.equal(output, once)


@distributed(4)
def test_a_twin_group_has_the_same_ranks_in_every_part_of_the_world():
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[dist.get_rank() // 2]
    twin = twin_group(mine)
    assert twin is not mine
    assert dist.get_process_group_ranks(twin) == dist.get_process_group_ranks(mine)
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total, group=twin)
    assert total == sum(dist.get_process_group_ranks(mine))


@distributed(2)
def test_sums_only_never_ask_the_backend_for_an_average():
    group, partial, output = dist.group.WORLD, values(64, torch.float32), torch.empty(32)
    asked = []

    def reduce_scatter(*args, op, **kwargs):
        asked.append(op)
        return torch_s(*args, op=op, **kwargs)

    torch_s = dist.reduce_scatter_tensor
    try:
        dist.reduce_scatter_tensor = reduce_scatter
        results = []
        inbox = torch.empty(32)
        for sum_only in (False, True):
            options = {"scale": 0.5, "accumulate": False, "inbox": inbox, "sum_only": sum_only}
            with mock.patch.object(backends, "INSTEAD", BuiltIn(averages=True)):
                lane("reduce").run(collectives.reduce_scatter, output, partial, group, **options).wait()
            results.append(output.clone())
    finally:
        dist.reduce_scatter_tensor = torch_s
    assert asked == [dist.ReduceOp.AVG, dist.ReduceOp.SUM]
    torch.testing.assert_close(*results)


@distributed(2)
def test_sums_of_the_backend_are_scaled_as_asked_whether_it_averages_or_not():
    group, rank = dist.group.WORLD, dist.get_rank()
    for averages, dtype in ((False, torch.float32), (False, torch.float16), (True, torch.float32)):
        backend = BuiltIn(averages=averages)
        for scales in ((0.5, 0.5), (0.5, 0.25), (0.25, 0.5)):
            # The sums of fp16 terms overflow, their scaled sums do not.
            partials = [torch.full((8,), 4e4 + 32 * rank, dtype=dtype) for _ in scales]
            outputs = [torch.ones(4) for _ in scales]
            backend.reduce_scatter_bundle(outputs, partials, scales, (False, True), group, 0).complete()
            expected = [torch.full((4,), scale * 80032.0) + add for scale, add in zip(scales, (0, 1))]
            torch.testing.assert_close(outputs, expected, rtol=1e-3, atol=0)
        for accumulate in (False, True):
            output, partial = torch.ones(8), torch.full((8,), 4e4 + 32 * rank, dtype=dtype)
            backend.all_reduce(output, partial, group, 0, Sum(0.5, accumulate, partial[:0])).complete()
            torch.testing.assert_close(output, torch.full((8,), 40016.0 + accumulate), rtol=1e-3, atol=0)


def test_work_that_follows_transfers_comes_after_their_second_round():
    events = []
    second = Pending(finish=lambda: events.append("second round"))
    Pending(second=lambda: second).followed_by(lambda: events.append("hook")).complete()
    assert events == ["second round", "hook"]


@distributed(2, 4)
def test_what_goes_through_memory_of_the_host_arrives_as_what_is_there_already():
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    counts = [[(sender + 2 * receiver) % 3 for receiver in range(ranks)] for sender in range(ranks)]

    def of(transport) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []

        def new(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            made.append(torch.full((numel,), 3, dtype=dtype))
            return made[-1]

        def inbox(reduction, partial) -> torch.Tensor:
            return partial.new_empty(collectives.inbox_numel(reduction, partial.numel(), group, partial.device))

        with mock.patch.object(backends, "INSTEAD", transport):
            for dtype in DTYPES:
                collectives.all_gather(new(ranks * 7, dtype), values(7, dtype), group, 0).complete()
            wanted, halves = (
                [new(ranks * 5, torch.bfloat16), None],
                [values(5, torch.float32), values(3, torch.float32)],
            )
            collectives.all_gather_bundle(wanted, halves, group, 0, dtype=torch.bfloat16).complete()
            parts = [new(1 + peer) for peer in range(ranks)]
            parts[rank].copy_(values(1 + rank, torch.float32))
            collectives.all_gather_uneven(parts, rank, group)
            for add in (False, True):
                for reduction, numel in ((collectives.reduce_scatter, 9), (collectives.all_reduce, 9 * ranks)):
                    partial = values(9 * ranks, torch.bfloat16)
                    how = {"scale": 0.5, "accumulate": add, "inbox": inbox(reduction, partial)}
                    reduction(new(numel), partial, group, 0, **how).complete()
            several = [values(4 * ranks, torch.float32), values(6 * ranks, torch.float32, 1)]
            outputs, scales = [new(4), new(6)], [0.5, 2.0]
            collectives.reduce_scatter_bundle(outputs, several, scales, [True, False], group, 0).complete()
            leaving, arriving = counts[rank], [sent[rank] for sent in counts]
            rows = values(2 * sum(leaving), torch.float32).view(-1, 2)
            landing = new(2 * sum(arriving)).view(-1, 2)
            collectives.all_to_all(landing, rows, arriving, leaving, group, 0).complete()
        return made

    expected = of(Gloo())
    with mock.patch.object(Gloo, "all_gather", wraps=backends.TRANSPORTS["gloo"].all_gather) as through:
        found = of(CopyingGloo())
    assert through.call_count == len(DTYPES)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert backends.transport_of(group, torch.device("cpu")) is backends.TRANSPORTS["gloo"]


def test_tensors_on_a_device_go_through_memory_of_the_host_over_gloo(monkeypatch):
    monkeypatch.setattr(backends, "backend_of", lambda group, device: "gloo")
    copying = backends.transport_of(None, torch.device("cuda"))
    assert isinstance(copying, CopyingGloo) and copying.inbox_numel(64, 2, scatters=True) == 0
    assert not copying.capabilities.tags and not copying.capabilities.helpers, "the host waits in each of them"
    monkeypatch.setattr(collectives, "backend_of", backends.backend_of)
    for move in (collectives.send, collectives.receive):
        with pytest.raises(ValueError, match="a tensor on meta cannot be sent over gloo"):
            move([torch.empty(2, device="meta")], None, 1, 0)
    assert isinstance(backends.transport_of(None, torch.device("cpu")), Gloo)


def test_a_transport_whose_imports_are_missing_is_not_replaced_by_another(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import not_installed")
    monkeypatch.setattr(weft.comm, "__path__", [*weft.comm.__path__, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="not_installed"):
        backends.Transports()["needs_more"]
    assert isinstance(backends.Transports()["not_written"], BuiltIn)


def test_the_cost_of_a_message_is_positive():
    for latency, bandwidth in ((-1e-6, 1e9), (0.0, 0.0), (0.0, -1.0)):
        with pytest.raises(ValueError, match=f"latency={latency}, bandwidth={bandwidth}: the latency must not be"):
            Capabilities(tags=True, helpers=True, bundles=True, latency=latency, bandwidth=bandwidth)
    assert Capabilities(tags=True, helpers=True, bundles=True, latency=0.0, bandwidth=1e9).bundle_bytes == 0


def test_only_errors_of_connections_are_taken_for_a_lost_one():
    assert backends.is_lost_connection(RuntimeError("Connection closed by peer [127.0.0.1]:43"))
    for other in (
        ValueError("the socket is odd"),
        StorageError(104, "read: connection reset"),
        RuntimeError("no memory"),
    ):
        assert not backends.is_lost_connection(other)


@distributed(2)
def test_a_bundle_of_averages_goes_straight_to_its_outputs_or_is_added():
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    outputs = [torch.full((4,), 3.0), torch.full((6,), 3.0), torch.full((2,), 3.0, dtype=torch.float64)]
    partials = [values(ranks * each.numel(), torch.float32) for each in outputs]
    whole = [partial.clone() for partial in partials]
    landings = []

    def coalesced(sums, sources, options):  # gloo has neither the call nor an average
        landings.extend(sums)
        for total, source in zip(sums, sources):
            dist.all_reduce(source)
            total.copy_(source.view(ranks, -1)[rank] / ranks)

    class Averaging:
        size, reduce_scatter_tensor_coalesced = group.size, staticmethod(coalesced)

    adds = [False, True, False]
    BuiltIn(averages=True).reduce_scatter_bundle(outputs, partials, [0.5] * 3, adds, Averaging(), 0).complete()
    assert landings[0] is outputs[0] and landings[1] is not outputs[1]
    for output, each, add in zip(outputs, whole, adds):
        dist.all_reduce(each)
        expected = each.view(ranks, -1)[rank] / ranks + 3 * add
        torch.testing.assert_close(output, expected.to(output.dtype))
