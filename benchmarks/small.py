"""Small units: a whole step, and torch's optimizers and clipping alone, compared with torch FSDP2 and DDP.

    weft bench small --ranks 2

This command measures two models with almost no computation: 150 units of eight parameter tensors each, and 60 units of
two. A step is forward, backward, clipping and AdamW. torch's functions are called with their defaults:
`torch.optim.AdamW(model.parameters())`.

    weft bench small --ranks 2 -- --sweep

This command measures the same step for units of 1 KB to 64 MB. Each unit is a single matrix. For small units, the
latency of messages dominates; for large units, the size of messages does.
"""

import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist
from _report import in_turn, machine, parser, ratio
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

import weft

WIDTH = 16
MODELS = {"150 units, 1,200 parameters": (150, 4), "60 units, 120 parameters": (60, 1)}
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {}),
    "Adam": (torch.optim.Adam, {}),
    "SGD": (torch.optim.SGD, {}),
    "SGD, momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {}),
}
SIZES = {"1 KB": 16, "4 KB": 32, "16 KB": 64, "64 KB": 128, "256 KB": 256, "1 MB": 512, "4 MB": 1024, "16 MB": 2048}
SIZES["64 MB"] = 4096
"""For each size of a unit, the width of a square fp32 matrix of this size."""
TOTAL = 128 << 20
"""The maximum size of a model of the sweep, in bytes: two units of the largest size."""


def sweep(rounds: int, times: int) -> None:
    """Print a row for each size of unit."""
    if dist.get_rank() == 0:
        print(f"\n{'a step, ms':24}{'weft':>10}{'FSDP2':>10}{'weft/FSDP2':>11}")
    for size, width in SIZES.items():
        units = max(min(150, TOTAL // (4 * width * width)), 2)
        steps = {}
        for side, fully_shard in (("weft", weft.fully_shard), ("FSDP2", torch_fully_shard)):
            torch.manual_seed(0)
            net = sharded(fully_shard)(nn.Sequential(*(matrix(width) for _ in range(units))))
            steps[side] = step_of(net, torch.ones(2, width))
        taken = in_turn(steps, rounds, times)
        if dist.get_rank() == 0:
            print(row(f"{units} units of {size}", taken, 24))
        del steps, net


def matrix(width: int) -> nn.Linear:
    """Return a layer that preserves the scale of its input. With torch's default initial weights, values would be
    denormal after 128 layers, which makes arithmetic several times slower."""
    layer = nn.Linear(width, width, bias=False)
    nn.init.normal_(layer.weight, std=width**-0.5)
    return layer


def step_of(net: nn.Module, rows: torch.Tensor) -> Callable[[], object]:
    """Return a function that runs one step: forward, backward, clipping and AdamW."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)

    def step() -> None:
        net.zero_grad()
        net(rows).sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    return step


def parts_of(units: int, layers: int, wrap: Callable[[nn.Sequential], nn.Module]) -> dict[str, Callable[[], object]]:
    """Return functions that run a whole step, each optimizer's step alone, and clipping alone. The last two use the
    gradients of an earlier backward."""
    torch.manual_seed(0)
    net = wrap(nn.Sequential(*(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))) for _ in range(units))))
    steps = {name: kind(net.parameters(), lr=1e-4, **form).step for name, (kind, form) in OPTIMIZERS.items()}
    step = step_of(net, torch.ones(2, WIDTH))
    step()
    return {"step": step, **steps, "clip_grad_norm_": lambda: nn.utils.clip_grad_norm_(net.parameters(), 1.0)}


def sharded(fully_shard: Callable) -> Callable[[nn.Sequential], nn.Module]:
    """Return a function that shards each block as one unit, then the root."""

    def wrap(net: nn.Sequential) -> nn.Module:
        for unit in net:
            fully_shard(unit)
        return fully_shard(net)

    return wrap


def row(what: str, taken: dict[str, list[float]], width: int = 34) -> str:
    """Return the median milliseconds of each variant, and weft's ratios to the others."""
    cells = f"{what:{width}}"
    for side, values in taken.items():
        cells += f"{1e3 * statistics.median(values):10.2f}"
        if side != "weft":
            cells += f"{ratio(taken['weft'], values):11.2f}"
    return cells


def main() -> None:
    """Measure all variants alternately; print on rank 0 median milliseconds and weft's ratio to each."""
    arguments = parser(__doc__, steps=3)
    arguments.add_argument("--sweep", action="store_true", help="units of 1 KB to 64 MB")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    wraps = {
        "weft": sharded(weft.fully_shard),
        "FSDP2": sharded(torch_fully_shard),
        "DDP": DistributedDataParallel,
    }
    if dist.get_rank() == 0:
        print(machine())
    if options.sweep:
        sweep(options.rounds, options.steps)
    for name, (units, layers) in () if options.sweep else MODELS.items():
        made = {side: parts_of(units, layers, wrap) for side, wrap in wraps.items()}
        if dist.get_rank() == 0:
            others = "".join(f"{side:>10}{f'weft/{side}':>11}" for side in wraps if side != "weft")
            print(f"\n{f'{name}, ms':34}{'weft':>10}{others}")
        for what in made["weft"]:
            times = options.steps if what == "step" else 3 * options.steps  # they take a millisecond
            taken = in_turn({side: made[side][what] for side in wraps}, options.rounds, times)
            if dist.get_rank() == 0:
                print(row(what, taken))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
