"""The communication-heavy model of the benchmarks: eight MLP blocks, 67 M parameters in fp32, 128 rows per rank."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

WIDTH, HIDDEN, BLOCKS, ROWS = 1024, 4096, 8, 128


def model(wrap: Callable[[nn.Module], nn.Module] = lambda block: block) -> nn.Sequential:
    """Return eight blocks of 8.4 M parameters, each passed through `wrap`."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(wrap(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))) for _ in range(BLOCKS))
    )


def sharded(net: nn.Sequential, fully_shard: Callable, **root: object) -> nn.Module:
    """Shard each block as one unit, then the root, with the options `root`."""
    for block in net:
        fully_shard(block)
    return fully_shard(net, **root)


def step_of(net: nn.Module) -> Callable[[], None]:
    """Return a function that runs one training step on this rank's rows: forward, backward, AdamW."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        optimizer.zero_grad()
        net(rows).square().mean().backward()
        optimizer.step()

    return step


def bytes_sent(passes: int) -> float:
    """Return the bytes that one rank sends if the shards of all parameters are gathered or reduced `passes` times."""
    ranks = dist.get_world_size()
    parameters = BLOCKS * (2 * WIDTH * HIDDEN + WIDTH + HIDDEN)
    return passes * parameters * 4 * (ranks - 1) / ranks
