"""Mutations of src/weft/comm."""

from mutation import Mutation
from mutations.tests import BUCKETS, ROWS, STREAMS

MUTATIONS = [
    Mutation(
        "a NaN is lost in the largest of numbers",
        "reduce_now",
        "_SIGNS.get(op)",
        "None",
        "dtensor/test_dtensor.py::test_a_nan_is_the_largest_and_the_smallest_whichever_rank_has_it",
    ),
    Mutation(
        "what travels together is summed from this rank on",
        "Gloo.reduce_scatter_bundle.take_sums",
        "column.unbind()",
        "column.roll(-rank, 0).unbind()",
        BUCKETS + "test_the_bits_are_those_of_units_that_travel_by_themselves[4-optim_grads_params-1]",
    ),
    Mutation(
        "a lane yields to no exchange",
        "Lane.run",
        "priority.gate_of(self.name) if group is not None else None",
        "None",
        "overlap/test_events.py::"
        "test_an_exchange_that_is_about_to_leave_goes_before_the_reduction_of_the_layer_above[2]",
    ),
    Mutation(
        "a ticket is not waited for",
        "Ticket.wait",
        "self._collect()",
        "",
        "comm/test_lanes.py::test_what_a_ticket_failed_by_is_raised_by_all_that_come_after_it",
    ),
    Mutation(
        "after= is ignored",
        "Lane.run",
        "after._transfer if after is not None else None",
        "None",
        "comm/test_lanes.py::test_what_comes_after_another_ticket_begins_when_that_has_ended_and_before_anybody_waits",
    ),
    Mutation(
        "a lane does not wait for what was computed",
        "Lane.run",
        "self.stream.wait_stream(home)",
        "",
        STREAMS + "test_a_steady_step_has_no_wait_of_the_host[2-optim_grads_params-False]",
    ),
    Mutation(
        "a lane does not wait for the lane before it",
        "Lane.run",
        "self.stream.wait_event(after._event)",
        "",
        STREAMS + "test_outer_gathers_and_reductions_run_beside_the_computation[4]",
    ),
    Mutation(
        "the computation does not wait for a lane",
        "Ticket._order",
        "stream.wait_event(self._event)",
        "",
        STREAMS + "test_a_steady_step_has_no_wait_of_the_host[2-optim_grads_params-False]",
    ),
    Mutation(
        "a ticket knows of one wait, not of one for each stream",
        "Ticket.wait",
        "stream not in self._behind",
        "not self._behind",
        STREAMS + "test_a_ticket_is_awaited_by_each_stream_that_needs_it_and_by_the_one_that_asked_when_it_dies[2]",
    ),
    Mutation(
        "a ticket that dies orders the stream that happens to be current",
        "Ticket.order",
        "self._order(self._home)",
        "self._order(streams.current(torch.device('cpu')))",
        STREAMS + "test_a_ticket_is_awaited_by_each_stream_that_needs_it_and_by_the_one_that_asked_when_it_dies[2]",
    ),
    Mutation(
        "a hook's stream does not wait for the reduction",
        "on_stream.run",
        "stream.wait_stream(around)",
        "",
        STREAMS + "test_a_hook_with_a_stream_of_its_own_comes_between_the_reduction_and_what_reads_it[2]",
    ),
    Mutation(
        "a hook's stream is not awaited",
        "on_stream.run",
        "around.wait_stream(stream)",
        "",
        STREAMS + "test_a_hook_with_a_stream_of_its_own_comes_between_the_reduction_and_what_reads_it[2]",
    ),
    Mutation(
        "what is forgotten is not counted",
        "Ticket.__del__",
        "streams.unawaited(self._name, self._event)",
        "",
        STREAMS + "test_a_ticket_is_awaited_by_each_stream_that_needs_it_and_by_the_one_that_asked_when_it_dies[2]",
    ),
    Mutation(
        "rows that leave wait for what is computed beside them",
        "Lane.run",
        "behind is None",
        "True",
        STREAMS + ROWS,
    ),
    Mutation(
        "memory of a lane goes back while the computation reads it",
        "Lane.memory",
        "streams.lend(made, home)",
        "",
        STREAMS + ROWS,
    ),
    Mutation(
        "the name of a group has the number of groups that a rank has",
        "_named.give",
        "name if threading.get_ident() == caller else named(ranks, use_hashed_name)",
        "f'{name}/{len(c10d._world.pg_names)}'",
        "comm/test_groups.py::"
        "test_ranks_that_have_made_different_numbers_of_groups_find_each_other_in_groups_beside_others[4]",
    ),
    Mutation(
        "what is known of a model's gathers stays when the model goes",
        "HangDetector.__init__",
        "weakref.WeakKeyDictionary()",
        "{}",
        "comm/test_pruned.py::test_nothing_is_known_of_how_to_take_part_in_the_gathers_of_a_model_that_has_gone[2]",
    ),
    Mutation(
        "small units travel one by one without tags",
        "BuiltIn.__init__",
        "bundles=True",
        "bundles=False",
        "fsdp/test_untagged.py::test_small_units_travel_in_one_group_call_where_the_transport_has_no_tags[2]",
    ),
    Mutation(
        "words of one model pair with those of another",
        "agree",
        "tag_of(TAGS, what, channel)",
        "tag_of(TAGS, what)",
        "comm/test_control.py::test_words_of_another_moment_or_model_are_never_taken_for_these[2-model]",
    ),
]
