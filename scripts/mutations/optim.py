"""Mutations of src/weft/optim."""

from mutation import Mutation
from mutations.tests import TENSOR

MUTATIONS = [
    Mutation(
        "a norm counts whole experts again over expert-parallel ranks",
        "ModelRanks.beyond",
        "self._slices or slices",
        "slices",
        TENSOR + "test_with_sharding_replicas_context_ranks_and_stages[4-replicas, whole experts]",
    ),
    Mutation(
        "a norm counts parameters shared by two stages twice",
        "_norm_of",
        "cut is not None and stages is not None and cut.has_copies",
        "False",
        "overlap/test_stages_sharded.py::test_clipped_steps_equal_those_of_one_process[True-2]",
    ),
    Mutation(
        "a gradient norm restores frozen main weights",
        "_pieces_of",
        "main.window(start, stop) if present else nothing",
        "main.window(start, stop) if present else group.main_weight.local[:0]",
        "fsdp/test_payload_only.py::test_what_needs_no_values_leaves_the_payload_alone[2]",
    ),
    Mutation(
        "norms count unsliced parameters once per tensor-parallel rank",
        "_squared_norms",
        "math.prod(each.size() for each in slices if each is not own)",
        "1",
        "dtensor/test_tensor_parallel.py::test_norms_by_parameter_count_what_is_sliced_and_what_is_not_once[4]",
    ),
    Mutation(
        "loading a state without momentum keeps the old momentum",
        "FlatOptimizer.load_state_dict",
        "del old[key]",
        "",
        "optim/test_flat.py::test_a_state_without_momentum_replaces_one_with_it[2]",
    ),
    Mutation(
        "hooks of a flat optimizer's state dict do not run",
        "FlatOptimizer.state_dict",
        "before(self)",
        "",
        "optim/test_flat.py::test_hooks_of_state_dicts_run[2]",
    ),
    Mutation(
        "parts of a run that was divided share one step count",
        "FlatRun.state_for",
        "value.clone()",
        "value",
        "optim/test_flat.py::test_a_parameter_counts_the_steps_in_which_it_had_a_gradient[2]",
    ),
]
