"""At rest everything is sharded, and a deleted model takes all its memory with it."""

import enum
import gc
import time
import weakref
from collections import deque
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import weft
from tests.fsdp import nets
from tests.fsdp.failing import Oops, fails_later, throw
from tests.pool import distributed
from weft.comm.watch.hang_detector import HangDetector


def storages(*tensors: torch.Tensor) -> dict[int, int]:
    """Bytes of the distinct storages behind local tensors, by address."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    found = [tensor.detach().untyped_storage() for tensor in local]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def full_bytes(net: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())


def step(net, optimizer=None, seed=1) -> None:
    nets.loss_of(net, nets.data(1, 4, seed)[0]).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("allocator", ["trace", "caching"])
@distributed(2, 4)
def test_at_rest_a_rank_holds_its_share_and_nothing_gathered(allocator):
    net = nets.make(width=64, hidden=128)
    whole = full_bytes(net)
    nets.shard(net, runtime=weft.RuntimeOptions(allocator=allocator))
    optimizer = torch.optim.AdamW(net.parameters())

    def passes():
        yield "construction"
        for _ in range(2):
            step(net, optimizer)
            yield "a training step"
        with torch.no_grad():
            net(nets.data(1, 4)[0])
        yield "an evaluation"
        net.unshard()
        net.reshard()
        yield "unshard and reshard"
        net.state_dict()
        yield "a state dict"

    for event in passes():
        registered = storages(*net.parameters())
        assert all(isinstance(parameter, DTensor) for parameter in net.parameters()), event
        assert sum(registered.values()) < 1.1 * whole / dist.get_world_size(), event
        report = weft.memory_report(net)
        assert sum(registered.values()) == report["persistent"]["weights"], event
        assert [role["live"] for role in report["transient"].values()] == [0, 0], event
        for unit in units(net):
            for group in unit.groups:
                memory = group.transient.own.untyped_storage().nbytes()
                assert memory == 0, f"{unit.name} kept {memory} gathered bytes after {event}"


@pytest.mark.slow
@distributed(2)
def test_gradients_take_one_share_and_go_with_zero_grad_or_are_reused():
    net = nets.shard(nets.make(width=64, hidden=128))
    step(net)
    gradients = storages(*(parameter.grad for parameter in net.parameters()))
    weights = storages(*net.parameters())
    assert sum(gradients.values()) == sum(weights.values()) == weft.memory_report(net)["persistent"]["gradients"]
    assert not gradients.keys() & weights.keys()
    for parameter in net.parameters():
        parameter.grad = None
    step(net)
    assert storages(*(parameter.grad for parameter in net.parameters())) == gradients


@distributed(2)
def test_local_views_of_different_parameters_never_overlap():
    net = nets.shard(nets.make())
    step(net)
    for tensors in ([*net.parameters()], [parameter.grad for parameter in net.parameters()]):
        ranges = sorted(
            (local.data_ptr(), local.data_ptr() + local.nbytes)
            for local in (tensor.to_local() for tensor in tensors)
            if local.numel()
        )
        assert all(stop <= start for (_, stop), (start, _) in pairwise(ranges))


def units(net) -> list:
    return list(dict.fromkeys(m._weft_unit for m in net.modules() if isinstance(m, weft.FSDPModule)))


def watched(net, *more) -> dict[str, weakref.ref]:
    """Weak references to all of weft's objects and tensors that a model holds, by where they are."""
    found: dict[str, weakref.ref] = {"model": weakref.ref(net)}
    seen = set()

    def walk(thing, path: str) -> None:
        # The detector of hangs and states are the process'.
        if id(thing) in seen or isinstance(thing, (weakref.ref, torch.nn.Module, HangDetector, enum.Enum)):
            return
        seen.add(id(thing))
        if isinstance(thing, (list, tuple, deque)):
            for number, each in enumerate(thing):
                walk(each, f"{path}[{number}]")
        elif isinstance(thing, dict):
            for key, each in thing.items():
                walk(each, f"{path}[{key if isinstance(key, str) else type(key).__name__}]")
        elif isinstance(thing, torch.Tensor):
            found[path] = weakref.ref(thing)
            if isinstance(thing, DTensor):
                walk(thing._local_tensor, f"{path}.local")
        elif type(thing).__module__.startswith("weft.") and hasattr(thing, "__dict__"):
            found[path] = weakref.ref(thing)
            for name, each in vars(thing).items():
                walk(each, f"{path}.{name}")

    for unit in units(net):
        walk(unit, unit.name or "root")
    walk(list(more), "other")
    return found


def training(net) -> list:
    optimizer = torch.optim.AdamW(net.parameters())
    for seed in range(3):
        step(net, optimizer, seed)
    return [value for state in optimizer.state.values() for value in state.values()]


def training_by_microbatches(net) -> list:
    for last in (False, True):
        net.set_is_last_backward(last)
        step(net)
    return []


def evaluation(net) -> list:
    with torch.no_grad():
        net(nets.data(1, 4)[0])
    return []


def forward_without_backward(net) -> list:
    return [net(nets.data(1, 4)[0])]


def failed_forward(net) -> list:
    step(net)
    handle = net.blocks[1].down.register_forward_pre_hook(throw)
    with pytest.raises(Oops):
        net(nets.data(1, 4)[0])
    handle.remove()
    return []


def failed_backward(net) -> list:
    handle = net.blocks[1].register_forward_hook(fails_later)
    with pytest.raises(Oops):
        step(net)
    handle.remove()
    net.reset_iter_state()
    return []


def state_dict(net) -> list:
    return list(net.state_dict().values())


USES = [
    training,
    training_by_microbatches,
    evaluation,
    forward_without_backward,
    failed_forward,
    failed_backward,
    state_dict,
]


def survivors(references: dict[str, weakref.ref]) -> list[str]:
    """What is still alive, up to a moment later: gloo's thread lets go of a tensor shortly after its work is done."""
    deadline = time.monotonic() + 2
    while (alive := [name for name, ref in references.items() if ref() is not None]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return alive


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
@distributed(2)
def test_a_deleted_model_leaves_nothing_behind_without_the_cyclic_collector(strategy):
    for allocator in ("trace", "caching"):
        for use in USES:
            gc.collect()
            gc.disable()
            try:
                net = nets.shard(nets.make(), strategy=strategy, runtime=weft.RuntimeOptions(allocator=allocator))
                references = watched(net, *use(net)) | watched(net)
                del net
                alive = survivors(references)
            finally:
                gc.enable()
            assert not alive, f"after {use.__name__}, {allocator}: {alive}"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
@distributed(2)
def test_a_block_that_is_kept_keeps_nothing_of_its_model_and_trains_on_by_itself(strategy):
    plain, sharded = (torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4))) for _ in range(2))
    sharded.load_state_dict(plain.state_dict())
    for block in sharded:
        weft.fully_shard(block, strategy=strategy)
    weft.fully_shard(sharded, strategy=strategy)
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    mine = rows.chunk(2)[dist.get_rank()]
    sharded(mine).square().mean().backward()
    plain(rows).square().mean().backward()
    kept, others = sharded[2], [weakref.ref(sharded[number]._weft_unit) for number in (0, 1, 3)]
    gc.collect()
    gc.disable()
    try:
        del sharded, block
        assert not any(unit() is not None for unit in others)
    finally:
        gc.enable()
    for _ in range(2):
        kept(mine).square().mean().backward()
        plain[2](rows).square().mean().backward()
    for parameter, original in zip(kept.parameters(), plain[2].parameters()):
        torch.testing.assert_close(parameter.grad.full_tensor(), original.grad)
