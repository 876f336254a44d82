"""Tests that mutations in several files name."""

ORDER = "fsdp/test_order.py::"
BUCKETS = "fsdp/test_buckets.py::"
AGREED = "overlap/test_agreed.py::"
SEAMS = "fsdp/seams/"
MEMBERSHIP = "fsdp/test_membership.py::"
BETWEEN = "fsdp/test_between_passes.py::"
EARLIER_FORWARD = SEAMS + (
    "test_failures.py::test_a_backward_of_an_earlier_forward_runs_after_one_that_failed_and_has_nothing_of_it[2]"
)
WAYS_IN = SEAMS + "test_ways_in.py::"
STREAMS = "debug/test_order_of_work.py::"
ROWS = "test_the_sizes_of_an_exchange_come_while_the_other_microbatch_computes_beside_which_its_rows_travel[2-False]"
REDUCED_BESIDE = ORDER + "test_a_unit_is_reduced_while_the_next_one_s_backward_computes_unless_one_may_be_alive"
NARROW = "fsdp/test_narrow.py::"
NARROW_BYTES = NARROW + ("test_a_gather_brings_the_bytes_of_the_format_and_maxima_are_exchanged_once_in_a_step[2]")
SCALED = "fsdp/test_scaled.py::"
COPIES = "fsdp/test_two_copies.py::"
TENSOR = "models/test_tensor_parallel.py::"
OF_KINDS = TENSOR + "test_every_kind_of_layer_equals_one_process"
HALVES = "overlap/test_halves.py::test_a_half_leaves_behind_its_counts_and_the_other_while_experts_compute[2]"
PAIRED = "overlap/test_paired.py::"
