"""Where units are small: a whole step, torch's optimizers and its clipping alone, beside torch FSDP2 and DDP.

    weft bench small --ranks 2

Two models in which next to nothing is computed: 150 units of eight parameters, and 60 units of two. A step is forward,
backward, clipping and AdamW. Everything of torch's is as people call it: `torch.optim.AdamW(model.parameters())`.
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


def parts_of(units: int, layers: int, wrap: Callable[[nn.Sequential], nn.Module]) -> dict[str, Callable[[], object]]:
    """A whole step, and what follows a backward alone, with the gradients that are there."""
    torch.manual_seed(0)
    net = wrap(nn.Sequential(*(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))) for _ in range(units))))
    steps = {name: kind(net.parameters(), lr=1e-4, **form).step for name, (kind, form) in OPTIMIZERS.items()}
    rows = torch.ones(2, WIDTH)

    def clip() -> None:
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)

    def step() -> None:
        net.zero_grad()
        net(rows).sum().backward()
        clip()
        steps["AdamW"]()

    return {"step": step, **steps, "clip_grad_norm_": clip}


def sharded(fully_shard: Callable) -> Callable[[nn.Sequential], nn.Module]:
    """One unit per block, the root last."""

    def wrap(net: nn.Sequential) -> nn.Module:
        for unit in net:
            fully_shard(unit)
        return fully_shard(net)

    return wrap


def row(what: str, taken: dict[str, list[float]]) -> str:
    """Median milliseconds of each side, and weft's ratio to the others."""
    cells = f"{what:34}"
    for side, values in taken.items():
        cells += f"{1e3 * statistics.median(values):10.2f}"
        if side != "weft":
            cells += f"{ratio(taken['weft'], values):11.2f}"
    return cells


def main() -> None:
    """Measure in turn and print, on rank 0, median milliseconds and the ratios of weft's to each."""
    options = parser(__doc__, steps=3).parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    wraps = {
        "weft": sharded(weft.fully_shard),
        "FSDP2": sharded(torch_fully_shard),
        "DDP": DistributedDataParallel,
    }
    if dist.get_rank() == 0:
        print(machine())
    for name, (units, layers) in MODELS.items():
        made = {side: parts_of(units, layers, wrap) for side, wrap in wraps.items()}
        if dist.get_rank() == 0:
            others = "".join(f"{side:>10}{'weft / it':>11}" for side in wraps if side != "weft")
            print(f"\n{f'{name}, ms':34}{'weft':>10}{others}")
        for what in made["weft"]:
            times = options.steps if what == "step" else 3 * options.steps  # they take a millisecond
            taken = in_turn({side: made[side][what] for side in wraps}, options.rounds, times)
            if dist.get_rank() == 0:
                print(row(what, taken))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
