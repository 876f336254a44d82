"""Helpers of the benchmarks that compare several variants: interleaved timing, and tables with ratios."""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist


def parser(description: str | None, *, rounds: int = 5, steps: int = 0, link: str = "") -> argparse.ArgumentParser:
    """Return a parser with the options of a benchmark: `--rounds`, and `--steps` and `--link` if given here."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds)
    if steps:
        made.add_argument("--steps", type=int, default=steps, help="steps per side and round")
    if link:
        made.add_argument("--link", metavar="RATE", help=f'limit each rank\'s network to this rate, as in "{link}"')
    return made


def slowest(work: Callable[[], object], times: int) -> float:
    """Return the mean time of `work` over `times` calls, in seconds, on the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(times):
        work()
    taken = torch.tensor((time.perf_counter() - begin) / times)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def in_turn(sides: Mapping[str, Callable[[], object]], rounds: int, times: int) -> dict[str, list[float]]:
    """Return the seconds of each variant in each round, after a warm-up. The variants alternate within a round, so that
    a slow phase of the machine affects all of them."""
    for work in sides.values():
        slowest(work, 2)
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, work in sides.items():
            taken[name].append(slowest(work, times))
    return taken


def machine() -> str:
    """Return the number of ranks, the backend, the versions and the hardware of this run."""
    cores = f"{os.cpu_count()} cores {platform.machine()}"
    return f"{dist.get_world_size()} ranks, 1 thread each, gloo, torch {torch.__version__}, {cores}"


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Return the median over rounds of the ratio of two variants' times."""
    return statistics.median(mine / other for mine, other in zip(ours, theirs))


def table(taken: Mapping[str, list[float]], ours: str, unit: str, scale: float = 1.0) -> None:
    """Print the median, minimum and maximum of each variant, and the median ratio of `ours` to the variant."""
    width = max(map(len, taken)) + 2
    print(f"{'side':{width}}{unit:>12}{'min':>10}{'max':>10}{f'{ours} / side':>20}")
    for name, values in taken.items():
        median, least, most = (scale * value for value in (statistics.median(values), min(values), max(values)))
        print(f"{name:{width}}{median:12.2f}{least:10.2f}{most:10.2f}{ratio(taken[ours], values):20.2f}")
