"""What was lent for a moment comes back, whatever ran; and a new plan is never there beside the old one."""

import math
from unittest import mock

import pytest
import torch
from torch import nn

import weft
from tests.fsdp import nets
from tests.fsdp.seams.truth import naming
from tests.pool import distributed
from weft.memory.pool import Pool, Transient

HALF = weft.MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Some(nn.Module):
    """Four blocks, of which those in `path` run; with `parts`, only these layers of each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nets.Block(13, 29) for _ in range(4))
        self.last = nn.Linear(13, 5)
        self.path: tuple[int, ...] = (0, 1, 2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.path:
            x = self.blocks[number](x)
        return self.last(x)


def live(net: nn.Module) -> dict[str, int]:
    return {role: pool["live"] for role, pool in weft.memory_report(net)["transient"].items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "allocator"),
    [
        ("no_shard", "caching"),
        ("optim", "trace"),
        ("optim_grads", "trace"),
        ("optim_grads_params", "trace"),
        ("optim_grads_params", "caching"),
    ],
)
@distributed(2)
def test_staging_of_offloaded_weights_comes_back_when_units_are_skipped(strategy, allocator):
    net = Some()
    options = {"strategy": strategy, "mp_policy": HALF, "offload_policy": weft.CPUOffloadPolicy()}
    for block in net.blocks:
        weft.fully_shard(block, **options)
    weft.fully_shard(net, **options, runtime=weft.RuntimeOptions(allocator=allocator))
    paths = [(0, 1, 2, 3), (0, 2, 3), (3,), (), (0, 1, 2, 3), (1, 0)]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for round_ in range(2):
        for path in paths:
            with naming("round", round_, "path", path):
                net.path = path
                with torch.no_grad():
                    net(torch.ones(2, 13))
                assert live(net) == dict.fromkeys(live(net), 0), "after an evaluation"
                net(torch.ones(2, 13)).float().square().mean().backward()
                assert live(net) == dict.fromkeys(live(net), 0), "after a backward"
                optimizer.step()
                optimizer.zero_grad()


@distributed(2)
def test_what_skipped_units_took_does_not_grow_from_step_to_step():
    net = Some()
    options = {"strategy": "optim_grads", "mp_policy": HALF, "offload_policy": weft.CPUOffloadPolicy()}
    for block in net.blocks:
        weft.fully_shard(block, **options)
    weft.fully_shard(net, **options, runtime=weft.RuntimeOptions(allocator="caching"))
    net.path = (0, 2)
    peaks = []
    for _ in range(4):
        net(torch.ones(2, 13)).float().square().mean().backward()
        peaks.append(weft.memory_report(net)["transient"]["gathered weights"]["peak"])
    assert live(net)["gathered weights"] == 0
    assert peaks[1:] == peaks[1:2] * 3, "from the second step on one unit is gathered ahead, and that is all"


class Watched:
    """The most bytes of slabs that were there at once, by every way in which a pool can ask for memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = 0
        self._storages: list[torch.UntypedStorage] = []
        originals = {name: getattr(torch, name) for name in ("empty", "zeros", "empty_like", "empty_strided")}

        def watch(name):
            def made(*args, **kwargs):
                tensor = originals[name](*args, **kwargs)
                self._see(tensor.untyped_storage())
                return tensor

            return made

        resize = torch.UntypedStorage.resize_

        def resized(storage, size):
            done = resize(storage, size)
            self._see(storage)
            return done

        for name in originals:
            monkeypatch.setattr(torch, name, watch(name))
        monkeypatch.setattr(torch.UntypedStorage, "resize_", resized)

    def _see(self, storage: torch.UntypedStorage) -> None:
        if all(storage._cdata != other._cdata for other in self._storages):
            self._storages.append(storage)
        self.most = max(self.most, sum(each.nbytes() for each in self._storages))


def step(pool: Pool, together: list[list[Transient]]) -> None:
    """A step in which each of these sets is alive at once."""
    for alive in together:
        for each in alive:
            pool.take(each)
        for each in alive:
            pool.give(each)
    pool.end_step()


def test_a_new_plan_never_holds_the_old_slab_and_the_new_one(monkeypatch):
    """Steps that need more and less by turns; each begins from a plan that fits the one before."""
    kib = 1024
    transients = [Transient(size * kib, torch.uint8, torch.device("cpu")) for size in (64, 96, 160, 224, 48)]
    small, large = [[transients[0]], [transients[1]]], [transients[:4], [transients[4], transients[3]]]
    pool = Pool(True)
    step(pool, small)
    for together in (large, [transients], small, [[transients[4]]], [transients]):
        with monkeypatch.context() as patch:
            watched = Watched(patch)
            before, plans = pool.slab_bytes, pool.plans
            pool.foresee(together)
            assert pool.plans == plans or watched.most <= max(before, pool.slab_bytes), "foreseen"
        step(pool, together)  # on the plan: takes nothing of its own
        with monkeypatch.context() as patch:
            watched = Watched(patch)
            before = pool.slab_bytes
            pool.outdated = True
            pool.end_step()
            assert watched.most <= max(before, pool.slab_bytes), (watched.most, before, pool.slab_bytes)


def test_a_new_plan_at_the_end_of_a_step_resizes_in_place_or_lets_the_old_one_go_first(monkeypatch):
    first, second = (Transient(1 << 16, torch.uint8, torch.device("cpu")) for _ in range(2))
    pool = Pool(True)
    step(pool, [[first], [second]])  # they share a place
    assert pool.slab_bytes == 1 << 16
    pool.take(first)
    pool.take(second)  # has no place beside the first: takes memory of its own for now
    pool.give(first)
    pool.give(second)
    with monkeypatch.context() as patch:
        watched = Watched(patch)
        pool.end_step()
        assert pool.slab_bytes == 2 << 16
        assert watched.most <= 2 << 16, f"{watched.most} bytes were there for a slab of {pool.slab_bytes}"


@pytest.mark.slow
@distributed(2)
def test_a_new_plan_of_a_model_never_holds_the_old_slab_and_the_new_one():
    net = Some()
    for block in net.blocks:
        weft.fully_shard(block)
    weft.fully_shard(net)
    patch = pytest.MonkeyPatch()
    adopt = Pool._adopt
    seen = []

    def adopting(pool, plan):
        with pytest.MonkeyPatch.context() as inner:
            watched = Watched(inner)
            before = pool.slab_bytes
            adopt(pool, plan)
        seen.append((watched.most, before, pool.slab_bytes))

    patch.setattr(Pool, "_adopt", adopting)
    try:
        for path in [(0, 1), (0, 1, 2, 3), (3, 2, 1, 0), (0, 1, 0, 1), (2,), (0, 1, 2, 3)]:
            net.path = path
            net(torch.ones(2, 13)).square().mean().backward()
            with torch.no_grad():
                net(torch.ones(2, 13))
    finally:
        patch.undo()
    assert len(seen) > 2
    for most, before, after in seen:
        assert most <= max(before, after), seen


# --- memory comes with unspecified contents ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@distributed(2)
def test_what_memory_held_before_is_in_no_gradient_and_no_norm(strategy):
    """Padding between parameters and parameters without gradient lie in the same buffers."""
    take = Pool.take

    def garbage(pool: Pool, transient: Transient) -> torch.Tensor:
        return take(pool, transient).fill_(math.nan)

    batches = nets.data(3, 4)
    plain = nets.train(nets.make(), batches, microbatches=2)
    with mock.patch.object(Pool, "take", garbage):
        net = nets.shard(nets.make(), strategy=strategy)
        run = nets.train_here(net, batches, microbatches=2, clip=weft.optim.clip_grad_norm_)  # reads all of a buffer
    for what in ("norms", "gradients", "weights"):
        torch.testing.assert_close(run[what], plain[what])
