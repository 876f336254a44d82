"""Layouts: every element has one place, borders fall where they may, and padding stays small."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import weft
from weft.layout.cuts import Cuts
from weft.layout.layout import ALIGNMENT_BYTES, Layout, _first_fit, _place, plan_layout

LLAMA_3_8B = [
    (4096, 4096),
    (1024, 4096),
    (1024, 4096),
    (4096, 4096),
    (14336, 4096),
    (14336, 4096),
    (4096, 14336),
    (4096,),
    (4096,),
]
DEEPSEEK_V3_ATTENTION = [
    (1536, 7168),
    (1536,),
    (128 * 192, 1536),
    (512 + 64, 7168),
    (512,),
    (128 * 256, 512),
    (7168, 128 * 128),
    (7168,),
]
DEEPSEEK_V3_DENSE_MLP = [(18432, 7168), (18432, 7168), (7168, 18432), (7168,)]
GPT_OSS_EXPERTS = [(32, 2880, 5760), (32, 5760), (32, 2880, 2880), (32, 2880), (32, 2880), (32,)]
MAMBA_2 = [(8512, 2048), (4352, 1, 4), (4352,), (64,), (64,), (64,), (4096,), (2048, 4096), (2048,)]
ODD = [(1000, 1023), (777, 1021), (513, 769), (1023,), (769,)]
REAL = {
    "Llama-3-8B layer": LLAMA_3_8B,
    "DeepSeek-V3 attention": DEEPSEEK_V3_ATTENTION,
    "DeepSeek-V3 dense MLP": DEEPSEEK_V3_DENSE_MLP,
    "GPT-OSS experts": GPT_OSS_EXPERTS,
    "Mamba-2 layer": MAMBA_2,
    "odd sizes": ODD,
}

shapes = st.lists(st.lists(st.integers(0, 9) | st.integers(0, 70), max_size=3).map(tuple), max_size=7)
shard_counts = st.integers(1, 9) | st.sampled_from([64, 256])
itemsizes = st.sampled_from([1, 2, 4, 8])


def assert_sound(layout: Layout, itemsize: int) -> None:
    """What every layout promises, whatever it was planned for."""
    assert layout.numel == layout.shards * layout.shard_numel
    assert layout.shard_numel * itemsize % ALIGNMENT_BYTES == 0
    ends = [0, *(extent.end for extent in layout.extents)]
    starts = [*(extent.offset for extent in layout.extents), layout.numel]
    assert all(end <= start for end, start in zip(ends, starts)), "in order, apart, within the buffer"

    covered = torch.zeros(layout.numel, dtype=torch.int8)
    for extent in layout.extents:
        covered[extent.offset : extent.end] += 1
    for start, stop in layout.gaps:
        covered[start:stop] += 1
    assert covered.eq(1).all(), "each element is one tensor's or padding"
    assert sum(stop - start for start, stop in layout.gaps) == layout.numel - layout.data_numel

    for number, extent in enumerate(layout.extents):
        cuts = layout.cuts(number)
        assert cuts[0] == 0 and cuts[-1] == extent.numel and list(cuts) == sorted(cuts)
        for shard in range(layout.shards):
            begin, end = shard * layout.shard_numel, (shard + 1) * layout.shard_numel
            here = range(max(begin, extent.offset), min(end, extent.end))
            assert len(here) == cuts[shard + 1] - cuts[shard]
            assert not here or here[0] == extent.offset + cuts[shard]
        assert all(cut % extent.granularity == 0 or cut == extent.numel for cut in cuts)


@pytest.mark.slow
@settings(max_examples=120)
@given(shapes, shard_counts, itemsizes)
def test_every_element_has_one_place_and_every_shard_is_aligned(shapes, shards, itemsize):
    layout = plan_layout(shapes, shards, itemsize=itemsize)
    assert_sound(layout, itemsize)
    assert [extent.shape for extent in layout.extents] == shapes


@pytest.mark.slow
@settings(max_examples=120)
@given(shapes, shard_counts, itemsizes)
def test_padding_is_at_most_one_percent_or_one_alignment_unit_per_shard(shapes, shards, itemsize):
    layout = plan_layout(shapes, shards, itemsize=itemsize)
    unit = ALIGNMENT_BYTES // itemsize
    assert layout.numel - layout.data_numel <= max(0.01 * layout.data_numel, shards * unit)


@pytest.mark.slow
@settings(max_examples=120)
@given(shapes, shard_counts, itemsizes, st.data())
def test_cuts_respect_the_demanded_granularity(shapes, shards, itemsize, data):
    demanded = []
    for shape in shapes:
        numel = math.prod(shape)
        divisors = [step for step in range(1, numel + 1) if numel % step == 0][-12:] or [1]
        demanded.append(data.draw(st.sampled_from([1, *divisors])))
    layout = plan_layout(shapes, shards, itemsize=itemsize, granularities=demanded)
    assert_sound(layout, itemsize)
    for number, step in enumerate(demanded):
        assert all(cut % step == 0 for cut in layout.cuts(number))


@pytest.mark.slow
@settings(max_examples=70)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 90)), min_size=1, max_size=5), shard_counts, itemsizes)
def test_no_cut_goes_through_a_block_where_the_last_one_is_smaller(tensors, shards, itemsize):
    layout = plan_layout(
        [(size,) for size, _ in tensors], shards, itemsize=itemsize, granularities=[s for _, s in tensors]
    )
    assert_sound(layout, itemsize)
    for number, (size, step) in enumerate(tensors):
        assert all(cut % step == 0 or cut == size for cut in layout.cuts(number))


blocks = st.tuples(st.integers(1, 40), st.integers(1, 6), st.integers(1, 9))
"""How many blocks a tensor has, of how many rows, of how many elements."""


@pytest.mark.slow
@settings(max_examples=120)
@given(st.lists(blocks, min_size=1, max_size=6), shard_counts, itemsizes)
def test_blocks_of_odd_sizes_pad_shards_to_a_multiple_of_them_or_by_one_tensor_at_most(tensors, shards, itemsize):
    demanded = [rows * row for _, rows, row in tensors]
    sizes = [count * block for (count, _, _), block in zip(tensors, demanded)]
    shapes = [(count * rows, row) for count, rows, row in tensors]
    layout = plan_layout(shapes, shards, itemsize=itemsize, granularities=demanded)
    assert_sound(layout, itemsize)
    assert all(cut % step == 0 for number, step in enumerate(demanded) for cut in layout.cuts(number))
    unit = ALIGNMENT_BYTES // itemsize
    tight = -(-sum(sizes) // shards // unit) * unit
    common = math.lcm(*demanded, unit)
    with_gaps = -(-(sum(sizes) + sum(demanded)) // shards)
    most = min(-(-with_gaps // common) * common, tight + max(sizes) + unit)
    assert layout.shard_numel <= most * (1 + 1 / 64) + unit


@pytest.mark.slow
@settings(max_examples=70)
@given(st.lists(blocks, min_size=1, max_size=4), st.integers(2, 9) | st.just(64))
@example([(1, 2, 5), (1, 2, 7), (6, 1, 7)], 3)  # cut at two borders the last has no place, at the second alone it has
def test_no_shard_that_is_much_smaller_could_hold_the_blocks(tensors, shards):
    demanded = [rows * row for _, rows, row in tensors]
    sizes = [count * block for (count, _, _), block in zip(tensors, demanded)]
    layout = plan_layout([(size,) for size in sizes], shards, itemsize=4, granularities=demanded)
    unit = ALIGNMENT_BYTES // 4
    smallest = unit
    while _place(sizes, [[step] for step in demanded], smallest, shards, 1) is None:
        smallest += unit
    assert smallest <= layout.shard_numel <= smallest * (1 + 1 / 64) + unit


@settings(max_examples=70)
@given(st.sampled_from([1, 2, 4]), st.integers(1, 6), st.integers(0, 9), st.integers(1, 7), st.integers(1, 9))
def test_a_tensor_begins_at_the_first_place_from_which_no_border_cuts_a_block(start, length, cursor, rows, step):
    shard, cursor, size = 4 * length, start * cursor, rows * step

    def fits(at):
        borders = range((at // shard + 1) * shard, at + size, shard)
        return at % start == 0 and all((border - at) % step == 0 for border in borders)

    first = next((at for at in range(cursor, cursor + 4 * shard) if fits(at)), None)
    assert _first_fit(cursor, size, step, shard, start) == first


def test_blocks_without_a_small_common_multiple_take_no_shard_larger_than_they_need():
    rows, widths, counts = 32, (2881, 1023), (100, 50)
    shapes = [(rows * count, width) for count, width in zip(counts, widths)]
    layout = plan_layout(shapes, 64, granularities=[rows * width for width in widths])
    assert layout.shard_numel <= 1.2 * math.prod(shapes[1]) / 2, "the smaller tensor over two shards"


@pytest.mark.slow
@settings(max_examples=70)
@given(shapes, shard_counts, itemsizes)
def test_a_tensor_whose_granularity_is_its_size_is_never_cut(shapes, shards, itemsize):
    sizes = [max(math.prod(shape), 1) for shape in shapes]
    layout = plan_layout(shapes, shards, itemsize=itemsize, granularities=[*sizes])
    for number, extent in enumerate(layout.extents):
        assert set(layout.cuts(number)) <= {0, extent.numel}


@pytest.mark.slow
@settings(max_examples=70)
@given(shapes, itemsizes)
def test_one_shard_pads_no_more_than_alignment_asks(shapes, itemsize):
    layout = plan_layout(shapes, 1, itemsize=itemsize)
    starts = sum(-(-math.prod(shape) * itemsize // 16) * 16 for shape in shapes)
    assert layout.numel * itemsize <= max(-(-starts // ALIGNMENT_BYTES), 1) * ALIGNMENT_BYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shards", [8, 64, 256, 1024])
@pytest.mark.parametrize("name", REAL)
def test_real_layers_pad_at_most_one_percent(name, shards, dtype):
    shapes = REAL[name]
    data = sum(map(math.prod, shapes)) * dtype.itemsize
    assert weft.padding_of(shapes, shards, dtype=dtype) <= max(0.01, shards * ALIGNMENT_BYTES / data)


@pytest.mark.parametrize("shards", [8, 64])
def test_a_llama_layer_is_cut_between_whole_rows(shards):
    layout = plan_layout(LLAMA_3_8B, shards)
    for number, extent in enumerate(layout.extents):
        row = math.prod(extent.shape[1:])
        assert all(cut % row == 0 for cut in layout.cuts(number)), extent


def test_cuts_are_even_only_where_torch_makes_the_same_parts():
    assert Cuts((4, 2), (0, 4, 8), (0,)).is_even and Cuts((3, 2), (0, 3, 6), (0,), dim=1).is_even
    through_a_row, uneven = Cuts((3, 2), (0, 3, 6), (0,)), Cuts((4, 2), (0, 2, 8), (0,))
    over_two_axes, scalar = Cuts((4, 2), (0, 2, 4, 6, 8), (0, 1)), Cuts((), (0, 1, 1), (0,))
    assert not any(each.is_even for each in (through_a_row, uneven, over_two_axes, scalar))


def test_experts_are_cut_between_rows_of_their_trailing_dimensions():
    layout = plan_layout(GPT_OSS_EXPERTS, 64)
    for number in (0, 2):
        _, rows, row = GPT_OSS_EXPERTS[number]
        cuts = layout.cuts(number)
        assert all(cut % row == 0 for cut in cuts)
        assert any(cut % (rows * row) for cut in cuts), "whole experts would not fit without padding"


@pytest.mark.parametrize(
    "shards, sizes, message",
    [
        (0, [(4,)], "shards=0.*at least one"),
        (2, [(7,)], "granularity 0 of a tensor of 7 elements"),
    ],
)
def test_impossible_layouts_are_refused(shards, sizes, message):
    with pytest.raises(ValueError, match=message):
        plan_layout(sizes, shards, granularities=[0])
