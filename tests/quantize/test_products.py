"""Products of quantized operands equal torch's own kernel, and the products of what both operands hold."""

import pytest
import torch

from weft.quantize import (
    beside,
    blockwise,
    dequantize,
    mx,
    nvfp4,
    products,
    quantize,
    rowwise,
    scaled_product,
    tensorwise,
)

RECIPES = [tensorwise(), rowwise(), blockwise(16, 32), mx(32), nvfp4()]


def operands(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(24, 64, dtype=dtype), torch.randn(48, 64, dtype=dtype)


def rounded(x: torch.Tensor, recipe) -> torch.Tensor:
    return dequantize(*quantize(x, recipe), recipe)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_equal_torch_s_kernel_to_the_bit(dtype):
    x, weight = operands(dtype)
    for recipe, scale in ((tensorwise(), lambda s, row: s), (rowwise(), lambda s, row: s[:, None] if row else s[None])):
        (payload, own), (codes, scales) = quantize(x, recipe), quantize(weight, recipe)
        eight = torch.float8_e4m3fn
        kernel = torch._scaled_mm(
            payload.view(eight), codes.view(eight).t(), scale(own, True), scale(scales, False), out_dtype=dtype
        )
        assert torch.equal(scaled_product(x, codes, scales, recipe), kernel)
        assert torch.equal(products.by_kernel(x, codes, scales, recipe, recipe, -1), kernel)
        assert not torch.equal(kernel, x @ weight.t())
    gradient = torch.randn(24, 48, dtype=dtype)
    codes, scales = quantize(weight, tensorwise())
    found = scaled_product(gradient, codes, scales, tensorwise(), dim=-2)
    assert torch.equal(found, products.by_kernel(gradient, codes, scales, tensorwise(), tensorwise(), -2))


def test_both_operands_hold_what_their_recipes_keep():
    x, weight = operands()
    gradient = torch.randn(24, 48, dtype=torch.bfloat16)
    for recipe, other, of_gradient in (
        (tensorwise(), tensorwise(), tensorwise()),
        (rowwise(), rowwise(), None),
        (blockwise(16, 32), blockwise(1, 32), blockwise(1, 16)),
        (mx(32), mx(32), None),
        (nvfp4(), nvfp4(), None),
    ):
        payload, scales = quantize(weight, recipe)
        kept = dequantize(payload, scales, recipe)
        assert torch.equal(scaled_product(x, payload, scales, recipe), (rounded(x, other) @ kept.t()).bfloat16())
        wanted = gradient @ kept.bfloat16() if of_gradient is None else rounded(gradient, of_gradient) @ kept
        assert torch.equal(scaled_product(gradient, payload, scales, recipe, dim=-2), wanted.bfloat16())


def test_autocast_rounds_no_operand_once_more():
    x, weight = operands()
    ends = torch.tensor([5, 24], dtype=torch.int32)
    for recipe in RECIPES:
        payload, scales = quantize(weight, recipe)
        wanted = scaled_product(x, payload, scales, recipe)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(scaled_product(x, payload, scales, recipe), wanted)
    payload, scales = quantize(torch.stack([weight, weight]), tensorwise())
    wanted = scaled_product(x, payload, scales, tensorwise(), offsets=ends)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(scaled_product(x, payload, scales, tensorwise(), offsets=ends), wanted)


def test_the_last_block_of_a_sum_over_rows_may_be_shorter():
    recipe, weight, gradient = mx(32).along(-2), torch.randn(40, 64), torch.randn(24, 40)
    payload, scales = quantize(weight, recipe)
    whole = torch.nn.functional.pad(gradient, (0, 24))
    wanted = rounded(whole, mx(32))[:, :40] @ dequantize(payload, scales, recipe)
    assert torch.equal(scaled_product(gradient, payload, scales, recipe, dim=-2), wanted)


def test_rows_of_a_grouped_product_depend_on_no_other_rows():
    x, weight = torch.randn(9, 32), torch.randn(3, 32, 48)
    ends = torch.tensor([2, 2, 9], dtype=torch.int32)
    for recipe in (tensorwise(), blockwise(16, 16)):
        payload, scales = quantize(weight, recipe)
        kept, other = dequantize(payload, scales, recipe), beside(recipe, -2, by_row=True)
        wanted = torch.cat([rounded(x[n : n + 1], other) @ kept[0 if n < 2 else 2] for n in range(9)])
        found = scaled_product(x, payload, scales, recipe, dim=-2, offsets=ends)
        torch.testing.assert_close(found, wanted)
    assert beside(tensorwise(pow2=True), -2, by_row=True) == rowwise(pow2=True)


def test_weights_without_a_product_on_a_device_are_refused_by_name(monkeypatch):
    cuda, cpu, bf16 = torch.device("cuda", 0), torch.device("cpu"), torch.bfloat16
    missing = products.missing_product
    monkeypatch.setattr(products, "_kernel_failure", lambda *given: None)
    assert not any(missing(recipe, (48, 64), bf16, cpu) for recipe in RECIPES)
    assert missing(rowwise(), (48, 64), bf16, cuda) is missing(tensorwise(), (48, 64), bf16, cuda) is None
    assert "no such product on cuda:0" in missing(mx(32), (48, 64), bf16, cuda)
    assert "no such product on cuda:0" in missing(nvfp4(), (48, 64), bf16, cuda)
    assert "no such product on cuda:0" in missing(tensorwise(), (2, 48, 64), bf16, cuda)
    assert "multiples of 16" in missing(rowwise(), (40, 64), bf16, cuda)
    assert "blockwise() or mx(32)" in missing(nvfp4(), (2, 48, 64), bf16, cpu)
    assert "multiples of 8" in missing(tensorwise(), (2, 20, 64), bf16, cpu)
    assert missing(tensorwise(), (2, 20, 64), torch.float32, cpu) is missing(tensorwise(), (20, 9), bf16, cpu) is None
    assert "narrower than torch.float64" in missing(rowwise(), (48, 64), torch.float64, cpu)
    monkeypatch.undo()
    assert products._kernel_failure("rowwise", bf16, cpu) is None

    def fails(*given, **options):
        raise RuntimeError("scaled products need compute capability 8.9\nand more")

    monkeypatch.setattr(torch, "_scaled_mm", fails)
    products._kernel_failure.cache_clear()
    try:
        assert products._kernel_failure("rowwise", bf16, cpu) == "scaled products need compute capability 8.9"
    finally:
        products._kernel_failure.cache_clear()
