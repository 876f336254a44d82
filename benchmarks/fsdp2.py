"""weft, torch FSDP2, DDP and no communication at all: one model, interleaved in one run.

    weft bench fsdp2 --ranks 2
    weft bench fsdp2 --ranks 2 -- --link 4gbit      # as root: a network of limited rate between the ranks

The model is communication-heavy: eight MLP blocks, 67 M parameters in fp32, 128 rows per rank. A step is forward,
backward and AdamW. The sides take turns within each round, so that a machine that drifts drifts for all of them; a
round's time is that of the slowest rank, a side's figure the median over rounds.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

import _link
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

import weft

WIDTH, HIDDEN, BLOCKS, ROWS = 1024, 4096, 8, 128


def model() -> nn.Sequential:
    """Eight blocks of 8.4 M parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(BLOCKS))
    )


def sharded(fully_shard: Callable) -> nn.Module:
    """One unit per block, the root last."""
    net = model()
    for block in net:
        fully_shard(block)
    fully_shard(net)
    return net


SIDES: dict[str, Callable[[], nn.Module]] = {
    "weft": lambda: sharded(weft.fully_shard),
    "FSDP2": lambda: sharded(torch_fully_shard),
    "DDP": lambda: DistributedDataParallel(model()),
    "compute alone": model,
}


def step_of(net: nn.Module) -> Callable[[], None]:
    """One training step on this rank's rows."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        optimizer.zero_grad()
        net(rows).square().mean().backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None], steps: int) -> float:
    """Seconds per step of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    taken = torch.tensor((time.perf_counter() - begin) / steps)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def main() -> None:
    """Measure and print, on rank 0, seconds per step and the ratios to weft's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="steps per side and round")
    parser.add_argument("--link", metavar="RATE", help='limit each rank\'s network to this rate, as in "4gbit"')
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    network = f"weft{os.environ['MASTER_PORT']}"
    if options.link:
        if reason := _link.available():
            raise SystemExit(f"--link {options.link}: {reason}")
        _link.join_limited_network(options.link, rank, ranks, network)
    else:
        dist.init_process_group("gloo")
    steps = {name: step_of(make()) for name, make in SIDES.items()}
    for step in steps.values():
        seconds(step, 2)
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            rounds[name].append(seconds(step, options.steps))
    if dist.get_rank() == 0:
        report(rounds, options.link)
    dist.destroy_process_group()
    if options.link:
        _link.take_down(rank, ranks, network)


def report(rounds: dict[str, list[float]], link: str | None) -> None:
    """A table of medians, ranges and ratios."""
    ranks = dist.get_world_size()
    machine = f"{os.cpu_count()} cores {platform.machine()}"
    print(f"{ranks} ranks, 1 thread each, gloo on {link or 'loopback'}, torch {torch.__version__}, {machine}")
    print(f"{'side':15}{'s/step':>8}{'min':>8}{'max':>8}{'weft / side':>13}")
    for name, times in rounds.items():
        ratio = statistics.median(ours / theirs for ours, theirs in zip(rounds["weft"], times))
        print(f"{name:15}{statistics.median(times):8.3f}{min(times):8.3f}{max(times):8.3f}{ratio:13.2f}")
    if link:
        print(f"the link alone: {wire_seconds(link, ranks):.3f} s for the bytes of one step in ZeRO-3")


def wire_seconds(link: str, ranks: int) -> float:
    """Seconds that a link needs for what one rank sends in a step: two gathers and a reduction of the shards."""
    number, unit = float(link.rstrip("mgbit")), link.lstrip("0123456789.")
    bits = number * {"gbit": 1e9, "mbit": 1e6}[unit]
    parameters = sum(parameter.numel() for parameter in model().parameters())
    return 3 * parameters * 4 * 8 * (ranks - 1) / ranks / bits


if __name__ == "__main__":
    main()
