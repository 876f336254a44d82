"""Random sequences of what a user may call, on two models beside each other, against the same calls of plain ones.

A program is data: which models, and what is done with them. Every rank runs it with its rows, and a plain copy of each
model with the rows of all. What makes no sense at a point, such as a backward without a forward, is left out there.
"""

import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import weft
from tests.fsdp import nets
from tests.fsdp.failing import Oops, fails_later, throw
from tests.fsdp.seams.truth import STRATEGIES
from weft.fsdp.gradients.group import Where
from weft.fsdp.runtime.passes import Pass
from weft.fsdp.unit import State

DEPTH = 2
ROOT = DEPTH
"""The number of the root among the units of a model: behind its blocks."""
RANKS = 2
REDUCES_FOR_S = 60


@dataclass(frozen=True)
class Setup:
    """How both models are sharded. `mesh`: (outer, shard). `mixed`: main weights in fp32, which compute in fp64."""

    strategy: str = "optim_grads_params"
    mesh: tuple[int, ...] = (RANKS,)
    allocator: str = "trace"
    reshard_after_forward: bool | None = None
    mixed: bool = False
    offload: bool = False
    recompute: str | None = None
    max_live_reduce_buffers: int = 2
    check_collectives: bool = True

    @property
    def defers(self) -> bool:
        """Whether gradients wait for the last microbatch."""
        return self.strategy in ("no_shard", "optim") or len(self.mesh) == 2


class Forward(NamedTuple):
    """A forward whose backward may follow; at most two of a model wait for theirs."""

    model: int


class Backward(NamedTuple):
    """Of the forward that waits longest, or shortest; `twice`: through a retained graph, where memory does not move."""

    first: bool
    last_microbatch: bool
    twice: bool = False


class BackwardOfBoth(NamedTuple):
    """One backward of a forward of each model."""

    last_microbatch: bool


class Train(NamedTuple):
    """A microbatch, forward and backward."""

    model: int
    kind: str


class TrainBlock(NamedTuple):
    """A microbatch of one block alone."""

    model: int
    block: int


class Keep(NamedTuple):
    """Whether weights stay after backward."""

    model: int
    keeps: bool


class Evaluate(NamedTuple):
    """A forward without gradients, of the model or of one block alone."""

    model: int
    unit: int


class ForwardAlone(NamedTuple):
    """A forward with gradients that no backward follows."""

    model: int


class Step(NamedTuple):
    """Of the optimizer, if gradients are due."""

    model: int


class ZeroGrad(NamedTuple):
    """By the model, or by the optimizer."""

    model: int
    by: str
    to_none: bool


class Clip(NamedTuple):
    """The norm of all gradients, if they are due."""

    model: int
    most: float


class Unshard(NamedTuple):
    """One unit, or all (None)."""

    model: int
    unit: int | None
    asynchronous: bool


class Reshard(NamedTuple):
    """One unit, or all (None)."""

    model: int
    unit: int | None


class Load(NamedTuple):
    """A state dict with other values."""

    model: int


class Read(NamedTuple):
    """A state dict."""

    model: int


class Write(NamedTuple):
    """To a sharded parameter."""

    model: int
    parameter: int
    way: str


class Fail(NamedTuple):
    """An exception leaves a pass."""

    model: int
    block: int
    where: str


class Reset(NamedTuple):
    """`reset_iter_state`."""

    model: int


class Freeze(NamedTuple):
    """A block, or make it train again; on one rank alone, or on all (None)."""

    model: int
    block: int
    trains: bool
    rank: int | None = None


class Adapt(NamedTuple):
    """A block by parameters that no unit has; on one rank alone, or on all (None). The next pass refuses them."""

    model: int
    block: int
    rank: int | None


WAYS = ("add_", "data", "local", "copy_")
FAILURES = (
    "in a forward",
    "in a hook before a forward",
    "in a hook behind a forward",
    "in a forward inside of the block",
    "in an evaluation",
    "in a backward",
    "in a backward inside of the block",
    "at the beginning of a backward",
    "in a backward of both",
)


def setup_of(r: Random) -> Setup:
    """Any way to shard."""
    return Setup(
        strategy=r.choice(STRATEGIES),
        mesh=r.choice([(RANKS,), (RANKS,), (1, RANKS), (RANKS, 1)]),
        allocator=r.choice(["trace", "caching"]),
        reshard_after_forward=r.choice([None, True, False]),
        mixed=r.random() < 0.3,
        offload=r.random() < 0.2,
        recompute=r.choice([None, None, "non-reentrant", "reentrant"]),
        max_live_reduce_buffers=r.choice([1, 2]),
        check_collectives=r.random() < 0.7,
    )


def actions_of(r: Random, parts: int) -> list:
    """`parts` that are one action, or some in a row that are seldom found by chance."""
    return list(chain.from_iterable(_part_of(r, r.choice([0, 0, 0, 1])) for _ in range(parts)))


def _part_of(r: Random, m: int) -> tuple:
    """Of what is done with model `m`."""

    def flag() -> bool:
        return r.random() < 0.5

    def any_units() -> int | None:
        return r.choice([None, *range(DEPTH + 1)])

    makes: dict[str, Callable[[], Any]] = {
        "forward": lambda: Forward(m),
        "backward": lambda: Backward(m == 0, flag(), twice=r.random() < 0.2),
        "backward of both": lambda: BackwardOfBoth(flag()),
        "train": lambda: Train(m, r.choice(["last", "not last", "without sync"])),
        "train a block": lambda: TrainBlock(m, r.randrange(DEPTH)),
        "evaluate": lambda: Evaluate(m, r.randrange(DEPTH + 1)),
        "forward alone": lambda: ForwardAlone(m),
        "step": lambda: Step(m),
        "zero": lambda: ZeroGrad(m, r.choice(["model", "optimizer"]), flag()),
        "clip": lambda: Clip(m, r.choice([1e-2, 1e2])),
        "unshard": lambda: Unshard(m, any_units(), flag()),
        "reshard": lambda: Reshard(m, any_units()),
        "keep": lambda: Keep(m, flag()),
        "load": lambda: Load(m),
        "read": lambda: Read(m),
        "write": lambda: Write(m, r.randrange(30), r.choice(WAYS)),
        "fail": lambda: Fail(m, r.randrange(DEPTH), r.choice(FAILURES)),
        "reset": lambda: Reset(m),
        "freeze": lambda: Freeze(m, r.randrange(DEPTH), flag(), r.choice([None, *range(RANKS)])),
        "adapt": lambda: Adapt(m, r.randrange(DEPTH), r.choice([None, *range(RANKS)])),
    }
    some = lambda *names: makes[r.choice(names or list(makes))]()  # noqa: E731
    run = lambda: some("train", "evaluate", "forward")  # noqa: E731
    return r.choice(
        [
            lambda: (some(),),
            lambda: (some("unshard"), some("write", "step", "load"), run()),
            lambda: (some("train"), some(), some("train"), some("step")),
            lambda: (some("forward"), some(), some("backward")),
            lambda: (some("forward"), some("forward"), some(), some("backward"), some("backward"), some("step")),
            lambda: (some("train"), some("fail"), some("zero", "step", "evaluate", "train"), some("train")),
            lambda: (Forward(0), some(), Forward(1), some("backward of both")),
            lambda: (some("freeze"), some("train"), some("freeze", "adapt"), some("train"), some("step")),
        ]
    )()


class Pair:
    """A model, plain and sharded, and what is known of it."""

    def __init__(self, number: int, setup: Setup) -> None:
        self.setup = setup
        dtype = torch.float32 if setup.mixed else torch.float64
        self.plain = nets.make(seed=number, depth=DEPTH, width=5, hidden=7).to(dtype)
        self.sharded = nets.make(setup.recompute, seed=number, depth=DEPTH, width=5, hidden=7).to(dtype)
        runtime = weft.RuntimeOptions(
            allocator=setup.allocator,
            max_live_reduce_buffers=setup.max_live_reduce_buffers,
            check_collectives=setup.check_collectives,
        )
        nets.shard(
            self.sharded,
            strategy=setup.strategy,
            mesh=init_device_mesh("cpu", setup.mesh, mesh_dim_names=("outer", "shard")[-len(setup.mesh) :]),
            offload_policy=weft.CPUOffloadPolicy(pin_memory=False) if setup.offload else None,
            reshard_after_forward=setup.reshard_after_forward,
            runtime=runtime,
            mp_policy=weft.MixedPrecisionPolicy(param_dtype=torch.float64) if setup.mixed else None,
        )
        self.units = [*self.sharded.blocks, self.sharded]
        self.mine = dict(self.sharded.named_parameters())
        """The sharded parameters, whatever is registered."""
        self.optimizers = [torch.optim.SGD(each.values(), lr=0.05, momentum=0.9) for each in (self.truth, self.mine)]
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Losses whose backward may follow, plain and sharded."""
        self.due = True
        """Whether the gradients are those of all backwards so far."""
        self.handed_out = self.gradients()
        """The gradients when they last were due."""
        self.held: dict[int, bool] = {}
        """The units that the user unsharded, and whether what is registered is what the main weights are."""
        self.batches = 0
        self.frozen: list[set[int]] = [set() for _ in range(RANKS)]
        """The blocks that each rank has frozen."""

    @property
    def truth(self) -> dict[str, nn.Parameter]:
        return dict(self.plain.named_parameters())

    def rows(self) -> torch.Tensor:
        """The next batch, of all ranks."""
        self.batches += 1
        return torch.randint(0, 11, (2 * RANKS, 5), generator=torch.Generator().manual_seed(self.batches))

    def plain_outputs(self, rows: torch.Tensor, module: nn.Module, rank: int) -> torch.Tensor:
        """Of the plain model with what `rank` has frozen."""
        frozen = {id(p) for block in self.frozen[rank] for p in self.plain.blocks[block].parameters()}
        weights = {n: (p.detach() if id(p) in frozen else p).double() for n, p in module.named_parameters()}
        if module is self.plain:
            weights["head.weight"] = weights["embedding.weight"]
        return torch.func.functional_call(module, weights, (rows,))

    def losses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the global batch in the plain model, of this rank's rows in the sharded one."""
        rows = self.rows()
        self.begins()
        parts = rows.chunk(RANKS)
        plain = [
            F.cross_entropy(self.plain_outputs(part[:, :-1], self.plain, rank).flatten(0, 1), part[:, 1:].flatten())
            for rank, part in enumerate(parts)
        ]
        sharded = nets.loss_of(self.sharded, parts[dist.get_rank()])
        close(sharded.detach(), plain[dist.get_rank()].detach(), self.setup, "the loss")
        return torch.stack(plain).mean(), sharded

    def begins(self) -> None:
        """A pass begins: what the user holds is made anew if it must be."""
        self.held = dict.fromkeys(self.held, True)

    def writes(self) -> None:
        """Weights are written to: a backward of an earlier forward would be refused by torch."""
        self.waiting.clear()
        self.held = dict.fromkeys(self.held, False)

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {name: None if p.grad is None else p.grad.clone() for name, p in self.truth.items()}

    def says(self, last_microbatch: bool, sync: bool = True) -> None:
        """What kind of backward follows."""
        self.sharded.set_is_last_backward(last_microbatch)
        self.sharded.set_requires_gradient_sync(sync)

    def has_run(self, last_microbatch: bool, sync: bool = True) -> None:
        """A backward of that kind is over."""
        self.due = sync and (last_microbatch or not self.setup.defers)

    def loses(self) -> None:
        """What was accumulated and not handed out is gone."""
        if not self.due:
            for name, parameter in self.truth.items():
                parameter.grad = self.handed_out[name]
            self.due = True

    def check(self) -> None:
        """Weights, gradients and what is registered are right."""
        for name, parameter in self.truth.items():
            close(nets.full(self.mine[name]), parameter.detach(), self.setup, name)
            if self.due:
                found = self.mine[name].grad
                close(
                    None if found is None else nets.full(found), parameter.grad, self.setup, f"the gradient of {name}"
                )
        registered = dict(self.sharded.named_parameters())
        for name, parameter in registered.items():
            unit = int(name.split(".")[1]) if name.startswith("blocks") else ROOT
            if unit in self.held:
                if isinstance(parameter, DTensor):  # a pass of its own has ended the hold, as with torch
                    del self.held[unit]
                elif self.held[unit]:
                    close(parameter.detach(), self.truth[name].detach(), self.setup, f"the unsharded {name}")
        if self.due:
            self.handed_out = self.gradients()

    def check_rest(self) -> None:
        """Nobody has left anything behind."""
        for name, parameter in self.sharded.named_parameters():
            assert isinstance(parameter, DTensor), f"{name} is unsharded at the end"
        for module in self.units:
            unit = module._weft_unit
            assert unit.state is State.AT_REST, f"{unit} is {unit.state.value}"
            assert not unit.holders, f"{unit} is held by {[holder.name for holder in unit.holders]}"
            for group in unit.groups:
                assert group.gradients.where is Where.NOWHERE, f"gradients of {unit} are {group.gradients.where.value}"
        assert self.sharded._weft_driver.engine.passes.current is Pass.IDLE
        live = {role: each["live"] for role, each in weft.memory_report(self.sharded)["transient"].items()}
        assert set(live.values()) == {0}, f"transient bytes: {live}"


def close(actual: torch.Tensor | None, expected: torch.Tensor | None, setup: Setup, what: str) -> None:
    """The values are equal up to rounding."""
    if actual is None or expected is None:
        assert actual is expected, f"{what} is {'None' if actual is None else 'there'}, not so in the plain model"
        return
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if setup.mixed else {"rtol": 1e-8, "atol": 1e-10}
    torch.testing.assert_close(
        actual, expected, check_dtype=False, **tolerance, msg=lambda said: f"{what}: {said.splitlines()[2]}"
    )


class Program:
    """Runs actions on two pairs."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.pairs = [Pair(0, setup), Pair(1, setup)]

    def run(self, action: Any) -> None:
        """Run it, and check the models that it is about."""
        getattr(self, f"_{type(action).__name__}")(action)
        about = [action.model] if hasattr(action, "model") and not isinstance(action, Fail) else [0, 1]
        for number in about:
            self.pairs[number].check()

    def end(self) -> None:
        """A whole step of both, after which all is at rest."""
        for pair in self.pairs:
            pair.check()
        for number, pair in enumerate(self.pairs):
            pair.waiting.clear()
            for unit in pair.units:
                unit.reshard()
            pair.held.clear()
            self._Keep(Keep(number, False))
            self._Train(Train(number, "last"))
            pair.check()
            self._Step(Step(number))
            pair.check()
        for pair in self.pairs:
            pair.check_rest()

    def _Forward(self, action: Forward) -> None:
        pair = self.pairs[action.model]
        if len(pair.waiting) < 2:
            pair.waiting.append(pair.losses())

    def _Backward(self, action: Backward) -> None:
        pair = next((each for each in (self.pairs if action.first else self.pairs[::-1]) if each.waiting), None)
        if pair is not None:
            pair.says(action.last_microbatch)
            for loss in pair.waiting.pop(0 if action.first else -1):
                if action.twice and self.setup.allocator == "caching":
                    loss.backward(retain_graph=True)
                loss.backward()
            pair.has_run(action.last_microbatch)

    def _BackwardOfBoth(self, action: BackwardOfBoth) -> None:
        if all(pair.waiting for pair in self.pairs):
            for pair in self.pairs:
                pair.says(action.last_microbatch)
            for one, other in zip(*(pair.waiting.pop() for pair in self.pairs)):
                (one + other).backward()
            for pair in self.pairs:
                pair.has_run(action.last_microbatch)

    def _Train(self, action: Train) -> None:
        pair = self.pairs[action.model]
        kind = (action.kind == "last", action.kind != "without sync")
        losses = pair.losses()
        pair.says(*kind)
        for loss in losses:
            loss.backward()
        pair.has_run(*kind)

    def _TrainBlock(self, action: TrainBlock) -> None:
        pair = self.pairs[action.model]
        inputs = torch.linspace(-1, 1, 2 * RANKS * 5, dtype=torch.float64).view(2 * RANKS, 5)
        if action.block in pair.held:
            pair.held[action.block] = True
        pair.says(True)
        for rank, part in enumerate(inputs.chunk(RANKS)):
            part = part.detach().requires_grad_()  # the block may be frozen
            plain = pair.plain_outputs(part, pair.plain.blocks[action.block], rank)
            (plain.square().mean() / RANKS).backward()
            if rank == dist.get_rank():
                mine = part.detach().requires_grad_()
        pair.sharded.blocks[action.block](mine).square().mean().backward()
        pair.has_run(True)

    def _Keep(self, action: Keep) -> None:
        self.pairs[action.model].sharded.set_reshard_after_backward(not action.keeps)

    def _Evaluate(self, action: Evaluate) -> None:
        pair = self.pairs[action.model]
        rows, module, plain = pair.rows(), pair.units[action.unit], [*pair.plain.blocks, pair.plain][action.unit]
        if action.unit == ROOT:
            pair.begins()
        elif action.unit in pair.held:
            pair.held[action.unit] = True
        if action.unit != ROOT:
            rows = torch.linspace(-1, 1, 2 * RANKS * 5, dtype=torch.float64).view(2 * RANKS, 5)
        with torch.no_grad():
            expected = pair.plain_outputs(rows, plain, 0)
            close(module(rows), expected, self.setup, "the output")

    def _ForwardAlone(self, action: ForwardAlone) -> None:
        self.pairs[action.model].losses()

    def _Step(self, action: Step) -> None:
        pair = self.pairs[action.model]
        if pair.due:
            pair.writes()
            for optimizer in pair.optimizers:
                optimizer.step()

    def _ZeroGrad(self, action: ZeroGrad) -> None:
        pair = self.pairs[action.model]
        if not pair.due:  # zero_grad does not reach what waits for its reduction, with torch's FSDP neither
            self._Reset(Reset(action.model))
        if action.by == "model":
            pair.plain.zero_grad(action.to_none)
            pair.sharded.zero_grad(action.to_none)
        else:
            for optimizer in pair.optimizers:
                optimizer.zero_grad(action.to_none)

    def _Clip(self, action: Clip) -> None:
        pair = self.pairs[action.model]
        if pair.due:
            norms = [torch.nn.utils.clip_grad_norm_(each.values(), action.most) for each in (pair.truth, pair.mine)]
            close(nets.full(norms[1]), norms[0], self.setup, "the norm of the gradients")

    def _Unshard(self, action: Unshard) -> None:
        pair = self.pairs[action.model]
        for number in range(DEPTH + 1) if action.unit is None else [action.unit]:
            handle = pair.units[number].unshard(async_op=action.asynchronous)
            if handle is not None:
                handle.wait()
            pair.held[number] = True

    def _Reshard(self, action: Reshard) -> None:
        pair = self.pairs[action.model]
        for number in range(DEPTH + 1) if action.unit is None else [action.unit]:
            pair.units[number].reshard()
            pair.held.pop(number, None)

    def _Load(self, action: Load) -> None:
        pair = self.pairs[action.model]
        pair.writes()
        for net in (pair.plain, pair.sharded):
            net.load_state_dict({name: 0.9 * value for name, value in net.state_dict().items()})
        pair.held.clear()

    def _Read(self, action: Read) -> None:
        pair = self.pairs[action.model]
        expected = pair.plain.state_dict()
        for name, value in pair.sharded.state_dict().items():
            assert isinstance(value, DTensor), f"{name} of the state dict is whole"
            close(nets.full(value), expected[name], self.setup, f"{name} of the state dict")
        pair.held.clear()

    @torch.no_grad()
    def _Write(self, action: Write) -> None:
        pair = self.pairs[action.model]
        pair.writes()
        name = list(pair.mine)[action.parameter % len(pair.mine)]
        written = pair.mine[name]
        pair.truth[name].add_(0.1)
        if action.way == "copy_":
            written.copy_(written + 0.1)
        else:
            {"add_": written, "data": written.data, "local": written.to_local()}[action.way].add_(0.1)

    def _Fail(self, action: Fail) -> None:
        pair, where = self.pairs[action.model], action.where
        block = pair.sharded.blocks[action.block]
        handle = {
            "in a forward": lambda: block.down.register_forward_pre_hook(throw),
            "in a hook before a forward": lambda: block.register_forward_pre_hook(throw),
            "in a hook behind a forward": lambda: block.register_forward_hook(throw),
            "in a forward inside of the block": lambda: block.up.register_forward_hook(throw),
            "in an evaluation": lambda: block.down.register_forward_pre_hook(throw),
            "in a backward": lambda: block.register_forward_hook(fails_later),
            "in a backward inside of the block": lambda: block.up.register_forward_hook(fails_later),
            "at the beginning of a backward": lambda: pair.sharded.register_forward_hook(fails_later),
            "in a backward of both": lambda: block.register_forward_hook(fails_later),
        }[where]()
        both = where == "in a backward of both"
        mine = [each.rows().chunk(RANKS)[dist.get_rank()] for each in self.pairs]
        try:
            with torch.set_grad_enabled(where != "in an evaluation"):
                loss = nets.loss_of(pair.sharded, mine[action.model])
                if both:
                    other = self.pairs[1 - action.model]
                    other.begins()
                    loss = loss + nets.loss_of(other.sharded, mine[1 - action.model])
                loss.backward()
        except Oops:
            pass
        else:
            raise AssertionError("nothing failed")
        finally:
            handle.remove()
        for each in self.pairs if both else [pair]:
            each.begins()
            if "backward" in where:  # whatever was accumulated before it is gone with it
                each.plain.zero_grad()
                each.due = True

    def _Reset(self, action: Reset) -> None:
        pair = self.pairs[action.model]
        pair.sharded.reset_iter_state()
        pair.loses()

    def _Freeze(self, action: Freeze) -> None:
        pair = self.pairs[action.model]
        pair.waiting.clear()
        here = dist.get_rank()
        alone = action.rank is not None and self.setup.check_collectives  # else nothing tells them apart
        for rank in [action.rank] if alone else range(RANKS):
            (pair.frozen[rank].discard if action.trains else pair.frozen[rank].add)(action.block)
        trains = action.block not in pair.frozen[here]
        pair.sharded.blocks[action.block].requires_grad_(trains)
        for name, parameter in pair.mine.items():  # also where the user has unsharded them
            if name.startswith(f"blocks.{action.block}."):
                parameter.requires_grad_(trains)
        pair.plain.blocks[action.block].requires_grad_(any(action.block not in each for each in pair.frozen))

    def _Adapt(self, action: Adapt) -> None:
        pair = self.pairs[action.model]
        rows = pair.rows()
        if action.rank in (None, dist.get_rank()):
            block = pair.sharded.blocks[action.block]
            block.up = nn.Sequential(block.up, nn.Linear(7, 7).double())
            try:
                with pytest.raises(RuntimeError, match=r"'blocks\.\d\.up\.1\.weight' was added to"):
                    nets.loss_of(pair.sharded, rows[:1])
            finally:
                block.up = block.up[0]


def run(setup: Setup, actions: list) -> str | None:
    """What goes wrong first, on any rank."""
    hosts = dist.new_group()

    def somewhere(wrong: str | None) -> str | None:
        said: list[Any] = [None] * dist.get_world_size()
        if not any_of(wrong is not None, hosts):
            return None
        dist.all_gather_object(said, wrong, group=hosts)
        return next(f"on rank {rank}, {each}" for rank, each in enumerate(said) if each is not None)

    program = Program(setup)
    for number, action in enumerate([*actions, None]):
        wrong = None
        try:
            if action is None:
                program.end()
            else:
                program.run(action)
        except Exception:  # whatever the engine raises is a result, and the other ranks wait to hear it
            wrong = f"at {'the end' if action is None else f'action {number}, {action}'}:\n{traceback.format_exc()}"
        if wrong := somewhere(wrong):
            return wrong
    return None


def any_of(flag: bool, group: Any) -> bool:
    flags = torch.tensor([flag], dtype=torch.int32)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return bool(flags.item())


def readable(setup: Setup, actions: list) -> str:
    return "\n".join([f"    {setup},", "    [", *(f"        {action}," for action in actions), "    ],"])


def check(pool: Any, random: Random, parts: int) -> None:
    """Run a program; if it goes wrong, drop what it goes wrong without, and say what is left."""
    setup, actions = setup_of(random), actions_of(random, parts)
    wrong = pool.run(RANKS, run, setup, actions)[0]
    if wrong is None:
        return
    deadline = time.monotonic() + REDUCES_FOR_S
    for position in reversed(range(len(actions))):
        if time.monotonic() > deadline:
            break
        fewer = actions[:position] + actions[position + 1 :]
        if (still := pool.run(RANKS, run, setup, fewer)[0]) is not None:
            actions, wrong = fewer, still
    raise AssertionError(f"{wrong}\nthe program:\n{readable(setup, actions)}")


def settings_of(examples: int) -> settings:
    return settings(
        max_examples=examples,
        derandomize="WEFT_FUZZ" not in os.environ,  # the same programs each time, or `make fuzz` has new ones
        database=None,
        phases=[Phase.generate],  # what fails is reduced by `check`
        suppress_health_check=list(HealthCheck),
    )


# Truly random: choices that are drawn one by one would be much alike in the first few dozen programs.
RANDOM = st.randoms(use_true_random=True)


@pytest.mark.long
@settings_of(3)
@given(random=RANDOM)
def test_any_sequence_of_calls_computes_what_the_plain_models_do(pool, random):
    check(pool, random, parts=4)


@pytest.mark.long
@settings_of(7)
@given(random=RANDOM)
def test_any_long_sequence_of_calls_computes_what_the_plain_models_do(pool, random):
    check(pool, random, parts=6)
