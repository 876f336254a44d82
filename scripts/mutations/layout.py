"""Mutations of src/weft/layout."""

from mutation import Mutation
from mutations.tests import BUCKETS, COPIES, ORDER, REDUCED_BESIDE

MUTATIONS = [
    Mutation(
        "small units are reduced one by one",
        "turns_of",
        "kind is not None",
        "False",
        BUCKETS + "test_a_step_of_small_units_is_a_message_for_each_pass_and_one_for_the_gradients[2]",
    ),
    Mutation(
        "the number of bundled reductions in flight is unlimited",
        "ReductionOrder._take",
        "self._keep_under_way(self.most_alive - 1)",
        "",
        BUCKETS + "test_few_reductions_that_travel_together_are_under_way_at_once[2]",
    ),
    Mutation(
        "units with shared weights do not gather each other's buckets",
        "GatherOrder._gather",
        "self._gather(tied, backward)",
        "",
        BUCKETS + "test_units_whose_weights_are_shared_bring_their_bucket[2]",
    ),
    Mutation(
        "the next bucket is not gathered ahead",
        "GatherOrder.use",
        "for following in here.wanted: ...",
        "for following in () if unit.number in self.bundles else here.wanted: ...",
        BUCKETS + "test_the_next_bucket_is_gathered_before_the_units_of_this_one_are_computed[2]",
    ),
    Mutation(
        "a bucket is gathered again for one of its units",
        "GatherOrder._gather",
        "bundle is not None and here.kind != 'schedule' and not here.gathered.issuperset(bundle.numbers)",
        "bundle is not None and here.kind != 'schedule'",
        BUCKETS + "test_a_unit_that_is_used_again_travels_by_itself[2]",
    ),
    Mutation(
        "nothing is gathered ahead",
        "GatherOrder.use",
        "for following in here.wanted: ...",
        "for following in (): ...",
        ORDER + "test_a_unit_is_gathered_while_the_one_before_it_computes[2-optim_grads_params]",
    ),
    Mutation(
        "units that the user names are not gathered ahead",
        "GatherOrder.use",
        "named is not None",
        "False",
        ORDER + "test_units_that_the_user_names_are_gathered_ahead_in_place_of_the_next[2]",
    ),
    Mutation(
        "prefetched units stay when a pass deviates from its record",
        "GatherOrder._leave_plan",
        "self._units[each].free()",
        "",
        ORDER + "test_what_was_gathered_ahead_goes_when_the_pass_leaves_its_record[2-None]",
    ),
    Mutation(
        "prefetch_bytes is ignored",
        "GatherOrder._behind",
        "self._budget is not None and spent > self._budget",
        "False",
        ORDER + "test_a_budget_of_bytes_says_how_far_ahead_gathers_go[2]",
    ),
    Mutation(
        "max_live_reduce_buffers=1 is ignored",
        "ReductionOrder._keep_under_way",
        "most = max(most, 0)",
        "most = len(self._under_way)",
        REDUCED_BESIDE + "[2-no_shard]",
    ),
    Mutation(
        "only one of the waiting reductions starts with a turn",
        "ReductionOrder.ready",
        "while self._turns and self.waiting.issuperset(self._turns[0]): ...",
        "if self._turns and self.waiting.issuperset(self._turns[0]): ...",
        ORDER + "test_reductions_that_wait_for_the_turn_of_another_all_start_with_it[2]",
    ),
    Mutation(
        "a byte budget counts a unit once per use",
        "GatherOrder._behind",
        "number in seen",
        "False",
        "overlap/test_residency.py::test_weights_are_gathered_as_often_as_the_visits_demand[interleaved-loop-2]",
    ),
    Mutation(
        "a unit that is needed next is freed and gathered again",
        "GatherOrder.stays",
        "number == expected[position] or number in here.wanted",
        "number == expected[position]",
        "overlap/test_residency.py::test_weights_are_gathered_as_often_as_the_visits_demand[interleaved-loop-2]",
    ),
    Mutation(
        "prefetching gathers forward's copy for backward",
        "GatherOrder.use",
        "self._turn_ahead(ahead)",
        "",
        COPIES + "test_a_backward_gathers_its_copy_instead_of_the_other_and_as_the_plan_says[2]",
    ),
    Mutation(
        "units without room are gathered ahead",
        "GatherOrder.use",
        "not ahead.has_room()",
        "False",
        "memory/test_memory.py::test_what_has_no_room_where_backward_needs_it_is_not_gathered_ahead[2]",
    ),
]
