"""Transient memory: planned after a step, stable in address, and never shared by two that are alive."""

import torch

from weft.memory.pool import Pool, Transient

CPU = torch.device("cpu")


def transient(numel: int = 200, **options) -> Transient:
    made = Transient(numel, torch.float32, CPU, **options)
    made.settle()
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


def test_a_buffer_whose_views_are_in_use_does_not_move():
    pool = Pool(True)
    fixed = transient(is_fixed=lambda: True)
    address = step(pool, fixed)
    assert step(pool, fixed) == address or fixed.moves == 0
    assert pool.plan is None, "no plan is made while a buffer must not move"


def test_a_buffer_held_in_advance_makes_room_for_one_that_must_not_move():
    pool, views = Pool(True), []
    ahead = transient(evict=lambda: pool.give(ahead) or True)
    now = transient(is_fixed=lambda: bool(views))
    step(pool, ahead)
    step(pool, now)
    pool.end_step(lambda one, other: False)
    assert pool.plan.offsets[ahead] == pool.plan.offsets[now]
    fallbacks = pool.fallbacks
    views.append(step(pool, now))
    pool.take(ahead)
    assert not pool.has_room(now)
    pool.take(now).fill_(1.0)
    assert pool.fallbacks == fallbacks and pool.live == now.nbytes


def test_buffers_that_may_meet_are_kept_apart_though_they_did_not_yet():
    pool, one, other = Pool(True), transient(), transient()
    for buffer in (one, other):
        pool.take(buffer)
        pool.give(buffer)
    pool.end_step(lambda a, b: {a, b} == {one, other})
    assert pool.plan.offsets[one] != pool.plan.offsets[other]
