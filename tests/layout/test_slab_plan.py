"""Buffers share memory in a slab exactly where they never meet."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from weft.layout.slab_plan import ALIGNMENT, plan_slab

lifetimes = st.tuples(st.integers(0, 20), st.integers(1, 6)).map(lambda pair: (pair[0], pair[0] + pair[1]))
buffers = st.lists(st.tuples(st.integers(0, 5000), st.lists(lifetimes, min_size=1, max_size=3)), max_size=12)


def plan(buffers):
    """The plan of buffers `(bytes, lifetimes)`, by number, and whether two of them are ever alive together."""

    def meet(one, other):
        return any(a < d and c < b for a, b in buffers[one][1] for c, d in buffers[other][1])

    return plan_slab({number: size for number, (size, _) in enumerate(buffers)}, meet), meet


@given(buffers)
def test_buffers_that_meet_never_overlap_and_all_are_aligned_and_inside(buffers):
    slab, meet = plan(buffers)
    assert slab.offsets.keys() == set(range(len(buffers)))
    for one, (size, _) in enumerate(buffers):
        start, stop = slab.offsets[one], slab.offsets[one] + size
        assert start % ALIGNMENT == 0 and stop <= slab.nbytes
        for other in range(one):
            begin, end = slab.offsets[other], slab.offsets[other] + buffers[other][0]
            if meet(one, other):
                assert stop <= begin or end <= start


@given(buffers)
def test_a_slab_lies_between_the_largest_live_bytes_and_all_bytes(buffers):
    slab, _ = plan(buffers)
    moments = {start for _, lives in buffers for start, _ in lives}
    live = [sum(size for size, lives in buffers if any(a <= now < b for a, b in lives)) for now in moments]
    everything = sum(-(-size // ALIGNMENT) * ALIGNMENT for size, _ in buffers)
    assert max(live, default=0) <= slab.nbytes <= everything


@given(st.integers(1, 9), st.integers(1, 4000))
def test_equal_blocks_gathered_one_ahead_need_two_places(count, size):
    slab, _ = plan([(size, [(number, number + 2)]) for number in range(count)])
    places = -(-size // ALIGNMENT) * ALIGNMENT
    assert slab.nbytes == min(count, 2) * places


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=14), st.integers(0, 5000))
def test_layers_of_any_sizes_gathered_one_ahead_take_their_largest_neighbours_and_the_root(sizes, root):
    alive = [(size, [(number, number + 2)]) for number, size in enumerate(sizes)]
    slab, _ = plan([*alive, (root, [(0, len(sizes) + 1)])])
    places = [-(-size // ALIGNMENT) * ALIGNMENT for size in (*sizes, 0)]
    assert slab.nbytes == max(map(sum, pairwise(places))) + -(-root // ALIGNMENT) * ALIGNMENT


@given(st.lists(st.integers(1, 50), min_size=4, max_size=14), st.integers(3, 4))
def test_a_longer_look_ahead_takes_at_most_half_more_than_is_alive(sizes, ahead):
    slab, _ = plan([(size * ALIGNMENT, [(number, number + ahead)]) for number, size in enumerate(sizes)])
    live = max(sum(sizes[start : start + ahead]) for start in range(len(sizes))) * ALIGNMENT
    assert live <= slab.nbytes <= 1.5 * live
