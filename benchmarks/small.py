"""Where units are small: a whole step, and torch's default AdamW alone, beside torch FSDP2 and DDP.

    weft bench small --ranks 2

Two models in which next to nothing is computed: 150 units of eight parameters, and 60 units of two. A step is forward,
backward, clipping and AdamW as people call it, `torch.optim.AdamW(model.parameters())`.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from _report import in_turn, machine, parser, table
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

import weft

WIDTH = 16
MODELS = {"150 units, 1,200 parameters": (150, 4), "60 units, 120 parameters": (60, 1)}


def steps_of(units: int, layers: int, wrap: Callable[[nn.Sequential], nn.Module]) -> dict[str, Callable[[], None]]:
    """A whole step, and the optimizer's alone with the gradients that are there."""
    torch.manual_seed(0)
    net = wrap(nn.Sequential(*(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))) for _ in range(units))))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    rows = torch.ones(2, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        net(rows).sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    return {"step": step, "AdamW": optimizer.step}


def sharded(fully_shard: Callable) -> Callable[[nn.Sequential], nn.Module]:
    """One unit per block, the root last."""

    def wrap(net: nn.Sequential) -> nn.Module:
        for unit in net:
            fully_shard(unit)
        return fully_shard(net)

    return wrap


def main() -> None:
    """Measure in turn and print, on rank 0, milliseconds and the ratios to weft's."""
    options = parser(__doc__, steps=5).parse_args()
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
        made = {side: steps_of(units, layers, wrap) for side, wrap in wraps.items()}
        for what in ("step", "AdamW"):
            taken = in_turn({side: made[side][what] for side in wraps}, options.rounds, options.steps)
            if dist.get_rank() == 0:
                print(f"\n{name}: {what}")
                table(taken, "weft", "ms", 1e3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
