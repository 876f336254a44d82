"""Tests of other files with small units that travel together, as they do unless somebody says otherwise.

They compare with one process, and pass here as they do with units that travel by themselves.
"""

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from tests.fsdp import test_behaviour, test_conditional, test_frozen
from tests.fsdp.seams import test_failures, test_freshness, test_multimodal, test_two_roots, test_ways_in
from weft.comm.collectives import all_gather_bundle, reduce_scatter_bundle
from weft.comm.lanes import Lane
from weft.fsdp.runtime import options

Z3 = {"strategy": "optim_grads_params"}


def case(body: Callable, ranks: int = 2, **given: Any) -> Any:
    name = [body.__name__.removeprefix("test_"), *(getattr(each, "__name__", str(each)) for each in given.values())]
    return pytest.param(body, ranks, given, id="-".join(name))


CASES = [
    case(test_behaviour.test_parameters_tied_across_units_stay_tied, **Z3),
    case(test_behaviour.test_units_nest_three_deep_and_inputs_need_no_gradient, 4),
    case(test_behaviour.test_several_forwards_then_their_backwards_in_any_order),
    case(test_behaviour.test_gradients_accumulate_with_and_without_synchronisation, **Z3),
    case(test_behaviour.test_validation_during_training_changes_nothing, allocator="trace"),
    case(test_behaviour.test_evaluation_between_forward_and_backward_changes_nothing),
    case(test_behaviour.test_training_goes_on_after_an_exception_in_backward_and_a_reset, **Z3),
    case(test_frozen.test_adapters_frozen_units_and_later_changes_equal_one_process, recompute="non-reentrant"),
    case(
        test_frozen.test_a_parameter_frozen_in_the_middle_of_an_accumulation_keeps_what_it_has,
        strategy="optim_grads",
        checked=True,
    ),
    case(test_conditional.test_units_that_do_not_run_in_the_last_microbatch_are_reduced_with_what_they_have),
    case(
        test_multimodal.test_images_on_some_ranks_only,
        strategy="optim_grads",
        who="ranks in turn",
        frozen="nothing",
        microbatches=2,
    ),
    case(test_freshness.test_an_optimizer_that_steps_between_microbatches, strategy="optim_grads"),
    case(
        test_failures.test_going_on_after_an_exception,
        fails=test_failures.FAILURES[0],
        then=test_failures.trains,
        strategy="optim_grads",
        known=2,
    ),
    case(test_ways_in.test_a_backward_is_noticed_whichever_tensor_it_starts_from, nested=True, **Z3),
    case(test_two_roots.test_a_parameter_tied_across_two_roots, runs="in turn", **Z3),
    case(test_two_roots.test_two_roots_that_step_between_each_others_passes, **Z3),
]


def together(module: str, name: str, given: dict[str, Any]) -> None:
    """Run the body of a test on this rank; some of its messages are of several units."""
    body = getattr(importlib.import_module(module), name)
    run, collectives = Lane.run, set()

    def note(lane: Lane, collective: Callable, *args: Any, **kinds: Any) -> Any:
        collectives.add(collective)
        return run(lane, collective, *args, **kinds)

    with mock.patch.object(options, "BUCKET_BYTES", 1 << 18), mock.patch.object(Lane, "run", note):
        getattr(body, "body", body)(**given)
    assert collectives & {all_gather_bundle, reduce_scatter_bundle}


@pytest.mark.slow
@pytest.mark.parametrize(("body", "ranks", "given"), CASES)
def test_units_that_travel_together_change_nothing(pool, body, ranks, given):
    pool.run(ranks, together, body.__module__, body.__name__, given)
