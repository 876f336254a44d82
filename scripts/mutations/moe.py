"""Mutations of src/weft/moe."""

from mutation import Mutation
from mutations.tests import HALVES, OF_KINDS, ROWS, STREAMS

SIZES = "test_the_exchange_of_a_schedule_overlaps_with_the_computation_and_the_host_waits_for_sizes_only[2]"
VISITS = "moe/test_visits.py::"

MUTATIONS = [
    Mutation(
        "each rank adds the whole bias of a last projection",
        "Part.of",
        "full / self.mesh.size() if self.share else full",
        "full",
        OF_KINDS + "[2-E]",
    ),
    Mutation(
        "a router's loss covers only this rank's positions",
        "Router._loss",
        "self.over_positions is not None",
        "False",
        "models/test_whole_experts.py::test_losses_steps_and_loads_are_those_of_one_process[2]",
    ),
    Mutation(
        "a router's graph contains the exchange of means",
        "Router.share_positions",
        "vars(self)['graph_scopes'] = {'_scored': ('moe_router', None)}",
        "",
        "graphs/test_scopes.py::test_tensor_parallel_ranks_sum_gradients_of_the_router_behind_its_replay[2]",
    ),
    Mutation(
        "each half counts the loss of its router",
        "MoE._send_per_rank",
        "losses=each is routings[0]",
        "losses=True",
        "overlap/test_halves.py::test_a_microbatch_of_one_token_and_a_capacity_that_leaves_a_half_nothing[2]",
    ),
    Mutation(
        "rows that were not sent come back with what was in memory",
        "AllToAll.combine",
        "output[handle.sent:].zero_()",
        "",
        "moe/test_dispatch.py::test_rows_behind_those_that_are_sent_come_back_as_zeros[1]",
    ),
    Mutation(
        "ranks in threads share the flag for halves",
        "moe:_Mode",
        "class _Mode(threading.local): ...",
        "class _Mode: ...",
        "train/test_check.py::test_ranks_as_threads_go_in_halves_each_by_itself",
    ),
    Mutation(
        "rows of padding get the gradient of a token",
        "_Weigh.backward",
        "torch.nn.functional.pad(weights.flatten(), (0, 1))",
        "torch.nn.functional.pad(weights.flatten(), (0, 1), value=1.0)",
        "moe/test_padding.py::test_padding_changes_no_result_and_makes_the_rows_of_each_expert_equally_many[0.7]",
    ),
    Mutation(
        "the host waits for an exchange immediately",
        "AllToAll._move",
        "Arrival(output, ticket, rows)",
        "ticket.wait() or Arrival(output, ticket, rows)",
        "overlap/test_events.py::"
        "test_an_exchange_is_issued_before_the_computation_that_hides_it_and_awaited_after_it[2]",
    ),
    Mutation(
        "a token's last row is dropped on its way back",
        "visits_of",
        "visited.sum(1, keepdim=True)",
        "visited.sum(1, keepdim=True) - 1",
        VISITS + "test_each_rank_gets_each_of_its_tokens_once_with_the_weights_of_its_experts",
    ),
    Mutation(
        "a token is sent once for each of its experts",
        "visits_of",
        "visited.sum(0)",
        "torch.bincount(rank.flatten(), minlength=ranks + 1)[:ranks]",
        VISITS + "test_each_rank_gets_each_of_its_tokens_once_with_the_weights_of_its_experts",
    ),
    Mutation(
        "a weight is applied twice",
        "MoE.run_experts",
        "weigh(self.compute(rows, handle.offsets), weights, handle.arrived, exact=False)",
        "weigh(self.compute(rows, handle.offsets), weights * weights, handle.arrived, exact=False)",
        "moe/test_layer.py::test_experts_over_ranks_equal_one_process_with_all_of_them[2]",
    ),
    Mutation(
        "gradients of routing weights are not sent back",
        "_OpenUp.backward",
        "_bits(for_weights, ctx.dtype)",
        "_bits(torch.zeros_like(for_weights), ctx.dtype)",
        VISITS + "test_each_rank_gets_each_of_its_tokens_once_with_the_weights_of_its_experts",
    ),
    Mutation(
        "a half is sent before its counts have arrived",
        "AllToAll.dispatch.rows_to_all",
        "handle.arriving()",
        "[0] * self.size",
        "overlap/test_halves.py::test_halves_change_no_loss_and_gradients_only_by_the_order_of_sums[2]",
    ),
    Mutation(
        "the host waits for sizes before it sends rows",
        "AllToAll.dispatch",
        "if streams.has_streams(rows.device): ...",
        "...",
        HALVES,
    ),
    Mutation(
        "computation does not wait for arriving rows",
        "Arrival.wait",
        "self._ticket.wait()",
        "",
        STREAMS + SIZES,
    ),
    Mutation(
        "sizes of an exchange are read before they have arrived",
        "_ExchangeHandle.ready",
        "ticket.synchronize()",
        "",
        STREAMS + SIZES,
    ),
    Mutation(
        "rows arrive in memory of the computation's stream",
        "AllToAll._memory",
        "behind is None or not rows.is_contiguous()",
        "True",
        STREAMS + ROWS,
    ),
    Mutation(
        "rows are sent before they are copied",
        "AllToAll._move",
        "behind = None",
        "pass",
        "moe/test_dispatch.py::test_rows_that_must_be_copied_first_leave_after_the_copy[2]",
    ),
    Mutation(
        "the gradient of a router is rounded before it is summed",
        "Router._scored",
        "scores = logits.softmax(-1) if self.score == 'softmax' else logits.sigmoid()",
        "logits.requires_grad and logits.register_hook(lambda gradient: gradient.to(hidden.dtype).float())\n"
        "scores = logits.softmax(-1) if self.score == 'softmax' else logits.sigmoid()",
        "moe/test_router.py::test_scores_are_computed_in_fp32_for_any_model_dtype[False]",
    ),
]
