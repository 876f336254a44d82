"""Mutations of src/weft/overlap."""

from mutation import Mutation
from mutations.tests import AGREED, HALVES, PAIRED, ROWS, STREAMS

MICROBATCHES = "overlap/test_microbatches.py::"

MUTATIONS = [
    Mutation(
        "a schedule does not pass further microbatch entries to layers",
        "ChunkPass._begin",
        "self._microbatch.given(self._layers[layer].attend)",
        "{}",
        MICROBATCHES + "test_documents_reach_layers_depths_and_loss_of_a_schedule",
    ),
    Mutation(
        "experts wait for both halves",
        "LayerPass._experts",
        "part.arrived = Value(part.arrive(), self._rows.needs_grad)",
        "[each.moving.wait() for each in self._parts if each.moving]\n"
        "part.arrived = Value(part.arrive(), self._rows.needs_grad)",
        HALVES,
    ),
    Mutation(
        "unpaired microbatches are not exchanged in halves",
        "ScheduledRun._pass",
        "place in self._halves",
        "False",
        HALVES,
    ),
    Mutation(
        "remaining weight gradients run without an exchange to hide",
        "table_order",
        "_last_weights(steps)",
        "[]",
        "overlap/test_order.py::test_weight_gradients_that_a_backward_leaves_are_computed_under_the_first_exchange_of_"
        "the_next[combined]",
    ),
    Mutation(
        "in a pair of forwards, the second finishes a layer before the first sends",
        "FORWARDS",
        "(FIRST, 'attend'), (FIRST, 'dispatch'), (LATE, 'finish')",
        "(FIRST, 'attend'), (LATE, 'finish'), (FIRST, 'dispatch')",
        PAIRED + "test_two_of_a_kind_run_in_the_order_of_the_table[forward]",
    ),
    Mutation(
        "each backward of a pair reduces separately",
        "ModelUnits.program",
        "for pair in together: ...",
        "for pair in (): ...",
        PAIRED + "test_gradients_of_two_backwards_of_a_pair_are_reduced_as_one[2]",
    ),
    Mutation(
        "delayed weight gradients of attention run after the last exchange",
        "COMBINED",
        "(BEFORE, 'attend.weights')",
        "(BACKWARD, 'attend.weights')",
        "overlap/test_order.py::"
        "test_the_last_backward_computes_the_weight_gradients_of_the_layer_before_under_its_exchange",
    ),
    Mutation(
        "a schedule gathers nothing ahead",
        "SCHEDULED_AHEAD",
        "SCHEDULED_AHEAD = 2",
        "SCHEDULED_AHEAD = 0",
        "overlap/test_events.py::test_units_of_a_schedule_are_gathered_and_reduced_while_others_compute[2]",
    ),
    Mutation(
        "the projection of a prediction depth is not delayed",
        "DepthPass.__init__",
        "ComputeNode(f'{name}.enter', self._delayed)",
        "ComputeNode(f'{name}.enter')",
        "overlap/test_events.py::test_each_delayed_product_of_a_sharded_model_runs_in_its_slot[2]",
    ),
    Mutation(
        "weight gradients of the head are not computed separately",
        "weights_order",
        "yield behind.behind(BACKWARD)._replace(slot='head.weights')",
        "",
        "overlap/test_stages.py::test_two_chunks_on_a_rank_in_a_loop_and_in_a_v[2]",
    ),
    Mutation(
        "a second call adds gradients shared by two stages again",
        "SharedEnds.__init__",
        "self._parameters if cut.has_copies else ()",
        "()",
        "overlap/test_stages.py::test_tied_weights_on_two_ranks_and_prediction_depths[2]",
    ),
    Mutation(
        "the parts of a pair run one after the other",
        "table_order",
        "(entry,) if overlap else ((action,) for action in entry)",
        "((action,) for action in entry) if overlap else ((action,) for action in entry)",
        "overlap/test_order.py::test_a_pair_of_a_table_runs_as_one_and_without_overlap_one_after_the_other",
    ),
    Mutation(
        "no weight gradient is delayed",
        "_operands",
        "(x, weight, beside) if can_wait else None",
        "None",
        "overlap/test_events.py::test_each_delayed_product_runs_in_its_slot[recompute0]",
    ),
    Mutation(
        "the host waits for sizes before it has queued work for the device",
        "ScheduledRun.forward_backward",
        "streams.has_streams(self._device)",
        "False",
        STREAMS + ROWS,
    ),
    Mutation(
        "rows are sent before they are computed",
        "LayerPass._attended",
        "streams.moment(crossing.rows.device)",
        "streams.new('none', crossing.rows.device).record_event()",
        STREAMS + ROWS,
    ),
    Mutation(
        "stages do not compare their tokens",
        "agree_on_schedule",
        "f'{shapes} {checksum}'",
        "f'{shapes}'",
        AGREED + "test_stages_that_read_different_data_say_so_before_anything_runs[2-tokens]",
    ),
    Mutation(
        "after a refused call, stages expect messages in the dtype before a conversion",
        "agree_on_schedule",
        "_computes_in.pop(model, None)",
        "",
        AGREED + "test_a_model_that_is_converted_between_calls_crosses_stages_in_its_new_dtype[2]",
    ),
    Mutation(
        "a schedule does not keep the addresses of weights for their backward",
        "ModelUnits.before",
        "torch.is_grad_enabled()",
        "not torch.is_grad_enabled()",
        "overlap/test_plan.py::test_weights_keep_their_addresses_from_a_forward_to_its_backward_and_no_longer[2]",
    ),
    Mutation(
        "a stage reduces the head before its separate weight gradients",
        "ModelUnits._read_outside",
        "step.slot.partition('.')[0]",
        "step.slot",
        "overlap/test_plan.py::test_the_last_reduction_of_the_head_comes_after_its_separate_weight_gradients",
    ),
    Mutation(
        "a unit of the embedding and a layer is held for the layer alone",
        "ModelUnits.of",
        "units_under(model, without=parts)",
        "[unit for unit in units_under(model) if not any(unit in units_under(part) for part in parts)]",
        "overlap/test_schedule.py::"
        "test_units_of_modules_inside_and_outside_of_layers_are_held_for_both_and_reduced_once[2]",
    ),
    Mutation(
        "a stage without the head offers no main_grad to modules before the layers",
        "ModelUnits.before",
        "self._read_outside(around.step)",
        "self.outside if around.step.slot == 'head' else ()",
        "overlap/test_main_grad.py::test_modules_before_the_layers_find_main_grad_on_a_rank_without_the_head[2]",
    ),
    Mutation(
        "stages take messages of an evaluation for those of training",
        "ScheduledRun._key",
        "self._microbatches[number].shapes, self._model.training",
        "(self._microbatches[number].shapes,)",
        "overlap/test_stages.py::test_layers_that_have_losses_in_training_alone_are_evaluated_in_stages_after_it[2]",
    ),
]
