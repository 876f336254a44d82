"""Mutations of src/weft/graphs."""

from mutation import Mutation

GRAPHS = "graphs/test_hooks.py::"
KEYS = "graphs/test_keys.py::"
BACKWARDS = "graphs/test_backward.py::"
WRITES = "graphs/test_writes.py::test_both_conventions_are_replayed_in_the_first_microbatch_and_in_later_ones[2]"
PYTHON = "graphs/test_python.py::"
REPLAYS = "graphs/test_settings.py::test_a_replay_reads_nothing_of_the_one_before"

MUTATIONS = [
    # --- graphs -------------------------------------------------------------------------------------------------------
    Mutation(
        "captures share nodes that accumulate gradients with the caller",
        "Places.stand_ins",
        "type(each) is nn.Parameter",
        "False",
        "graphs/test_backward.py::test_a_capture_and_its_caller_share_no_node_that_accumulates_gradients",
    ),
    Mutation(
        "a weight that a module also has in a list gets no gradient from there",
        "Captured._capture",
        "[*(entered[number] for number in self._needs), *alike, *stand_ins.values(), *trained]",
        "[*(entered[number] for number in self._needs), *alike, *stand_ins.values(), *stand_ins.values()]",
        "graphs/test_backward.py::test_a_weight_that_a_module_also_has_in_a_list_gets_its_whole_gradient",
    ),
    Mutation(
        "a gradient that is written goes to the leaf that stands in for its weight",
        "weight_gradient",
        "original_of(parameter)",
        "parameter",
        "graphs/test_lifetimes.py::test_calls_under_delayed_weights_have_a_capture_of_their_own",
    ),
    Mutation(
        "graphs are never replayed",
        "GraphedCall.enable",
        "captured.ready = True",
        "captured.ready = False",
        GRAPHS + "test_twenty_steps_with_graphs_are_those_without[2]",
    ),
    Mutation(
        "replays skip hooks on gathered weights",
        "Places.addresses",
        "(tensor.requires_grad, hooked(tensor))",
        "(tensor.requires_grad,)",
        "graphs/test_hooks.py::test_a_hook_on_a_gathered_weight_ends_the_replays_of_its_module[2]",
    ),
    Mutation(
        "a replay uses the inputs of the capture",
        "Captured.forward",
        "static.fill(given)",
        "",
        REPLAYS,
    ),
    Mutation(
        "a replay skips the last operator",
        "Tape.replay",
        "for function, args, kwargs, results, differentiable in self.calls: ...",
        "for function, args, kwargs, results, differentiable in self.calls[:-1]: ...",
        REPLAYS,
    ),
    Mutation(
        "static outputs change without a version change",
        "Captured.forward",
        "self._changed if copies else [*self._changed, *self._outputs]",
        "self._changed",
        "graphs/test_settings.py::test_an_output_that_the_next_replay_overwrites_is_refused_by_autograd",
    ),
    Mutation(
        "a backward does not check whether weights moved",
        "Captured.backward",
        "self._places.addresses() != self.addresses",
        "False",
        "graphs/test_settings.py::test_weights_that_moved_are_no_address_of_a_replay",
    ),
    Mutation(
        "buffers keep the changes made by a capture",
        "Places.restored",
        "each.copy_(values)",
        "",
        GRAPHS + "test_buffers_that_a_forward_changes_are_counted_once_per_call[2]",
    ),
    Mutation(
        "a replay does not set grad_added_to_main_grad",
        "Targets.written",
        "each.grad_added_to_main_grad = True",
        "",
        WRITES,
    ),
    Mutation(
        "a recording that adds is used where one that overwrites is needed",
        "Targets.__init__",
        "(*((each.data_ptr(), each.stride(), each.dtype) for each in buffers), *(accumulate for _, "
        "accumulate in self._answers))",
        "(*((each.data_ptr(), each.stride(), each.dtype) for each in buffers),)",
        WRITES,
    ),
    Mutation(
        "recording a backward leaves gradients in the buffers",
        "Targets.restored",
        "buffer.copy_(values)",
        "",
        WRITES,
    ),
    Mutation(
        "a rank replays a part whose capture failed on another rank",
        "GraphTable.agree",
        "anywhere and call.refused is None",
        "False",
        GRAPHS + "test_a_capture_that_fails_on_one_rank_is_used_on_none[2]",
    ),
    Mutation(
        "in a replay, an output without a gradient gets zeros",
        "_Replayed.forward",
        "ctx.set_materialize_grads(False)",
        "ctx.set_materialize_grads(True)",
        BACKWARDS + "test_an_output_without_a_gradient_leaves_its_weights_without_one",
    ),
    Mutation(
        "gradients of all layouts are copied into the first layout",
        "Backward.run",
        "None if each is None else each.stride()",
        "None if each is None else ()",
        BACKWARDS + "test_gradients_that_arrive_in_other_layouts_are_those_of_eager_calls",
    ),
    Mutation(
        "gradients of a leaf are added in forward order",
        "Uses.__init__",
        "-node._sequence_nr()",
        "node._sequence_nr()",
        BACKWARDS + "test_uses_inside_are_added_to_those_outside_in_the_order_of_an_eager_backward[True]",
    ),
    Mutation(
        "a replay's backward reads buffers that were written to since its forward",
        "Captured.forward",
        "[*self._read, *(inputs[number] for number in self._shown)]",
        "[*(inputs[number] for number in self._shown)]",
        BACKWARDS + "test_writes_between_forward_and_backward_are_refused_as_by_an_eager_backward[a buffer]",
    ),
    Mutation(
        "a retained graph releases its capture",
        "_Replayed.backward",
        "not torch._C._autograd._get_current_graph_task_keep_graph()",
        "True",
        KEYS + "test_a_retained_graph_keeps_its_capture_until_it_is_gone",
    ),
    Mutation(
        "gradients of inputs are overwritten by the next replay",
        "Form.handed",
        "copied(each) if copies else each.detach()",
        "each.detach()",
        "graphs/test_scopes.py::test_delayed_weight_gradients_are_replayed_after_the_backward_that_queues_them[2]",
    ),
    Mutation(
        "changed attributes of captured modules are ignored",
        "GraphedCall._keyed",
        "not captured.python.same()",
        "False",
        PYTHON + "test_attributes_that_change_between_calls_lead_to_a_new_capture[a number]",
    ),
    Mutation(
        "an attribute with an equal value in a new object counts as changed",
        "Walk._token",
        "(kind, repr(value))",
        "(0, value)",
        PYTHON + "test_what_changes_deep_inside_leads_to_a_new_capture[a sign]",
    ),
    Mutation(
        "a weight's gradient is in memory that the next forward overwrites",
        "Form.__init__",
        "keep or not touches(each, made) or touches(each, [*ranges[:number], *ranges[number + 1:]])",
        "keep or touches(each, [*ranges[:number], *ranges[number + 1:]])",
        BACKWARDS + "test_gradients_of_weights_that_are_views_of_others_outlast_the_backward",
    ),
    Mutation(
        "a function with different code counts as unchanged",
        "Walk._reach",
        "self.tokens.append((f'{name}.__code__', value.__code__))",
        "",
        PYTHON + "test_what_functions_and_references_hold_leads_to_a_new_capture[the code of a function]",
    ),
    Mutation(
        "a buffer with another layout counts as unchanged",
        "graphs:_place",
        "(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)",
        "(tensor.data_ptr(),)",
        PYTHON + "test_a_buffer_that_gets_another_layout_at_its_address_leads_to_a_new_capture[transposed]",
    ),
    Mutation(
        "state that cannot be compared counts as unchanged",
        "Walk._object",
        "not known and _hides(kind, len(slots))",
        "False",
        PYTHON + "test_state_that_cannot_be_compared_keeps_a_module_eager[ndarray]",
    ),
    Mutation(
        "a capture does not undo its own changes",
        "Captured.__init__",
        "self.python.restore()",
        "",
        PYTHON + "test_a_forward_with_side_effects_stays_eager_and_has_each_once[Counts]",
    ),
    Mutation(
        "replays lose what a forward appends to its caller's list",
        "Captured._capture.forward",
        "form != spec or any(each is not given for each, given in zip(left, arguments))",
        "False and any(each is not given for each, given in zip(left, arguments))",
        PYTHON + "test_a_list_or_dict_that_a_forward_fills_keeps_it_eager[list]",
    ),
    Mutation(
        "a copy of a captured module computes with the original's weights",
        "GraphedCall.__deepcopy__",
        "memo.get(id(module), module)",
        "module",
        PYTHON + "test_a_copy_of_a_module_computes_with_its_own_weights",
    ),
    Mutation(
        "static outputs that a backward reads may be written to",
        "Captured.forward",
        "shared or (read and not copies)",
        "shared",
        "graphs/test_settings.py::test_an_output_that_its_backward_reads_must_not_be_written_to",
    ),
    Mutation(
        "a capture treats tensors on another device as constants",
        "Watch.__torch_dispatch__",
        "len({each.device for each in used}) > 1",
        "len({each.device for each in (*used, *(it for _, it in results)) if isinstance(each, Tensor)}) > 2",
        "graphs/test_settings.py::test_what_a_graph_cannot_hold_is_found_at_capture[a copy to another device]",
    ),
    Mutation(
        "calls under autocast are captured",
        "GraphedCall._key",
        "torch.is_autocast_enabled(device.type)",
        "False",
        KEYS + "test_training_is_part_of_what_differs_and_calls_under_autocast_stay_eager",
    ),
]
