"""Mutations of src/weft/pipeline."""

from mutation import Mutation
from mutations.tests import AGREED, PAIRED

CHECK = "pipeline/test_check.py::"
SCHEDULES = "pipeline/test_schedules.py::"

MUTATIONS = [
    Mutation(
        "forwards and backwards at both ends are not paired",
        "pipeline:_alike",
        "len(waiting) == len(entry) == 1",
        "len(waiting) == len(entry) == 0",
        PAIRED + "test_with_pairs_at_both_ends_another_microbatch_computes_beside_every_exchange[2]",
    ),
    Mutation(
        "the next message between stages is not received ahead",
        "Channel.take",
        "tensors, ticket = self._expected.popleft()\nself._expect()",
        "tensors, ticket = self._expected.popleft()",
        "pipeline/test_transport.py::test_the_next_message_is_expected_while_one_is_worked_on[2]",
    ),
    Mutation(
        "the memory of a message is freed while it is sent",
        "Channel.send",
        "tensors if streams.has_streams(self._device) else ()",
        "()",
        "pipeline/test_transport.py::test_what_leaves_on_a_stream_is_kept_until_the_stream_is_past_it[2]",
    ),
    Mutation(
        "the memory of a message stays until the end of a schedule",
        "Channel.send",
        "ticket.end_by_itself()",
        "",
        "pipeline/test_transport.py::test_the_memory_of_a_message_goes_when_it_has_arrived[2]",
    ),
    Mutation(
        "after a conversion, messages between stages keep the old dtype",
        "Channel.forget_shapes",
        "self._known.clear()",
        "",
        AGREED + "test_a_model_that_is_converted_between_calls_crosses_stages_in_its_new_dtype[2]",
    ),
    Mutation(
        "a deadlock passes the check",
        "_Run.simulation",
        "len(self._spans[rank]) < len(entries)",
        "False",
        CHECK + "test_ranks_that_wait_for_each_other_are_named_as_a_cycle",
    ),
    Mutation(
        "a missing microbatch passes the check",
        "check_ranks",
        "ledger.missing()",
        "None",
        CHECK + "test_an_entry_that_is_missing_is_named",
    ),
    Mutation(
        "a repeated microbatch passes the check",
        "_Ledger._order_fault",
        "microbatch < due",
        "False",
        CHECK + "test_an_entry_that_comes_twice_is_refused_where_it_comes_again",
    ),
    Mutation(
        "microbatches out of order pass the check",
        "_Ledger._order_fault",
        "microbatch > due",
        "False",
        CHECK + "test_what_cannot_be_is_refused_with_its_place_and_reason",
    ),
    Mutation(
        "a backward before its forward passes the check",
        "_Ledger._order_fault",
        "kind in 'BI' and microbatch >= self._next['F', chunk]",
        "False",
        CHECK + "test_what_cannot_be_is_refused_with_its_place_and_reason",
    ),
    Mutation(
        "weight gradients before input gradients pass the check",
        "_Ledger._order_fault",
        "kind == 'W' and microbatch >= self._next['I', chunk]",
        "False",
        CHECK + "test_what_cannot_be_is_refused_with_its_place_and_reason",
    ),
    Mutation(
        "a simulated forward does not wait for the previous stage",
        "_Run._needs",
        "kind == 'F' and stage > 0",
        "False",
        CHECK + "test_what_a_simulation_says_keeps_the_order_of_what_needs_what",
    ),
    Mutation(
        "simulated transfers take no time",
        "_Run._arrival",
        "end + self.costs.transfer * (origin != rank)",
        "end",
        CHECK + "test_transfers_between_ranks_take_time_and_those_on_one_rank_do_not",
    ),
    Mutation(
        "a simulated pair takes as long as its halves",
        "Costs.of",
        "time * self.pair if len(entry) == 2 else time",
        "time",
        SCHEDULES + "test_dualpipev_idles_as_long_as_its_authors_say[0.8-4-8]",
    ),
    Mutation(
        "activations are counted as freed before their weight gradients",
        "pipeline:_alive",
        "action.kind in 'BW'",
        "action.kind in 'BI'",
        CHECK + "test_activations_live_until_the_gradients_of_weights_are_there",
    ),
    Mutation(
        "the combined schedule starts without its extra forward",
        "combined",
        "extra=1",
        "extra=0",
        SCHEDULES + "test_pairs_of_the_combined_schedule_follow_each_other_without_a_gap",
    ),
    Mutation(
        "dualpipev pairs the last rank's first forward too",
        "_dualpipev",
        "number == 0 and behind == 0",
        "False",
        SCHEDULES + "test_a_table_is_torch_s_where_both_have_the_schedule[dualpipev]",
    ),
]
