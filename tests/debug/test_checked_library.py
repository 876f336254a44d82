"""The library through its code for CUDA, with checked streams: tests of other rooms pass here as they do there.

They compare with one process; here each operator of theirs is checked as well.
"""

from collections.abc import Callable
from typing import Any

import pytest

import weft
from tests.fsdp import test_behaviour, test_double_backward, test_narrow, test_numbers, test_post_forward
from tests.fsdp.seams import test_failures, test_freshness, test_holds, test_transients, test_two_roots
from tests.memory import test_offload
from tests.moe import test_sharded
from tests.optim import test_flat
from tests.overlap import test_events, test_main_grad, test_schedule

Z3 = {"strategy": "optim_grads_params"}


def case(body: Callable, ranks: int = 2, slow: bool = False, **options: Any) -> Any:
    """A test of another file, how many ranks run it, and with which parameters."""
    name = [body.__name__.removeprefix("test_"), *(getattr(each, "__name__", str(each)) for each in options.values())]
    return pytest.param(body, ranks, options, id="-".join(name), marks=[pytest.mark.long] if slow else [])


def sharded_experts_train() -> None:
    """Each strategy and each way of recomputing once."""
    meshes = weft.init_meshes("cpu", ep=2)
    test_sharded.compare(meshes, "optim_grads", recompute=True)
    test_sharded.compare(meshes, "optim_grads_params", recompute=False)


def every_way_of_running() -> None:
    """Each switch of a schedule with up to three microbatches."""
    cfg, meshes = test_schedule.MODELS["odd"], weft.init_meshes("cpu", ep=2)
    ways = {count: chosen for count, chosen in test_schedule.ALL.items() if count <= 3}
    test_schedule.compare(cfg, meshes, ways, strategy="optim_grads_params")


CASES = [
    # every strategy, both allocators, recomputation, two axes, precision
    case(test_numbers.test_one_axis_equals_one_process, recompute="reentrant", slow=True),
    case(
        test_numbers.test_two_axes_equal_one_process,
        4,
        recompute="non-reentrant",
        microbatches=3,
        flagged=True,
        some=slice(2, None, 3),
        slow=True,
    ),
    case(test_behaviour.test_options_for_speed_give_bit_equal_results, slow=True),
    case(test_behaviour.test_several_forwards_then_their_backwards_in_any_order),
    case(test_behaviour.test_parameters_tied_across_units_stay_tied, **Z3),
    case(test_behaviour.test_validation_during_training_changes_nothing, allocator="trace", slow=True),
    case(test_behaviour.test_evaluation_between_forward_and_backward_changes_nothing, slow=True),
    case(test_double_backward.test_what_cannot_be_differentiated_twice_says_so, slow=True),
    case(test_narrow.test_a_step_equals_one_process_that_quantizes_in_the_same_places, slow=True),
    case(test_narrow.test_every_option_equals_one_process, slow=True),
    # what is kept elsewhere, and comes back
    case(test_offload.test_accumulation_evaluation_and_flat_optimizers_work_alike, slow=True),
    case(test_post_forward.test_training_equals_one_process_and_allocates_nothing_once_planned, 4, slow=True),
    case(
        test_freshness.test_weights_that_are_written_between_microbatches, strategy="optim", flagged=True, way="copy_"
    ),
    case(
        test_holds.test_a_root_that_returns_its_heads_weight_for_a_fused_loss, **Z3, microbatches=2, tie=True, slow=True
    ),
    case(test_transients.test_what_memory_held_before_is_in_no_gradient_and_no_norm, strategy="optim"),
    # two roots, exceptions
    case(test_two_roots.test_two_roots_that_step_between_each_others_passes, **Z3),
    *(
        case(
            test_failures.test_going_on_after_an_exception,
            fails=fails,
            then=test_failures.trains,
            strategy=strategy,
            known=known,
            slow=True,
        )
        for fails, strategy, known in zip(
            test_failures.FAILURES, ("optim_grads_params", "optim_grads", "optim"), (0, 2, 2)
        )
    ),
    # experts, schedules, optimizers
    case(sharded_experts_train, 4, slow=True),
    case(test_schedule.test_one_combined_run_equals_the_plain_one),
    case(test_schedule.test_an_exception_leaves_a_model_that_runs_again, slow=True),
    case(every_way_of_running, slow=True),
    case(test_events.test_each_delayed_product_of_a_sharded_model_runs_in_its_slot, slow=True),
    case(test_main_grad.test_modules_that_add_to_main_grad_find_it_in_every_step_that_needs_it, slow=True),
    case(test_flat.test_a_parameter_without_gradient_keeps_its_value_and_its_state),
]


@pytest.mark.long
@pytest.mark.parametrize(("body", "ranks", "options"), CASES)
def test_every_operator_comes_behind_what_it_needs(pool, body, ranks, options):
    pool.run(ranks, body, checked_streams=True, **options)
