"""Mutations of src/weft/quantize."""

from mutation import Mutation
from mutations.tests import NARROW, NARROW_BYTES, SCALED

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
    Mutation(
        "biases of experts are quantized",
        "_suits",
        "attribute in multiplied",
        "True",
        SCALED + "test_biases_of_experts_are_not_quantized_by_default[2-dequantize]",
    ),
    # --- payloads -----------------------------------------------------------------------------------------------------
    Mutation(
        "frozen quantized weights also keep their main weights",
        "payload_only_of",
        "group.trainable or group.offload is not None or not group.layout.data_numel",
        "True or group.offload is not None or not group.layout.data_numel",
        "fsdp/test_payload_only.py::test_adapters_train_on_a_base_whose_payload_alone_is_kept[2]",
    ),
    Mutation(
        "weights with two copies are kept as payload only",
        "payload_only_of",
        "stays or not isinstance(group.payload, Narrow) or group.payload.copies > 1",
        "stays or not isinstance(group.payload, Narrow)",
        "fsdp/test_payload_only.py::test_two_copies_and_main_weights_in_cpu_memory_keep_exact_values[2]",
    ),
    Mutation(
        "memory shared with NumPy is not replaced",
        "PayloadOnly.let_go",
        "not self.storage.resizable()",
        "False",
        "fsdp/test_payload_only.py::test_main_weights_stay_while_other_code_has_their_memory[2]",
    ),
    Mutation(
        "main weights are quantized without the cast to the compute dtype",
        "Narrow.__init__",
        "dataclasses.replace(recipe, via=compute) if casts else recipe",
        "recipe",
        NARROW + "test_bytes_are_those_of_the_whole_weight[2]",
    ),
    Mutation(
        "the memory of gathered quantized bytes is not freed",
        "Narrow.drop",
        "self.staging.give()",
        "",
        NARROW_BYTES,
    ),
    Mutation(
        "a quantized weight uses the scales of another weight",
        "Narrow.operand",
        "self._scales_at[number]",
        "self._scales_at[0]",
        SCALED + "test_a_step_of_scaled_products_equals_one_process[2]",
    ),
    Mutation(
        "transposed codes are not read",
        "Narrow.operand",
        "recipe.keep_transpose and (codes.dim() == 3) != backward",
        "False",
        SCALED + "test_transposed_codes_are_kept_beside_the_others_and_change_nothing_else[2]",
    ),
    Mutation(
        "rows of an operand beside a power-of-two scale have other scales",
        "beside",
        "rowwise(pow2=recipe.pow2)",
        "rowwise()",
        "quantize/test_products.py::test_rows_of_a_grouped_product_depend_on_no_other_rows",
    ),
    Mutation(
        "a negative NaN is dequantized to a number",
        "_has_nan",
        "payload.max() == 0xFF",
        "False",
        "quantize/test_formats.py::test_a_nan_of_either_sign_stays_one",
    ),
    Mutation(
        "a short last block of an operand is not filled up",
        "scaled_product",
        "other.kind == 'mx'",
        "False",
        "quantize/test_products.py::test_the_last_block_of_a_sum_over_rows_may_be_shorter",
    ),
    Mutation(
        "weights that were written are quantized with the maxima from before",
        "Narrow.made_from",
        "version if self.maxima_version is None else self.maxima_version",
        "version",
        "fsdp/seams/test_freshness.py::"
        "test_weights_that_a_forward_writes_before_their_update_are_quantized_with_their_own_maximum[2-tensorwise()]",
    ),
]
