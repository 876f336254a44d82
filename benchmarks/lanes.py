"""Measures whether all-gathers overlap with reduce-scatters, with one communicator for both and with one for each.

    weft bench lanes --ranks 2 -- --link 4gbit --picture lanes.png      # as root: a link between the ranks

Prints the seconds per step in which a gather runs, in which a reduction runs, and in which both run. "both / reduce" is
the share of the reductions' time during which a gather runs too. With one communicator this share is 0, because a
communicator runs its operations one after another. The last line is the time of a step with two communicators, relative
to one.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import _link
import _mlp
import _report
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn

import weft
from weft.comm.ranges import recording, span
from weft.debug.timeline import Interval, Timeline
from weft.overlap.hidden import busy, overlap
from weft.train.report.figures import LIGHT, Draw, Theme, render

LANES = ("compute", "gather", "reduce")


class Spans(nn.Module):
    """A block whose forward and backward are recorded as computation, without the waits around them."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with span("compute", "forward"):
            y = self.block(x)
        entries: list[Any] = []

        def begin(gradients: Any) -> None:
            if recording:
                entries.append(recording[0].begin("compute", "backward"))

        def end(gradient: Any) -> None:
            if entries and recording:
                recording[0].end(entries.pop())

        if y.grad_fn is not None:
            y.grad_fn.register_prehook(begin)
            if x.requires_grad:
                x.register_hook(end)
        return y


def draw(sides: dict[str, list[Interval]]) -> Draw:
    """Draw one panel per variant with one row per lane, all on the same time axis."""

    def panels(figure: Figure, theme: Theme) -> None:
        colors = dict(zip(LANES, (theme.blue, theme.orange, theme.green)))
        rows = figure.subplots(len(sides), sharex=True, squeeze=False)[:, 0]
        for axes, (name, intervals) in zip(rows, sides.items()):
            begin = min(each.start for each in intervals)
            for row, (lane, color) in enumerate(colors.items()):
                spans = [(each.start - begin, each.end - each.start) for each in intervals if each.lane == lane]
                axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=color, edgecolor=theme.paper)
            axes.set_title(name)
            axes.grid(visible=False)
            axes.set_yticks(range(len(LANES)), LANES)
            axes.set_ylim(len(LANES) - 0.5, -0.5)
            axes.tick_params(axis="y", labelcolor=theme.ink, length=0)
        rows[-1].set_xlim(left=0)
        rows[-1].set_xlabel("seconds")

    return panels


def main() -> None:
    """Measure both variants alternately; print on rank 0, and draw the last step of each."""
    parser = _report.parser(__doc__, link="4gbit")
    parser.add_argument("--picture", metavar="FILE", type=Path, help="draw one step of each side into this PNG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with _link.process_group(options.link):
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Measure both variants alternately, with one recorded step per round."""
    steps = {}
    for name, separate in (("one communicator", False), ("two communicators", True)):
        runtime = weft.RuntimeOptions(separate_all_gather_group=separate)
        steps[name] = _mlp.step_of(_mlp.sharded(_mlp.model(Spans), weft.fully_shard, runtime=runtime))
    for step in steps.values():
        _report.slowest(step, 2)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    recorded: dict[str, list[list[Interval]]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            with Timeline() as timeline:
                taken[name].append(_report.slowest(step, 1))
            recorded[name].append(timeline.intervals())
    if dist.get_rank():
        return
    print(f"{_report.machine()}, on {options.link or 'loopback'}, medians of {options.rounds}")
    print(f"{'s per step':20}{'step':>9}{'gather':>9}{'reduce':>9}{'both':>9}{'both / reduce':>16}")
    for name, rounds in recorded.items():
        figures = [(busy(each, "gather"), busy(each, "reduce"), overlap(each, "gather", "reduce")) for each in rounds]
        gather, reduce, both = (statistics.median(column) for column in zip(*figures))
        share = statistics.median(both / reduce for _, reduce, both in figures)
        print(f"{name:20}{statistics.median(taken[name]):9.2f}{gather:9.2f}{reduce:9.2f}{both:9.2f}{share:16.2f}")
    one, two = taken.values()
    print(f"step with two / with one: {statistics.median(b / a for a, b in zip(one, two)):.2f}")
    if options.picture:
        picture = draw({name: rounds[-1] for name, rounds in recorded.items()})
        options.picture.write_bytes(render(picture, LIGHT, (7.6, 4.2), "png"))


if __name__ == "__main__":
    main()
