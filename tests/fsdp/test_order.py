"""Communication runs beside computation: what is issued before what, and who waits when. No clock is asked."""

from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.fsdp.events import Chain, Order, chain, count, steps
from tests.pool import distributed
from weft.comm.lanes import Lane
from weft.fsdp.runtime import freshness

ONE_AXIS = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
GATHERED = ONE_AXIS[1:]
FORWARD = ["embed", "0", "1", "2", "3"]
BACKWARD = ["head", "3", "2", "1", "0", "embed"]
UNITS = ["root", *FORWARD[1:]]


def two_axes() -> dict:
    return {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))}


def gathered_ahead(order: Order, names: list[str], way: str, kind: str = "gather") -> list[str]:
    """The units that were gathered before the layer before them was computed, and awaited behind it."""
    return [
        following
        for layer, following in pairwise(names)
        if f"{kind} {following}" in order
        and order.goes(f"{kind} {following}", f"{way} {layer}", f"await gather {following}", f"{way} {following}")
    ]


# --- gathers ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("strategy", GATHERED)
@distributed(2)
def test_a_unit_is_gathered_while_the_one_before_it_computes(strategy):
    first, *later = [passes[0] for passes in steps(chain(strategy=strategy), 3)]
    for forward, backward in later:
        assert gathered_ahead(forward, FORWARD, "forward") == FORWARD[1:]
        assert forward.goes("gather root", "await gather root", "forward embed")
        if strategy == "optim_grads_params":  # the last unit of a forward stays for the backward
            assert gathered_ahead(backward, BACKWARD[1:-1], "backward") == ["2", "1", "0"]
    forward, backward = first
    if strategy == "optim_grads_params":  # nothing is known of a first forward, and of its backward all
        assert gathered_ahead(backward, BACKWARD[:-1], "backward") == ["3", "2", "1", "0"]
        for layer, following in pairwise(FORWARD):
            assert forward.goes(f"forward {layer}", f"gather {following}", f"forward {following}")
    else:  # all will be made anew, known or not, and nothing is gathered for a backward
        assert gathered_ahead(forward, FORWARD, "forward") == FORWARD[1:]
        assert not [event for _, backward in (first, *later) for event in backward if "gather" in event]


@pytest.mark.slow
@distributed(4)
def test_outer_gathers_run_while_the_previous_unit_computes_without_a_wait():
    net = chain(outer_strategy="optim", **two_axes())
    for forward, backward in [passes[0] for passes in steps(net, 3)][1:]:
        assert gathered_ahead(forward, FORWARD, "forward", "outer gather") == FORWARD[1:]
        assert gathered_ahead(forward, FORWARD, "forward") == FORWARD[1:]
        assert gathered_ahead(backward, BACKWARD[1:-1], "backward") == ["2", "1", "0"]
        assert not any("outer gather" in event for event in backward)
        for unit in UNITS:
            assert forward.goes(f"outer gather {unit}", f"gather {unit}", f"await gather {unit}")
            assert f"await outer gather {unit}" not in forward
    assert all(net.events.behind[f"gather {unit}"] == f"outer gather {unit}" for unit in UNITS)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
@distributed(2)
def test_recomputation_gathers_nothing_twice(recompute):
    for step, (passes, plain) in enumerate(zip(steps(chain(recompute=recompute), 3), steps(chain(), 3))):
        forward, backward = passes[0]
        for unit in UNITS:
            assert count(passes, f"gather {unit}") == count(plain, f"gather {unit}")
        for layer in UNITS[1:]:
            assert count(passes, f"forward {layer}") == 2 and f"forward {layer}" in backward
        if step:
            assert gathered_ahead(forward, FORWARD, "forward") == FORWARD[1:]
            for layer, following in pairwise(BACKWARD[1:-1]):
                assert backward.goes(f"gather {following}", f"backward {layer}", f"await gather {following}")
                if recompute == "non-reentrant":  # there the unit's backward begins before its forward runs again
                    assert backward.goes(f"gather {following}", f"forward {layer}")


@pytest.mark.parametrize("allocator", ["trace", "caching"])
@distributed(2)
def test_weights_go_when_the_next_unit_has_computed(allocator):
    net = chain(depth=6, runtime=weft.RuntimeOptions(allocator=allocator))
    steps(net, 3)
    root, layer = (module._weft_unit.gathered_bytes for module in (net, net.layers[0]))
    # The layer that computes and the next one, beside the root: six layers would be here at the end of a forward.
    assert weft.memory_report(net)["transient"]["gathered weights"]["peak"] == root + 2 * layer


@pytest.mark.slow
@distributed(2)
def test_a_budget_of_bytes_says_how_far_ahead_gathers_go():
    bytes_of_layer = chain().layers[0]._weft_unit.gathered_bytes
    for ahead, budget in [(0, 0), (0, bytes_of_layer - 1), (1, bytes_of_layer), (2, 2 * bytes_of_layer), (4, 1 << 20)]:
        net = chain(runtime=weft.RuntimeOptions(prefetch_bytes=budget))
        for forward, backward in [passes[0] for passes in steps(net, 3)][1:]:
            for order, names, way in ((forward, FORWARD, "forward"), (backward, BACKWARD[1:-1], "backward")):
                for position, layer in enumerate(names):
                    issued = order[: order.index(f"{way} {layer}")]
                    here = [each for each in names[position + 1 :] if f"gather {each}" in issued]
                    assert here == names[position + 1 : position + 1 + ahead], (budget, layer, order)


@distributed(2)
def test_units_that_the_user_names_are_gathered_ahead_in_place_of_the_next():
    net = chain()
    first, second, *others = net.layers
    first.set_modules_to_forward_prefetch(others)
    net.layers[3].set_modules_to_backward_prefetch([second])
    for forward, backward in [passes[0] for passes in steps(net, 2)]:
        assert forward.goes("gather 2", "gather 3", "forward 0", "gather 1", "forward 1")
        assert backward.goes("gather 1", "backward 3", "gather 2", "backward 2")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
@distributed(2)
def test_weights_that_stay_are_gathered_once_in_a_step_of_many_microbatches(strategy):
    for passes in steps(chain(strategy=strategy), 3, microbatches=3):
        for unit in UNITS:
            assert count(passes, f"gather {unit}") == passes[0][0].count(f"gather {unit}") == 1


@pytest.mark.slow
@distributed(2)
def test_ranks_ask_each_other_whether_weights_have_changed_only_between_microbatches():
    net = chain(strategy="optim")
    with mock.patch.object(freshness, "agree", wraps=freshness.agree) as asked:
        steps(net, 3)
        assert not asked.called
        steps(net, 2, microbatches=3)
        assert asked.call_count == 2 * 2


@pytest.mark.slow
@distributed(4)
def test_weights_that_stay_on_the_outer_axis_are_gathered_over_it_once_in_a_step():
    net = chain(outer_strategy="optim", **two_axes())
    for passes in steps(net, 3, microbatches=2):
        for unit in UNITS:
            assert count(passes, f"outer gather {unit}") == passes[0][0].count(f"outer gather {unit}") == 1


@pytest.mark.slow
@distributed(4)
def test_backward_gathers_ahead_over_the_neighbours_alone():
    net = chain(reshard_after_forward=2)
    events = net.events
    sizes: dict[str, set[int]] = {}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with events.recording(net):
        for step in range(3):
            for way in ("forward", "backward"):
                events.groups["gather"].clear()
                if way == "forward":
                    loss = net(torch.ones(2, 6)).square().sum()
                else:
                    loss.backward()
                order = events.take()
                sizes[way] = {group.size() for group in events.groups["gather"]}
                if step and way == "backward":
                    assert gathered_ahead(order, BACKWARD[:-1], way) == ["3", "2", "1", "0"]
            optimizer.step()
            assert sizes == {"forward": {4}, "backward": {2}}


@pytest.mark.parametrize("budget", [None, 1 << 20])
@distributed(2)
def test_what_was_gathered_ahead_goes_when_the_pass_leaves_its_record(budget):
    net = chain(runtime=weft.RuntimeOptions(prefetch_bytes=budget))
    steps(net, 2)
    net.layers = torch.nn.ModuleList(net.layers[number] for number in (0, 2, 1, 3))
    [[(forward, _)]] = steps(net, 1)
    again = {"0": 1, "1": 2, "2": 1, "3": 1 if budget is None else 2}
    assert {unit: forward.count(f"gather {unit}") for unit in again} == again
    assert forward.index("gather 1") < forward.index("forward 2") < len(forward) - forward[::-1].index("gather 1")


# --- reductions -------------------------------------------------------------------------------------------------------


def reductions(net: Chain, kind: str = "reduce", awaited: str = "await reduce") -> list[list[bool]]:
    """Of each step, for each unit from the last to the first: whether it is reduced while the next computes."""
    found = []
    for (_, backward), *_ in steps(net, 3):
        beside = []
        for layer, following in pairwise(BACKWARD[1:]):
            assert backward.goes(f"backward {layer}", f"{kind} {layer}", f"backward {following}")
            beside.append(backward.goes(f"{kind} {layer}", f"backward {following}", f"{awaited} {layer}"))
            unit = following if following in UNITS else "root"
            assert backward.goes(f"{awaited} {layer}", f"{kind} {unit}"), "two alive at once"
        found.append(beside)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@distributed(2)
def test_a_unit_is_reduced_while_the_next_one_s_backward_computes_unless_one_may_be_alive(strategy):
    assert reductions(chain(strategy=strategy)) == [[True] * 4] * 3
    alone = chain(strategy=strategy, runtime=weft.RuntimeOptions(max_live_reduce_buffers=1))
    assert reductions(alone) == [[False] * 4] * 3


@pytest.mark.slow
@distributed(2)
def test_more_units_are_reduced_at_once_where_more_may_be_alive():
    for alive in (2, 3, 4):
        net = chain(runtime=weft.RuntimeOptions(max_live_reduce_buffers=alive))
        for (_, backward), *_ in steps(net, 2):
            under_way, most = 0, 0
            for event in backward:
                under_way += event.startswith("reduce") - event.startswith("await reduce")
                most = max(most, under_way)
            assert (under_way, most) == (0, alive - 1)  # and one is packed or computed


@pytest.mark.slow
@pytest.mark.parametrize("outer_strategy", ["no_shard", "optim"])
@distributed(4)
def test_outer_reductions_follow_the_inner_ones_without_a_wait_between_them(outer_strategy):
    net = chain(outer_strategy=outer_strategy, **two_axes())
    assert reductions(net, "outer reduce", "await outer reduce") == [[True] * 4] * 3
    for (_, backward), *_ in steps(net, 1):
        for unit in UNITS:
            issued = backward.index(f"reduce {unit}")
            assert backward[issued + 1] == f"outer reduce {unit}"
            assert f"await reduce {unit}" not in backward
    assert all(net.events.behind[f"outer reduce {unit}"] == f"reduce {unit}" for unit in UNITS)


@pytest.mark.parametrize("strategy", ONE_AXIS)
@distributed(2)
def test_partial_gradients_are_reduced_once_in_a_step_and_sharded_ones_after_each_microbatch(strategy):
    for passes in steps(chain(strategy=strategy), 2, microbatches=3):
        for unit in UNITS:
            each = [backward.count(f"reduce {unit}") for _, backward in passes]
            assert each == ([0, 0, 1] if strategy in ("no_shard", "optim") else [1, 1, 1])


@distributed(2)
def test_a_switch_without_recursion_is_that_of_one_unit():
    net = chain()
    net.set_requires_gradient_sync(False, recurse=False)
    [[(_, backward)]] = steps(net, 1)
    assert [backward.count(f"reduce {unit}") for unit in UNITS] == [0, 1, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("outer_strategy", ["no_shard", "optim"])
@distributed(4)
def test_the_outer_axis_is_reduced_over_once_in_a_step(outer_strategy):
    for passes in steps(chain(outer_strategy=outer_strategy, **two_axes()), 2, microbatches=3):
        for unit in UNITS:
            assert [backward.count(f"reduce {unit}") for _, backward in passes] == [1, 1, 1]
            assert [backward.count(f"outer reduce {unit}") for _, backward in passes] == [0, 0, 1]


@distributed(2)
def test_nothing_waits_for_the_turn_of_a_unit_that_is_frozen():
    net = chain()
    net.layers[2].requires_grad_(False)
    for (_, backward), *_ in steps(net, 2):
        assert backward.goes("backward 3", "reduce 3", "backward 1", "reduce 1", "backward 0", "reduce 0")
        assert "reduce 2" not in backward


@distributed(2)
def test_reductions_that_wait_for_the_turn_of_another_all_start_with_it():
    net = chain()
    steps(net, 1)
    net.layers = torch.nn.ModuleList(net.layers[number] for number in (0, 3, 2, 1))
    [[(_, backward)]] = steps(net, 1)
    assert backward.goes("backward 1", "backward 2", "backward 3", "reduce 3", "reduce 2", "reduce 1", "backward 0")
    [[(_, backward)]] = steps(net, 1)  # the ranks have agreed on the order that all of them had
    assert backward.goes("backward 1", "reduce 1", "backward 2", "reduce 2", "backward 3", "reduce 3", "backward 0")


# --- communicators ----------------------------------------------------------------------------------------------------


def communicators(**options) -> tuple[set, set]:
    """The process groups of gathers and of reductions."""
    net = chain(depth=2, **options)
    steps(net, 2)
    return net.events.groups["gather"], net.events.groups["reduce"]


def ranks_of(groups: set) -> list[list[int]]:
    return sorted(dist.get_process_group_ranks(group) for group in groups)


@pytest.mark.parametrize("strategy", GATHERED)
@distributed(2)
def test_gathers_have_communicators_of_their_own_if_that_is_asked_for(strategy):
    gathers, reduces = communicators(strategy=strategy)
    assert gathers == reduces
    apart, reduces = communicators(strategy=strategy, runtime=weft.RuntimeOptions(separate_all_gather_group=True))
    assert not apart & reduces and ranks_of(apart) == ranks_of(reduces) == [[0, 1]]


@pytest.mark.slow
@distributed(2)
def test_how_many_may_be_alive_and_on_which_communicators_can_be_said_after_sharding():
    net = chain()
    net.set_reduce_scatter_max_input_buffers(1)
    assert reductions(net) == [[False] * 4] * 3
    gathers, reduces = (net.events.groups[kind] for kind in ("gather", "reduce"))
    for apart in (True, False):
        gathers.clear()
        reduces.clear()
        net.set_separate_reduce_scatter_group(apart)
        steps(net, 1)
        assert (gathers != reduces) == apart


@distributed(2)
def test_what_is_said_before_the_root_is_sharded_holds_in_its_model():
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    for layer in (net[0][0], net[0][1], net[1]):
        weft.fully_shard(layer)
    net[0][0].set_separate_reduce_scatter_group(True, recurse=False)
    net[0][1].set_reduce_scatter_max_input_buffers(4, recurse=False)
    net[1].set_reduce_scatter_max_input_buffers(3, recurse=False)
    weft.fully_shard(net[0])
    weft.fully_shard(net, runtime=weft.RuntimeOptions(bucket_bytes=0))
    runtime = net[1]._weft_driver.engine
    assert runtime is net._weft_driver.engine
    assert (runtime.options.max_live_reduce_buffers, runtime.reductions.most_alive) == (4, 4)
    assert runtime.options.separate_all_gather_group and runtime.channels.separate
    given, changed = weft.RuntimeOptions(separate_all_gather_group=True), weft.RuntimeOptions()
    assert given.joined(given, changed).separate_all_gather_group, "an inner model's False does not count"
    assert runtime.options.bucket_bytes == 0
    weft.fully_shard(alone := nn.Sequential(weft.fully_shard(nn.Linear(4, 4))), runtime=weft.RuntimeOptions())
    assert alone._weft_driver.engine.options == weft.RuntimeOptions()


@distributed(2)
def test_a_number_of_buffers_below_the_default_can_be_set_before_the_root_is_sharded():
    for numbers, of_root, expected in (([1], 2, 1), ([1, 3], 2, 3), ([3, 1], 2, 3), ([1], 3, 3)):
        layers = [weft.fully_shard(nn.Linear(4, 4)) for _ in numbers]
        for layer, number in zip(layers, numbers):
            layer.set_reduce_scatter_max_input_buffers(number)
        runtime = weft.RuntimeOptions(max_live_reduce_buffers=of_root)
        net = weft.fully_shard(nn.Sequential(*layers), runtime=runtime)
        assert net._weft_driver.engine.options.max_live_reduce_buffers == expected


@pytest.mark.slow
@pytest.mark.parametrize("outer_strategy", ["no_shard", "optim"])
@distributed(4)
def test_gathers_over_two_axes_have_communicators_of_their_own_if_that_is_asked_for(outer_strategy):
    options = {"outer_strategy": outer_strategy, **two_axes()}
    gathers, reduces = communicators(**options)
    assert gathers <= reduces
    apart, reduces = communicators(runtime=weft.RuntimeOptions(separate_all_gather_group=True), **options)
    assert not apart & reduces and len(reduces) == 2
    assert ranks_of(apart) == ranks_of(reduces if outer_strategy == "optim" else gathers)


def lanes_of(net: Chain) -> set[Lane]:
    """Those that a step uses."""
    with mock.patch.object(Lane, "run", autospec=True, side_effect=Lane.run) as issued:
        net(torch.ones(2, 6)).sum().backward()
    return {call.args[0] for call in issued.call_args_list}


@pytest.mark.slow
@distributed(2)
def test_models_that_share_their_communication_queue_it_on_the_same_lanes():
    one, other = chain(depth=1), chain(depth=1)
    assert not lanes_of(one) & lanes_of(other)
    weft.share_comm_ctx([one, other])
    assert lanes_of(one) == lanes_of(other)
