"""Quantized weights compared with bf16 weights, gathered over a network of limited bandwidth.

    weft bench narrow --ranks 2 -- --link 400mbit      # as root

The model has four MLP blocks of 8.4 M parameters, with ZeRO-3. Gathers dominate, because gradients are reduced only
once in a step of four microbatches, in bf16. With two ranks at 400 mbit, the gathers of a step take 5.4 s in bf16, and
the reduction takes 0.7 s. Bytes, memory and the CPU time of a rank are measured too.
"""

import statistics
import time
from collections.abc import Callable

import _link
import _mlp
import _report
import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.fsdp import plan_of

MICROBATCHES, BLOCKS = 4, 4
RECIPES = {
    "bf16": None,
    "tensorwise()": weft.quantize.tensorwise(),
    "rowwise()": weft.quantize.rowwise(),
    "blockwise(128, 128)": weft.quantize.blockwise(128, 128),
    "mx(32)": weft.quantize.mx(32),
    "nvfp4()": weft.quantize.nvfp4(),
}


def sharded(recipe: weft.quantize.Quantization | None) -> nn.Module:
    """Shard each block as one unit."""
    policy = weft.MixedPrecisionPolicy(torch.bfloat16, param_quantization=recipe)
    return _mlp.sharded(
        _mlp.model()[:BLOCKS], lambda module, **root: weft.fully_shard(module, mp_policy=policy, **root)
    )


def step_of(net: nn.Module, cpu: list[float]) -> Callable[[], None]:
    """Return a function that runs four microbatches and an update, and appends its CPU seconds to `cpu`."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    rows = torch.randn(8, _mlp.WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        begin = time.process_time()
        for number in range(MICROBATCHES):
            net.set_requires_gradient_sync(number == MICROBATCHES - 1)
            net(rows).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        cpu.append(time.process_time() - begin)

    return step


def main() -> None:
    """Measure all recipes alternately; print on rank 0 milliseconds, the ratio to bf16, CPU time, bytes and slabs."""
    options = _report.parser(__doc__, rounds=3, steps=1, link="400mbit").parse_args()
    torch.set_num_threads(1)
    with _link.process_group(options.link):
        nets = {name: sharded(recipe) for name, recipe in RECIPES.items()}
        cpu: dict[str, list[float]] = {name: [] for name in nets}
        steps = {name: step_of(net, cpu[name]) for name, net in nets.items()}
        taken = _report.in_turn(steps, options.rounds, options.steps)
        if dist.get_rank() == 0:
            print(f"{_report.machine()}, on {options.link or 'loopback'}, medians of {options.rounds}")
            print(
                f"{'recipe':22}{'a step, ms':>12}{'of bf16':>10}{'CPU, ms':>10}{'bytes/element':>16}{'slab, MiB':>12}"
            )
        for name, net in nets.items():
            plan, report = plan_of(net), weft.memory_report(net)
            assert plan is not None
            sizes = {each.nbytes for each in plan.collectives if each.operation == "all-gather"}
            each = max(sizes) / sum(p.numel() for p in net[0].parameters())  # type: ignore[index]
            if dist.get_rank() == 0:
                median, of_bf16 = 1e3 * statistics.median(taken[name]), _report.ratio(taken[name], taken["bf16"])
                slab = report["transient"]["gathered weights"]["slab"] / 2**20
                busy = 1e3 * statistics.median(cpu[name][2:])
                print(f"{name:22}{median:12.0f}{of_bf16:10.2f}{busy:10.0f}{each:16.4f}{slab:12.1f}")


if __name__ == "__main__":
    main()
