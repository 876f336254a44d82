"""Mutations of src/weft/fsdp/runtime."""

from mutation import Mutation
from mutations.tests import (
    BETWEEN,
    BUCKETS,
    COPIES,
    EARLIER_FORWARD,
    MEMBERSHIP,
    NARROW,
    NARROW_BYTES,
    ORDER,
    REDUCED_BESIDE,
    SEAMS,
    STREAMS,
    WAYS_IN,
)

DIFFERENTLY_FROZEN = (
    "fsdp/test_differently_frozen.py::"
    "test_ranks_that_freeze_different_blocks_have_true_gradients_by_themselves_and_in_bundles[2-0]"
)
GIVEN_UP = "test_reductions_of_a_backward_that_fails_are_given_up_and_gradients_dropped[2]"

MUTATIONS = [
    # --- what changes between passes ----------------------------------------------------------------------------------
    Mutation(
        "parameters beside the model that no rank reduces get no warning",
        "fsdp.runtime.inventory:_warn",
        "not _is_managed(owners, parents)",
        "False",
        MEMBERSHIP + "test_parameters_of_a_loss_beside_the_model_get_a_warning_unless_something_reduces_their_gradients"
        "[2-none]",
    ),
    Mutation(
        "modules added after the first pass are not checked",
        "Inventory.check",
        "_contents(modules) != self._seen",
        "False",
        MEMBERSHIP + "test_what_comes_after_the_first_pass_is_refused_by_name_until_a_unit_has_it[2]",
    ),
    Mutation(
        "a frozen parameter in no unit is checked only once",
        "Inventory.check",
        "any(map(_trains, map(call, self._frozen)))",
        "False",
        MEMBERSHIP + "test_what_comes_after_the_first_pass_is_refused_by_name_until_a_unit_has_it[2]",
    ),
    Mutation(
        "the order of reductions never adapts",
        "Consensus.exchange",
        "reductions.learn()",
        "pass",
        "fsdp/test_order.py::test_reductions_that_wait_for_the_turn_of_another_all_start_with_it[2]",
    ),
    Mutation(
        "only parameters that this rank trains are reduced",
        "Consensus.exchange",
        "self._reduce(trains)",
        "self._reduce([group.trainable for group in groups])",
        DIFFERENTLY_FROZEN,
    ),
    Mutation(
        "gradients of parameters unfrozen on some ranks stay unreduced",
        "Consensus.exchange",
        "[group for group in late if group.is_reduced]",
        "[]",
        DIFFERENTLY_FROZEN,
    ),
    Mutation(
        "an evaluation inside another model's backward is treated as a recomputation",
        "Runtime._recomputes",
        "in_backward() and (torch.is_grad_enabled() or self.passes.current is Pass.BACKWARD)",
        "in_backward()",
        BETWEEN + "test_a_model_evaluated_in_a_hook_of_another_s_backward_has_the_weights_of_now[2-optim]",
    ),
    # --- what travels together ----------------------------------------------------------------------------------------
    Mutation(
        "units with different compute dtypes share a message",
        "fill_buckets",
        "(each.groups[-1], each.recipe.compute)",
        "(each.groups[-1], torch.float32)",
        "fsdp/test_mixed_bundles.py::"
        "test_fp32_units_between_bf16_ones_compute_with_weights_that_nothing_has_rounded[2-optim_grads_params]",
    ),
    Mutation(
        "small units never share a message",
        "fill_buckets",
        "len(run) > 1",
        "len(run) > 99",
        BUCKETS + "test_a_step_of_small_units_is_one_message_for_the_weights_and_one_for_the_gradients[2]",
    ),
    Mutation(
        "the size of a bucket is unlimited",
        "fill_buckets",
        "len(alike) > 1 or sum(other.gathered_bytes for other in (*runs[-1], unit)) > most",
        "len(alike) > 1",
        BUCKETS + "test_a_bucket_holds_as_many_bytes_as_asked_for_and_large_units_travel_by_themselves[2]",
    ),
    Mutation(
        "on one rank, gradients of small units are added one by one",
        "bundle_bytes",
        "(each.capabilities.bundle_bytes for each in transports)",
        "(each.capabilities.bundle_bytes for each in transports if units[0].groups[-1].groups[-1].size() > 1)",
        BUCKETS + "test_one_rank_adds_up_the_gradients_of_small_units_at_once[1]",
    ),
    Mutation(
        "messages of a large model are as small as those of a small one",
        "bundle_bytes",
        "min(4 * least, sum(unit.gathered_bytes for unit in units) // 8)",
        "least",
        BUCKETS + "test_messages_of_a_large_model_are_larger_but_at_least_eight[2-32-8]",
    ),
    Mutation(
        "a rank that needs no unit of a bucket does not join its gather",
        "GatherHelper.offer",
        "for bucket in self._buckets: ...",
        "for bucket in (): ...",
        BUCKETS + "test_a_rank_that_needs_no_unit_of_a_bucket_takes_part_for_those_that_do[2]",
    ),
    Mutation(
        "a rank sends its weights before its optimizer step to ranks after theirs",
        "Steps.reached",
        "not self._counts or issued.get(self._key, 0) <= here",
        "True",
        "fsdp/test_steps_here.py::test_a_rank_that_has_not_stepped_yet_sends_nothing_to_one_that_has",
    ),
    Mutation(
        "a rank does not join the gather of a bucket that it has gathered",
        "Bucket.serve",
        "self._start([None] * len(sources), sources, copy)",
        "None if self.gathered else self._start([None] * len(sources), sources, copy)",
        BUCKETS + "test_a_rank_takes_part_for_a_forward_that_it_is_past_and_for_a_backward_too[2]",
    ),
    Mutation(
        "gradients of earlier microbatches survive a failed backward",
        "Runtime.fail",
        "left in (Pass.BACKWARD, Pass.SCHEDULE) and not evaluates",
        "False",
        "fsdp/seams/test_failures.py::test_a_failed_backward_drops_the_gradients_of_earlier_microbatches"
        "[2-optim_grads-0]",
    ),
    Mutation(
        "an evaluation that fails in a schedule drops deferred gradients",
        "Runtime.fail",
        "left in (Pass.FORWARD, Pass.EVALUATION) or (left is Pass.SCHEDULE and self._evaluates)",
        "left in (Pass.FORWARD, Pass.EVALUATION)",
        "overlap/test_schedule.py::test_a_schedule_that_fails_takes_all_gradients_and_an_evaluation_takes_none[2-optim]",
    ),
    # --- when things run ----------------------------------------------------------------------------------------------
    Mutation(
        "reductions wait for a frozen unit",
        "Reductions.due",
        "self._units[unit].trainable_groups",
        "self._units[unit].groups",
        ORDER + "test_nothing_waits_for_the_turn_of_a_unit_that_is_frozen[2]",
    ),
    Mutation(
        "weights are not freed after forward",
        "GatherOrder.done",
        "not self.stays(each)",
        "False",
        ORDER + "test_weights_go_when_the_next_unit_has_computed[2-trace]",
    ),
    Mutation(
        "resident weights are gathered in each microbatch",
        "Freshness.begin_pass",
        "self.certain = False",
        "",
        ORDER + "test_weights_that_stay_are_gathered_once_in_a_step_of_many_microbatches[2-optim]",
    ),
    Mutation(
        "the host waits for each reduction immediately",
        "Reductions.reduce_group",
        "group.gradients.reduce(self._channels, scale, channel=group.channel, finishes=finishes)",
        "[(ticket := group.gradients.reduce(self._channels, 1.0, channel=group.channel, finishes=finishes)), "
        "ticket.wait()][0]",
        REDUCED_BESIDE + "[2-optim_grads_params]",
    ),
    Mutation(
        "partial gradients are reduced in each microbatch",
        "Reductions.defers",
        "(group.placements.reduces_each_microbatch for group in unit.groups)",
        "(True for group in unit.groups)",
        ORDER + "test_partial_gradients_are_reduced_once_in_a_step_and_sharded_ones_after_each_microbatch[2-optim]",
    ),
    Mutation(
        "resident weights are updated without overlap",
        "RefreshOrder.update_to",
        "self.ahead and self.made and self.made[-1] is unit",
        "False",
        ORDER + "test_a_unit_is_gathered_while_the_one_before_it_computes[2-optim]",
    ),
    # --- the order of streams, where there are some -------------------------------------------------------------------
    Mutation(
        "gradients are used before they are reduced",
        "Reductions.finish_group",
        "under_way.wait()",
        "",
        STREAMS + "test_a_steady_step_has_no_wait_of_the_host[2-optim_grads_params-False]",
    ),
    Mutation(
        "reductions of a failed backward are dropped without a wait",
        "Reductions.abandon",
        "ticket.abandon_watched()",
        "",
        STREAMS + GIVEN_UP,
    ),
    Mutation(
        "the host continues while a backward's uploads read frozen weights",
        "Shared._come_to_rest",
        "self._finish_uploads()",
        "",
        STREAMS + "test_frozen_weights_in_memory_of_the_host_may_be_written_after_a_backward[2]",
    ),
    # --- weights ------------------------------------------------------------------------------------------------------
    Mutation(
        "resident weights are never updated",
        "Freshness.begin_pass",
        "ordinary if words[0] else []",
        "[]",
        SEAMS + "test_freshness.py::test_weights_that_are_written_between_microbatches[2-optim-True-copy_]",
    ),
    Mutation(
        "small writes to weights kept as payload are lost",
        "_word_of",
        "rewritten and resting.has_passed",
        "False",
        "fsdp/test_payload_only.py::test_small_writes_add_up_as_those_to_main_weights[2]",
    ),
    Mutation(
        "a rank quantizes with the maxima of its own shard",
        "agree_on_maxima",
        "part.copy_(whole)",
        "(part, whole)",
        NARROW + "test_bytes_are_those_of_the_whole_weight[2]",
    ),
    Mutation(
        "a write on one rank is not announced to the others",
        "Freshness.begin_pass",
        "words = agree(words, groups, 'beginning of a pass', channel=self._agreement.channel)",
        "agree(words, groups, 'beginning of a pass', channel=self._agreement.channel)",
        SEAMS + "test_freshness.py::test_a_write_on_one_rank_is_a_write_on_all[2-optim]",
    ),
    Mutation(
        "a pass frees weights that the user holds",
        "Shared._begin_units",
        "unit.end_holds(UNTIL_BACKWARD, RETURNED, *((UNTIL_RESHARD,) if unit.reshard_after_backward else ()))",
        "unit.end_holds(USER, UNTIL_BACKWARD, RETURNED, *((UNTIL_RESHARD,) if unit.reshard_after_backward else ()))",
        SEAMS + "test_holds.py::test_a_users_unshard_is_not_evicted_by_a_pass_of_others[2-0]",
    ),
    Mutation(
        "a rank that joins a gather sends stale weights",
        "GatherHelper.serve",
        "self._freshness.update_to(unit)",
        "",
        "fsdp/test_conditional.py::test_a_rank_that_takes_part_in_a_gather_sends_the_weights_of_now[4]",
    ),
    # --- narrow weights -----------------------------------------------------------------------------------------------
    Mutation(
        "a plan counts gathers of quantized weights at full width",
        "fsdp:_facts",
        "sent=sum(group.payload.sent for group in unit.groups)",
        "sent=None",
        NARROW_BYTES,
    ),
    Mutation(
        "a rank sends stale quantized weights of a unit that its pass does not use",
        "RefreshOrder.update_to",
        "self.is_due(unit)",
        "False",
        "fsdp/test_mixed_bundles.py::test_a_rank_whose_pass_is_one_without_some_quantized_units_sends_those_of_after_its_last_step[2-0]",
    ),
    Mutation(
        "a plan omits weights that are gathered again while held",
        "fsdp:_facts",
        "sum(group.payload.sent for group in double)",
        "0",
        COPIES + "test_a_backward_gathers_its_copy_instead_of_the_other_and_as_the_plan_says[2]",
    ),
    # --- passes and calls ---------------------------------------------------------------------------------------------
    Mutation(
        "models end a joint backward in different orders on different ranks",
        "_Ending.__call__",
        "self.parts.sort(key=lambda model: model[0])",
        "",
        SEAMS + "test_two_roots.py::"
        "test_models_end_a_backward_in_the_order_of_their_places_whichever_was_reached_first",
    ),
    Mutation(
        "a failed pass is not recovered from",
        "Shared._reset_units",
        "group.gradients.discard()",
        "",
        SEAMS + "test_failures.py::test_going_on_after_an_exception[2-in_backward-trains-optim_grads_params-0]",
    ),
    # --- schedules of pipelines ---------------------------------------------------------------------------------------
    Mutation(
        "gradients of units that the last microbatch skips stay unreduced",
        "Reductions.left_over",
        "group.gradients.accumulates(self.finishes(unit))",
        "False",
        "fsdp/test_conditional.py::test_units_that_do_not_run_in_the_last_microbatch_are_reduced_with_what_they_have[2]",
    ),
    # --- by which way a backward comes in -----------------------------------------------------------------------------
    Mutation(
        "a failed forward drops deferred gradients",
        "Shared._reset_units",
        "not keeps_gradients",
        "True",
        WAYS_IN + "test_a_forward_that_fails_takes_nothing_from_the_microbatches_before_it[2-optim-evaluation]",
    ),
    Mutation(
        "parameters added after sharding train separately on each rank",
        "Inventory._walk",
        "if parameter.requires_grad: ...",
        "if False: ...",
        WAYS_IN + "test_what_is_added_after_sharding_is_refused_unless_it_is_sharded_or_ignored[2]",
    ),
    # --- in the place of torch's FSDP2 --------------------------------------------------------------------------------
    Mutation(
        "weights without values are accepted",
        "Runtime._enter",
        "not self._filled",
        "False",
        "fsdp/test_meta.py::test_what_has_no_values_is_refused_by_name_on_all_ranks_and_may_be_filled_then[2]",
    ),
    Mutation(
        "replicas that were filled separately stay different",
        "check_filled",
        "equalize(group)",
        "",
        "fsdp/test_meta.py::test_replicas_that_drew_other_numbers_start_alike[2]",
    ),
    Mutation(
        "gathers over a communicator that is chosen late cannot be joined",
        "Shared.change",
        "self._helper.offer(self.units)",
        "",
        "fsdp/test_own_groups.py::"
        "test_a_rank_joins_gathers_over_a_communicator_that_was_chosen_after_the_first_pass[2]",
    ),
    Mutation(
        "unshard starts from a shard that a forward has kept",
        "Runtime.unshard",
        "if not unit.holders: ...",
        "if False: ...",
        "fsdp/test_post_forward.py::test_what_stays_is_dropped_when_the_weights_may_have_changed[4]",
    ),
    Mutation(
        "steps of a model are not counted",
        "Runtime._end_backward",
        "self._steps.expect()",
        "",
        "fsdp/test_steps_here.py::test_a_model_says_how_many_steps_its_weights_have_until_a_pass_fails[2]",
    ),
    Mutation(
        "steps are counted after a pass that failed",
        "Runtime._recover",
        "self._steps.forget()",
        "",
        "fsdp/test_steps_here.py::test_a_model_says_how_many_steps_its_weights_have_until_a_pass_fails[2]",
    ),
    Mutation(
        "no optimizer step is expected after a backward",
        "Runtime._end_backward",
        "self._freshness.certain = True",
        "",
        SEAMS + "test_freshness.py::test_a_write_that_no_counter_sees_is_seen_after_the_next_backward[2]",
    ),
    Mutation(
        "reshard leaves a shard that a forward has kept",
        "Runtime.reshard",
        "unit.forget()",
        "",
        "fsdp/test_post_forward.py::test_what_stays_is_dropped_when_the_weights_may_have_changed[4]",
    ),
    Mutation(
        "a backward leaves the shards of units that it does not reach",
        "Shared._end_units",
        "unit.forget()",
        "",
        "fsdp/test_post_forward.py::test_what_stays_is_dropped_when_the_weights_may_have_changed[4]",
    ),
    Mutation(
        "after a failed backward, that of another forward is refused",
        "Runtime.begin_backward",
        "if self.passes.current is Pass.FAILED: ...",
        "if False: ...",
        EARLIER_FORWARD,
    ),
    Mutation(
        "a rank names the outermost of the forwards that failed",
        "Runtime.note_failure",
        "self._failure is None or self._failure[0] is not error",
        "True",
        SEAMS + "test_failures.py::test_of_nested_forwards_that_fail_the_innermost_is_told_to_other_ranks[2]",
    ),
    Mutation(
        "reshard leaves gathered weights of units that share parameters",
        "Runtime.reshard",
        "(unit, *unit.tied)",
        "(unit,)",
        "fsdp/test_behaviour.py::test_parameters_tied_across_units_stay_tied[2-optim_grads_params]",
    ),
    Mutation(
        "tensor-parallel ranks compute with different payloads of a frozen weight",
        "_equalize_over",
        "torch.autograd.graph.increment_version(group.main_weight.local)",
        "",
        "fsdp/test_narrow_paths.py::"
        "test_tensor_parallel_ranks_that_drew_other_frozen_weights_compute_with_those_of_the_first[2]",
    ),
    Mutation(
        "tensor-parallel ranks do not tell each other of weights without values",
        "fsdp.runtime.start:_check_filled",
        "(*group.groups, *(each for each in beyond if each is not None))",
        "group.groups",
        "fsdp/test_meta.py::test_a_meta_model_with_tensor_parallel_slices_is_filled_by_its_own_initialisation[4]",
    ),
    Mutation(
        "a model that has only evaluated lets gradients of more units be alive",
        "JointBackward.may_share_backward",
        "any(unit.calls for other in others for unit in other._units)",
        "True",
        SEAMS + "test_two_roots.py::test_a_backward_may_reach_another_model_while_that_has_a_forward_without_backward",
    ),
    Mutation(
        "ranks compare only the sizes of their groups",
        "Consensus.ask",
        "f'{each.name} {list(each.sharded.shape)} of {name}'",
        "name",
        "fsdp/test_agreement.py::"
        "test_ranks_whose_groups_have_other_parameters_of_the_same_sizes_raise_before_the_first_pass[2]",
    ),
]
