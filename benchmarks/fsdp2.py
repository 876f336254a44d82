"""weft, torch FSDP2, DDP and no communication at all: one model, interleaved in one run.

    weft bench fsdp2 --ranks 2

The model is communication-heavy: eight MLP blocks, 67 M parameters in fp32, 128 rows per rank. A step is forward,
backward and AdamW. The sides take turns within each round, so that a machine that drifts drifts for all of them; a
round's time is that of the slowest rank, a side's figure the median over rounds.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

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
        *(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
            for _ in range(BLOCKS)
        )
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
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps = {name: step_of(make()) for name, make in SIDES.items()}
    for step in steps.values():
        seconds(step, 2)
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            rounds[name].append(seconds(step, options.steps))
    if dist.get_rank() == 0:
        report(rounds)
    dist.destroy_process_group()


def report(rounds: dict[str, list[float]]) -> None:
    """A table of medians, ranges and ratios."""
    print(f"{dist.get_world_size()} ranks, 1 thread each, gloo, torch {torch.__version__}, {platform.processor() or platform.machine()}")
    print(f"{'side':15}{'s/step':>8}{'min':>8}{'max':>8}{'weft / side':>13}")
    for name, times in rounds.items():
        ratio = statistics.median(ours / theirs for ours, theirs in zip(rounds["weft"], times))
        print(f"{name:15}{statistics.median(times):8.3f}{min(times):8.3f}{max(times):8.3f}{ratio:13.2f}")


if __name__ == "__main__":
    main()
