"""Does a test see it? Named mutations of one line of the source each, of which each must make a named test fail soon.

    python scripts/mutate.py [--jobs 2] [--list] [NAME ...]

A mutation is applied to a copy of `src` in a temporary folder, and its test runs against that copy in a process of its
own. Before, all named tests pass against the copy as it is. Ends with 1 if a mutant survives, if its test gives no
answer, or if the text to be replaced is not in its file exactly once.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trials import Outcome, import_what_weft_does, run_in_turn

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
TIMEOUT_S = 300
"""For one test, on a machine that does other things."""
BASELINE_TIMEOUT_S = 900


class Mutation(NamedTuple):
    """`old`, once in `file` below src/weft, becomes `new`; `test` below tests/ must fail then."""

    name: str
    file: str
    old: str
    new: str
    test: str


ORDER = "fsdp/test_order.py::"
STEPS = "dtensor/test_steps.py::"
BUCKETS = "fsdp/test_buckets.py::"
AGREED = "overlap/test_agreed.py::"
SEAMS = "fsdp/seams/"
MEMBERSHIP = "fsdp/test_membership.py::"
BETWEEN = "fsdp/test_between_passes.py::"
DIFFERENTLY_FROZEN = (
    "fsdp/test_differently_frozen.py::"
    "test_ranks_that_freeze_different_blocks_have_true_gradients_by_themselves_and_in_bundles[2-0]"
)
WAYS_IN = SEAMS + "test_ways_in.py::"
CHECK = "pipeline/test_check.py::"
SCHEDULES = "pipeline/test_schedules.py::"
STREAMS = "debug/test_order_of_work.py::"
SIZES = "test_the_exchange_of_a_schedule_runs_beside_the_computation_and_the_host_waits_for_sizes_alone[2]"
ROWS = "test_the_sizes_of_an_exchange_come_while_the_other_microbatch_computes_beside_which_its_rows_travel[2-False]"
GIVEN_UP = "test_reductions_of_a_backward_that_fails_are_given_up_and_gradients_dropped[2]"
CHECKED = "debug/test_checked_library.py::test_every_operator_comes_behind_what_it_needs"
REDUCED_BESIDE = ORDER + "test_a_unit_is_reduced_while_the_next_one_s_backward_computes_unless_one_may_be_alive"
RESUMED = "train/test_loop.py::test_on_the_same_ranks_a_run_goes_on_bit_for_bit"
HABITS = "train/test_habits.py::"
SPIKES = HABITS + "test_a_step_with_a_spike_changes_no_weight_and_is_counted_and_a_resumed_run_knows"
BEST = HABITS + "test_a_run_ends_early_keeps_its_best_checkpoint_and_has_nothing_to_do_afterwards"

NARROW = "fsdp/test_narrow.py::"
NARROW_BYTES = NARROW + ("test_a_gather_brings_the_bytes_of_the_format_and_maxima_are_exchanged_once_in_a_step[2]")
SCALED = "fsdp/test_scaled.py::"
COPIES = "fsdp/test_two_copies.py::"
ALONE = "models/test_documents.py::test_a_packed_row_equals_its_documents_alone"
BITS = "models/test_documents.py::test_a_changed_token_changes_no_bit_of_another_document"
MICROBATCHES = "overlap/test_microbatches.py::"
PACKED = "train/test_documents.py::"
CONTEXT = "models/test_context.py::"
OF_MIXERS = CONTEXT + "test_every_mixer_equals_one_process[2]"
EXCHANGED = "models/test_exchanged.py::"
VISITS = "moe/test_visits.py::"
TENSOR = "models/test_tensor_parallel.py::"
OF_KINDS = TENSOR + "test_every_kind_of_layer_equals_one_process[2]"
HALVES = "overlap/test_halves.py::test_a_half_leaves_behind_its_counts_and_the_other_while_experts_compute[2]"
PAIRED = "overlap/test_paired.py::"
OF_CONFIGURATIONS = "train/test_check.py::"
GRAPHS = "graphs/test_hooks.py::"
KEYS = "graphs/test_keys.py::"
BACKWARDS = "graphs/test_backward.py::"
WRITES = "graphs/test_writes.py::test_both_conventions_are_replayed_in_the_first_microbatch_and_in_later_ones[2]"
PYTHON = "graphs/test_python.py::"
REPLAYS = "graphs/test_settings.py::test_a_replay_reads_nothing_of_the_one_before"
MUTATIONS = [
    # --- tensor parallelism -------------------------------------------------------------------------------------------
    Mutation(
        "a gathered input is kept for backward",
        "models/layers/positions.py",
        "or saved.untyped_storage().data_ptr() != self._memory",
        "or True",
        "models/test_activations.py::test_what_is_gathered_again_in_backward_starts_beside_the_inner_part_and_a_second_"
        "backward_finds_it[2]",
    ),
    Mutation(
        "the gradient of what is whole is not summed",
        "fsdp/gradients/partial.py",
        '        reduce_now(wide, dist.ReduceOp.SUM, ctx.group, "a gradient of tensor-parallel ranks")\n',
        "",
        TENSOR + "test_attention_and_mlps_equal_one_process_over_five_clipped_steps[2]",
    ),
    Mutation(
        "each rank adds the whole bias of a last projection",
        "moe/parts.py",
        "return full / self.mesh.size() if self.share else full",
        "return full",
        OF_KINDS,
    ),
    Mutation(
        "a router's loss is counted by every rank",
        "models/tensor_parallel.py",
        "return gradient / ctx.size, None",
        "return gradient, None",
        OF_KINDS,
    ),
    Mutation(
        "a norm over all heads is one over this rank's",
        "models/layers/attention.py",
        "norm.mean_over_ranks = partial(ranks.mean, first=0, count=ranks.size)",
        "pass",
        OF_KINDS,
    ),
    Mutation(
        "a group of Mamba that ranks share is normed by each for itself",
        "models/layers/mamba2.py",
        "        if groups < size and self.gated_norm is not None:  # ranks share a group\n",
        "        if False:\n",
        OF_KINDS,
    ),
    Mutation(
        "the loss leaves out the tokens of other ranks",
        "models/vocabulary.py",
        "        reduce_now(found_N2, dist.ReduceOp.SUM, group, WHAT)\n",
        "",
        TENSOR + "test_attention_and_mlps_equal_one_process_over_five_clipped_steps[2]",
    ),
    Mutation(
        "the gradient of scores is summed over ranks that all have it",
        "models/tensor_parallel.py",
        "return gradient.split(ctx.sizes, dim=ctx.dim)[ctx.ranks.rank], None, None, None",
        "return gradient.split(ctx.sizes, dim=ctx.dim)[ctx.ranks.rank] * ctx.ranks.size, None, None, None",
        TENSOR + "test_scores_are_those_of_one_process_and_so_are_losses_of_them[2]",
    ),
    Mutation(
        "a router's loss is one about this rank's positions",
        "moe/router.py",
        "            if self.over_positions is not None:\n",
        "            if False:\n",
        "models/test_whole_experts.py::test_losses_steps_and_loads_are_those_of_one_process[2]",
    ),
    Mutation(
        "gradients of whole experts are averaged over tensor-parallel ranks",
        "models/sharding.py",
        "        divisor /= meshes.tp.size()\n",
        "        pass\n",
        "models/test_whole_experts.py::test_losses_steps_and_loads_are_those_of_one_process[2]",
    ),
    Mutation(
        "a norm adds whole experts up over expert-parallel ranks that cross the data-parallel ones",
        "optim/norms.py",
        "return self._slices or slices",
        "return slices",
        TENSOR + "test_with_sharding_replicas_context_ranks_and_stages[4]",
    ),
    # --- checking a configuration -------------------------------------------------------------------------------------
    Mutation(
        "ranks as threads share the switch for halves",
        "moe/visits.py",
        "class _Mode(threading.local):",
        "class _Mode:",
        "train/test_check.py::test_ranks_as_threads_go_in_halves_each_by_itself",
    ),
    Mutation(
        "no gradient is compared with that of one rank",
        "train/check/findings.py",
        "    return found + gradients or _norm",
        "    return found or _norm",
        OF_CONFIGURATIONS + "test_a_norm_whose_gradient_is_not_summed",
    ),
    Mutation(
        "what the norm for clipping leaves out is not looked for",
        "train/check/findings.py",
        "        if all(_near(count, 1) for count in counts):\n            continue\n",
        "        continue\n",
        OF_CONFIGURATIONS + "test_sinks_that_the_norm_for_clipping_leaves_out",
    ),
    Mutation(
        "ranks that all wait for messages wait on",
        "train/check/threads/mailbox.py",
        "            self.waits = {rank: said for rank, _, said in self._blocked.values()} | self.ended\n",
        "            self.failed = True\n",
        OF_CONFIGURATIONS + "test_a_message_that_a_rank_does_not_send",
    ),
    Mutation(
        "a run with train.check begins without it",
        "train/loop.py",
        "        if config.train.check:\n",
        "        if False:\n",
        OF_CONFIGURATIONS + "test_a_run_with_a_fault_begins_on_no_rank",
    ),
    # --- graphs -------------------------------------------------------------------------------------------------------
    Mutation(
        "graphs are never replayed",
        "graphs/call.py",
        "captured.ready = True",
        "captured.ready = False",
        GRAPHS + "test_twenty_steps_with_graphs_are_those_without[2]",
    ),
    Mutation(
        "hooks on gathered weights are left out of replays",
        "graphs/places.py",
        "(tensor.requires_grad, hooked(tensor))",
        "(tensor.requires_grad,)",
        "graphs/test_hooks.py::test_a_hook_on_a_gathered_weight_ends_the_replays_of_its_module[2]",
    ),
    Mutation(
        "a replay has the inputs of its capture",
        "graphs/captured.py",
        "            static.fill(given)",
        "            pass",
        REPLAYS,
    ),
    Mutation(
        "a replay skips the last operator",
        "graphs/tape.py",
        "for function, args, kwargs, results, differentiable in self.calls:",
        "for function, args, kwargs, results, differentiable in self.calls[:-1]:",
        REPLAYS,
    ),
    Mutation(
        "static outputs change behind autograd's back",
        "graphs/captured.py",
        "self._changed if copies else [*self._changed, *self._outputs]",
        "self._changed",
        "graphs/test_settings.py::test_an_output_that_the_next_replay_overwrites_is_refused_by_autograd",
    ),
    Mutation(
        "a backward does not ask whether weights moved",
        "graphs/captured.py",
        "if self._places.addresses() != self.addresses:",
        "if False:",
        "graphs/test_settings.py::test_weights_that_moved_are_no_address_of_a_replay",
    ),
    Mutation(
        "buffers keep what a capture has done",
        "graphs/places.py",
        "each.copy_(values)",
        "pass",
        GRAPHS + "test_buffers_that_a_forward_changes_are_counted_once_per_call[2]",
    ),
    Mutation(
        "a replay does not say that it wrote to main_grad",
        "graphs/writes.py",
        "            each.grad_added_to_main_grad = True",
        "            pass",
        WRITES,
    ),
    Mutation(
        "a replay that adds is taken for one that writes",
        "graphs/writes.py",
        "            *(accumulate for _, accumulate in self._answers),",
        "",
        WRITES,
    ),
    Mutation(
        "a recording of a backward leaves its own gradients behind",
        "graphs/writes.py",
        "buffer.copy_(values)",
        "pass",
        WRITES,
    ),
    Mutation(
        "a rank replays what failed elsewhere",
        "graphs/table.py",
        "if anywhere and call.refused is None:",
        "if False:",
        GRAPHS + "test_a_capture_that_fails_on_one_rank_is_used_on_none[2]",
    ),
    Mutation(
        "an output without a gradient has one of zeros in a replay",
        "graphs/captured.py",
        "ctx.set_materialize_grads(False)",
        "ctx.set_materialize_grads(True)",
        BACKWARDS + "test_an_output_without_a_gradient_leaves_its_weights_without_one",
    ),
    Mutation(
        "gradients in any layout are copied into that of the first one",
        "graphs/backward.py",
        "key = tuple([None if each is None else each.stride() for each in gradients])",
        "key = tuple([None if each is None else () for each in gradients])",
        BACKWARDS + "test_gradients_that_arrive_in_other_layouts_are_those_of_eager_calls",
    ),
    Mutation(
        "uses of a leaf come in the order of the forward",
        "graphs/backward.py",
        "(-node._sequence_nr(), index, node)",
        "(node._sequence_nr(), index, node)",
        BACKWARDS + "test_uses_inside_are_added_to_those_outside_in_the_order_of_an_eager_backward[True]",
    ),
    Mutation(
        "a replay's backward reads buffers that were written to since its forward",
        "graphs/captured.py",
        "saved = [*self._read, *(",
        "saved = [*(",
        BACKWARDS + "test_writes_between_forward_and_backward_are_refused_as_by_an_eager_backward[a buffer]",
    ),
    Mutation(
        "a retained graph gives its capture away",
        "graphs/captured.py",
        "ends = not torch._C._autograd._get_current_graph_task_keep_graph()",
        "ends = True",
        KEYS + "test_a_retained_graph_keeps_its_capture_until_it_is_gone",
    ),
    Mutation(
        "gradients of inputs are those of the next replay",
        "graphs/backward.py",
        "None if each is None else copied(each) if copies else each.detach()",
        "None if each is None else each.detach()",
        "graphs/test_scopes.py::test_delayed_weight_gradients_are_replayed_after_the_backward_that_queues_them[2]",
    ),
    Mutation(
        "attributes of captured modules are those of the capture",
        "graphs/call.py",
        "elif not captured.python.same():",
        "elif False:",
        PYTHON + "test_attributes_that_change_between_calls_lead_to_a_new_capture[a number]",
    ),
    Mutation(
        "a changed attribute is met by a value that is equal and no longer the same",
        "graphs/walk.py",
        "return kind, repr(value)  # also those of NumPy",
        "return 0, value",
        PYTHON + "test_what_changes_deep_inside_leads_to_a_new_capture[a sign]",
    ),
    Mutation(
        "a gradient of a weight lies in memory of the next forward",
        "graphs/backward.py",
        "keep or not touches(each, made) or",
        "keep or",
        BACKWARDS + "test_gradients_of_weights_that_are_views_of_others_outlast_the_backward",
    ),
    Mutation(
        "a function of other code is taken for the one before",
        "graphs/walk.py",
        'self.tokens.append((f"{name}.__code__", value.__code__))',
        "pass",
        PYTHON + "test_what_functions_and_references_hold_leads_to_a_new_capture[the code of a function]",
    ),
    Mutation(
        "a buffer of another layout is taken for the one before",
        "graphs/places.py",
        "return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype",
        "return (tensor.data_ptr(),)",
        PYTHON + "test_a_buffer_that_gets_another_layout_at_its_address_leads_to_a_new_capture[transposed]",
    ),
    Mutation(
        "what cannot be compared is taken to stay as it is",
        "graphs/walk.py",
        "if not known and _hides(kind, len(slots)):",
        "if False:",
        PYTHON + "test_state_that_cannot_be_compared_keeps_a_module_eager[ndarray]",
    ),
    Mutation(
        "a capture leaves behind what its own run changed",
        "graphs/captured.py",
        "            self.python.restore()\n",
        "",
        PYTHON + "test_a_forward_with_side_effects_stays_eager_and_has_each_once[Counts]",
    ),
    Mutation(
        "what a forward leaves in a list of its caller is lost in replays",
        "graphs/captured.py",
        "if form != spec or any(",
        "if False and any(",
        PYTHON + "test_a_list_or_dict_that_a_forward_fills_keeps_it_eager[list]",
    ),
    Mutation(
        "a copy of a captured module computes with the weights of the other",
        "graphs/call.py",
        "memo.get(id(module), module)",
        "module",
        PYTHON + "test_a_copy_of_a_module_computes_with_its_own_weights",
    ),
    Mutation(
        "static outputs that a backward reads may be written to",
        "graphs/captured.py",
        "if shared or (read and not copies):",
        "if shared:",
        "graphs/test_settings.py::test_an_output_that_its_backward_reads_must_not_be_written_to",
    ),
    Mutation(
        "tensors of another device are constants of a capture",
        "graphs/watch.py",
        "if isinstance(each, Tensor)}) > 1:",
        "if isinstance(each, Tensor)}) > 2:",
        "graphs/test_settings.py::test_what_a_graph_cannot_hold_is_found_at_capture[a copy to another device]",
    ),
    Mutation(
        "calls under autocast are captured",
        "graphs/call.py",
        "if torch.is_autocast_enabled(device.type):",
        "if False:",
        KEYS + "test_training_is_part_of_what_differs_and_calls_under_autocast_stay_eager",
    ),
    Mutation(
        "rows of padding get the gradient of a token",
        "moe/permutation.py",
        "torch.nn.functional.pad(weights.flatten(), (0, 1)) if",
        "torch.nn.functional.pad(weights.flatten(), (0, 1), value=1.0) if",
        "moe/test_padding.py::test_padding_changes_no_result_and_makes_the_rows_of_each_expert_equally_many[0.7]",
    ),
    # --- context parallelism ------------------------------------------------------------------------------------------
    Mutation(
        "positions of slices begin at 0",
        "models/context.py",
        'return self.kept(device, "position_ids", lambda: self.cut(self.whole.position_ids()))',
        "return torch.arange(2 * self.width, device=device).expand(self.whole.batch, -1)",
        OF_MIXERS,
    ),
    Mutation(
        "a convolution sees nothing of the slice before",
        "models/context.py",
        "by_slice[number - 1] if number else torch.zeros_like(by_slice[0])",
        "torch.zeros_like(by_slice[0])",
        OF_MIXERS,
    ),
    Mutation(
        "a convolution reaches into another document in the slice before",
        "models/context.py",
        'same = self.kept(x.device, f"halo/{size}", make) == first',
        'same = self.kept(x.device, f"halo/{size}", make) >= 0',
        OF_MIXERS,
    ),
    Mutation(
        "a state does not fade in the slices that it passes",
        "models/layers/mamba2.py",
        "    return decay_BH[..., None, None] * state_BHPN\n",
        "    return state_BHPN\n",
        OF_MIXERS,
    ),
    Mutation(
        "what a slice writes forgets the state before it",
        "models/layers/delta_net.py",
        "written_BHRKLC - w @ more_BHRKCC",
        "written_BHRKLC",
        OF_MIXERS,
    ),
    Mutation(
        "the loss of context ranks is scaled as of one",
        "models/context.py",
        "return gradient * ctx.ranks, None",
        "return gradient, None",
        OF_MIXERS,
    ),
    Mutation(
        "queries wait for the keys and values of other ranks",
        "models/layers/attention.py",
        "            q_BSHC, gate_BSHC = self._queries(x_BSD, where)  # during",
        "            came = others._coming()\n            others._coming = lambda: came\n"
        "            q_BSHC, gate_BSHC = self._queries(x_BSD, where)  # during",
        CONTEXT + "test_what_the_context_lane_moves_is_under_way_while_the_local_part_computes[2]",
    ),
    Mutation(
        "keys and values of other ranks are kept for backward",
        "models/layers/gathered.py",
        "            self._parts = parts",
        "            self._parts = ()",
        CONTEXT + "test_what_the_context_lane_moves_is_under_way_while_the_local_part_computes[2]",
    ),
    Mutation(
        "a window reaches into another document in the slice before",
        "models/context.py",
        "seen = end - max(first, begin - before)",
        "seen = end - begin + before",
        OF_MIXERS,
    ),
    Mutation(
        "keys of whole rows are gathered for a window",
        "models/layers/attention.py",
        "if self.window is None or not 1 < self.window <= slices.width:",
        "if True:",
        CONTEXT + "test_recurrences_send_as_much_for_long_rows_as_for_short_ones[2]",
    ),
    Mutation(
        "context ranks that are tensor-parallel too keep what they gather",
        "models/layers/gathered.py",
        'return hooks is not None and not isinstance(getattr(hooks[0], "__self__", None), Positions)',
        "return hooks is not None",
        "models/test_shared_rows.py::test_activations_are_spread_over_context_and_tensor_parallel_ranks[4]",
    ),
    Mutation(
        "context ranks send whole slices for a window as long as one",
        "models/layers/attention.py",
        "not 1 < self.window <= slices.width:",
        "not 1 < self.window < slices.width:",
        CONTEXT + "test_recurrences_send_as_much_for_long_rows_as_for_short_ones[2]",
    ),
    Mutation(
        "exchanged heads come back in the order of the row",
        "models/context.py",
        "zip(parts[: self.ranks], reversed(parts))]",
        "zip(parts[: self.ranks], parts[self.ranks :])]",
        EXCHANGED + "test_exchanged_heads_equal_one_process[2]",
    ),
    Mutation(
        "a rank computes its exchanged heads with the sinks of the first",
        "models/layers/attention.py",
        'how["sinks"].chunk(slices.ranks)[slices.rank]',
        'how["sinks"].chunk(slices.ranks)[0]',
        EXCHANGED + "test_exchanged_heads_equal_one_process[2]",
    ),
    Mutation(
        "heads are gathered where they are to be exchanged",
        "models/layers/attention.py",
        'self.exchanges = cfg.context_attention == "heads"',
        "self.exchanges = False",
        EXCHANGED + "test_keys_and_values_travel_while_queries_are_computed[2]",
    ),
    Mutation(
        "a window in blocks sees one position too many",
        "models/layers/attention.py",
        "F.pad(ones.tril(window - 1).triu(), (first, 0), value=True)",
        "F.pad(ones.tril(window).triu(), (first, 0), value=True)",
        "models/layers/test_windows.py::test_a_window_in_blocks_equals_one_mask_over_everything[4-3]",
    ),
    Mutation(
        "each layer keeps a mask of its own",
        "models/layers/attention.py",
        "    if key not in _bands:\n        with",
        "    if True:\n        with",
        "models/layers/test_windows.py::test_all_layers_and_steps_share_one_mask",
    ),
    Mutation(
        "each tensor-parallel rank keeps all rows of experts",
        "models/layers/experts.py",
        "with Rows(self.ranks, rows) as kept:",
        "with Rows(None, rows) as kept:",
        "models/test_shared_rows.py::test_activations_are_spread_over_context_and_tensor_parallel_ranks[4]",
    ),
    Mutation(
        "sinks take a mask over all scores",
        "models/layers/attention.py",
        "    if queries < seen:\n        first",
        "    if queries < seen or sinks is not None:\n        first",
        "models/layers/test_windows.py::test_sinks_without_a_window_take_memory_for_positions_and_none_for_scores",
    ),
    # --- documents in one row -----------------------------------------------------------------------------------------
    Mutation(
        "each layer makes the rotations of a batch anew",
        "models/layers/rotary.py",
        "documents.kept(self.cos.device, name, lambda",
        "(lambda _, name, make: make())(self.cos.device, name, lambda",
        "models/test_documents.py::test_all_layers_share_one_table_of_rotations_of_a_batch",
    ),
    Mutation(
        "attention sees the whole row",
        "models/layers/attention.py",
        "    if documents is None:\n        return causal_attention(",
        "    if True:\n        return causal_attention(",
        ALONE + "[*]",
    ),
    Mutation(
        "positions go on over a border",
        "models/layers/attention.py",
        "    return start, documents\n",
        "    return start, None\n",
        ALONE + "[+]",
    ),
    Mutation(
        "a convolution reaches over a border",
        "models/layers/convolution.py",
        "        if documents is not None:\n",
        "        if False:\n",
        ALONE + "[M]",
    ),
    Mutation(
        "within a chunk a state continues over a border",
        "models/layers/chunks.py",
        "nothing = nothing | (numbers[..., :, None] != numbers[..., None, :])",
        "pass",
        ALONE + "[M]",
    ),
    Mutation(
        "sums of decays begin at the chunk, and rounding tells of another document",
        "models/layers/chunks.py",
        "same = numbers[..., places:] == numbers[..., :-places]",
        "same = numbers[..., places:] == numbers[..., places:]",
        BITS + "[M]",
    ),
    Mutation(
        "the state before a chunk reaches every document in it",
        "models/layers/mamba2.py",
        "from_start_BKHL.where(numbers_BK1L == states_BK[:, :-1, None, None], -math.inf)",
        "from_start_BKHL",
        ALONE + "[M]",
    ),
    Mutation(
        "a chunk hands on what every document in it wrote",
        "models/layers/delta_net.py",
        "to_end_BHRKDL = to_end_BHRKDL.where(numbers_B11K1L == after, -math.inf)",
        "pass",
        ALONE + "[G]",
    ),
    Mutation(
        "the memory before a chunk outlives a border in it",
        "models/layers/delta_net.py",
        "across_BHRKD1 = across_BHRKD1.where(before == after, -math.inf)",
        "pass",
        ALONE + "[G]",
    ),
    Mutation(
        "a prediction depth reads and predicts tokens of the next document",
        "models/documents.py",
        "return moved.masked_fill(other != numbers, filling)",
        "return moved",
        BITS + "[*]",
    ),
    Mutation(
        "a document predicts the first token of the next",
        "models/documents.py",
        "ends[torch.tensor([*self.starts[1:], self.batch * self.seq]) - 1] = True",
        "pass",
        "models/test_documents.py::test_documents_are_what_they_were_made_from",
    ),
    Mutation(
        "a schedule leaves out what stands beside tokens and labels of layers",
        "overlap/chunk_pass.py",
        "beside=self._microbatch.given(self._layers[layer].attend),",
        "beside={},",
        MICROBATCHES + "test_documents_reach_layers_depths_and_loss_of_a_schedule",
    ),
    Mutation(
        "the trainer counts labels over borders",
        "train/data/sequences.py",
        "        if self.apart:\n",
        "        if False:\n",
        PACKED + "test_no_document_predicts_the_next_and_no_label_of_one_is_lost",
    ),
    Mutation(
        "a model that looks beyond borders is trained on packed documents",
        "train/task/text.py",
        "    if change > 0:\n",
        "    if False:\n",
        PACKED + "test_a_model_that_is_told_and_looks_beyond_borders_is_refused",
    ),
    Mutation(
        "a model of transformers keeps a cache and reads over borders",
        "train/task/text.py",
        'given["use_cache"] = False',
        "pass",
        PACKED + "test_a_model_of_transformers_is_told_where_documents_begin",
    ),
    # --- what methods say ---------------------------------------------------------------------------------------------
    Mutation(
        "what a method sets before the root is sharded is lost",
        "fsdp/roots.py",
        "        around.options = around.options.joined(self._given, changed)\n",
        "        del changed\n",
        ORDER + "test_what_is_said_before_the_root_is_sharded_holds_in_its_model[2]",
    ),
    # --- what changes between passes ----------------------------------------------------------------------------------
    Mutation(
        "what comes into a model after its first pass is not looked at",
        "fsdp/runtime/inventory.py",
        "or _contents(modules) != self._seen",
        "or False",
        MEMBERSHIP + "test_what_comes_after_the_first_pass_is_refused_by_name_until_a_unit_has_it[2]",
    ),
    Mutation(
        "a frozen parameter in no unit is not looked at again",
        "fsdp/runtime/inventory.py",
        "or any(map(_trains, map(call, self._frozen)))",
        "or False",
        MEMBERSHIP + "test_what_comes_after_the_first_pass_is_refused_by_name_until_a_unit_has_it[2]",
    ),
    Mutation(
        "a first backward does not look for a forgotten root",
        "fsdp/autograd.py",
        "if first_backwards and not inputs:",
        "if False:",
        MEMBERSHIP + "test_a_root_that_was_forgotten_is_named_at_the_first_backward_and_can_be_sharded_then[2]",
    ),
    Mutation(
        "the order of reductions stays that of the units",
        "fsdp/runtime/consensus.py",
        "reductions.agreed = tuple(reductions.arrived)",
        "pass",
        "fsdp/test_order.py::test_reductions_that_wait_for_the_turn_of_another_all_start_with_it[2]",
    ),
    Mutation(
        "what is reduced is what this rank trains",
        "fsdp/runtime/consensus.py",
        "        self._reduce(agreed.trains)\n",
        "        self._reduce([group.trainable for group in groups])\n",
        DIFFERENTLY_FROZEN,
    ),
    Mutation(
        "gradients that only some ranks have unfrozen are left where they are",
        "fsdp/runtime/consensus.py",
        "[number for number in numbers if unit.groups[number].agreed])\n",
        "[])\n",
        DIFFERENTLY_FROZEN,
    ),
    Mutation(
        "what is registered follows every holder",
        "fsdp/unit.py",
        "                if each.computes or is_users(each):\n                    return\n",
        "                return\n",
        BETWEEN + "test_between_a_forward_and_its_backward_a_module_shows_its_sharded_parameters[2-optim_grads_params]",
    ),
    Mutation(
        "an evaluation inside of another model's backward is taken for a recomputation",
        "fsdp/runtime/runtime.py",
        "return in_backward() and (torch.is_grad_enabled() or self.passes.current is Pass.BACKWARD)",
        "return in_backward()",
        BETWEEN + "test_a_model_evaluated_in_a_hook_of_another_s_backward_has_the_weights_of_now[2-optim]",
    ),
    # --- optimizers over many small parameters ------------------------------------------------------------------------
    Mutation(
        "a default step goes tensor by tensor",
        "dtensor/steps.py",
        "or not _goes_over_lists(params, args, kwargs)",
        "or True",
        STEPS + "test_a_default_step_goes_over_lists_and_is_that_of_one_process_bit_for_bit",
    ),
    Mutation(
        "a default step goes through the operators of DTensors",
        "dtensor/steps.py",
        "elif _are_cut_alike(params, args):",
        "elif False:",
        STEPS + "test_a_default_step_goes_over_lists_and_is_that_of_one_process_bit_for_bit",
    ),
    Mutation(
        "torch's clipping asks the other ranks for each norm by itself",
        "dtensor/norms.py",
        "(id(tensor._spec.mesh), tensor.axes, tensor.dtype)",
        "(number, tensor.axes, tensor.dtype)",
        "dtensor/test_dtensor.py::test_clipping_asks_the_other_ranks_for_one_number_and_computes_with_plain_tensors",
    ),
    Mutation(
        "torch's clipping takes the norm of DTensors, one for each gradient",
        "fsdp/patches.py",
        'Patch("nn.utils.clip_grad", "_get_total_norm", norm_at_once)',
        'Patch("nn.utils.clip_grad", "_get_total_norm", lambda theirs: theirs)',
        "dtensor/test_dtensor.py::test_clipping_asks_the_other_ranks_for_one_number_and_computes_with_plain_tensors",
    ),
    Mutation(
        "torch's clipping multiplies DTensors",
        "fsdp/patches.py",
        'Patch("nn.utils.clip_grad", "_clip_grads_with_norm_", clipping_at_once)',
        'Patch("nn.utils.clip_grad", "_clip_grads_with_norm_", lambda theirs: theirs)',
        "dtensor/test_dtensor.py::test_clipping_asks_the_other_ranks_for_one_number_and_computes_with_plain_tensors",
    ),
    Mutation(
        "sums of half precision are added in half precision",
        "dtensor/norms.py",
        "torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype",
        "dtype",
        "dtensor/test_dtensor.py::test_sums_and_norms_of_half_precision_are_those_of_one_process",
    ),
    Mutation(
        "a step writes past version counters",
        "dtensor/steps.py",
        "torch.autograd.graph.increment_version(written)",
        "written.clear()",
        STEPS + "test_what_backward_has_saved_is_not_stepped_on_in_silence",
    ),
    Mutation(
        "a step that autograd is to know goes over parts",
        "dtensor/steps.py",
        " or torch.is_grad_enabled()",
        "",
        STEPS + "test_autograd_knows_a_differentiable_step",
    ),
    Mutation(
        "a group whose step is differentiable goes over lists",
        "dtensor/steps.py",
        ' or options.get("differentiable")',
        "",
        STEPS + "test_a_group_may_be_differentiable_by_itself",
    ),
    Mutation(
        "lists take narrower gradients, and round otherwise",
        "dtensor/steps.py",
        "for values in (parameters, *lists) for",
        "for values in [parameters] for",
        STEPS + "test_narrower_gradients_step_as_in_one_process",
    ),
    Mutation(
        "a step goes over lists of several devices",
        "dtensor/steps.py",
        "kinds_of(parts_of(sharded))",
        "kinds_of(parts_of(sharded[:1]))",
        STEPS + "test_parameters_of_several_devices_are_left_to_torch[2]",
    ),
    Mutation(
        "cuts that were saved are equal, but not the same",
        "dtensor/uneven.py",
        "_wrap(local, spec, _one(cuts), requires_grad)",
        "_wrap(local, spec, cuts, requires_grad)",
        STEPS + "test_a_step_behind_a_saved_state_has_no_dtensors_either",
    ),
    Mutation(
        "a NaN is lost in the largest of numbers",
        "comm/collectives.py",
        "_SIGNS.get(op) if",
        "None if",
        "dtensor/test_dtensor.py::test_a_nan_is_the_largest_and_the_smallest_whichever_rank_has_it",
    ),
    Mutation(
        "norms of half precision are rounded on each rank",
        "dtensor/norms.py",
        "return torch.linalg.vector_norm(part, order, dtype=inner)",
        "return torch.linalg.vector_norm(part, order, dtype=dtype).to(inner)",
        "dtensor/test_dtensor.py::test_norms_of_half_precision_are_rounded_once",
    ),
    Mutation(
        "each rank chooses for itself how to step",
        "dtensor/steps.py",
        "each._cuts.mean_size for each",
        "each._local_tensor.numel() for each",
        STEPS + "test_all_ranks_step_alike_whatever_lies_where[2]",
    ),
    Mutation(
        "lists write past version counters",
        "dtensor/local.py",
        "torch.autograd.graph.increment_version([*chain.from_iterable(changed)])",
        "changed.clear()",
        "dtensor/test_versions.py",
    ),
    # --- what travels together ----------------------------------------------------------------------------------------
    Mutation(
        "units that compute in different dtypes travel together",
        "fsdp/runtime/buckets.py",
        "return group.groups[-1], group.recipe.compute",
        "return group.groups[-1], torch.float32",
        "fsdp/test_mixed_bundles.py::"
        "test_fp32_units_between_bf16_ones_compute_with_weights_that_nothing_has_rounded[2-optim_grads_params]",
    ),
    Mutation(
        "small units never travel together",
        "fsdp/runtime/buckets.py",
        "for run in runs if len(run) > 1",
        "for run in runs if len(run) > 99",
        BUCKETS + "test_a_step_of_small_units_is_a_message_for_each_pass_and_one_for_the_gradients[2]",
    ),
    Mutation(
        "small units are reduced one by one",
        "layout/turns.py",
        "joins = kind is not None and",
        "joins = False and",
        BUCKETS + "test_a_step_of_small_units_is_a_message_for_each_pass_and_one_for_the_gradients[2]",
    ),
    Mutation(
        "a bucket has no largest size",
        "fsdp/runtime/buckets.py",
        "bytes_before + unit.gathered_bytes > most or",
        "",
        BUCKETS + "test_a_bucket_holds_as_many_bytes_as_asked_for_and_large_units_travel_by_themselves[2]",
    ),
    Mutation(
        "any number of reductions that travel together are under way",
        "layout/turns.py",
        "unit, group, handle))\n        self._leave_room()",
        "unit, group, handle))",
        BUCKETS + "test_few_reductions_that_travel_together_are_under_way_at_once[2]",
    ),
    Mutation(
        "units that share weights do not bring their buckets",
        "layout/gathers.py",
        "            self._gather(tied, backward)",
        "            pass",
        BUCKETS + "test_units_whose_weights_are_shared_bring_their_bucket[2]",
    ),
    Mutation(
        "gradients of small units on one rank are added up one by one",
        "fsdp/runtime/buckets.py",
        "return min((each.bundle_bytes for each in said), default=0)",
        "return min((each.bundle_bytes for each in said if groups[0].groups[-1].size() > 1), default=0)",
        BUCKETS + "test_one_rank_adds_up_the_gradients_of_small_units_at_once[1]",
    ),
    Mutation(
        "what travels together is summed from this rank on",
        "comm/gloo/transport.py",
        "column.unbind()",
        "column.roll(-rank, 0).unbind()",
        BUCKETS + "test_the_bits_are_those_of_units_that_travel_by_themselves[4-optim_grads_params-1]",
    ),
    Mutation(
        "the next bucket is gathered when it is needed",
        "layout/gathers.py",
        "for following in self._wanted:",
        "for following in () if unit.number in self._bundles else self._wanted:",
        BUCKETS + "test_the_next_bucket_is_gathered_before_the_units_of_this_one_are_computed[2]",
    ),
    Mutation(
        "a rank that needs nothing of a bucket leaves others waiting",
        "fsdp/runtime/helper.py",
        "for number, bucket in enumerate(self._buckets):",
        "for number, bucket in ():",
        BUCKETS + "test_a_rank_that_needs_no_unit_of_a_bucket_takes_part_for_those_that_do[2]",
    ),
    Mutation(
        "a rank that has not stepped yet sends its weights to one that has",
        "fsdp/runtime/steps.py",
        "return not self._counts or issued.get(self._key, 0) <= here",
        "return True",
        "fsdp/test_steps_here.py::test_a_rank_that_has_not_stepped_yet_sends_nothing_to_one_that_has",
    ),
    Mutation(
        "a bucket is gathered again for one of its units",
        "layout/gathers.py",
        " and not self._gathered.issuperset(bundle.numbers):",
        ":",
        BUCKETS + "test_a_unit_that_is_used_again_travels_by_itself[2]",
    ),
    Mutation(
        "a rank takes part in a bucket only while it has not gathered it itself",
        "fsdp/runtime/buckets.py",
        "return self._start([None",
        "return None if self.gathered else self._start([None",
        BUCKETS + "test_a_rank_takes_part_for_a_forward_that_it_is_past_and_for_a_backward_too[2]",
    ),
    Mutation(
        "gradients of earlier microbatches stay where a backward failed",
        "fsdp/runtime/runtime.py",
        "if left in (Pass.BACKWARD, Pass.SCHEDULE) and not evaluates:",
        "if False:",
        "fsdp/seams/test_failures.py::test_a_backward_that_fails_takes_the_gradients_of_the_microbatches_before_it"
        "[2-optim_grads-0]",
    ),
    Mutation(
        "an evaluation that fails in a schedule takes gradients that wait",
        "fsdp/runtime/runtime.py",
        "or (left is Pass.SCHEDULE and self._evaluates)",
        "",
        "overlap/test_schedule.py::test_a_schedule_that_fails_takes_all_gradients_and_an_evaluation_takes_none[2-optim]",
    ),
    # --- when things run ---------------------------------------------------------------------------------------------
    Mutation(
        "nothing is gathered ahead",
        "layout/gathers.py",
        "for following in self._wanted:",
        "for following in ():",
        ORDER + "test_a_unit_is_gathered_while_the_one_before_it_computes[2-optim_grads_params]",
    ),
    Mutation(
        "what the user wants to be gathered ahead is not",
        "layout/gathers.py",
        "        if named is not None:",
        "        if False:",
        ORDER + "test_units_that_the_user_names_are_gathered_ahead_in_place_of_the_next[2]",
    ),
    Mutation(
        "what was gathered ahead stays when the pass leaves its record",
        "layout/gathers.py",
        "                self._units[each].free()\n",
        "                pass\n",
        ORDER + "test_what_was_gathered_ahead_goes_when_the_pass_leaves_its_record[2-None]",
    ),
    Mutation(
        "reductions wait for the turn of a frozen unit",
        "fsdp/runtime/reductions.py",
        "if unit.trainable_groups and not self.defers(unit)",
        "if not self.defers(unit)",
        ORDER + "test_nothing_waits_for_the_turn_of_a_unit_that_is_frozen[2]",
    ),
    Mutation(
        "a gather is waited for at once",
        "fsdp/unit.py",
        "            self._tickets.append(ticket)",
        "            self._tickets.append(ticket) or ticket.wait()",
        ORDER + "test_a_unit_is_gathered_while_the_one_before_it_computes[2-optim]",
    ),
    Mutation(
        "the budget of bytes is ignored",
        "layout/gathers.py",
        "if self._budget is not None and spent > self._budget:",
        "if False:",
        ORDER + "test_a_budget_of_bytes_says_how_far_ahead_gathers_go[2]",
    ),
    Mutation(
        "weights do not go after forward",
        "fsdp/runtime/shared.py",
        "if not self.gathers.stays(each):",
        "if False:",
        ORDER + "test_weights_go_when_the_next_unit_has_computed[2-trace]",
    ),
    Mutation(
        "a recomputation lets the weights go",
        "fsdp/hooks.py",
        "if call is not None and (recomputing or not self._reshards()):",
        "if call is not None and not self._reshards():",
        ORDER + "test_recomputation_gathers_nothing_twice[2-reentrant]",
    ),
    Mutation(
        "weights that stay are gathered in each microbatch",
        "fsdp/runtime/freshness.py",
        "self._certain = False",
        "pass",
        ORDER + "test_weights_that_stay_are_gathered_once_in_a_step_of_many_microbatches[2-optim]",
    ),
    Mutation(
        "an outer gather is waited for before the inner one",
        "fsdp/group.py",
        "after=refreshing,",
        "after=refreshing and refreshing.wait(),",
        ORDER + "test_outer_gathers_are_under_way_while_the_unit_before_computes_and_nobody_waits_for_them[4]",
    ),
    Mutation(
        "each reduction is waited for at once",
        "fsdp/runtime/reductions.py",
        "return one.gradients.reduce(self._channels, each.scale_of(one), channel=one.channel, finishes=finishes)",
        "return [ticket := one.gradients.reduce(self._channels, 1.0, channel=one.channel, finishes=finishes), "
        "ticket.wait()][0]",
        REDUCED_BESIDE + "[2-optim_grads_params]",
    ),
    Mutation(
        "max_live_reduce_buffers=1 is ignored",
        "layout/turns.py",
        "most = max(most, 0)",
        "most = len(self._under_way)",
        REDUCED_BESIDE + "[2-no_shard]",
    ),
    Mutation(
        "partial gradients are reduced in each microbatch",
        "fsdp/runtime/reductions.py",
        "group.placements.reduces_each_microbatch for group in unit.groups",
        "True for group in unit.groups",
        ORDER + "test_partial_gradients_are_reduced_once_in_a_step_and_sharded_ones_after_each_microbatch[2-optim]",
    ),
    Mutation(
        "an inner reduction is waited for before the outer one",
        "fsdp/gradients/group.py",
        "after=ticket,",
        "after=ticket and ticket.wait(),",
        ORDER + "test_outer_reductions_follow_the_inner_ones_and_nobody_waits_in_between[4-no_shard]",
    ),
    Mutation(
        "gathers share the communicator of reductions",
        "fsdp/channels.py",
        "return _twins[group] if self.separate else group",
        "return group",
        ORDER + "test_gathers_have_communicators_of_their_own_if_that_is_asked_for[2-optim]",
    ),
    Mutation(
        "weights that stay are made anew one at a time",
        "fsdp/runtime/freshness.py",
        "        if self.ahead and self._made and self._made[-1] is unit:",
        "        if False:",
        ORDER + "test_a_unit_is_gathered_while_the_one_before_it_computes[2-optim]",
    ),
    Mutation(
        "one reduction starts with the turn of another, not all that wait for it",
        "layout/turns.py",
        "while self._turns and self.waiting.issuperset(self._turns[0]):",
        "if self._turns and self.waiting.issuperset(self._turns[0]):",
        ORDER + "test_reductions_that_wait_for_the_turn_of_another_all_start_with_it[2]",
    ),
    Mutation(
        "an exchange is waited for at once",
        "moe/dispatch.py",
        "return Arrival(output, ticket, rows)",
        "return ticket.wait() or Arrival(output, ticket, rows)",
        "overlap/test_events.py::"
        "test_an_exchange_is_issued_before_the_computation_that_hides_it_and_awaited_after_it[2]",
    ),
    # --- one row per rank, halves, and what goes first ----------------------------------------------------------------
    Mutation(
        "a token's last row is dropped on its way back",
        "moe/visits.py",
        "< visited.sum(1, keepdim=True)",
        "< visited.sum(1, keepdim=True) - 1",
        VISITS + "test_each_rank_gets_each_of_its_tokens_once_with_the_weights_of_its_experts",
    ),
    Mutation(
        "a token travels once for each of its experts",
        "moe/visits.py",
        "    counts = visited.sum(0)\n",
        "    counts = torch.bincount(rank.flatten(), minlength=ranks + 1)[:ranks]\n",
        VISITS + "test_each_rank_gets_each_of_its_tokens_once_with_the_weights_of_its_experts",
    ),
    Mutation(
        "a weight is applied twice",
        "moe/layer.py",
        "return weigh(self.compute(rows, handle.offsets), weights, handle.arrived, exact=False)",
        "return weigh(self.compute(rows, handle.offsets), weights * weights, handle.arrived, exact=False)",
        "moe/test_layer.py::test_experts_over_ranks_equal_one_process_with_all_of_them[2]",
    ),
    Mutation(
        "gradients of weights stay where the experts are",
        "moe/visits.py",
        "        beside = _bits(for_weights, ctx.dtype)",
        "        beside = _bits(torch.zeros_like(for_weights), ctx.dtype)",
        VISITS + "test_each_rank_gets_each_of_its_tokens_once_with_the_weights_of_its_experts",
    ),
    Mutation(
        "a half leaves before its counts are here",
        "moe/dispatch.py",
        "            arriving = handle.arriving()\n",
        "            arriving = [0] * self.size\n",
        "overlap/test_halves.py::test_halves_change_no_loss_and_gradients_only_by_the_order_of_sums[2]",
    ),
    Mutation(
        "the host waits for sizes before rows may leave",
        "moe/dispatch.py",
        "        if streams.has_streams(rows.device):\n            handle.ready()\n",
        "        handle.ready()\n",
        HALVES,
    ),
    Mutation(
        "experts compute when both halves are here",
        "overlap/layer_pass.py",
        "        for part in self._parts:\n            part.arrived",
        "        for part in self._parts:\n            [each.moving.wait() for each in self._parts if each.moving]\n"
        "            part.arrived",
        HALVES,
    ),
    Mutation(
        "what stands alone goes in one piece",
        "overlap/run.py",
        "halves=place in self._halves",
        "halves=False",
        HALVES,
    ),
    Mutation(
        "forwards and backwards at both ends stand alone",
        "pipeline/schedules.py",
        "if len(waiting) == len(entry) == 1 and waiting",
        "if len(waiting) == len(entry) == 0 and waiting",
        PAIRED + "test_with_pairs_at_both_ends_another_microbatch_computes_beside_every_exchange[2]",
    ),
    Mutation(
        "weight gradients that a backward leaves run beside nothing",
        "overlap/entries.py",
        "owed = _last_weights(steps) if overlap",
        "owed = [] if overlap",
        "overlap/test_order.py::test_weight_gradients_that_a_backward_leaves_are_computed_under_the_first_exchange_of_"
        "the_next[combined]",
    ),
    Mutation(
        "the second of two forwards ends a layer before the first sends",
        "overlap/order.py",
        '    (FIRST, "attend"),\n    (FIRST, "dispatch"),\n    (LATE, "finish"),\n',
        '    (FIRST, "attend"),\n    (LATE, "finish"),\n    (FIRST, "dispatch"),\n',
        PAIRED + "test_two_of_a_kind_run_in_the_order_of_the_table[forward]",
    ),
    Mutation(
        "each of two backwards of a pair reduces what it finds",
        "overlap/units.py",
        "        for pair in together:\n",
        "        for pair in ():\n",
        PAIRED + "test_gradients_of_two_backwards_of_a_pair_are_reduced_as_one[2]",
    ),
    Mutation(
        "a lane yields to no exchange",
        "comm/lanes.py",
        "gate = priority.gate_of(self.name) if group is not None else None",
        "gate = None",
        "overlap/test_events.py::"
        "test_an_exchange_that_is_about_to_leave_goes_before_the_reduction_of_the_layer_above[2]",
    ),
    Mutation(
        "delayed weight gradients of attention wait behind the last exchange",
        "overlap/order.py",
        '    (BEFORE, "attend.weights"),',
        '    (BACKWARD, "attend.weights"),',
        "overlap/test_order.py::"
        "test_the_last_backward_computes_the_weight_gradients_of_the_layer_before_under_its_exchange",
    ),
    Mutation(
        "a schedule gathers nothing ahead",
        "overlap/units.py",
        "AHEAD = 2",
        "AHEAD = 0",
        "overlap/test_events.py::test_units_of_a_schedule_are_gathered_and_reduced_while_others_compute[2]",
    ),
    Mutation(
        "the projection of a prediction depth is not delayed",
        "overlap/depth_pass.py",
        'ComputeNode(f"{name}.enter", self._delayed)',
        'ComputeNode(f"{name}.enter")',
        "overlap/test_events.py::test_each_delayed_product_of_a_sharded_model_runs_in_its_slot[2]",
    ),
    Mutation(
        "the next message between stages is not received ahead",
        "pipeline/transport.py",
        "        tensors, ticket = self._expected.popleft()\n        self._expect()\n",
        "        tensors, ticket = self._expected.popleft()\n",
        "pipeline/test_transport.py::test_the_next_message_is_expected_while_one_is_worked_on[2]",
    ),
    Mutation(
        "the memory of a message is given back while it leaves",
        "pipeline/transport.py",
        "tensors if streams.has_streams(self._device) else ()",
        "()",
        "pipeline/test_transport.py::test_what_leaves_on_a_stream_is_kept_until_the_stream_is_past_it[2]",
    ),
    Mutation(
        "the memory of a message stays until the end of a schedule",
        "pipeline/transport.py",
        "        ticket.end_by_itself()\n",
        "",
        "pipeline/test_transport.py::test_the_memory_of_a_message_goes_when_it_has_arrived[2]",
    ),
    Mutation(
        "a byte budget counts a unit at each of its visits",
        "layout/gathers.py",
        "if number in seen:",
        "if False:",
        "overlap/test_residency.py::test_weights_are_gathered_as_often_as_the_visits_demand[interleaved-loop-2]",
    ),
    Mutation(
        "what is needed next is let go and gathered again",
        "layout/gathers.py",
        "return number == expected[position] or number in self._wanted",
        "return number == expected[position]",
        "overlap/test_residency.py::test_weights_are_gathered_as_often_as_the_visits_demand[interleaved-loop-2]",
    ),
    Mutation(
        "weight gradients of the head are not computed apart",
        "overlap/entries.py",
        """        yield behind.behind(BACKWARD)._replace(slot="head.weights")""",
        "        pass",
        "overlap/test_stages.py::test_two_chunks_on_a_rank_in_a_loop_and_in_a_v[2]",
    ),
    Mutation(
        "copies of what two stages share count twice in a norm",
        "optim/norms.py",
        "if cut is not None and stages is not None and cut.has_copies:",
        "if False:",
        "overlap/test_stages_sharded.py::test_clipped_steps_equal_those_of_one_process[True-2]",
    ),
    Mutation(
        "gradients of what two stages share are added again by a second call",
        "overlap/run.py",
        "for parameter in self._parameters if cut.has_copies else ():",
        "for parameter in ():",
        "overlap/test_stages.py::test_tied_weights_on_two_ranks_and_prediction_depths[2]",
    ),
    Mutation(
        "a pair of a table runs one after the other",
        "overlap/entries.py",
        "for actions in (entry,) if overlap else",
        "for actions in ((action,) for action in entry) if overlap else",
        "overlap/test_order.py::test_a_pair_of_a_table_runs_as_one_and_without_overlap_one_after_the_other",
    ),
    Mutation(
        "no weight gradient is delayed",
        "overlap/wgrad.py",
        "return (x, weight, beside) if can_wait else None",
        "return None",
        "overlap/test_events.py::test_each_delayed_product_runs_in_its_slot[recompute0]",
    ),
    # --- lanes and memory --------------------------------------------------------------------------------------------
    Mutation(
        "a ticket is not waited for",
        "comm/lanes.py",
        "self._collect()",
        "pass",
        "comm/test_lanes.py::test_what_a_ticket_failed_by_is_raised_by_all_that_come_after_it",
    ),
    Mutation(
        "after= is ignored",
        "comm/lanes.py",
        "earlier = after._transfer if after is not None else None",
        "earlier = None",
        "comm/test_lanes.py::test_what_comes_after_another_ticket_begins_when_that_has_ended_and_before_anybody_waits",
    ),
    Mutation(
        "a unit computes before its weights have come",
        "fsdp/unit.py",
        "            ticket.wait()",
        "            pass",
        ORDER + "test_a_unit_is_gathered_while_the_one_before_it_computes[2-optim_grads]",
    ),
    Mutation(
        "two units lie in one place of the slab",
        "memory/pool.py",
        "return begin < start + one.nbytes and start < begin + other.nbytes",
        "return False",
        "memory/test_pool.py::test_buffers_alive_together_never_share_memory_even_when_no_plan_foresaw_it",
    ),
    Mutation(
        "who moved out comes back without its values",
        "memory/pool.py",
        "place.copy_(transient.own)",
        "pass",
        "memory/test_pool.py::"
        "test_a_buffer_that_nobody_computes_with_moves_out_for_one_that_must_not_move_and_comes_back",
    ),
    Mutation(
        "staging is not given back",
        "fsdp/payload.py",
        "            self.staging.give()",
        "            pass",
        SEAMS + "test_transients.py::"
        "test_staging_of_offloaded_weights_comes_back_when_units_are_skipped[2-optim_grads-trace]",
    ),
    Mutation(
        "padding is not zeroed",
        "fsdp/gradients/group.py",
        "torch._foreach_zero_(padding)",
        "pass",
        SEAMS + "test_transients.py::test_what_memory_held_before_is_in_no_gradient_and_no_norm[2-optim]",
    ),
    # --- the order of streams, where there are some ------------------------------------------------------------------
    Mutation(
        "a lane does not wait for what was computed",
        "comm/lanes.py",
        "        self.stream.wait_stream(home)",
        "        pass",
        STREAMS + "test_a_steady_step_has_no_wait_of_the_host[2-optim_grads_params-False]",
    ),
    Mutation(
        "a lane does not wait for the lane before it",
        "comm/lanes.py",
        "            self.stream.wait_event(after._event)",
        "            pass",
        STREAMS + "test_outer_gathers_and_reductions_run_beside_the_computation[4]",
    ),
    Mutation(
        "the computation does not wait for a lane",
        "comm/lanes.py",
        "            stream.wait_event(self._event)",
        "            pass",
        STREAMS + "test_a_steady_step_has_no_wait_of_the_host[2-optim_grads_params-False]",
    ),
    Mutation(
        "a ticket knows of one wait, not of one for each stream",
        "comm/lanes.py",
        "            if stream not in self._behind:",
        "            if not self._behind:",
        STREAMS + "test_a_ticket_is_awaited_by_each_stream_that_needs_it_and_by_the_one_that_asked_when_it_dies[2]",
    ),
    Mutation(
        "a ticket that dies orders the stream that happens to be current",
        "comm/lanes.py",
        "        self._order(self._home)",
        "        self._order(streams.current(torch.device('cpu')))",
        STREAMS + "test_a_ticket_is_awaited_by_each_stream_that_needs_it_and_by_the_one_that_asked_when_it_dies[2]",
    ),
    Mutation(
        "a hook's stream does not wait for the reduction",
        "comm/lanes.py",
        "        stream.wait_stream(around)",
        "        pass",
        STREAMS + "test_a_hook_with_a_stream_of_its_own_comes_between_the_reduction_and_what_reads_it[2]",
    ),
    Mutation(
        "a hook's stream is not awaited",
        "comm/lanes.py",
        "        around.wait_stream(stream)",
        "        pass",
        STREAMS + "test_a_hook_with_a_stream_of_its_own_comes_between_the_reduction_and_what_reads_it[2]",
    ),
    Mutation(
        "gradients are used before they are reduced",
        "fsdp/runtime/reductions.py",
        "        under_way.wait()",
        "        pass",
        STREAMS + "test_a_steady_step_has_no_wait_of_the_host[2-optim_grads_params-False]",
    ),
    Mutation(
        "a unit's gather is not awaited",
        "fsdp/unit.py",
        "        for ticket in tickets:\n            ticket.wait()",
        "        pass",
        STREAMS + "test_a_steady_step_has_no_wait_of_the_host[2-optim_grads_params-False]",
    ),
    Mutation(
        "weights that are updated are not awaited",
        "fsdp/group.py",
        "            with torch.no_grad():\n                ticket.wait()\n            self.payload.open(",
        "            self.payload.open(",
        STREAMS + "test_weights_that_come_for_a_unit_that_does_not_run_are_awaited[2]",
    ),
    Mutation(
        "rows that arrive are not awaited",
        "moe/dispatch.py",
        "            self._ticket.wait()",
        "            pass",
        STREAMS + SIZES,
    ),
    Mutation(
        "reductions of a failed backward are forgotten, not given up",
        "fsdp/runtime/reductions.py",
        "            ticket.abandon()",
        "            pass",
        STREAMS + GIVEN_UP,
    ),
    Mutation(
        "what is forgotten is not counted",
        "comm/lanes.py",
        "            streams.unawaited(self._name, self._event)",
        "            pass",
        STREAMS + "test_a_ticket_is_awaited_by_each_stream_that_needs_it_and_by_the_one_that_asked_when_it_dies[2]",
    ),
    Mutation(
        "weights in memory of the host change while they are uploaded",
        "fsdp/group.py",
        "            upload.synchronize()",
        "            pass",
        STREAMS + "test_weights_in_memory_of_the_host_may_be_written_after_an_evaluation[2-optim_grads_params]",
    ),
    Mutation(
        "uploads of weights that stay are in no list",
        "fsdp/group.py",
        "self._upload = uploaded or self._upload",
        "pass",
        STREAMS + "test_weights_in_memory_of_the_host_may_be_written_after_an_evaluation[2-no_shard]",
    ),
    Mutation(
        "the host continues while a backward's uploads read frozen weights",
        "fsdp/runtime/unit_set.py",
        "        if self._offloaded:",
        "        if False:",
        STREAMS + "test_frozen_weights_in_memory_of_the_host_may_be_written_after_a_backward[2]",
    ),
    Mutation(
        "gradients in memory of the host are read before they are here",
        "memory/offload.py",
        "            self._arriving.synchronize()",
        "            pass",
        CHECKED + "[accumulation_evaluation_and_flat_optimizers_work_alike]",
    ),
    Mutation(
        "sizes of an exchange are read before they are here",
        "moe/dispatch.py",
        "        ticket.synchronize()",
        "        pass",
        STREAMS + SIZES,
    ),
    Mutation(
        "rows that leave wait for what is computed beside them",
        "comm/lanes.py",
        "        if behind is None:",
        "        if True:",
        STREAMS + ROWS,
    ),
    Mutation(
        "the host asks for sizes before the device has something to do",
        "overlap/run.py",
        "queues=streams.has_streams(self._device)",
        "queues=False",
        STREAMS + ROWS,
    ),
    Mutation(
        "rows arrive in memory that was the computation's",
        "moe/dispatch.py",
        "        if behind is None or not rows.is_contiguous():",
        "        if True:",
        STREAMS + ROWS,
    ),
    Mutation(
        "memory of a lane goes back while the computation reads it",
        "comm/lanes.py",
        "            streams.lend(made, home)",
        "            pass",
        STREAMS + ROWS,
    ),
    Mutation(
        "rows leave before they are there",
        "overlap/layer_pass.py",
        "            self._attended_at = streams.moment(crossing.rows.device)",
        "            self._attended_at = streams.new('none', crossing.rows.device).record_event()",
        STREAMS + ROWS,
    ),
    Mutation(
        "a plan is made on the stream where a backward ends",
        "memory/pool.py",
        "            with streams.on(self._home):",
        "            with streams.on(None):",
        "debug/test_checker.py::"
        "test_the_slab_of_a_plan_belongs_to_the_stream_that_takes_from_it_wherever_the_plan_is_made",
    ),
    Mutation(
        "the name of a group has the number of groups that a rank has",
        "comm/groups.py",
        "return name if threading.get_ident() == caller else named(ranks, use_hashed_name)",
        "return f'{name}/{len(c10d._world.pg_names)}'",
        "comm/test_groups.py::"
        "test_ranks_that_have_made_different_numbers_of_groups_find_each_other_in_groups_beside_others[4]",
    ),
    # --- what the ranks agree on --------------------------------------------------------------------------------------
    Mutation(
        "stages do not compare their tokens",
        "overlap/agreed.py",
        'f"{shapes} {checksum}".encode()',
        'f"{shapes}".encode()',
        AGREED + "test_stages_that_read_different_data_say_so_before_anything_runs[2-tokens]",
    ),
    Mutation(
        "a model that was converted crosses stages in its old dtype",
        "pipeline/transport.py",
        "        self._known.clear()\n",
        "        pass\n",
        AGREED + "test_a_model_that_is_converted_between_calls_crosses_stages_in_its_new_dtype[2]",
    ),
    Mutation(
        "what is known of a model's gathers stays when the model goes",
        "comm/watch/hang_detector.py",
        "MutableMapping[Any, dict[str, Join]] = weakref.WeakKeyDictionary()",
        "MutableMapping[Any, dict[str, Join]] = {}",
        "comm/test_pruned.py::test_nothing_is_known_of_how_to_take_part_in_the_gathers_of_a_model_that_has_gone[2]",
    ),
    Mutation(
        "a torch that lacks a name is patched in part",
        "fsdp/patches.py",
        "    if missing:\n",
        "    if False:\n",
        "fsdp/test_patches.py::test_a_torch_that_lacks_a_name_is_refused_and_left_as_it_is",
    ),
    Mutation(
        "small units travel one by one without tags",
        "comm/builtin.py",
        "helpers=False, bundles=True",
        "helpers=False, bundles=False",
        "fsdp/test_untagged.py::test_small_units_travel_in_one_group_call_where_the_transport_has_no_tags[2]",
    ),
    # --- weights -----------------------------------------------------------------------------------------------------
    Mutation(
        "weights that are gone can be read",
        "fsdp/autograd.py",
        "        self._versions = (self._gone,) * len(self._parameters)\n",
        "        self._versions = (self._version,) * len(self._parameters)\n",
        SEAMS + "test_entries.py::test_a_tensor_that_leaves_a_unit_around_its_output[2-alone-as an attribute]",
    ),
    Mutation(
        "parameters that are gone look like others",
        "fsdp/autograd.py",
        "                parameter.__class__ = _gone[here]",
        "                pass",
        SEAMS
        + "test_users.py::test_a_parameter_that_was_taken_under_unshard_is_read_after_reshard[2-optim_grads_params]",
    ),
    Mutation(
        "a write to a copy is lost",
        "fsdp/autograd.py",
        "        if not self._copies:\n            return []\n        found",
        "        return []\n        found",
        SEAMS + "test_users.py::test_weights_that_forward_itself_writes[2-optim_grads_params-clamp]",
    ),
    Mutation(
        "a write to a copy is forgotten where a pass begins",
        "fsdp/unit.py",
        "                group.fulls.check_unwritten()\n                group.fulls.come(group.version)",
        "                group.fulls.come(group.version)",
        SEAMS + "test_users.py::test_weights_that_are_written_under_the_users_unshard[2-optim_grads_params-a pass]",
    ),
    Mutation(
        "autograd is not told of writes to weights that stay",
        "fsdp/autograd.py",
        "        elif moved:",
        "        elif False:",
        SEAMS
        + "test_users.py::test_a_backward_through_weights_that_a_step_has_changed_raises_as_in_one_process[2-optim]",
    ),
    Mutation(
        "what is frozen before a backward gets gradients",
        "fsdp/gradients/group.py",
        "if not each.sharded.requires_grad:",
        "if False:",
        SEAMS + "test_users.py::test_parameters_that_are_frozen_between_forward_and_backward[2-optim]",
    ),
    Mutation(
        "weights that stay are never made anew",
        "fsdp/runtime/freshness.py",
        "due = ordinary if words[0] else []",
        "due = []",
        SEAMS + "test_freshness.py::test_weights_that_are_written_between_microbatches[2-optim-True-copy_]",
    ),
    Mutation(
        "frozen weights keep their main weights beside the payload",
        "fsdp/payload_only.py",
        "stays = group.trainable or",
        "stays = True or",
        "fsdp/test_payload_only.py::test_adapters_train_on_a_base_whose_payload_alone_is_kept[2]",
    ),
    Mutation(
        "a norm of gradients brings frozen main weights back",
        "optim/norms.py",
        "if present else nothing, slices",
        "if present else group.main_weight.local[:0], slices",
        "fsdp/test_payload_only.py::test_what_needs_no_values_leaves_the_payload_alone[2]",
    ),
    Mutation(
        "weights with two copies are kept as payload alone",
        "fsdp/payload_only.py",
        " or group.payload.copies > 1",
        "",
        "fsdp/test_payload_only.py::test_two_copies_and_main_weights_in_cpu_memory_keep_exact_values[2]",
    ),
    Mutation(
        "memory that numpy has shared is not replaced",
        "fsdp/payload_only.py",
        "if not self.storage.resizable():",
        "if False:",
        "fsdp/test_payload_only.py::test_main_weights_stay_while_other_code_has_their_memory[2]",
    ),
    Mutation(
        "small writes to weights that rest as payload are lost",
        "fsdp/runtime/freshness.py",
        "(rewritten and resting.has_passed)",
        "False",
        "fsdp/test_payload_only.py::test_small_writes_add_up_as_those_to_main_weights[2]",
    ),
    Mutation(
        "a write on one rank is not told to the others",
        "fsdp/runtime/freshness.py",
        "words, _ = agree(words",
        "agree(words",
        SEAMS + "test_freshness.py::test_a_write_on_one_rank_is_a_write_on_all[2-optim]",
    ),
    Mutation(
        "a second backward reads where its weights were before they moved",
        "fsdp/hooks.py",
        "            if unit.moves != self._moves:",
        "            if False:",
        "fsdp/test_behaviour.py::"
        "test_a_backward_through_the_rest_of_a_graph_finds_weights_where_they_were_or_says_that_they_moved[2-trace]",
    ),
    Mutation(
        "a user's hold is evicted by a pass",
        "fsdp/runtime/unit_set.py",
        "unit.end_holds(UNTIL_BACKWARD, RETURNED, *(",
        "unit.end_holds(USER, UNTIL_BACKWARD, RETURNED, *(",
        SEAMS + "test_holds.py::test_a_users_unshard_is_not_evicted_by_a_pass_of_others[2-0]",
    ),
    Mutation(
        "a user's hold is evicted after a failed pass",
        "fsdp/unit.py",
        "for holder in [each for each in self.holders if not is_users(each)]:",
        "for holder in list(self.holders):",
        SEAMS + "test_holds.py::test_a_users_unshard_outlives_a_pass_that_fails[2]",
    ),
    Mutation(
        "a parameter that two units share is held by one",
        "fsdp/construction/members.py",
        "unit.tied.setdefault(record.unit, mine.name)",
        "pass",
        "fsdp/test_behaviour.py::test_parameters_tied_across_units_stay_tied[2-optim_grads_params]",
    ),
    Mutation(
        "replicas are not made equal",
        "fsdp/construction/members.py",
        "            equalize(group)\n",
        "",
        SEAMS + "test_replicas.py::test_ranks_that_build_the_model_with_different_seeds_start_equal[2-no_shard]",
    ),
    Mutation(
        "who takes part in a gather sends stale weights",
        "fsdp/runtime/helper.py",
        "self._freshness.reach(unit)",
        "pass",
        "fsdp/test_conditional.py::test_a_rank_that_takes_part_in_a_gather_sends_the_weights_of_now[4]",
    ),
    # --- narrow weights -----------------------------------------------------------------------------------------------
    Mutation(
        "infinities spoil the scale of their block",
        "quantize/formats.py",
        ".nan_to_num_(nan=0.0, posinf=0.0)",
        "",
        "quantize/test_formats.py::test_infinities_saturate_and_spoil_nothing_else",
    ),
    Mutation(
        "a rank quantizes with the maxima of its own shard",
        "fsdp/runtime/maxima.py",
        "part.copy_(whole)",
        "part, whole",
        NARROW + "test_bytes_are_those_of_the_whole_weight[2]",
    ),
    Mutation(
        "main weights are quantized as they are",
        "fsdp/narrow.py",
        "return recipe if recipe.via is not None or compute.itemsize > 4 else dataclasses.replace(recipe, via=compute)",
        "return recipe",
        NARROW + "test_bytes_are_those_of_the_whole_weight[2]",
    ),
    Mutation(
        "cuts go through blocks",
        "fsdp/construction/quantized.py",
        "return math.lcm(step, recipe.cut_between(shape)), dim",
        "return step, dim",
        NARROW + "test_bytes_are_those_of_the_whole_weight[2]",
    ),
    Mutation(
        "the memory of what came quantized is kept",
        "fsdp/narrow.py",
        "self.staging.give()",
        "pass",
        NARROW_BYTES,
    ),
    Mutation(
        "a plan takes gathers of quantized weights for wide ones",
        "fsdp/runtime/planner.py",
        "sent=sum(group.payload.sent for group in unit.groups),",
        "",
        NARROW_BYTES,
    ),
    Mutation(
        "small quantized units travel by themselves",
        "fsdp/group.py",
        "self.payload.refreshes and self.plan.moves and not self.refreshed_bytes",
        "False",
        "fsdp/test_mixed_bundles.py::test_small_quantized_units_share_one_message_and_compute_the_same[2]",
    ),
    Mutation(
        "a bundle sends the quantized weights of the last step",
        "fsdp/group.py",
        "self.refresh(channels)\n        return self.copies[min",
        "return self.copies[min",
        "fsdp/test_mixed_bundles.py::test_a_rank_whose_pass_is_one_without_some_quantized_units_sends_those_of_after_its_last_step[2-262144]",
    ),
    Mutation(
        "a rank sends the quantized weights of the last step of a unit that its pass is without",
        "fsdp/runtime/freshness.py",
        "elif self.is_due(unit):",
        "elif False:",
        "fsdp/test_mixed_bundles.py::test_a_rank_whose_pass_is_one_without_some_quantized_units_sends_those_of_after_its_last_step[2-0]",
    ),
    Mutation(
        "the operand beside a quantized weight is not quantized",
        "quantize/products.py",
        "rows = dequantize(*quantize(whole, other), other)[:, : x.shape[-1]]",
        "rows = x.float()",
        "quantize/test_products.py::test_both_operands_hold_what_their_recipes_keep",
    ),
    Mutation(
        "a quantized weight takes the scales of another one",
        "fsdp/narrow.py",
        "tuple(codes.shape), self._scales_at[number]",
        "tuple(codes.shape), self._scales_at[0]",
        SCALED + "test_a_step_of_scaled_products_equals_one_process[2]",
    ),
    Mutation(
        "a backward multiplies the copy of forward",
        "fsdp/gradients/products.py",
        "if len(group.copies) > 1 and group.copy != backward:",
        "if False:",
        COPIES + "test_a_part_of_a_unit_may_be_recomputed_in_its_backward[2]",
    ),
    Mutation(
        "a gather ahead brings the copy of forward",
        "layout/gathers.py",
        "self._turn_ahead(ahead)",
        "pass",
        COPIES + "test_a_backward_gathers_its_copy_instead_of_the_other_and_as_the_plan_says[2]",
    ),
    Mutation(
        "a rank sends the copy of forward to those that ask for the other",
        "fsdp/group.py",
        "self.copies[copy].local\n            return",
        "self.copies[0].local\n            return",
        COPIES + "test_a_rank_sends_the_copy_that_others_ask_for[2-0]",
    ),
    Mutation(
        "a plan knows nothing of weights that are gathered again while they are held",
        "fsdp/runtime/planner.py",
        "sum(group.payload.sent for group in turning),",
        "0,",
        COPIES + "test_a_backward_gathers_its_copy_instead_of_the_other_and_as_the_plan_says[2]",
    ),
    Mutation(
        "transposed codes are not read",
        "fsdp/narrow.py",
        "if recipe.keep_transpose and (codes.dim() == 3) != backward:",
        "if False:",
        SCALED + "test_transposed_codes_are_kept_beside_the_others_and_change_nothing_else[2]",
    ),
    Mutation(
        "codes are read without their scales",
        "fsdp/scaled.py",
        "if name in _READS_NO_VALUES or attribute in _READS_NO_VALUES:",
        "if True:",
        SCALED + "test_other_uses_of_a_quantized_weight_are_refused[2]",
    ),
    Mutation(
        "elements that become zeros are not counted",
        "quantize/shares.py",
        "(values != 0) & (found == 0)",
        "(values == 0) & (found != 0)",
        "quantize/test_formats.py::test_saturated_and_underflowed_elements_are_counted",
    ),
    # --- gradients ---------------------------------------------------------------------------------------------------
    Mutation(
        "gradients are summed and not averaged",
        "fsdp/unit.py",
        "return 1 / (group.ranks * (self._divide_factor or 1))",
        "return 1.0",
        "fsdp/test_behaviour.py::test_a_list_of_modules_is_one_unit[2]",
    ),
    Mutation(
        "gradient_divide_factor is ignored",
        "fsdp/unit.py",
        "return 1 / (group.ranks * (self._divide_factor or 1))",
        "return 1 / group.ranks",
        "fsdp/test_behaviour.py::test_gradient_divide_factors_replace_or_follow_the_average[2]",
    ),
    Mutation(
        "a unit that forces sums has averages by the backend",
        "fsdp/gradients/group.py",
        "sum_only=self.sums_only,",
        "sum_only=False,",
        "fsdp/test_habits.py::test_a_unit_that_forces_sums_asks_the_backend_for_no_average[2]",
    ),
    Mutation(
        "the outer axis is not reduced over",
        "fsdp/gradients/group.py",
        "self._finishes = finishes or len(self._stages) == 1",
        "self._finishes = len(self._stages) == 1",
        ORDER + "test_the_outer_axis_is_reduced_over_once_in_a_step[4-no_shard]",
    ),
    Mutation(
        "a further microbatch overwrites the gradients",
        "fsdp/gradients/group.py",
        "targets, gradients = more if state.filled else new",
        "targets, gradients = new",
        "fsdp/test_behaviour.py::test_gradients_accumulate_with_and_without_synchronisation[2-optim]",
    ),
    Mutation(
        "memory of gradients is reused while it is held",
        "fsdp/gradients/main.py",
        "if old is None or self._is_held(dropped) or (renewed and dropped and self._is_viewed()):",
        "if old is None:",
        SEAMS + "test_gradient_owner.py::"
        "test_a_held_gradient_does_not_change_by_another_backward[2-optim-none by hand]",
    ),
    Mutation(
        "a penalty in .grad is overwritten",
        "fsdp/gradients/main.py",
        "mine.add_(theirs)",
        "pass",
        SEAMS + "test_gradient_owner.py::"
        "test_a_penalty_on_sharded_parameters_computed_beside_the_forward[2-optim-1-before]",
    ),
    Mutation(
        "zero_grad forgets the sharded parameters",
        "fsdp/module.py",
        "        super().zero_grad(set_to_none)  # type: ignore[misc]\n        for unit in units_under(self):",
        "        super().zero_grad(set_to_none)  # type: ignore[misc]\n        for unit in ():",
        SEAMS + "test_gradient_owner.py::test_zero_grad_of_an_unsharded_block_between_forward_and_backward[2]",
    ),
    # --- passes and calls --------------------------------------------------------------------------------------------
    Mutation(
        "models end a backward in any order",
        "fsdp/runtime/joint_backward.py",
        "self._parts.sort(key=lambda model: model[0])",
        "pass",
        SEAMS + "test_two_roots.py::"
        "test_models_end_a_backward_in_the_order_of_their_places_whichever_was_reached_first",
    ),
    Mutation(
        "words of one model pair with those of another",
        "comm/control.py",
        "tag = tag_of(TAGS, what, channel)",
        "tag = tag_of(TAGS, what)",
        "comm/test_control.py::test_words_of_another_moment_or_model_are_never_taken_for_these[2-model]",
    ),
    Mutation(
        "a failed pass is not recovered from",
        "fsdp/runtime/unit_set.py",
        "group.gradients.discard()",
        "pass",
        SEAMS + "test_failures.py::test_going_on_after_an_exception[2-in_backward-trains-optim_grads_params-0]",
    ),
    Mutation(
        "fully_shard does not look at its mesh",
        "fsdp/construction/arguments.py",
        "if mesh is not None and not isinstance(mesh, DeviceMesh):",
        "if False:",
        "fsdp/test_errors.py::test_a_mesh_of_another_type_is_refused",
    ),
    # --- models ------------------------------------------------------------------------------------------------------
    Mutation(
        "decays are rounded like other weights",
        "fsdp/construction/quantized.py",
        "keep, recipe = keeps_dtype(parameter), policy",
        "keep, recipe = False, policy",
        "models/test_shard.py::test_decays_keep_their_dtype_where_everything_else_computes_in_bf16[2]",
    ),
    Mutation(
        "the state of a Mamba layer is not handed on",
        "models/layers/mamba2.py",
        'state["ssm"] = last',
        'state["ssm"] = torch.zeros_like(last)',
        "models/layers/test_decoding.py::test_a_sequence_in_parts_has_the_scores_of_the_sequence[M]",
    ),
    Mutation(
        "a prediction depth reads the same tokens",
        "models/model.py",
        "embed(shifted(tokens, number + 1, 0, documents))",
        "embed(tokens)",
        "models/test_prediction.py::test_loss_and_gradients_are_those_of_transformers[2]",
    ),
    Mutation(
        "a tensor on disk that nothing needs is passed over",
        "models/hf/weights.py",
        "if unused := {name",
        "if unused := {name for name in ()} and {name",
        "models/hf/test_convert.py::test_a_tensor_that_is_missing_or_unused_is_named",
    ),
    Mutation(
        "a tied head that differs is taken for the embedding",
        "models/hf/places.py",
        "for copy in (*self.copies, *self.repeats):",
        "for copy in self.copies:",
        "models/hf/test_found.py::test_a_tied_model_may_have_its_head_again_where_it_is_equal",
    ),
    Mutation(
        "weights that need a scale are taken as they are",
        "models/hf/directory.py",
        "if kind not in OF_WEIGHTS:",
        "if False:",
        "models/hf/test_found.py::test_weights_that_are_no_plain_numbers_are_refused_by_tensor_and_dtype[dtype0]",
    ),
    Mutation(
        "tables of rotation stay rounded",
        "models/layers/rotary.py",
        "if torch.finfo(self.cos.dtype).bits < 32:",
        "if False:",
        "models/hf/test_found.py::test_tables_of_rotation_do_not_stay_rounded",
    ),
    Mutation(
        "a saved model loses what it came with",
        "models/hf/weights.py",
        "            raw = origin.config_json(family, model.cfg, raw)\n",
        "",
        "models/hf/test_found.py::test_a_field_that_is_not_known_is_passed_over_where_it_is_named",
    ),
    Mutation(
        "a text is decoded without its prompt",
        "train/source.py",
        "each[-CONTEXT:]",
        "each[:0]",
        "train/test_published_programs.py::test_a_text_is_continued_with_the_blank_between_words",
    ),
    Mutation(
        "a field that is null is a field",
        "models/hf/fields.py",
        "if raw[name] is not None}",
        "}",
        "models/hf/test_absent.py"
        "::test_fields_that_switch_nothing_on_pass_in_every_family_and_those_that_do_are_refused[llama]",
    ),
    Mutation(
        "Gemma's factor of embeddings is not rounded",
        "models/model.py",
        "if self.cfg.embedding_multiplier_rounded:",
        "if False:",
        "models/hf/test_rounding.py::test_embeddings_in_bf16_are_those_of_transformers_bit_for_bit[gemma-3-1b-it]",
    ),
    Mutation(
        "the Mamba-2 part of Falcon-H1 is not multiplied",
        "models/layers/parallel.py",
        "scaled(scanned, of_mamba)",
        "scanned",
        "models/hf/test_families.py::test_logits_and_gradients_are_those_of_transformers[falcon_h1 multipliers]",
    ),
    Mutation(
        "the stretched pairs of yarn have no last one",
        "models/layers/rotary.py",
        "min(high, 2 * pairs - 1)",
        "high",
        "models/hf/test_found.py::test_pairs_that_yarn_stretches_end_at_the_first_and_the_last[10.0-100000]",
    ),
    Mutation(
        "steps of Mamba begin below their floor",
        "models/layers/mamba2.py",
        ".clamp(min=floor)",
        "",
        "models/test_model.py::test_steps_of_mamba_begin_between_their_bounds_and_not_below_the_floor",
    ),
    Mutation(
        "the gradient of a router is rounded before it is summed",
        "moe/router.py",
        "        scores = logits.softmax(-1) if",
        "        logits.requires_grad and logits.register_hook(lambda gradient: gradient.to(hidden.dtype).float())\n"
        "        scores = logits.softmax(-1) if",
        "moe/test_router.py::test_scores_are_computed_in_fp32_whatever_the_model_computes_in[False]",
    ),
    Mutation(
        "the base of a rotation is read from its newer place alone",
        "models/hf/rope.py",
        ' or raw.get("rope_theta") or theta',
        " or theta",
        "models/hf/test_absent.py::test_the_base_and_the_part_of_a_rotation_may_stand_in_the_older_place[llama]",
    ),
    Mutation(
        "a family has another default than transformers",
        "models/hf/olmo.py",
        '{"num_attention_heads": 16, **raw}',
        "raw",
        "models/hf/test_absent.py::test_a_model_type_alone_is_the_model_of_all_defaults[olmoe]",
    ),
    Mutation(
        "a step of latent attention expands all latents",
        "models/layers/latent_attention.py",
        "x_BSD.shape[1] == 1",
        "x_BSD.shape[1] == 0",
        "models/layers/test_decoding.py::test_a_step_of_latent_attention_expands_no_latent",
    ),
    Mutation(
        "what a user writes is learnt too",
        "train/data/conversations.py",
        "written |= (begins < end) & (ends > begin)",
        "written |= True",
        "train/test_conversations.py::test_tokens_and_masks_of_forty_conversations_are_those_of_transformers[chatml]",
    ),
    Mutation(
        "a text continues past its end",
        "models/generate.py",
        "if token in ends and token >= 0:",
        "if False:",
        "train/test_published.py::test_prompts_of_different_lengths_together_are_continued_as_each_alone_by_transformers"
        "[llama]",
    ),
    Mutation(
        "sinks take no part in the softmax",
        "models/layers/attention.py",
        '"sinks": part(self, "sinks")}',
        '"sinks": None}',
        "models/hf/test_families.py::test_logits_and_gradients_are_those_of_transformers[gpt_oss plain]",
    ),
    Mutation(
        "every attention layer has the window",
        "models/kinds/attention.py",
        "or number in self.windowed else None",
        "or True else None",
        "models/hf/test_families.py::test_logits_and_gradients_are_those_of_transformers[gpt_oss windows in the other]",
    ),
    Mutation(
        "optimizer state keeps the numbers of another spelling",
        "models/renumber.py",
        "self.inner.prepare_load(_translated(stored, self.spelling.ours))",
        "self.inner.prepare_load(stored)",
        "models/test_renumber.py::test_training_goes_on_bit_equal_through_other_spellings_with_its_optimizer[spellings0]",
    ),
    # --- schedules of pipelines --------------------------------------------------------------------------------------
    Mutation(
        "ranks that wait for each other pass the check",
        "pipeline/simulation.py",
        "if len(self._spans[rank]) < len(entries):",
        "if False:",
        CHECK + "test_ranks_that_wait_for_each_other_are_told_as_a_circle",
    ),
    Mutation(
        "a microbatch that never comes passes the check",
        "pipeline/rules.py",
        "if missing := ledger.missing():",
        "if missing := None:",
        CHECK + "test_an_entry_that_is_missing_is_named",
    ),
    Mutation(
        "a microbatch that comes twice passes the check",
        "pipeline/rules.py",
        "if microbatch < due:",
        "if False:",
        CHECK + "test_an_entry_that_comes_twice_is_refused_where_it_comes_again",
    ),
    Mutation(
        "microbatches out of order pass the check",
        "pipeline/rules.py",
        "if microbatch > due:",
        "if False:",
        CHECK + "test_what_cannot_be_is_refused_with_its_place_and_reason",
    ),
    Mutation(
        "a backward before its forward passes the check",
        "pipeline/rules.py",
        'if kind in "BI" and microbatch >= self._next["F", chunk]:',
        "if False:",
        CHECK + "test_what_cannot_be_is_refused_with_its_place_and_reason",
    ),
    Mutation(
        "weight gradients before their other part pass the check",
        "pipeline/rules.py",
        'if kind == "W" and microbatch >= self._next["I", chunk]:',
        "if False:",
        CHECK + "test_what_cannot_be_is_refused_with_its_place_and_reason",
    ),
    Mutation(
        "a simulated forward does not wait for the stage before",
        "pipeline/simulation.py",
        'if kind == "F" and stage > 0:',
        "if False:",
        CHECK + "test_what_a_simulation_says_keeps_the_order_of_what_needs_what",
    ),
    Mutation(
        "simulated transfers take no time",
        "pipeline/simulation.py",
        "return end + self.costs.transfer * (origin != rank)",
        "return end",
        CHECK + "test_transfers_between_ranks_take_time_and_those_on_one_rank_do_not",
    ),
    Mutation(
        "a simulated pair takes as long as its halves",
        "pipeline/simulation.py",
        "return time * self.pair if len(entry) == 2 else time",
        "return time",
        SCHEDULES + "test_dualpipev_idles_as_long_as_its_authors_say[0.8-4-8]",
    ),
    Mutation(
        "activations are counted as gone before their weight gradients",
        "pipeline/simulation.py",
        'alive -= sum(action.kind in "BW" for action in entry)',
        'alive -= sum(action.kind in "BI" for action in entry)',
        CHECK + "test_activations_live_until_the_gradients_of_weights_are_there",
    ),
    Mutation(
        "the combined schedule starts without its extra forward",
        "pipeline/schedules.py",
        "extra=1",
        "extra=0",
        SCHEDULES + "test_pairs_of_the_combined_schedule_follow_each_other_without_a_gap",
    ),
    Mutation(
        "dualpipev pairs the last rank's first forward too",
        "pipeline/schedules.py",
        "if number == 0 and behind == 0:",
        "if False:",
        SCHEDULES + "test_a_table_is_torch_s_where_both_have_the_schedule[dualpipev]",
    ),
    Mutation(
        "gradients of units that do not run in the last microbatch are left over",
        "fsdp/runtime/reductions.py",
        "waits = gradients.where in (Where.PACKED, Where.SUMMED)",
        "waits = False",
        "fsdp/test_conditional.py::test_units_that_do_not_run_in_the_last_microbatch_are_reduced_with_what_they_have[2]",
    ),
    Mutation(
        "norms count what is not sliced once for each slice",
        "optim/norms.py",
        "repeated = math.prod(each.size() for each in slices if each is not own)",
        "repeated = 1",
        "dtensor/test_tensor_parallel.py::test_norms_by_parameter_count_what_is_sliced_and_what_is_not_once[4]",
    ),
    Mutation(
        "an optimizer from before fully_shard trains nothing and says nothing",
        "fsdp/originals.py",
        'if attribute == "grad" or _WRITES',
        "if _WRITES",
        "fsdp/test_originals.py::test_an_optimizer_that_was_built_before_sharding_says_so_at_its_first_use[2]",
    ),
    Mutation(
        "memory under guard keeps what it had",
        "memory/pool.py",
        "            blank(transient.tensor)\n",
        "            pass\n",
        "debug/test_guard.py::test_a_kept_view_of_gathered_weights_reads_nan_and_the_numbers_are_the_same[2-trace]",
    ),
    Mutation(
        "a write to what went is not noticed",
        "fsdp/autograd.py",
        "self._written() if from_gone else []",
        "[]",
        "debug/test_guard.py::test_a_write_to_a_kept_view_after_the_weights_went_is_found_at_the_next_gather[2]",
    ),
    Mutation(
        "what has no room is gathered ahead",
        "layout/gathers.py",
        "if not ahead.has_room():",
        "if False:",
        "memory/test_memory.py::test_what_has_no_room_where_backward_needs_it_is_not_gathered_ahead[2]",
    ),
    # --- by which way a backward comes in -----------------------------------------------------------------------------
    Mutation(
        "a backward without a hook leaves its gradients on each rank",
        "fsdp/autograd.py",
        "        settle()\n",
        "",
        WAYS_IN + "test_a_backward_is_noticed_by_whatever_tensor_it_comes_in[2-False-optim_grads_params]",
    ),
    Mutation(
        "an output that was written to is not followed to its base",
        "fsdp/hooks.py",
        "base.register_hook(self._call.begin_inside)",
        "pass",
        WAYS_IN + "test_a_backward_is_noticed_by_whatever_tensor_it_comes_in[2-True-optim_grads_params]",
    ),
    Mutation(
        "a forward that fails drops the gradients that wait",
        "fsdp/runtime/unit_set.py",
        "if not keeps_gradients:",
        "if True:",
        WAYS_IN + "test_a_forward_that_fails_takes_nothing_from_the_microbatches_before_it[2-optim-evaluation]",
    ),
    Mutation(
        "what is added after sharding trains on each rank for itself",
        "fsdp/runtime/inventory.py",
        "            if parameter.requires_grad:",
        "            if False:",
        WAYS_IN + "test_what_is_added_after_sharding_is_refused_unless_it_is_sharded_or_ignored[2]",
    ),
    # --- in the place of torch's FSDP2 -------------------------------------------------------------------------------
    Mutation(
        "weights without values are used",
        "fsdp/runtime/runtime.py",
        "if not self._filled:",
        "if False:",
        "fsdp/test_meta.py::test_what_has_no_values_is_refused_by_name_on_all_ranks_and_may_be_filled_then[2]",
    ),
    Mutation(
        "replicas that were filled by themselves stay different",
        "fsdp/runtime/start.py",
        "                equalize(group)\n",
        "",
        "fsdp/test_meta.py::test_replicas_that_drew_other_numbers_start_alike[2]",
    ),
    Mutation(
        "an assigned state dict takes the parameter's place",
        "fsdp/construction/assignment.py",
        "state_dict[prefix + name] = parameter",
        "pass",
        "fsdp/test_meta.py::test_state_dicts_that_are_assigned_are_copied_whatever_their_cuts[2]",
    ),
    Mutation(
        "a tensor subclass loses its class",
        "fsdp/construction/parameters.py",
        "    _refuse_own_operators(parameter, where)\n",
        "",
        "fsdp/test_subclasses.py::test_a_parameter_with_operators_of_its_own_is_refused_by_name[2]",
    ),
    Mutation(
        "placements do not know their cuts",
        "dtensor/placements.py",
        "if cuts.is_even or not cuts.axes:",
        "if True:",
        "dtensor/test_placements.py::test_parts_of_other_cuts_are_refused_on_each_rank_that_has_one[2]",
    ),
    Mutation(
        "a sharded child is in no registry",
        "fsdp/module.py",
        "enter_registry(module)",
        "pass",
        "fsdp/test_composition.py::test_what_replicates_the_rest_leaves_a_sharded_child_alone[2-replicate0]",
    ),
    Mutation(
        "a gradient over the whole mesh is reduced over its data-parallel axes twice",
        "dtensor/tensor_parallel.py",
        "placements = [wanted if name in names else there for name, there, wanted in pairs]",
        "placements = [wanted for name, there, wanted in pairs]",
        "dtensor/test_whole_mesh.py::test_training_is_that_of_one_process_and_of_torch[4-dp-tp]",
    ),
    Mutation(
        "a parameter over the data-parallel axes alone is no DTensor for its module",
        "dtensor/tensor_parallel.py",
        "return TensorParallel(None, mesh, whole)",
        "return None",
        "dtensor/test_whole_mesh.py::test_training_is_that_of_one_process_and_of_torch[4-dp]",
    ),
    Mutation(
        "an annotation of a plain parameter is lost",
        "fsdp/construction/parameters.py",
        "if _ANNOTATION in vars(parameter):",
        "if False:",
        "dtensor/test_whole_mesh.py::test_what_does_not_go_together_is_named[4]",
    ),
    # --- checkpoints -------------------------------------------------------------------------------------------------
    Mutation(
        "a damaged token file is trained on",
        "train/data/cache.py",
        "if _shown(digest) != part.fingerprint:",
        "if False:",
        "train/test_token_cache.py::test_a_damaged_token_file_of_the_right_length_is_made_anew[tokens]",
    ),
    Mutation(
        "a checkpoint of another run is taken",
        "checkpoint/directory.py",
        "if own and manifest.run and manifest.run != own:",
        "if False:",
        "checkpoint/test_trust.py::test_a_checkpoint_of_another_run_is_passed_over_and_named",
    ),
    Mutation(
        "the legacy format is read behind a harmless archive",
        "checkpoint/loading.py",
        "if stream.read(4) != _ZIP:",
        "if False:",
        "checkpoint/test_trust.py::test_the_legacy_format_in_front_of_a_harmless_archive_is_refused",
    ),
    Mutation(
        "code that a run directory from elsewhere names is imported",
        "train/run/trust.py",
        "if trust or not code or _is_marked(directory, code):",
        "if True:",
        "train/test_trust_of_runs.py::test_own_directories_are_trusted_and_others_name_their_code",
    ),
    Mutation(
        "a file operation that does not return is not noticed",
        "train/run/watchdog.py",
        "if operations and time.monotonic() - operations[0].started > self.limit:",
        "if False:",
        "train/test_hangs.py::test_a_file_operation_that_never_returns_is_named_on_all_ranks_though_nothing_else_is_watched[2]",
    ),
    Mutation(
        "buffers of ranks are left as they are",
        "train/buffers.py",
        'if self.rule == "own" or not self._buffers or dist.get_world_size() == 1:',
        "if True:",
        "train/test_buffers.py::test_the_mean_is_that_of_all_ranks_and_counts_are_those_of_rank_0[2]",
    ),
    Mutation(
        "each rank of another number of ranks skips as much of its own data as before",
        "train/task/own.py",
        "before // self.ranks",
        "before // known[0]",
        "train/test_trainer.py::test_a_position_in_own_data_that_another_number_of_ranks_cannot_have_is_refused",
    ),
    Mutation(
        "a tensor of which a part is missing is loaded",
        "checkpoint/metadata.py",
        "_require(held == math.prod(entry.size), ",
        "_require(True, ",
        "checkpoint/test_crafted.py::test_each_rule_that_the_metadata_breaks_is_told",
    ),
    Mutation(
        "many small storages may take any memory",
        "checkpoint/loading.py",
        "calls * largest > 16 * length",
        "largest > 16 * length",
        "checkpoint/test_crafted.py::test_bare_storages_that_would_take_memory_are_told",
    ),
    # --- the trainer -------------------------------------------------------------------------------------------------
    Mutation(
        "a restart does not look at the copies in memory",
        "train/saves.py",
        "copied > newest",
        "copied < newest",
        "train/test_memory_copies.py::test_a_run_resumes_from_the_newer_copy_and_from_the_disk_where_that_is_damaged[intact]",
    ),
    Mutation(
        "the room for copies in memory is not checked",
        "train/saves.py",
        "if 2 * needed > free:",
        "if False:",
        "train/test_memory_copies.py::test_copies_without_a_place_or_without_room_are_refused_in_one_line",
    ),
    Mutation(
        "a run that lost its lease saves on",
        "checkpoint/manager.py",
        "            self._lock.check()\n",
        "",
        "checkpoint/test_leases.py::test_a_run_that_lost_its_lease_saves_no_more",
    ),
    Mutation(
        "any process may tell ranks that another one has failed",
        "train/run/peers.py",
        'if not secrets.compare_digest(str(message["secret"]), self._secret):',
        "if False:",
        "train/test_safeguards.py::test_a_stranger_is_neither_heard_nor_answered",
    ),
    Mutation(
        "a run that is asked to stop starts again",
        "train/run/launch.py",
        "code != FAILURE or supervisor.requests.count or",
        "code != FAILURE or",
        "train/test_safeguards.py::test_there_is_no_restart_after_ctrl_c",
    ),
    Mutation(
        "a resumed run reads its text from the beginning",
        "train/data/batches.py",
        'self.position = int(state["position"])',
        "pass",
        RESUMED,
    ),
    Mutation(
        "a resumed run reads your own data from the beginning",
        "train/task/own.py",
        "for done in range(self.taken):",
        "for done in ():",
        "train/test_trainer.py::test_a_run_of_one_s_own_goes_on_bit_for_bit[go_on]",
    ),
    Mutation(
        "the learning rate begins anew after a resume",
        "train/schedule.py",
        'self.step = state["step"]',
        "pass",
        RESUMED,
    ),
    Mutation(
        "options of the checkpoint's optimizer hold in place of the configured ones",
        "train/loop.py",
        "group.update(configured)",
        "pass",
        "train/test_changes.py::test_a_changed_option_is_used_and_recorded",
    ),
    Mutation(
        "gradients are not clipped",
        "train/optimizers.py",
        "return weft.optim.clip_grad_norm_(model, largest, error_if_nonfinite=True)",
        "return weft.optim.grad_norm(model)",
        "train/test_trainer.py::test_training_one_s_own_model_is_the_plain_loop_in_one_process[1]",
    ),
    Mutation(
        "an average of the weights stays where it began",
        "train/ema.py",
        "torch._foreach_lerp_(averages, weights, 1 - self.decay)",
        "pass",
        "train/test_ema.py::test_the_average_on_any_ranks_is_that_of_one_process[1]",
    ),
    Mutation(
        "the average of the weights is in no checkpoint",
        "train/loop.py",
        '            **({"ema": self.average} if self.average else {}),\n',
        "",
        "train/test_ema.py::test_a_run_with_an_average_goes_on_bit_for_bit",
    ),
    Mutation(
        "a step that is skipped counts in the average of the weights",
        "train/loop.py",
        "if self.average and not skipped:",
        "if self.average:",
        "train/test_ema.py::test_a_step_that_is_skipped_does_not_count_in_the_average",
    ),
    Mutation(
        "a state without momentum leaves the momentum that was there",
        "optim/flat.py",
        "                        del old[key]",
        "                        pass",
        "optim/test_flat.py::test_a_state_without_momentum_replaces_one_with_it[2]",
    ),
    Mutation(
        "every rank draws the same random numbers",
        "train/run/process.py",
        "* 1_000_003 + rank",
        "* 1_000_003",
        "train/test_trainer.py::test_each_rank_draws_random_numbers_that_no_other_rank_draws",
    ),
    Mutation(
        "the labels at the cuts of long documents are lost",
        "train/data/sequences.py",
        "begin += room - 1 ",
        "begin += room ",
        "train/test_documents.py::test_no_document_predicts_the_next_and_no_label_of_one_is_lost",
    ),
    Mutation(
        "validation takes the beginning of the text",
        "train/data/documents.py",
        'key=lambda i: hashlib.sha256(b"%d" % i).digest()',
        "key=lambda i: i",
        "train/test_data.py::test_validation_text_is_spread_over_the_whole_text",
    ),
    Mutation(
        "losses of routers are divided by all ranks where stages have them",
        "train/loop.py",
        "parts = self.ranks // self.config.sharding.pp ",
        "parts = self.ranks ",
        "train/test_stages.py::test_losses_of_routers_are_logged_apart_where_stages_have_them",
    ),
    Mutation(
        "a save is renamed before its folder is on the disk",
        "checkpoint/directory.py",
        "    flush_directory(temporary)\n",
        "",
        "checkpoint/test_storage.py::"
        "test_everything_is_on_the_disk_before_the_rename_and_the_rename_before_the_save_ends",
    ),
    Mutation(
        "a directory that other ranks do not see is taken",
        "checkpoint/probe.py",
        "            return False\n",
        "            return True\n",
        "checkpoint/test_storage.py::test_a_folder_that_not_all_ranks_see_is_refused_when_a_run_is_claimed[2]",
    ),
    Mutation(
        "a microbatch with few labels counts as one with many",
        "train/data/batches.py",
        "    return each / each.mean()",
        "    return each / each",
        "train/test_kinds.py::test_every_label_of_a_step_counts_alike_however_sequences_meet_in_microbatches",
    ),
    Mutation(
        "validations of the average have the weights themselves",
        "train/ema.py",
        "            weight.copy_(average)",
        "            pass",
        "train/test_ema.py::test_the_average_on_any_ranks_is_that_of_one_process[1]",
    ),
    Mutation(
        "a step with a spike is taken",
        "train/loop.py",
        "        if not skipped:",
        "        if True:",
        SPIKES,
    ),
    Mutation(
        "a step with a spike moves the biases of experts",
        "train/experts.py",
        "moves = self._has_bias and not skipped",
        "moves = self._has_bias",
        SPIKES,
    ),
    Mutation(
        "a resumed run knows no norms of before",
        "train/spikes.py",
        'self.norms = [float(norm) for norm in state["norms"]]',
        "pass",
        SPIKES,
    ),
    Mutation(
        "norms of long ago say what a spike is",
        "train/spikes.py",
        "[-_KNOWN:]",
        "",
        HABITS + "test_the_median_is_that_of_the_last_hundred_and_twenty_must_be_known",
    ),
    Mutation(
        "the best checkpoint goes with its turn",
        "train/saves.py",
        "complete\n            self.checkpoints.protected = {best_step}",
        "complete",
        BEST,
    ),
    Mutation(
        "validations that get no better never end a run",
        "train/loop.py",
        "return 0 < self.config.train.stop_after <= self.position.worse",
        "return False",
        BEST,
    ),
]


def misfits(mutations: Sequence[Mutation]) -> list[str]:
    """The mutations whose text is not in its file exactly once."""
    found = []
    for each in mutations:
        count = (SOURCE / "weft" / each.file).read_text().count(each.old)
        if count != 1:
            found.append(f"{each.name}: {each.old!r} is {count} times in {each.file}: it must be there once")
    return found


def mutated(mutation: Mutation, pristine: Path, folder: Path) -> Path:
    """A copy of `pristine` in `folder`, mutated. Its other files are those of `pristine`."""
    source = folder / mutation.name.replace(" ", "-")
    shutil.copytree(pristine, source, copy_function=os.link)
    file = source / "weft" / mutation.file
    text = file.read_text().replace(mutation.old, mutation.new)
    file.unlink()
    file.write_text(text)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()
    return source


def said_of(outcome: Outcome) -> str:
    """The verdict on a mutant whose test ended so."""
    known = {0: "SURVIVED", 1: "killed", None: f"NO ANSWER in {TIMEOUT_S} s"}
    return known.get(outcome.status, f"NO TEST (exit {outcome.status})")


def try_out(mutations: Sequence[Mutation], folder: Path, jobs: int) -> list[str]:
    """Print what becomes of each mutant; reports of those that were not killed."""
    pristine = folder / "as it is"
    shutil.copytree(SOURCE, pristine)
    begin = time.monotonic()
    tests = list(dict.fromkeys(each.test for each in mutations))
    shares = [(lambda: pristine, tests[first::jobs]) for first in range(min(jobs, len(tests)))]
    for plain in run_in_turn(shares, ROOT, timeout=BASELINE_TIMEOUT_S, jobs=jobs):
        if plain.status != 0:
            return [f"{plain.output}\nwithout any mutation the named tests end with {plain.status}: they must pass"]
    print(f"{len(tests)} tests pass without mutation ({time.monotonic() - begin:.0f} s)\n")
    print("| mutation | file | test | verdict | seconds |\n|---|---|---|---|---|", flush=True)
    trials = [(lambda each=each: mutated(each, pristine, folder), [each.test]) for each in mutations]
    reports = []
    for mutation, outcome in zip(mutations, run_in_turn(trials, ROOT, timeout=TIMEOUT_S, jobs=jobs)):
        said, (file, _, test) = said_of(outcome), mutation.test.partition("::")
        print(f"| {mutation.name} | {mutation.file} | {file} {test} | {said} | {outcome.seconds:.0f} |", flush=True)
        shutil.rmtree(folder / mutation.name.replace(" ", "-"))
        if said != "killed":
            reports.append(f"--- {mutation.name}: {said}\n{outcome.output[-3000:]}")
    print(f"\n{len(mutations) - len(reports)} of {len(mutations)} mutants killed in {time.monotonic() - begin:.0f} s")
    return reports


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="Mutants of the source that a named test must kill.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of the mutations to try; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="mutants to try at a time (default: 2)")
    parser.add_argument("--list", action="store_true", help="print the names, and what does not fit the source")
    arguments = parser.parse_args()
    if arguments.list:
        problems = misfits(MUTATIONS)
        print("\n".join([*(each.name for each in MUTATIONS), *problems]))
        return 1 if problems else 0
    unknown = set(arguments.names) - {each.name for each in MUTATIONS}
    if unknown:
        parser.error(f"no mutation is called {', '.join(sorted(unknown))}: see --list")
    chosen = [each for each in MUTATIONS if not arguments.names or each.name in arguments.names]
    if problems := misfits(chosen):
        print("\n".join(problems))
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    import_what_weft_does(ROOT, [each.test for each in chosen])
    with tempfile.TemporaryDirectory(prefix="weft-mutants-") as folder:
        reports = try_out(chosen, Path(folder), arguments.jobs)
    print("\n\n".join(["", *reports]) if reports else "", end="")
    return 1 if reports else 0


if __name__ == "__main__":
    sys.exit(main())
