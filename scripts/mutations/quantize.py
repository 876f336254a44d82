"""Mutations of src/weft/quantize."""

from mutation import Mutation

MUTATIONS = [
    Mutation(
        "infinities determine the scale of their block",
        "_finite_magnitudes",
        "values.abs().nan_to_num_(nan=0.0, posinf=0.0)",
        "values.abs()",
        "quantize/test_formats.py::test_infinities_saturate_and_spoil_nothing_else",
    ),
    Mutation(
        "the other operand of a quantized weight is not quantized",
        "scaled_product",
        "dequantize(*quantize(whole, other), other)[:, :x.shape[-1]]",
        "x.float()",
        "quantize/test_products.py::test_both_operands_hold_what_their_recipes_keep",
    ),
    Mutation(
        "elements that become zeros are not counted",
        "count_losses",
        "(values != 0) & (found == 0)",
        "(values == 0) & (found != 0)",
        "quantize/test_formats.py::test_saturated_and_underflowed_elements_are_counted",
    ),
]
