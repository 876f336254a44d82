"""Pipeline schedules of weft and of torch on the same model.

    weft bench pipeline --ranks 4 -- --device 0.5 --link 30mbit   # as root: a device and a link for each rank
    weft bench pipeline --ranks 4 -- --pp 4 --device 0.5          # experts are not spread: no exchange to hide
    weft bench pipeline --ranks 4                                # the cores of this machine, shared by all ranks

The model has layers of attention and eight experts, four per token. Each of the `--pp` ranks of a pipeline has two
layers. The experts of a layer are spread over all ranks that have this layer. A step is forward and backward of all
microbatches. Nothing is sharded or reduced, so only the order of operations differs. torch's schedules run the same
layers, whose experts exchange tokens inside of their forward and backward.

For one additional step, as means over ranks:

    idle       the share of the step in which a rank neither computes nor waits for an exchange inside a computation
    exposed    the share of the step in which a rank waits for an exchange
    hidden     the share of the exchange that overlaps with computation
"""

import argparse
import dataclasses
import math
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import _device
import _link
import _report
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleDualPipeV

import weft
from weft.comm.ranges import span
from weft.debug.timeline import Interval, Timeline
from weft.models import HybridConfig, HybridModel
from weft.overlap import forward_backward
from weft.overlap.hidden import busy, overlap

ROWS, SEQUENCE = 1, 128
CONFIG = HybridConfig(
    pattern="[*E]",
    vocab_size=256,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_experts=8,
    num_experts_per_tok=4,
    moe_intermediate_size=64,
)
LOOPS, V = {"chunks": 2}, {"chunks": 2, "placement": "v"}
FINEST = {"halves": True, "delay_wgrad": True}
OURS: dict[str, tuple[dict, dict]] = {
    "weft 1f1b": ({"schedule": "1f1b"}, {}),
    "weft interleaved": ({"schedule": "interleaved"}, LOOPS),
    "weft combined": ({"schedule": "combined"}, LOOPS),
    "weft dualpipev": ({"schedule": "dualpipev"}, V),
    "weft zbv": ({"schedule": "zbv"}, V),
    "weft combined, halves": ({"schedule": "combined", **FINEST}, LOOPS),
    "weft dualpipev, halves": ({"schedule": "dualpipev", **FINEST}, V),
}
"""For each variant, the arguments of `forward_backward` and of the model."""
THEIRS: dict[str, tuple[Any, dict]] = {"torch 1F1B": (Schedule1F1B, {}), "torch DualPipeV": (ScheduleDualPipeV, V)}


class Chunk(nn.Module):
    """One stage of a staged model, in the form that torch's pipelines take."""

    def __init__(self, model: HybridModel, chunk: int) -> None:
        super().__init__()
        cut: Any = model.cut
        before = sum(map(len, cut.mine[:chunk]))
        self.layers = nn.ModuleList(model.decoder.layers[before : before + len(cut.mine[chunk])])
        self.embed = model.embed if cut.stage(chunk) == 0 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x, _ = layer(x)
        return x


class RecordedStage(PipelineStage):
    """A stage whose computation is recorded."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with span("compute"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with span("compute"):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with span("compute"):
            return super().backward_weight_one_chunk(*args, **kwargs)


def built(meshes: weft.Meshes, how: dict) -> HybridModel:
    """Return this rank's stages, with the same weights for every schedule."""
    torch.manual_seed(0)
    cfg = dataclasses.replace(CONFIG, pattern=CONFIG.pattern * 2 * meshes.pp.size())
    return HybridModel(cfg, meshes, **how)


def our_step(model: HybridModel, data: list, how: dict) -> list[Tensor]:
    """Run forward and backward under one of weft's schedules. Return the losses."""
    losses = forward_backward(model, data, **how)
    model.zero_grad()
    return losses


def their_step(meshes: weft.Meshes, model: HybridModel, data: list, schedule: Any) -> Callable[[], list[Tensor]]:
    """Return a function that runs forward and backward under one of torch's schedules, and returns the losses."""
    cut: Any = model.cut
    hidden = torch.empty(ROWS, SEQUENCE, CONFIG.hidden_size, requires_grad=True)
    stages = []
    for chunk in range(cut.chunks):
        number = cut.stage(chunk)
        given = data[0][0] if number == 0 else hidden
        how: Any = {"input_args": given, "output_args": hidden, "group": cut.group}
        stages.append(RecordedStage(Chunk(model, chunk), number, len(cut.segments), torch.device("cpu"), **how))

    def loss(output: Tensor, labels: Tensor) -> Tensor:
        with span("compute"):
            return model.loss(output, labels, labels, ())

    runs = schedule(stages if cut.chunks > 1 else stages[0], len(data), loss, scale_grads=False)
    tokens, labels = (torch.cat(side) for side in zip(*data))

    def step() -> list[Tensor]:
        losses: list[Tensor] = []
        ends = {"target": labels, "losses": losses} if cut.is_last else {}
        runs.step(*([tokens] if cut.is_first else []), **ends)
        model.zero_grad()
        return [loss.detach() for loss in losses]

    return step


def sides(meshes: weft.Meshes, data: list) -> dict[str, Callable[[], list[Tensor]]]:
    """Return the steps to measure, by name."""
    found: dict[str, Callable[[], list[Tensor]]] = {}
    for name, (switches, how) in OURS.items():
        found[name] = partial(our_step, built(meshes, how), data, switches)
    for name, (schedule, how) in THEIRS.items():
        found[name] = their_step(meshes, built(meshes, how), data, schedule)
    return found


def shares(intervals: list[Interval], seconds: float) -> list[float]:
    """Return the idle share, the exposed share and the exchange's share of a step of `seconds`, and the hidden fraction
    of the exchange."""
    computing = busy(intervals, "compute", "wait") - busy(intervals, "wait")
    moving = busy(intervals, "exchange")
    hidden = overlap(intervals, "exchange", "compute", without="wait")
    inside = overlap(intervals, "exchange", "wait")
    idle = 1 - (computing + inside) / seconds
    return [idle, inside / seconds, moving / seconds, hidden / moving if moving else float("nan")]


def recorded(step: Callable[[], object]) -> list[float]:
    """Return the shares of one additional step, the mean over ranks."""
    dist.barrier()
    with Timeline() as timeline:
        seconds = _report.slowest(step, 1)
    found = torch.tensor(shares(timeline.intervals(), seconds))
    dist.all_reduce(found)
    return (found / dist.get_world_size()).tolist()


def main() -> None:
    """Measure all schedules alternately; print on rank 0 seconds per step, ratios and shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pp", type=int, default=2, help="ranks of a pipeline (default: 2)")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--device", metavar="GFLOPS", type=float, help="each rank has a device of this rate")
    parser.add_argument("--link", metavar="RATE", help='limit each rank\'s network to this rate, as in "30mbit"')
    options = parser.parse_args()
    torch.set_num_threads(1)
    with _link.process_group(options.link):
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Measure all schedules alternately."""
    meshes = weft.init_meshes("cpu", pp=options.pp, ep=dist.get_world_size() // options.pp)
    generator = torch.Generator().manual_seed(meshes.dp_rank)
    shape = (2, ROWS, SEQUENCE)
    data = [torch.randint(CONFIG.vocab_size, shape, generator=generator).unbind() for _ in range(options.microbatches)]
    with _device.SlowDevice(options.device * 1e9) if options.device else nullcontext():
        steps = sides(meshes, data)
        expected = steps["weft 1f1b"]()
        for step in steps.values():
            if losses := step():  # torch returns losses only on the rank of the last stage
                torch.testing.assert_close(losses, expected)
        taken = _report.in_turn(steps, options.rounds, 1)
        found = {name: recorded(step) for name, step in steps.items()}
    if dist.get_rank() == 0:
        device = f"devices of {options.device:g} GFLOP/s" if options.device else "the machine's cores"
        print(f"{_report.machine()}, on {options.link or 'loopback'}, {device}, medians of {options.rounds}")
        print(f"pp {options.pp}, ep {meshes.ep.size() if meshes.ep else 1}, {options.microbatches} microbatches")
        _report.table(taken, "weft 1f1b", "ms/step", 1e3)
        report(taken, found)


def report(taken: dict, found: dict) -> None:
    """Print how the ranks spent their time."""
    print(f"\n{'one more step':24}{'idle':>8}{'exposed':>9}{'exchange':>10}{'hidden':>8}{'speedup':>11}")
    for name, values in found.items():
        ratio = statistics.median(one / it for one, it in zip(taken["weft 1f1b"], taken[name]))
        idle, exposed, exchange, hidden = (f"{value:.0%}" for value in values)
        if name in THEIRS or math.isnan(values[-1]):  # torch's schedules wait for each exchange immediately
            hidden = "-"
        print(f"{name:24}{idle:>8}{exposed:>9}{exchange:>10}{hidden:>8}{ratio:11.2f}")


if __name__ == "__main__":
    main()
