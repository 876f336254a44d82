"""What benchmarks of two sides share: turns within each round, and the lines that say where and with what ratio."""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist


def parser(description: str | None, *, rounds: int = 5, steps: int = 0, link: str = "") -> argparse.ArgumentParser:
    """The options of a benchmark: its `rounds`, and where they have defaults or an example its `steps` and `link`."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds)
    if steps:
        made.add_argument("--steps", type=int, default=steps, help="steps per side and round")
    if link:
        made.add_argument("--link", metavar="RATE", help=f'limit each rank\'s network to this rate, as in "{link}"')
    return made


def slowest(work: Callable[[], object], times: int) -> float:
    """Seconds that `work` takes, the mean of `times`, on the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(times):
        work()
    taken = torch.tensor((time.perf_counter() - begin) / times)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def in_turn(sides: Mapping[str, Callable[[], object]], rounds: int, times: int) -> dict[str, list[float]]:
    """Seconds of every side, round by round, so that a machine that drifts drifts for all of them. Warmed up before."""
    for work in sides.values():
        slowest(work, 2)
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, work in sides.items():
            taken[name].append(slowest(work, times))
    return taken


def machine() -> str:
    """Ranks, backend, versions and hardware of this run."""
    cores = f"{os.cpu_count()} cores {platform.machine()}"
    return f"{dist.get_world_size()} ranks, 1 thread each, gloo, torch {torch.__version__}, {cores}"


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median of the ratios of two sides, round by round."""
    return statistics.median(mine / other for mine, other in zip(ours, theirs))


def table(taken: Mapping[str, list[float]], ours: str, unit: str, scale: float = 1.0) -> None:
    """Print the median, least and most of each side, and the median ratio of `ours` to it."""
    width = max(map(len, taken)) + 2
    print(f"{'side':{width}}{unit:>12}{'min':>10}{'max':>10}{f'{ours} / side':>20}")
    for name, values in taken.items():
        median, least, most = (scale * value for value in (statistics.median(values), min(values), max(values)))
        print(f"{name:{width}}{median:12.2f}{least:10.2f}{most:10.2f}{ratio(taken[ours], values):20.2f}")
