"""Mutations of src/weft/dtensor."""

from mutation import Mutation

STEPS = "dtensor/test_steps.py::"

MUTATIONS = [
    Mutation(
        "a default optimizer step runs tensor by tensor",
        "over_parts.choosing",
        "_are_small(params)",
        "False",
        STEPS + "test_a_default_step_goes_over_lists_and_is_that_of_one_process_bit_for_bit",
    ),
    Mutation(
        "a default optimizer step runs DTensor operators",
        "over_parts.choosing",
        "_are_cut_alike(params, args)",
        "False",
        STEPS + "test_a_default_step_goes_over_lists_and_is_that_of_one_process_bit_for_bit",
    ),
    Mutation(
        "torch's clipping all-reduces each norm separately",
        "dtensor:_alike",
        "id(tensor._spec.mesh)",
        "number",
        "dtensor/test_dtensor.py::test_clipping_asks_the_other_ranks_for_one_number_and_computes_with_plain_tensors",
    ),
    Mutation(
        "sums of half precision are added in half precision",
        "dtensor:wide",
        "torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype",
        "dtype",
        "dtensor/test_dtensor.py::test_sums_and_norms_of_half_precision_are_those_of_one_process",
    ),
    Mutation(
        "an optimizer step does not increment version counters",
        "_step_parts",
        "torch.autograd.graph.increment_version(written)",
        "written.clear()",
        STEPS + "test_what_backward_has_saved_is_not_stepped_on_in_silence",
    ),
    Mutation(
        "a differentiable step runs over local parts",
        "_dtype_on_cpu",
        "options.get('differentiable') or torch.is_grad_enabled()",
        "options.get('differentiable')",
        STEPS + "test_autograd_knows_a_differentiable_step",
    ),
    Mutation(
        "a differentiable step runs over lists",
        "_dtype_on_cpu",
        "options.get('differentiable') or torch.is_grad_enabled()",
        "torch.is_grad_enabled()",
        STEPS + "test_a_group_may_be_differentiable_by_itself",
    ),
    Mutation(
        "narrower gradients are stepped as lists, with different rounding",
        "_dtype_on_cpu",
        "(parameters, *lists)",
        "[parameters]",
        STEPS + "test_narrower_gradients_step_as_in_one_process",
    ),
    Mutation(
        "a step runs over lists on several devices",
        "_dtype_on_cpu",
        "parts_of(sharded)",
        "parts_of(sharded[:1])",
        STEPS + "test_parameters_of_several_devices_are_left_to_torch[2]",
    ),
    Mutation(
        "loaded cuts are equal objects instead of identical ones",
        "_rebuilt",
        "UnevenDTensor._wrap(local, spec, _one(cuts), requires_grad)",
        "UnevenDTensor._wrap(local, spec, cuts, requires_grad)",
        STEPS + "test_a_step_behind_a_saved_state_has_no_dtensors_either",
    ),
    Mutation(
        "norms of half precision are rounded on each rank",
        "part_norm",
        "torch.linalg.vector_norm(part, order, dtype=inner)",
        "torch.linalg.vector_norm(part, order, dtype=dtype).to(inner)",
        "dtensor/test_dtensor.py::test_norms_of_half_precision_are_rounded_once",
    ),
    Mutation(
        "each rank chooses separately how to step",
        "_are_small",
        "(each._cuts.mean_size for each in parameters)",
        "(each._local_tensor.numel() for each in parameters)",
        STEPS + "test_all_ranks_step_in_the_same_way_wherever_the_parts_are[2]",
    ),
    Mutation(
        "Nesterov momentum steps over lists",
        "over_parts.choosing",
        "not kwargs.get('nesterov')",
        "True",
        STEPS + "test_what_a_list_could_not_do_alike_is_left_to_torch[2]",
    ),
    Mutation(
        "steps over lists do not increment version counters",
        "on_lists",
        "torch.autograd.graph.increment_version([*chain.from_iterable(changed)])",
        "changed.clear()",
        "dtensor/test_versions.py",
    ),
    Mutation(
        "placements do not store their cuts",
        "dtensor:placements_of",
        "cuts.is_even or not cuts.axes",
        "True",
        "dtensor/test_placements.py::test_parts_of_other_cuts_are_refused_on_each_rank_that_has_one[2]",
    ),
    Mutation(
        "a gradient over the whole mesh is reduced over its data-parallel axes twice",
        "TensorParallel.slice_of_gradient",
        "wanted if name in names else there",
        "wanted",
        "dtensor/test_whole_mesh.py::test_training_is_that_of_one_process_and_of_torch[4-dp-tp]",
    ),
    Mutation(
        "a module sees a plain tensor for a DTensor over data-parallel axes only",
        "tensor_parallel_of",
        "TensorParallel(None, mesh, whole)",
        "None",
        "dtensor/test_whole_mesh.py::test_training_is_that_of_one_process_and_of_torch[4-dp]",
    ),
    Mutation(
        "grad_placements is ignored",
        "_partial",
        "given is None or tuple(given) == own",
        "True",
        "dtensor/test_dtensor.py::test_gradients_of_full_tensors_and_parts_are_summed_where_their_placements_say_so[2]",
    ),
]
