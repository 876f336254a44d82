"""The published schedules: what torch's generators give, and what their papers say that they cost."""

import itertools
import random

import pytest

from tests.pipeline.oracle import torch_table
from weft.pipeline import SCHEDULES, Costs, check, table

TOGETHER = ["gpipe", "1f1b", "interleaved", "dualpipev", "zbv"]


def sizes_of(name, ranks=range(1, 17), chunks=range(1, 5), microbatches=range(1, 65)):
    schedule = SCHEDULES[name]
    return [
        {"ranks": p, "chunks": v, "microbatches": m}
        for p, v, m in itertools.product(ranks, chunks if schedule.any_chunks else [schedule.chunks], microbatches)
        if m >= schedule.microbatches_per_rank * p
    ]


def defined_by_torch(name, *, ranks, chunks, microbatches):
    if name == "gpipe":
        return chunks == 1
    if name == "1f1b":
        return microbatches >= ranks
    return name != "interleaved" or microbatches % max(1, microbatches // ranks) == 0


@pytest.mark.parametrize("name", TOGETHER)
def test_a_table_is_torch_s_where_both_have_the_schedule(name):
    sizes = sizes_of(name, ranks=[1, 2, 3, 4, 8], chunks=[1, 2, 3], microbatches=[1, 2, 3, 4, 7, 8, 10, 16, 19])
    sizes = [size for size in sizes if defined_by_torch(name, **size)]
    assert sizes
    for size in sizes:
        ours = table(name, size["ranks"], size["chunks"], size["microbatches"])
        assert ours.ranks == torch_table(ours), size


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_tables_of_every_size_pass_the_checker(name):
    sizes = sizes_of(name)
    for size in random.Random(0).sample(sizes, 12):
        check(table(name, **size))


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_great_many_tables_pass_the_checker(name):
    sizes = sizes_of(name)
    for size in random.Random(1).sample(sizes, 40):
        ours = SCHEDULES[name].generate(**size)
        check(ours)
        if name in TOGETHER and defined_by_torch(name, **size):
            assert ours.ranks == torch_table(ours), size


FORWARD, INPUTS, WEIGHTS = 2.0, 3.0, 1.0
BACKWARD = INPUTS + WEIGHTS


def idle(name, p, m, v=None):
    """The time that the most idle rank idles, where all chunks of a rank together take FORWARD, INPUTS and WEIGHTS."""
    made = table(name, ranks=p, microbatches=m, chunks=v)
    parts = made.chunks
    costs = Costs(FORWARD / parts, INPUTS / parts, WEIGHTS / parts)
    return max(check(made, costs).idle)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_ranks_idle_as_long_as_the_papers_say(p, m):
    bubble = (p - 1) * (FORWARD + BACKWARD)
    assert idle("gpipe", p, m) == pytest.approx(bubble)
    assert idle("1f1b", p, m) == pytest.approx(bubble)
    for v in (1, 2, 4):
        assert idle("interleaved", p, m, v) == pytest.approx(bubble / v)
        assert idle("combined", p, m, v) == pytest.approx(bubble / v)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 16), (16, 32)])
@pytest.mark.parametrize("pair", [1.0, 0.9, 0.8])
def test_dualpipev_idles_as_long_as_its_authors_say(p, m, pair):
    forward = inputs = weights = 1.0
    pair_together, backward = pair * (forward + inputs + weights), inputs + weights
    idle = check(table("dualpipev", ranks=p, microbatches=m), Costs(forward, inputs, weights, pair)).idle
    assert max(idle) == pytest.approx((p - 1) * (pair_together + backward - 3 * weights))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 32)])
def test_the_share_of_idle_time_is_that_of_the_papers(p, m):
    def share(name, v=None):
        return check(table(name, ranks=p, microbatches=m, chunks=v)).idle_share

    assert share("gpipe") == share("1f1b") == pytest.approx((p - 1) / (m + p - 1))
    assert share("interleaved", 2) == pytest.approx((p - 1) / (2 * m + p - 1))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 32)])
def test_a_zero_bubble_rank_never_stops_between_its_first_and_its_last_entry(p, m):
    for spans in check(table("zbv", ranks=p, microbatches=m)).spans:
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (8, 32)])
def test_activations_stay_as_few_as_the_papers_say(p, m):
    def live(name, v=None):
        return max(check(table(name, ranks=p, microbatches=m, chunks=v)).live)

    assert live("gpipe") == m
    assert live("1f1b") == live("zbv") == p
    assert live("interleaved", 2) == p * (1 + (p - 1) / (p * 2))
    assert live("combined", 1) == 2 * p
    assert live("combined", 2) == live("interleaved", 2) + 0.5
    assert live("dualpipev") == p + 0.5


def test_pairs_of_the_combined_schedule_follow_each_other_without_a_gap():
    """One forward more at the start is what keeps the two of a pair apart; without it every pair would wait."""
    made = table("combined", ranks=4, microbatches=16)
    for entries, spans in zip(made.ranks, check(made).spans):
        pairs = [span for entry, span in zip(entries, spans) if len(entry) == 2]
        assert len(pairs) > 16
        assert all(end == start for (_, end), (start, _) in itertools.pairwise(pairs))


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("magic", {}, "'magic' is neither a schedule nor a file; choose from gpipe, 1f1b"),
        ("1f1b", {"chunks": 2}, "1f1b: chunks = 2; it has 1 on each rank"),
        ("zbv", {"chunks": 1}, "zbv: chunks = 1; it has 2 on each rank"),
        ("dualpipev", {"microbatches": 7}, "dualpipev: microbatches = 7; on 4 ranks it needs 8 or more"),
        ("gpipe", {"microbatches": None}, "gpipe: a schedule needs a number of ranks and of microbatches"),
        ("gpipe", {"ranks": 0}, "gpipe: ranks = 0; must be at least 1"),
        ("gpipe", {"chunks": 0}, "gpipe: chunks = 0; must be at least 1"),
    ],
)
def test_sizes_that_a_schedule_cannot_take_are_one_clear_error(name, sizes, said):
    with pytest.raises(ValueError, match=said):
        table(name, **{"ranks": 4, "microbatches": 8, **sizes})
