"""The checker refuses every broken table, and says where and why."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.pipeline import SCHEDULES, Action, Costs, Table, TableError, check, parse_table, table


@st.composite
def tables(draw):
    name = draw(st.sampled_from(list(SCHEDULES)))
    schedule, ranks = SCHEDULES[name], draw(st.integers(1, 4))
    chunks = draw(st.integers(1, 3)) if schedule.any_chunks else schedule.chunks
    microbatches = draw(st.integers(max(1, schedule.microbatches_per_rank * ranks), 9))
    return table(name, ranks=ranks, chunks=chunks, microbatches=microbatches)


def with_row(whole, rank, row):
    rows = [*whole.ranks]
    rows[rank] = tuple(row)
    return Table(whole.name, tuple(rows), whole.chunks, whole.microbatches, whole.placement)


def place_in(draw, whole):
    rank = draw(st.integers(0, len(whole.ranks) - 1))
    return rank, draw(st.integers(0, len(whole.ranks[rank]) - 1))


def refused(broken, rank):
    """The position and reason of the fault, which is in `rank`."""
    with pytest.raises(TableError) as raised:
        check(broken)
    assert raised.value.rank == rank
    assert f"rank {rank}, entry {raised.value.position} (" in str(raised.value)
    assert raised.value.reason in str(raised.value)
    return raised.value.position, raised.value.reason


def depends(later, earlier):
    """Whether, on one rank, `later` cannot come before `earlier`."""
    return any(a.chunk == b.chunk and comes_after(a, b) for a in earlier for b in later)


def comes_after(a, b):
    """Whether `b` cannot come before `a`, of the same chunk."""
    parts = {"F": "F", "B": "IW", "I": "I", "W": "W"}
    if set(parts[a.kind]) & set(parts[b.kind]):
        return a.microbatch < b.microbatch
    return a.microbatch == b.microbatch and "FIW".index(parts[a.kind][0]) < "FIW".index(parts[b.kind][0])


@settings(max_examples=60)
@given(st.data())
def test_an_entry_that_is_missing_is_named(data):
    whole = data.draw(tables())
    rank, position = place_in(data.draw, whole)
    row = [*whole.ranks[rank]]
    gone = row.pop(position)
    at, reason = refused(with_row(whole, rank, row), rank)
    assert at >= position
    assert any(
        re.search(rf"{kind if kind == 'F' else '[BIW]'}{microbatch}\.{chunk} (has not run|is missing)", reason)
        for kind, microbatch, chunk in gone
    )


@settings(max_examples=60)
@given(st.data())
def test_an_entry_that_comes_twice_is_refused_where_it_comes_again(data):
    whole = data.draw(tables())
    rank, position = place_in(data.draw, whole)
    row = [*whole.ranks[rank]]
    again = data.draw(st.integers(position, len(row)))
    row.insert(again, row[position])
    at, reason = refused(with_row(whole, rank, row), rank)
    assert at == max(again, position + 1)
    assert "appears twice" in reason


@pytest.mark.slow
@settings(max_examples=100)
@given(st.data())
def test_two_swapped_entries_are_refused_or_the_table_still_keeps_every_rule(data):
    whole = data.draw(tables())
    rank, first = place_in(data.draw, whole)
    second = data.draw(st.integers(0, len(whole.ranks[rank]) - 1))
    first, second = min(first, second), max(first, second)
    row = [*whole.ranks[rank]]
    row[first], row[second] = row[second], row[first]
    moved = whole.ranks[rank][first + 1 : second + 1]
    must_fail = any(depends(each, whole.ranks[rank][first]) for each in moved) or any(
        depends(whole.ranks[rank][second], each) for each in whole.ranks[rank][first:second]
    )
    broken = with_row(whole, rank, row)
    if must_fail and first != second:
        at, _ = refused(broken, rank)
        assert first <= at <= second
        return
    try:
        spans = check(broken).spans
    except TableError as error:
        assert "no rank can continue" in error.reason
    else:
        assert_in_order(broken, spans)


def assert_in_order(made, spans):
    """Every action starts after what it needs has ended; said without the checker's own bookkeeping."""
    start, end = {}, {}
    for rank, (entries, times) in enumerate(zip(made.ranks, spans)):
        for entry, (begun, ended) in zip(entries, times):
            for action in entry:
                for kind in "IW" if action.kind == "B" else action.kind:
                    key = kind, action.microbatch, made.stage(rank, action.chunk)
                    assert key not in start
                    start[key], end[key] = begun, ended
    assert len(start) == 3 * made.microbatches * made.stages
    for (kind, microbatch, stage), begun in start.items():
        if kind == "F" and stage > 0:
            assert begun >= end["F", microbatch, stage - 1]
        if kind == "I":
            assert begun >= end["F", microbatch, stage]
            assert stage == made.stages - 1 or begun >= end["I", microbatch, stage + 1]
        if kind == "W":
            assert begun >= start["I", microbatch, stage]


@settings(max_examples=40)
@given(tables(), st.floats(0, 3), st.floats(0, 3), st.floats(0, 3))
def test_what_a_simulation_says_keeps_the_order_of_what_needs_what(made, forward, inputs, weights):
    found = check(made, Costs(forward, inputs, weights, pair=0.8, transfer=0.1))
    assert_in_order(made, found.spans)
    assert all(idle >= -1e-9 for idle in found.idle)
    assert 0 <= found.idle_share <= 1


def test_ranks_that_wait_for_each_other_are_named_as_a_cycle():
    text = """
        table stuck: chunks 1, microbatches 2, placement loop
        rank 0: F0.0 B0.0 F1.0 B1.0
        rank 1: F0.0 F1.0 B0.0 B1.0
    """
    with pytest.raises(TableError) as raised:
        parse_table(text)
    assert (raised.value.rank, raised.value.position) == (0, 1)
    assert raised.value.reason == (
        "no rank can continue: rank 0 is at entry 1 (B0.0) and waits for B0.0 of rank 1; "
        "rank 1 is at entry 1 (F1.0) and waits for F1.0 of rank 0"
    )


def test_who_waits_for_a_circle_is_not_in_it():
    text = """
        table stuck: chunks 1, microbatches 2, placement loop
        rank 0: F0.0 F1.0 B0.0 B1.0
        rank 1: F0.0 B0.0 F1.0 B1.0
        rank 2: F0.0 F1.0 B0.0 B1.0
    """
    with pytest.raises(TableError) as raised:
        parse_table(text)
    assert (raised.value.rank, raised.value.position) == (1, 1)
    assert "rank 0" not in raised.value.reason


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"placement": "w"}, "placement 'w'; must be 'loop' or 'v'"),
        ({"chunks": 0}, "chunks = 0; must be at least 1"),
        ({"ranks": (((),),)}, "an entry is one action"),
        ({"ranks": (((Action("F", 0, -1),),),)}, "there is no chunk -1"),
        ({"ranks": (((Action("F", -1, 0),),),)}, "not -1"),
    ],
)
def test_what_is_no_table_is_refused(changed, said):
    row = ((Action("F", 0, 0),), (Action("B", 0, 0),))
    with pytest.raises(ValueError, match=said):
        check(Table(**{"name": "x", "ranks": (row,), "chunks": 1, "microbatches": 1, **changed}))


def test_pairs_on_the_order_of_1f1b_wait_for_each_other():
    made = table("1f1b", ranks=4, microbatches=8)
    rows = []
    for rank, entries in enumerate(made.ranks):
        flat, warm = [entry[0] for entry in entries], 3 - rank
        steady = flat[warm : warm + 2 * (8 - warm)]
        pairs = list(zip(steady[::2], steady[1::2]))
        rows.append((*((each,) for each in flat[:warm]), *pairs, *((each,) for each in flat[warm + len(steady) :])))
    with pytest.raises(TableError, match=r"B0\.0 needs F0\.0: the two actions of a pair must have different"):
        check(Table("pairs", tuple(rows), 1, 8))


@pytest.mark.parametrize(
    ("row", "position", "said"),
    [
        ("F0.0 B0.0 F1.0 X1.0", 3, "'X' is not a kind of action"),
        ("F0.0 B0.0 F1.0 B1.1", 3, "there is no chunk 1: chunks are numbered from 0 to 0"),
        ("F0.0 B0.0 F2.0 B1.0", 2, "microbatches are numbered from 0 to 1, not 2"),
        ("B0.0 F0.0 F1.0 B1.0", 0, "its forward F0.0 has not run"),
        ("F1.0 F0.0 B0.0 B1.0", 0, "F0.0 has not run: each chunk runs the microbatches in order"),
        ("F0.0 I0.0 F1.0 B1.0", 3, "W0.0 has not run"),
        ("F0.0 W0.0 I0.0 F1.0", 1, "its first part I0.0 has not run"),
        ("F0.0 B0.0 F1.0 I1.0", 4, "W1.0 is missing"),
        ("F0.0 B0.0+F1.0 B1.0", 1, "a pair: F and B in this order, two F, or two B"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place_and_reason(row, position, said):
    entries = tuple(
        tuple(Action(word[0], int(word[1]), int(word[3])) for word in entry.split("+")) for entry in row.split()
    )
    at, reason = refused(Table("broken", (entries,), 1, 2), 0)
    assert at == position
    assert said in reason


def test_a_stage_that_takes_longer_makes_the_others_wait():
    made = table("1f1b", ranks=2, microbatches=4)
    even = check(made, Costs(1, 1, 1))
    heavy = check(made, Costs([1, 2], [1, 2], [1, 2]))
    assert heavy.idle[0] > even.idle[0]
    assert heavy.time == 2 * 3 * 4 + 3  # the heavy rank is busy but for the first forward and the last backward


def test_activations_live_until_the_gradients_of_weights_are_there():
    late = parse_table("table late: chunks 1, microbatches 2, placement loop\nrank 0: F0.0 I0.0 F1.0 I1.0 W0.0 W1.0")
    early = parse_table("table early: chunks 1, microbatches 2, placement loop\nrank 0: F0.0 I0.0 W0.0 F1.0 B1.0")
    assert check(late).live == (2,)
    assert check(early).live == (1,)


def test_what_takes_no_time_idles_for_none():
    assert check(table("gpipe", ranks=2, microbatches=2), Costs(0, 0, 0)).idle_share == 0


def test_transfers_between_ranks_take_time_and_those_on_one_rank_do_not():
    alone = table("interleaved", ranks=1, chunks=2, microbatches=2)
    assert check(alone, Costs(transfer=5)).time == check(alone).time
    across = table("1f1b", ranks=2, microbatches=1)
    assert check(across, Costs(transfer=5)).time == check(across).time + 10


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        (Costs(forward=[1, 2, 3]), "forward has 3 times for 4 stages; pass one for each, or one number for all"),
        (Costs(weights=-1), "weights = -1; times must be finite and not negative"),
        (Costs(pair=float("nan")), "pair = nan; times must be finite"),
        (Costs(transfer=float("inf")), "transfer = inf; times must be finite"),
    ],
)
def test_costs_that_no_run_has_are_refused(costs, said):
    with pytest.raises(ValueError, match=said):
        check(table("1f1b", ranks=4, microbatches=4), costs)
