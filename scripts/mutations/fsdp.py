"""Mutations of src/weft/fsdp but for fsdp/runtime."""

from mutation import Mutation
from mutations.tests import BETWEEN, COPIES, MEMBERSHIP, NARROW, NARROW_BYTES, ORDER, SEAMS, STREAMS, TENSOR, WAYS_IN

SCALED = "fsdp/test_scaled.py::"

MUTATIONS = [
    # --- tensor parallelism -------------------------------------------------------------------------------------------
    Mutation(
        "the partial gradient of a whole parameter is not summed over ranks",
        "_Whole.backward",
        "reduce_now(wide, dist.ReduceOp.SUM, ctx.group, 'a gradient of tensor-parallel ranks')",
        "",
        TENSOR + "test_attention_and_mlps_equal_one_process_over_five_clipped_steps[2]",
    ),
    # --- what methods say ---------------------------------------------------------------------------------------------
    Mutation(
        "options that methods set before the root is sharded are lost",
        "UnitDriver.come_under",
        "around.options = around.options.joined(self._asked or RuntimeOptions(), changed)",
        "del changed",
        ORDER + "test_what_is_said_before_the_root_is_sharded_holds_in_its_model[2]",
    ),
    # --- what changes between passes ----------------------------------------------------------------------------------
    Mutation(
        "the first backward does not check for a forgotten root",
        "explaining.explained",
        "first_backwards and not inputs",
        "False",
        MEMBERSHIP + "test_a_root_that_was_forgotten_is_named_at_the_first_backward_and_can_be_sharded_then[2]",
    ),
    Mutation(
        "every holder registers the full parameters",
        "Unit._let_go",
        "if each.computes or is_users(each): ...",
        "...",
        BETWEEN + "test_between_a_forward_and_its_backward_a_module_shows_its_sharded_parameters[2-optim_grads_params]",
    ),
    # --- optimizers over many small parameters ------------------------------------------------------------------------
    Mutation(
        "torch's clipping computes a DTensor norm for each gradient",
        "PATCHES",
        "Patch('nn.utils.clip_grad', '_get_total_norm', norm_at_once)",
        "Patch('nn.utils.clip_grad', '_get_total_norm', lambda theirs: theirs)",
        "dtensor/test_dtensor.py::test_clipping_asks_the_other_ranks_for_one_number_and_computes_with_plain_tensors",
    ),
    Mutation(
        "torch's clipping multiplies DTensors instead of local parts",
        "PATCHES",
        "Patch('nn.utils.clip_grad', '_clip_grads_with_norm_', clipping_at_once)",
        "Patch('nn.utils.clip_grad', '_clip_grads_with_norm_', lambda theirs: theirs)",
        "dtensor/test_dtensor.py::test_clipping_asks_the_other_ranks_for_one_number_and_computes_with_plain_tensors",
    ),
    # --- when things run ----------------------------------------------------------------------------------------------
    Mutation(
        "the host waits for a gather immediately",
        "Unit._gather",
        "self._tickets.append(ticket)",
        "self._tickets.append(ticket) or ticket.wait()",
        ORDER + "test_a_unit_is_gathered_while_the_one_before_it_computes[2-optim]",
    ),
    Mutation(
        "a recomputation frees the weights",
        "HookDriver._leave",
        "recomputing or not self._reshards()",
        "not self._reshards()",
        ORDER + "test_recomputation_gathers_nothing_twice[2-reentrant]",
    ),
    Mutation(
        "the host waits for the outer gather before the inner one",
        "ParameterGroup.gather",
        "after=refreshing",
        "after=refreshing and refreshing.wait()",
        ORDER + "test_outer_gathers_run_while_the_previous_unit_computes_without_a_wait[4]",
    ),
    Mutation(
        "the host waits for the inner reduction before the outer one",
        "GroupGradients.reduce",
        "after=ticket",
        "after=ticket and ticket.wait()",
        ORDER + "test_outer_reductions_follow_the_inner_ones_without_a_wait_between_them[4-no_shard]",
    ),
    Mutation(
        "gathers use the communicator of reductions",
        "Channels.of_gathers",
        "_twins[group] if self.separate else group",
        "group",
        ORDER + "test_gathers_have_communicators_of_their_own_if_that_is_asked_for[2-optim]",
    ),
    # --- lanes and memory ---------------------------------------------------------------------------------------------
    Mutation(
        "a unit computes before its weights have arrived",
        "Unit._wait",
        "ticket.wait()",
        "",
        ORDER + "test_a_unit_is_gathered_while_the_one_before_it_computes[2-optim_grads]",
    ),
    Mutation(
        "staging memory is not freed",
        "Plain.open",
        "self.staging.give()",
        "",
        SEAMS + "test_transients.py::"
        "test_staging_of_offloaded_weights_comes_back_when_units_are_skipped[2-optim_grads-trace]",
    ),
    Mutation(
        "padding is not zeroed",
        "GroupGradients.pack",
        "torch._foreach_zero_(padding)",
        "",
        SEAMS + "test_transients.py::test_what_memory_held_before_is_in_no_gradient_and_no_norm[2-optim]",
    ),
    # --- the order of streams, where there are some -------------------------------------------------------------------
    Mutation(
        "computation does not wait for a unit's gather",
        "Unit._wait",
        "for ticket in tickets: ...",
        "",
        STREAMS + "test_a_steady_step_has_no_wait_of_the_host[2-optim_grads_params-False]",
    ),
    Mutation(
        "computation does not wait for the update of model weights",
        "ParameterGroup.await_refresh",
        "with torch.no_grad(): ...\nself.payload.open(self.full.local)",
        "self.payload.open(self.full.local)",
        STREAMS + "test_weights_that_come_for_a_unit_that_does_not_run_are_awaited[2]",
    ),
    Mutation(
        "weights in host memory change during their upload",
        "ParameterGroup.finish_upload",
        "upload.synchronize()",
        "",
        STREAMS + "test_weights_in_memory_of_the_host_may_be_written_after_an_evaluation[2-optim_grads_params]",
    ),
    Mutation(
        "uploads of resident weights are not tracked",
        "ParameterGroup.refresh",
        "run = self._upload = lane.run(collectives.alone, fill, after=run)",
        "run = lane.run(collectives.alone, fill, after=run)",
        STREAMS + "test_weights_in_memory_of_the_host_may_be_written_after_an_evaluation[2-no_shard]",
    ),
    # --- what the ranks agree on --------------------------------------------------------------------------------------
    Mutation(
        "a torch version that lacks a name is partly patched",
        "apply",
        "if missing: ...",
        "if False: ...",
        "fsdp/test_patches.py::test_a_torch_that_lacks_a_name_is_refused_and_left_as_it_is",
    ),
    # --- weights ------------------------------------------------------------------------------------------------------
    Mutation(
        "freed weights can be read",
        "FullParameters.leave",
        "(self._gone,) * len(self._parameters)",
        "(self._version,) * len(self._parameters)",
        SEAMS + "test_entries.py::test_a_tensor_that_leaves_a_unit_around_its_output[2-alone-as an attribute]",
    ),
    Mutation(
        "freed parameters keep their class",
        "FullParameters.leave",
        "parameter.__class__ = _subclass(_Gone, here)",
        "",
        SEAMS
        + "test_users.py::test_a_parameter_that_was_taken_under_unshard_is_read_after_reshard[2-optim_grads_params]",
    ),
    Mutation(
        "a write to a gathered copy is silently lost",
        "FullParameters._written",
        "map(_version_of, self._parameters) if self._copies else ()",
        "()",
        SEAMS + "test_users.py::test_weights_that_forward_itself_writes[2-optim_grads_params-clamp]",
    ),
    Mutation(
        "the beginning of a pass hides a write to a gathered copy",
        "Unit.sync_versions",
        "group.fulls.check_unwritten()",
        "",
        SEAMS + "test_users.py::test_weights_that_are_written_under_the_users_unshard[2-optim_grads_params-a pass]",
    ),
    Mutation(
        "autograd does not see writes to resident weights",
        "FullParameters.come",
        "if moved: ...\nelse: ...",
        "if False: ...\nelse: ...",
        SEAMS
        + "test_users.py::test_a_backward_through_weights_that_a_step_has_changed_raises_as_in_one_process[2-optim]",
    ),
    Mutation(
        "parameters frozen before a backward get gradients",
        "GroupGradients.pack",
        "not each.sharded.requires_grad",
        "False",
        SEAMS + "test_users.py::test_parameters_that_are_frozen_between_forward_and_backward[2-optim]",
    ),
    Mutation(
        "frozen quantized weights also keep their main weights",
        "payload_only_of",
        "group.trainable or group.offload is not None or not group.layout.data_numel",
        "True or group.offload is not None or not group.layout.data_numel",
        "fsdp/test_payload_only.py::test_adapters_train_on_a_base_whose_payload_alone_is_kept[2]",
    ),
    Mutation(
        "weights with two copies are kept as payload only",
        "payload_only_of",
        "stays or not isinstance(group.payload, Narrow) or group.payload.copies > 1",
        "stays or not isinstance(group.payload, Narrow)",
        "fsdp/test_payload_only.py::test_two_copies_and_main_weights_in_cpu_memory_keep_exact_values[2]",
    ),
    Mutation(
        "memory shared with NumPy is not replaced",
        "PayloadOnly.let_go",
        "not self.storage.resizable()",
        "False",
        "fsdp/test_payload_only.py::test_main_weights_stay_while_other_code_has_their_memory[2]",
    ),
    Mutation(
        "a second backward reads the old address of moved weights",
        "ForwardCall.begin",
        "unit.moves != self._moves",
        "False",
        "fsdp/test_behaviour.py::"
        "test_a_backward_through_the_rest_of_a_graph_finds_weights_where_they_were_or_says_that_they_moved[2-trace]",
    ),
    Mutation(
        "weights that the user holds are freed after a failed pass",
        "Unit.drop_holders",
        "[each for each in self.holders if not is_users(each)]",
        "list(self.holders)",
        SEAMS + "test_holds.py::test_a_users_unshard_outlives_a_pass_that_fails[2]",
    ),
    Mutation(
        "a shared parameter is held by one of its units only",
        "Members.register",
        "unit.tied.setdefault(record.unit, mine.name)",
        "",
        "fsdp/test_behaviour.py::test_parameters_tied_across_units_stay_tied[2-optim_grads_params]",
    ),
    Mutation(
        "replicas do not receive the first replica's values",
        "Members.register",
        "equalize(group)",
        "",
        SEAMS + "test_replicas.py::test_ranks_that_build_the_model_with_different_seeds_start_equal[2-no_shard]",
    ),
    # --- narrow weights -----------------------------------------------------------------------------------------------
    Mutation(
        "main weights are quantized without the cast to the compute dtype",
        "Narrow.__init__",
        "dataclasses.replace(recipe, via=compute) if casts else recipe",
        "recipe",
        NARROW + "test_bytes_are_those_of_the_whole_weight[2]",
    ),
    Mutation(
        "cuts divide blocks",
        "cutting_of",
        "math.lcm(step, recipe.cut_between(shape))",
        "step",
        NARROW + "test_bytes_are_those_of_the_whole_weight[2]",
    ),
    Mutation(
        "the memory of gathered quantized bytes is not freed",
        "Narrow.open",
        "self.staging.give()",
        "",
        NARROW_BYTES,
    ),
    Mutation(
        "small quantized units are not bundled",
        "ParameterGroup.fits_buckets",
        "self.payload.refreshes and self.plan.moves and not self.refreshed_bytes",
        "False",
        "fsdp/test_mixed_bundles.py::test_small_quantized_units_share_one_message_and_compute_the_same[2]",
    ),
    Mutation(
        "a bundle sends stale quantized weights",
        "ParameterGroup.bundled",
        "self.refresh(channels)",
        "",
        "fsdp/test_mixed_bundles.py::test_a_rank_whose_pass_is_one_without_some_quantized_units_sends_those_of_after_its_last_step[2-262144]",
    ),
    Mutation(
        "a quantized weight uses the scales of another weight",
        "Narrow.operand",
        "self._scales_at[number]",
        "self._scales_at[0]",
        SCALED + "test_a_step_of_scaled_products_equals_one_process[2]",
    ),
    Mutation(
        "backward multiplies forward's copy",
        "_operand",
        "len(group.copies) > 1 and group.copy != backward",
        "False",
        COPIES + "test_a_part_of_a_unit_may_be_recomputed_in_its_backward[2]",
    ),
    Mutation(
        "a rank sends forward's copy to ranks that need backward's",
        "ParameterGroup.serve",
        "self.copies[copy]",
        "self.copies[0]",
        COPIES + "test_a_rank_sends_the_copy_that_others_ask_for[2-0]",
    ),
    Mutation(
        "transposed codes are not read",
        "Narrow.operand",
        "recipe.keep_transpose and (codes.dim() == 3) != backward",
        "False",
        SCALED + "test_transposed_codes_are_kept_beside_the_others_and_change_nothing_else[2]",
    ),
    Mutation(
        "operators read quantized codes without scales",
        "Scaled.__torch_function__",
        "name in _READS_NO_VALUES or attribute in _READS_NO_VALUES",
        "True",
        SCALED + "test_other_uses_of_a_quantized_weight_are_refused[2]",
    ),
    # --- gradients ----------------------------------------------------------------------------------------------------
    Mutation(
        "gradients are summed instead of averaged",
        "Unit.scale_of",
        "1 / (group.ranks * (self._divide_factor or 1))",
        "1.0",
        "fsdp/test_behaviour.py::test_a_list_of_modules_is_one_unit[2]",
    ),
    Mutation(
        "gradient_divide_factor is ignored",
        "Unit.scale_of",
        "group.ranks * (self._divide_factor or 1)",
        "group.ranks",
        "fsdp/test_behaviour.py::test_gradient_divide_factors_replace_or_follow_the_average[2]",
    ),
    Mutation(
        "a unit that forces sums lets the backend average",
        "GroupGradients.reduce",
        "sum_only=self.sums_only",
        "sum_only=False",
        "fsdp/test_habits.py::test_a_unit_that_forces_sums_asks_the_backend_for_no_average[2]",
    ),
    Mutation(
        "gradients are not reduced over the outer axis",
        "GroupGradients.reduce",
        "finishes or len(self._stages) == 1",
        "len(self._stages) == 1",
        ORDER + "test_the_outer_axis_is_reduced_over_once_in_a_step[4-no_shard]",
    ),
    Mutation(
        "a later microbatch overwrites the gradients",
        "GroupGradients.pack",
        "more if state.filled else new",
        "new",
        "fsdp/test_behaviour.py::test_gradients_accumulate_with_and_without_synchronisation[2-optim]",
    ),
    Mutation(
        "memory of gradients is reused while the user holds them",
        "MainGradients._exclusive",
        "old is None or self._is_held(dropped) or (renewed and dropped and self._is_viewed())",
        "old is None",
        SEAMS + "test_gradient_owner.py::"
        "test_a_held_gradient_does_not_change_by_another_backward[2-optim-none by hand]",
    ),
    Mutation(
        "a penalty in .grad is overwritten",
        "MainGradients.publish",
        "mine.add_(theirs)",
        "",
        SEAMS + "test_gradient_owner.py::"
        "test_a_penalty_on_sharded_parameters_computed_outside_the_forward[2-optim-1-before]",
    ),
    Mutation(
        "zero_grad skips the sharded parameters",
        "FSDPModule.zero_grad",
        "units_under(self)",
        "()",
        SEAMS + "test_gradient_owner.py::test_zero_grad_of_an_unsharded_block_between_forward_and_backward[2]",
    ),
    # --- passes and calls ---------------------------------------------------------------------------------------------
    Mutation(
        "fully_shard does not check its mesh",
        "Request.__init__",
        "mesh is not None and not isinstance(mesh, DeviceMesh)",
        "False",
        "fsdp/test_errors.py::test_a_mesh_of_another_type_is_refused",
    ),
    # --- models -------------------------------------------------------------------------------------------------------
    Mutation(
        "decays are cast like other weights",
        "recipe_of",
        "keeps_dtype(parameter)",
        "False",
        "models/test_shard.py::test_decays_keep_their_dtype_where_everything_else_computes_in_bf16[2]",
    ),
    # --- schedules of pipelines ---------------------------------------------------------------------------------------
    Mutation(
        "an optimizer built before fully_shard silently trains nothing",
        "Original.__torch_function__",
        "attribute == 'grad' or _WRITES.fullmatch(name)",
        "_WRITES.fullmatch(name)",
        "fsdp/test_originals.py::test_an_optimizer_that_was_built_before_sharding_raises_at_its_first_use[2]",
    ),
    Mutation(
        "a write to freed weights is not detected",
        "FullParameters.come",
        "self._written() if from_gone else []",
        "[]",
        "debug/test_guard.py::test_a_write_to_a_kept_view_after_the_weights_went_is_found_at_the_next_gather[2]",
    ),
    # --- by which way a backward comes in -----------------------------------------------------------------------------
    Mutation(
        "a backward that runs no hook leaves its gradients unreduced",
        "explaining.explained",
        "settle()",
        "",
        WAYS_IN + "test_a_backward_is_noticed_whichever_tensor_it_starts_from[2-False-optim_grads_params]",
    ),
    Mutation(
        "an output that was written to is not traced to its base",
        "HookDriver._marked_output",
        "base.register_hook(self._call.begin_inside)",
        "",
        WAYS_IN + "test_a_backward_is_noticed_whichever_tensor_it_starts_from[2-True-optim_grads_params]",
    ),
    # --- in the place of torch's FSDP2 --------------------------------------------------------------------------------
    Mutation(
        "an assigned state dict replaces the sharded parameter",
        "_copy_assigned",
        "state_dict[prefix + name] = parameter",
        "",
        "fsdp/test_meta.py::test_assigned_state_dicts_are_copied_for_any_cuts[2]",
    ),
    Mutation(
        "a tensor subclass loses its class",
        "checked_parameter",
        "_refuse_own_operators(parameter, where)",
        "",
        "fsdp/test_subclasses.py::test_a_parameter_with_operators_of_its_own_is_refused_by_name[2]",
    ),
    Mutation(
        "a sharded child is missing from torch's registry",
        "attach",
        'vars(module).setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()',
        "",
        "fsdp/test_composition.py::test_what_replicates_the_rest_leaves_a_sharded_child_alone[2-replicate0]",
    ),
    Mutation(
        "an spmd_types annotation of a plain parameter is ignored",
        "checked_parameter",
        "_ANNOTATION in vars(parameter)",
        "False",
        "dtensor/test_whole_mesh.py::test_what_does_not_go_together_is_named[4]",
    ),
]
