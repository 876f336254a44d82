"""AdamW and clipping on 1,000 small parameters: weft's flat tensors compared with DTensors of weft and of FSDP2.

    weft bench optimizer --ranks 2

The model has 50 units of ten linear layers each, 0.5 M parameters in total, so that only the handling of tensors costs
time. A step clips the norm of the whole model and runs AdamW, with the same gradients in all variants. FSDP2 is
measured with fused and with foreach AdamW. weft's target is 0.3 of the time of the faster one.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from _report import in_turn, machine, parser, table
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import weft

UNITS, LAYERS, WIDTH = 50, 10, 32


def trained(fully_shard: Callable) -> nn.Module:
    """Return a model with gradients, one unit per ten layers."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))) for _ in range(UNITS)))
    for unit in net:
        fully_shard(unit)
    fully_shard(net)
    net(torch.ones(2, WIDTH)).sum().backward()
    return net


def flat() -> Callable[[], None]:
    """Return a function that runs one step of weft's flat AdamW and clipping."""
    net = trained(weft.fully_shard)
    optimizer = weft.optim.flat(torch.optim.AdamW, net, lr=1e-4, fused=True)

    def step() -> None:
        weft.optim.clip_grad_norm_(net, 1.0)
        optimizer.step()

    return step


def per_parameter(fully_shard: Callable, **form: bool) -> Callable[[], None]:
    """Return a function that runs one step of torch's AdamW and clipping on the parameters of a sharded model."""
    net = trained(fully_shard)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, **form)

    def step() -> None:
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    return step


def main() -> None:
    """Measure all variants alternately; print on rank 0 milliseconds per step, and their ratios to weft's flat
    optimizer."""
    options = parser(__doc__, steps=5).parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sides = {
        "weft flat": flat(),
        "FSDP2 fused": per_parameter(torch_fully_shard, fused=True),
        "FSDP2 foreach": per_parameter(torch_fully_shard, foreach=True),
        "weft fused": per_parameter(weft.fully_shard, fused=True),
    }
    taken = in_turn(sides, options.rounds, options.steps)
    if dist.get_rank() == 0:
        print(f"{2 * UNITS * LAYERS} parameters, clipping and AdamW; {machine()}")
        table(taken, "weft flat", "ms/step", 1e3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
