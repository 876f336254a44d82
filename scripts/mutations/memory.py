"""Mutations of src/weft/memory."""

from mutation import Mutation

CHECKED = "debug/test_checked_library.py::test_every_operator_comes_behind_what_it_needs"

MUTATIONS = [
    Mutation(
        "two live units share memory in the slab",
        "Pool._share",
        "begin < start + one.nbytes and start < begin + other.nbytes",
        "False",
        "memory/test_pool.py::test_buffers_alive_together_never_share_memory_even_when_no_plan_foresaw_it",
    ),
    Mutation(
        "a buffer that was moved comes back without its values",
        "Pool.come_back",
        "place.copy_(transient.own)",
        "",
        "memory/test_pool.py::test_an_unused_buffer_moves_out_for_one_that_must_not_move_and_comes_back",
    ),
    Mutation(
        "gradients are read before their download has ended",
        "GradientDownload.finish",
        "ticket.synchronize()",
        "",
        CHECKED + "[accumulation_evaluation_and_flat_optimizers_work_alike]",
    ),
    Mutation(
        "the slab is allocated on the stream on which a backward ends",
        "Pool._resize_slab",
        "streams.on(self._home)",
        "streams.on(None)",
        "debug/test_checker.py::"
        "test_the_slab_of_a_plan_belongs_to_the_stream_that_takes_from_it_wherever_the_plan_is_made",
    ),
    Mutation(
        "copies inside a wait of gloo count as work of the program",
        "inside_collective",
        "frame.f_code is wait_for.__code__",
        "False",
        "debug/test_order_of_work.py::test_units_that_share_messages_are_in_order_and_the_host_waits_for_none[2]",
    ),
    Mutation(
        "guarded memory keeps its values when it is freed",
        "Pool.give",
        "blank(transient.tensor)",
        "",
        "debug/test_guard.py::test_a_stale_view_of_gathered_weights_reads_nan_and_the_numbers_do_not_change[2-trace]",
    ),
    Mutation(
        "a new plan moves buffers to where they are",
        "Pool._adopt",
        "old is not None and old.storage_offset() == place.storage_offset()",
        "False",
        "memory/test_pool.py::test_a_move_is_told_and_keeps_views_in_step",
    ),
]
