"""Payloads and scales equal formats that are written down slowly, and torch's own conversions."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quantize import plain
from weft.quantize import (
    blockwise,
    count_losses,
    decode,
    dequantize,
    formats,
    largest_of,
    mx,
    nvfp4,
    quantize,
    rowwise,
    tensorwise,
)

RECIPES = [tensorwise(), rowwise(), rowwise(pow2=True), blockwise(4, 24), blockwise(128, 128), mx(32), mx(4), nvfp4()]
NAN = 0x7F


def codes_of(payload: torch.Tensor) -> list[int]:
    """Of e4m3, without the sign of a NaN."""
    return payload.masked_fill(payload == 0x80 | NAN, NAN).flatten().tolist()


numbers = st.floats(width=32) | st.floats(-500, 500, width=32) | st.sampled_from([0.0, -0.0, 1e-12, 448.0, 1e-38])


def tensors(rows: st.SearchStrategy, columns: st.SearchStrategy) -> st.SearchStrategy:
    shapes = st.tuples(rows, columns)
    return shapes.flatmap(
        lambda shape: st.lists(numbers, min_size=math.prod(shape), max_size=math.prod(shape)).map(
            lambda values: torch.tensor(values, dtype=torch.float32).reshape(shape)
        )
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_values_of_a_payload_are_quantized_to_the_same_values(recipe):
    generator = torch.Generator().manual_seed(0)
    for kept, via in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float32, None)):
        if recipe.kind == "nvfp4" and via is None:
            continue  # its scales are products, which fp32 rounds
        each = dataclasses.replace(recipe, via=via)
        for _ in range(20):
            # Rows of other magnitudes, but none that underflows as a block of nvfp4.
            sizes = 10.0 ** torch.randint(-3, 1, (64, 1), generator=generator)
            weight = (torch.randn(64, 64, generator=generator) * sizes).to(kept)
            values = dequantize(*quantize(weight, each), each, kept)
            assert torch.equal(dequantize(*quantize(values, each), each, kept), values)


def test_every_value_of_e4m3_and_e2m1_comes_back():
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    assert values[:127].tolist() == plain.E4M3
    for each in (codes, codes[(codes & 0x7F) != 0x7F]):  # torch converts a payload with a NaN
        found = dequantize(each, torch.tensor(3.0), tensorwise())
        torch.testing.assert_close(found, values[each.long()] * 3, rtol=0, atol=0, equal_nan=True)
    matrix = values[(codes & 0x7F) != 0x7F].repeat(2).reshape(4, -1)[:, :126].contiguous()
    payload, scale = quantize(matrix.mul(2.0), tensorwise(pow2=True))
    assert torch.equal(dequantize(payload, scale, tensorwise(pow2=True)), matrix * 2)
    fours = torch.tensor(plain.E2M1 + [-each for each in plain.E2M1]).reshape(1, 16)
    payload, scales = quantize(fours, nvfp4())
    assert payload.tolist() == [[low | (low + 1) << 4 for low in range(0, 16, 2)]]
    torch.testing.assert_close(dequantize(payload, scales, nvfp4()), fours)


@pytest.mark.slow
@pytest.mark.parametrize("pow2", [False, True])
@settings(max_examples=40)
@given(x=tensors(st.integers(1, 5), st.integers(1, 12)))
def test_tiles_with_fp32_scales_equal_the_plain_format(pow2, x):
    height, width = x.shape
    for recipe, (rows, columns) in (
        (tensorwise(pow2=pow2), (height, width)),
        (rowwise(pow2=pow2), (1, width)),
        (blockwise(2, 8, pow2=pow2), (2, 8)),
    ):
        payload, scales = quantize(x, recipe)
        assert payload.shape == x.shape and payload.dtype == torch.uint8
        assert tuple(scales.shape) == recipe.scale_shape(x.shape)
        table = scales.reshape(math.ceil(height / rows), math.ceil(width / columns))
        for down in range(table.shape[0]):
            for across in range(table.shape[1]):
                here = slice(down * rows, (down + 1) * rows), slice(across * columns, (across + 1) * columns)
                codes, scale = plain.block(x[here].flatten().tolist(), pow2=pow2)
                assert table[down, across].item() == scale
                assert codes_of(payload[here]) == codes


@pytest.mark.slow
@settings(max_examples=40)
@given(x=tensors(st.integers(1, 3), st.sampled_from([4, 8, 32])))
def test_mx_equals_the_plain_format(x):
    for size in {4, x.shape[1]}:
        payload, scales = quantize(x, mx(size))
        found = zip(map(codes_of, payload.reshape(-1, size)), scales.flatten().tolist())
        assert list(found) == [plain.mx_block(block) for block in plain.rows(x.reshape(-1, size))]


@pytest.mark.slow
@settings(max_examples=40)
@given(x=tensors(st.integers(1, 3), st.sampled_from([16, 32])))
def test_nvfp4_equals_the_plain_format(x):
    payload, (steps, unit) = quantize(x, nvfp4())
    most = plain.largest(x.flatten().tolist())
    assert unit.item() == plain.fp32(max(most, plain.fp32(1e-12)) / 2688)
    found = [[byte & 15, byte >> 4] for byte in payload.flatten().tolist()]
    for number, block in enumerate(plain.rows(x.reshape(-1, 16))):
        wanted = plain.fp32(plain.fp32(plain.largest(block) / 6) / unit.item())
        code = plain.e4m3(max(wanted, 2.0**-9))
        scale = plain.fp32(plain.E4M3[code] * unit.item())
        has_nan = any(map(math.isnan, block))
        assert steps.flatten()[number].item() == (0x7F if has_nan else code)
        values = [plain.nearest(v if math.isinf(v) else plain.fp32(v / scale), plain.E2M1, 8) for v in block if v == v]
        codes = [code for pair in found[number * 8 : number * 8 + 8] for code in pair]
        assert [code for code, value in zip(codes, block) if value == value] == values


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_dequantized_values_are_payload_times_scale(recipe):
    torch.manual_seed(0)
    x = torch.randn(3, 20, 64) * torch.logspace(-20, 2, 60).reshape(3, 20, 1)
    payload, scales = quantize(x, recipe)
    for dtype in (torch.float32, torch.bfloat16):
        back = dequantize(payload, scales, recipe, dtype)
        assert back.dtype == dtype and back.shape == x.shape
        for number, matrix in enumerate(x):  # a stack is its matrices, one by one
            own, its = quantize(matrix, recipe)
            assert torch.equal(payload[number], own)
            assert torch.equal(back[number], dequantize(own, its, recipe, dtype))
    on_other_devices = decode._by_torch(payload, decode.wide(scales, recipe), recipe, x.shape)
    assert torch.equal(on_other_devices, dequantize(payload, scales, recipe))
    if recipe.kind != "nvfp4":
        wide = scales.view(torch.float8_e8m0fnu).float() if recipe.kind == "mx" else scales
        rows, columns = (side or size for side, size in zip(recipe.block, x.shape[1:]))
        wide = wide.reshape(3, math.ceil(20 / rows), -1).repeat_interleave(rows, 1)[:, :20]
        wide = wide.repeat_interleave(columns, 2)[..., :64]
        assert torch.equal(dequantize(payload, scales, recipe), payload.view(torch.float8_e4m3fn).float() * wide)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_chunks_of_a_large_tensor_equal_the_whole(recipe, monkeypatch):
    torch.manual_seed(6)
    for shape in ((3, 20, 64), (21, 64)):
        x = torch.randn(shape) * torch.logspace(-20, 20, 20 if len(shape) == 3 else 21).unsqueeze(-1)
        payload, scales = quantize(x, recipe)
        back = dequantize(payload, scales, recipe)
        with monkeypatch.context() as patches:
            for module in (decode, formats):
                patches.setattr(module, "CHUNK", 300)
            own, its = quantize(x, recipe)
            assert torch.equal(own, payload)
            pairs = zip(its, scales) if isinstance(scales, tuple) else [(its, scales)]
            assert all(torch.equal(one, other) for one, other in pairs)
            for dtype in (torch.float32, torch.bfloat16):
                assert torch.equal(dequantize(own, its, recipe, dtype), back.to(dtype))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_what_is_lost_is_half_a_step(recipe):
    torch.manual_seed(1)
    x = torch.randn(64, 64)
    back = dequantize(*quantize(x, recipe), recipe)
    relative, of_the_largest = (0.25, 1 / 12) if recipe.kind == "nvfp4" else (2**-4, 2**-10)
    error = (back - x).abs()
    if recipe.kind == "mx":  # what is beyond 448 saturates
        relative = 0.125
    assert (error <= x.abs() * relative + x.abs().max() * of_the_largest).all()
    assert error.max() > 0


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_infinities_saturate_and_spoil_nothing_else(recipe):
    torch.manual_seed(2)
    x = torch.randn(8, 64)
    spoilt = x.clone()
    spoilt[3, 5], spoilt[4, 6], x[3, 5], x[4, 6] = math.inf, -math.inf, 0, 0
    back, own = (dequantize(*quantize(each, recipe), recipe) for each in (spoilt, x))
    assert back.isfinite().all() and back[3, 5] > 0 > back[4, 6]
    changed = (back != own).nonzero().tolist()
    assert changed == [[3, 5], [4, 6]]
    spoilt[3, 5] = math.nan
    back = dequantize(*quantize(spoilt, recipe), recipe)
    assert back[3, 5].isnan() and back.isnan().sum() == (16 if recipe.kind == "nvfp4" else 1)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("recipe", [tensorwise(), rowwise(), blockwise(4, 8), mx(32)], ids=str)
def test_a_nan_of_either_sign_stays_one(recipe, sign):
    x = torch.ones(8, 32)
    x[1, 2] = torch.tensor(math.nan).copysign(torch.tensor(sign))
    found = dequantize(*quantize(x, recipe), recipe)
    assert found[1, 2].isnan() and found.isnan().sum() == 1


def test_saturated_and_underflowed_elements_are_counted():
    x = torch.full((2, 32), 256.0)
    x[0, :6] = torch.tensor([463.0, 465.0, -511.0, 2.0**-12, -(2.0**-12), 0.0])  # with the scale of mx, 1
    saturated, underflowed = count_losses(x, mx(32))
    assert (saturated, underflowed) == (2, 2)
    for recipe in (tensorwise(), rowwise(), nvfp4()):
        tiny = torch.tensor([[1.0, 1e-9, math.inf, math.nan] + [0.0] * 12] * 3)
        if recipe.kind == "nvfp4":
            tiny[:, 3] = 0
        assert tuple(map(int, count_losses(tiny, recipe))) == (3, 3)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_zeros_stay_zeros_and_an_empty_tensor_is_one(recipe):
    assert not dequantize(*quantize(torch.zeros(8, 64), recipe), recipe).any()
    for shape in ((0, 64), (0, 8, 64)):
        payload, scales = quantize(torch.zeros(shape), recipe)
        assert dequantize(payload, scales, recipe).shape == shape
    assert largest_of(torch.zeros(0), recipe) == 0


def test_an_mx_scale_of_zeros_is_the_smallest_and_none_is_rounded_up():
    x = torch.tensor([[0.0] * 4, [3.9] * 4, [4.0] * 4, [3.4e38] * 4, [1e-45] * 4])
    scales = quantize(x, mx(4))[1].view(torch.float8_e8m0fnu).float().flatten()
    assert scales.tolist() == [2.0**-127, 2.0**-7, 2.0**-6, 2.0**119, 2.0**-127]


def test_weights_are_cast_before_they_are_quantized():
    torch.manual_seed(3)
    x = torch.randn(16, 32)
    for recipe in (rowwise, mx):
        via = quantize(x, recipe(via=torch.bfloat16))
        cast = quantize(x.bfloat16(), recipe())
        assert all(map(torch.equal, via, cast))
        assert not all(map(torch.equal, via, quantize(x, recipe())))


@pytest.mark.parametrize("chunk", [formats.CHUNK, 20])
def test_a_part_of_a_matrix_takes_the_maximum_of_the_whole(chunk, monkeypatch):
    monkeypatch.setattr(formats, "CHUNK", chunk)
    torch.manual_seed(4)
    x = torch.randn(6, 32)
    whole, scale = quantize(x, tensorwise())
    for part, own in zip(x.flatten().split(50), whole.flatten().split(50)):
        payload, same = quantize(part, tensorwise(), largest=largest_of(x, tensorwise()))
        assert torch.equal(payload, own) and torch.equal(same, scale)
    whole, (steps, unit) = quantize(x, nvfp4())
    payload, (own, same) = quantize(x[2:4], nvfp4(), largest=largest_of(x, nvfp4()))
    assert torch.equal(payload, whole[2:4]) and torch.equal(own, steps[2:4]) and torch.equal(same, unit)


@pytest.mark.parametrize(
    "wrong, says",
    [
        (lambda: quantize(torch.zeros(4, 31), mx(32)), r"mx\(32\).*\(4, 31\).*multiple of 32"),
        (lambda: quantize(torch.zeros(4, 8), nvfp4()), r"nvfp4\(\).*multiple of 16"),
        (lambda: quantize(torch.zeros(4), rowwise()), r"rowwise\(\).*\(4,\).*two dimensions"),
        (lambda: quantize(torch.zeros(2, 2, 2, 2), tensorwise()), "two dimensions, or three"),
        (lambda: mx(24), "power of two"),
        (lambda: mx(0), "at least one"),
        (lambda: blockwise(-1, 128), "positive"),
        (lambda: blockwise(0, 128), "at least 1"),
        (lambda: rowwise(via=torch.int8), "via=torch.int8"),
        (lambda: rowwise(compute="fast"), "compute='fast'"),
        (lambda: tensorwise(keep_transpose=True), r"keep_transpose=True without compute=.scaled."),
        (lambda: rowwise(compute="scaled", keep_transpose=True), "backward dequantizes the weights"),
        (lambda: mx(compute="scaled", keep_transpose=True), "its own copy"),
    ],
)
def test_what_has_no_such_format_is_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        wrong()


def test_only_floating_tensors_are_quantized():
    with pytest.raises(TypeError, match=r"torch.int64"):
        quantize(torch.zeros(4, 4, dtype=torch.int64), rowwise())
