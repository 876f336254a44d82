"""Transient memory: planned after a step, stable in address, and never shared by two that are alive."""

import gc
import weakref
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.memory.pool import Pool, Transient

CPU = torch.device("cpu")


def transient(numel: int = 200, **options) -> Transient:
    made = Transient(numel, torch.float32, CPU)
    vars(made).update(options)
    return made


def step(pool: Pool, *buffers: Transient) -> list[int]:
    """Take and give the buffers as layers do, one ahead; their addresses."""
    addresses = []
    for number, buffer in enumerate(buffers):
        addresses.append(pool.take(buffer).data_ptr())
        if number:
            pool.give(buffers[number - 1])
    pool.give(buffers[-1])
    pool.end_step()
    return addresses


def memory(buffer: Transient) -> int:
    return buffer.own.untyped_storage().nbytes()


def test_a_transient_has_memory_only_between_take_and_give():
    for planned in (True, False):
        pool, buffer = Pool(planned), transient()
        assert memory(buffer) == 0
        pool.take(buffer).fill_(1.0)
        assert memory(buffer) == buffer.nbytes == pool.live
        pool.give(buffer)
        assert memory(buffer) == 0 == pool.live
        assert pool.peak == buffer.nbytes


def test_steps_after_the_first_run_from_one_slab_at_fixed_addresses():
    pool, buffers = Pool(True), [transient() for _ in range(5)]
    step(pool, *buffers)
    allocations = pool.allocations
    addresses = step(pool, *buffers)
    for _ in range(3):
        assert step(pool, *buffers) == addresses
    assert pool.allocations == allocations and pool.fallbacks == 0
    assert len(set(addresses)) == 2, "layers gathered one ahead take turns in two places"
    assert pool.peak <= pool.slab_bytes < sum(buffer.nbytes for buffer in buffers)
    assert not any(map(memory, buffers))


def test_a_caching_pool_allocates_each_time_and_keeps_no_slab():
    pool, buffers = Pool(False), [transient() for _ in range(3)]
    for _ in range(2):
        before = pool.allocations
        step(pool, *buffers)
        assert pool.allocations == before + len(buffers)
    assert pool.slab_bytes == 0


def test_buffers_alive_together_never_share_memory_even_when_no_plan_foresaw_it():
    pool, buffers = Pool(True), [transient() for _ in range(4)]
    step(pool, *buffers)
    for number, buffer in enumerate(buffers):
        pool.take(buffer).fill_(number)
    for number, buffer in enumerate(buffers):
        assert buffer.tensor.eq(number).all()
    assert pool.fallbacks > 0
    for buffer in buffers:
        pool.give(buffer)
    pool.end_step()
    fallbacks = pool.fallbacks
    for number, buffer in enumerate(buffers):
        pool.take(buffer).fill_(number)
    assert pool.fallbacks == fallbacks, "the new plan knows that they meet"
    for number, buffer in enumerate(buffers):
        assert buffer.tensor.eq(number).all()


def test_steps_that_do_not_go_together_do_not_make_the_slab_grow_without_end():
    pool, buffers = Pool(True), [transient() for _ in range(12)]
    orders = [[(first * number) % 13 - 1 for number in range(1, 13)] for first in range(1, 13)]
    for order in orders:  # every two of them are neighbours somewhere
        step(pool, *(buffers[number] for number in order))
    assert pool.plans > 2
    assert pool.lower_bound <= pool.slab_bytes <= 1.5 * pool.lower_bound
    assert pool.fallbacks > 0 and pool.live == 0


def test_a_move_is_told_and_keeps_views_in_step():
    views = []
    pool, other = Pool(True), transient()
    moving = transient(on_move=views.append)
    step(pool, other, moving)
    pool.take(moving).fill_(3.0)
    assert moving.moves == 1 and views[-1] is moving.tensor
    pool.give(moving)
    step(pool, other, moving)
    assert moving.moves == 1
    step(pool, transient())
    assert pool.plans == 2
    step(pool, other, moving)
    assert moving.moves == 1, "its place in the new plan is that in the old one"


def test_a_buffer_whose_views_are_in_use_does_not_move():
    pool = Pool(True)
    fixed = transient(is_fixed=lambda: True)
    address = step(pool, fixed)
    assert step(pool, fixed) == address or fixed.moves == 0
    assert pool.plan is None, "no plan is made while a buffer must not move"


def test_an_unused_buffer_moves_out_for_one_that_must_not_move_and_comes_back():
    pool, views = Pool(True), []
    ahead = transient(is_evictable=lambda: True)
    now = transient(is_fixed=lambda: bool(views), is_evictable=lambda: True)
    step(pool, ahead)
    step(pool, now)
    pool.end_step()
    assert pool.plan.offsets[ahead] == pool.plan.offsets[now]
    views.append(step(pool, now))
    place = pool.take(ahead).fill_(2.0)
    assert not pool.has_room(now)
    pool.take(now).fill_(1.0)
    assert ahead.tensor is ahead.own and ahead.tensor.eq(2).all() and pool.live == now.nbytes + ahead.nbytes
    pool.come_back(ahead)
    assert ahead.tensor is place and place.eq(2).all() and not memory(ahead)
    moved = now.tensor is now.own  # pytest must not print a tensor without memory
    assert moved and now.tensor.eq(1).all(), "that moves out in turn"
    assert pool.has_room(transient(is_fixed=lambda: True)), "what has no place takes memory of its own"
    pool.give(now)
    pool.give(ahead)
    assert not pool.live


def test_a_buffer_that_is_computed_with_is_not_evicted():
    pool, views = Pool(True), []
    held, now = transient(), transient(is_fixed=lambda: bool(views))
    step(pool, held)
    step(pool, now)
    pool.end_step()
    views.append(step(pool, now))
    pool.take(held)
    with pytest.raises(RuntimeError, match="never in use at the same time"):
        pool.take(now)


def test_a_new_plan_never_holds_two_slabs():
    pool, small, large = Pool(True), transient(200), transient(400_000)
    allocated, resize = [], torch.UntypedStorage.resize_
    step(pool, large)

    def counted(storage, size):
        resize(storage, size)
        allocated.append(sum(each.nbytes() for each in {pool._slab.untyped_storage(), storage}))

    with mock.patch.object(torch.UntypedStorage, "resize_", counted), _Allocations() as made:
        for buffer in (large, small):
            pool.take(buffer)
        for buffer in (large, small):
            pool.give(buffer)
        allocated.clear()
        made.clear()
        pool.end_step()
    assert pool.plans == 2 and max(allocated) == pool.slab_bytes
    assert sum(made) < 4096, "nothing of the slab's size beside it"


class _Allocations(TorchDispatchMode):
    """Bytes of the tensors that are made."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __enter__(self):
        super().__enter__()
        return self.made

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "empty" in func.name():
            self.made.append(result.untyped_storage().nbytes())
        return result


def test_a_buffer_that_is_forgotten_has_no_place_in_the_next_plan():
    pool, buffers = Pool(True), [transient() for _ in range(3)]
    for buffer in buffers:
        pool.take(buffer)
    for buffer in buffers:
        pool.give(buffer)
    pool.end_step()
    before = pool.slab_bytes
    forgotten = weakref.ref(buffers[0])
    pool.forget(buffers.pop(0))
    step(pool, *buffers)
    gc.collect()
    assert forgotten() is None
    assert pool.lower_bound <= pool.slab_bytes < before and pool.plans == 2 and not pool.fallbacks


def test_buffers_that_may_meet_are_kept_apart_though_they_did_not_yet():
    pool, one, other = Pool(True), transient(), transient()
    for buffer in (one, other):
        pool.take(buffer)
        pool.give(buffer)
    pool.end_step([[one, other]])
    assert pool.plan.offsets[one] != pool.plan.offsets[other]
