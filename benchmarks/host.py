"""The host time of sharding, per unit and step, on many tiny units, for which all other costs are negligible.

    weft bench host --ranks 1

A step is only forward and backward, and the time of the same layers without sharding is subtracted. Times are CPU time
of the process, so they do not include the time of other processes.

The benchmark also counts the calls of Python functions in the files of each library, during a steady step of three
layers and a root. This number does not depend on the machine.

The last line is about graphs. It shows the host time of one replayed scope (a captured part of a model), forward and
backward, without its kernels, and the number of operators that an eager call of the scope launches.
"""

import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from _report import parser
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import weft
from weft.graphs.tape import Tape

UNITS, WIDTH = 64, 8
FILES = {"weft": (weft.__path__[0],), "FSDP2": (f"{torch.distributed.fsdp.__path__[0]}/_fully_shard",)}
"""For each library, the paths of the files whose functions are counted."""


def model(fully_shard: Callable | None, units: int = UNITS) -> nn.Module:
    """Return layers of 72 parameters. Each layer is a separate unit, or unsharded if `fully_shard` is None."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(units)))
    if fully_shard is not None:
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
    return net


def seconds(net: nn.Module, steps: int) -> float:
    """Return the CPU seconds of one forward and backward."""
    rows = torch.ones(2, WIDTH)
    begin = time.process_time()
    for _ in range(steps):
        net.zero_grad()
        net(rows).sum().backward()
    return (time.process_time() - begin) / steps


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Apply the block; [rows, WIDTH] -> [rows, WIDTH]."""
        return rows + self.down(nn.functional.gelu(self.up(self.norm(rows))))


def replayed(steps: int) -> tuple[float, int]:
    """Return the host's microseconds per replayed scope, and the number of operators that the replay replaces."""
    calls = 0
    seconds_of = []
    for scopes in (UNITS, 0):  # the difference is the time of the scopes alone
        net = nn.Sequential(*(Block() for _ in range(UNITS)), nn.Linear(WIDTH, WIDTH))
        chosen = [str(number) for number in range(scopes)] or [str(UNITS)]
        graphs = weft.Graphs(modules=chosen, warmup=1, backend="tape")
        weft.fully_shard(net, runtime=weft.RuntimeOptions(graphs=graphs))
        if not scopes:
            for block in net[:-1]:
                block.forward = lambda rows: rows  # type: ignore[method-assign]
        seconds(net, 4)
        lengths: list[int] = []
        with patch.object(Tape, "replay", lambda tape, lengths=lengths: lengths.append(len(tape.calls))):
            seconds_of.append(seconds(net, steps))
        calls = calls or sum(lengths) // (steps * UNITS)
    return (seconds_of[0] - seconds_of[1]) / UNITS * 1e6, calls


def calls(net: nn.Module, files: tuple[str, ...]) -> int:
    """Count the calls of Python functions of `files` in one steady forward and backward on this thread."""
    rows, found = torch.ones(2, WIDTH), 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(files)

    for _ in range(5):
        net.zero_grad()
        net(rows).sum().backward()
    net.zero_grad()
    sys.setprofile(count)
    try:
        net(rows).sum().backward()
    finally:
        sys.setprofile(None)
    return found


def main() -> None:
    """Measure the libraries alternately; print microseconds per unit and step, and the ratio."""
    options = parser(__doc__, rounds=9, steps=10).parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sides = {"plain": model(None), "weft": model(weft.fully_shard), "FSDP2": model(torch_fully_shard)}
    called = {
        name: calls(model(shard, units=3), FILES[name])
        for name, shard in (("weft", weft.fully_shard), ("FSDP2", torch_fully_shard))
    }
    rounds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(options.rounds + 1):
        for name, net in sides.items():
            taken = seconds(net, options.steps)
            if number:
                rounds[name].append(taken)
    if dist.get_rank() == 0:
        machine = f"{os.cpu_count()} cores {platform.machine()}"
        print(f"{dist.get_world_size()} ranks, 1 thread each, gloo, torch {torch.__version__}, {machine}")
        own = {name: [t - p for t, p in zip(times, rounds["plain"])] for name, times in rounds.items()}
        print(f"{'side':8}{'us per unit and step':>22}{'weft / side':>13}{'calls, 3 layers and a root':>29}")
        for name in ("weft", "FSDP2"):
            ratio = statistics.median(ours / theirs for ours, theirs in zip(own["weft"], own[name]))
            print(f"{name:8}{statistics.median(own[name]) / UNITS * 1e6:22.0f}{ratio:13.2f}{called[name]:29}")
        if dist.get_world_size() == 1:
            rounds_of = [replayed(options.steps) for _ in range(3)]
            taken = statistics.median(each for each, _ in rounds_of)
            print(f"a replayed scope: {taken:.0f} us of the host in place of {rounds_of[0][1]} operators")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
