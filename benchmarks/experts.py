"""Expert parallelism: schedules that overlap the exchange of tokens, compared with plain forward and backward.

    weft bench experts --ranks 2 -- --link 800mbit      # as root: a network of limited rate between the ranks
    weft bench experts --ranks 2                        # loopback: the exchange costs little, so hiding it gains little
    weft bench experts --ranks 2 -- --link 400mbit --device 20     # as root: a device for each rank, too
    weft bench experts --ranks 2 -- --link 800mbit --routing zipf:1.0        # or uniform, or the folder of a run
    weft bench experts --ranks 2 -- --link 800mbit --skew --routing runs/stdlib-moe --picture skew.png

The model has four layers of attention and eight experts, two per token. The experts are spread over all ranks, and
everything is sharded (ZeRO-3). A step is forward and backward of all microbatches. "combined" and "paired" are
schedules of `weft.overlap.forward_backward`. "unpaired nodes" runs the parts of each layer (its nodes) one after
another, without overlap; "plain" is the model's own forward and backward.

An exchange counts as hidden while this rank computes, and as exposed while it waits for communication of any kind.

    --routing    draw the experts of each token from a distribution, the same for all variants
    --skew       measure uniform routing, then Zipf distributions with growing exponents, then --routing if given
    --device     matrix products take as long as on a device of this rate in GFLOP/s, and leave the cores to the
                 network during that time (benchmarks/_device.py)

Sending and receiving take CPU time, which no schedule hides. "core s" is the CPU time of a step on rank 0. With one
core per rank, no step is shorter than this time.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import _device
import _link
import _report
import _routing
import _skew
import torch
import torch.distributed as dist

import weft
from weft.debug.timeline import Timeline
from weft.models import HybridConfig, HybridModel
from weft.moe import exchanged_rows
from weft.moe.kinds import ROWS_PER
from weft.overlap import forward_backward, hidden_fraction
from weft.overlap.hidden import busy
from weft.train.report.timeline import computing

ROWS, SEQUENCE, MICROBATCHES = 4, 256, 6
CONFIG = HybridConfig(
    pattern="[*E]" * 4,
    hidden_size=256,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
)


def model(rows_per: str) -> HybridModel:
    """Return a model of 4 M parameters, three quarters of them in experts."""
    meshes = weft.init_meshes("cpu", ep=dist.get_world_size())
    torch.manual_seed(0)
    runtime = weft.RuntimeOptions(separate_all_gather_group=True)
    return weft.models.shard(
        HybridModel(dataclasses.replace(CONFIG, moe_rows_per=rows_per), meshes=meshes), meshes, runtime=runtime
    )


def plain(net: HybridModel, microbatches: list) -> None:
    """Run the model's own forward and backward, one microbatch after the other."""
    for tokens, labels in microbatches:
        net(tokens, labels).backward()


DELAYED, PAIRED = "combined, wgrad delayed", "paired, wgrad delayed"
HALVES = "combined, delayed, halves"
"""This variant needs one row per rank. With one row per expert, rows cannot be divided into halves."""
SIDES: dict[str, Callable[[HybridModel, list], object]] = {
    "combined": forward_backward,
    DELAYED: lambda net, data: forward_backward(net, data, delay_wgrad=True),
    HALVES: lambda net, data: forward_backward(net, data, delay_wgrad=True, halves=True),
    "paired": lambda net, data: forward_backward(net, data, schedule="paired"),
    PAIRED: lambda net, data: forward_backward(net, data, schedule="paired", delay_wgrad=True),
    "unpaired nodes": lambda net, data: forward_backward(net, data, overlap=False),
    "plain": plain,
}


class Recorded(NamedTuple):
    """Measurements of one more step on this rank.

    `processor`: its CPU time in seconds, over all threads. `lanes`: for each lane, the seconds in which it was busy,
    and the hidden fraction (0 to 1) of this time.
    """

    processor: float
    lanes: dict[str, tuple[float, float]]


def record(step: Callable[[], object]) -> Recorded:
    """Run `step` once more and measure it."""
    dist.barrier()
    begin = time.process_time()
    with Timeline() as timeline:
        step()
    processor = time.process_time() - begin
    intervals = timeline.intervals()
    lanes = {
        lane: (busy(intervals, lane), hidden_fraction(intervals, lane))
        for lane in ("exchange", "gather", "reduce")
        if busy(intervals, lane)
    }
    return Recorded(processor, lanes)


def main() -> None:
    """Measure all variants; print on rank 0 seconds per step, ratios, hidden fractions, memory, and the gain from
    delayed weight gradients."""
    parser = _report.parser(__doc__, link="800mbit")
    parser.add_argument(
        "--routing", metavar="NAME", help="uniform, zipf:S, or the folder of a run; default: the router's"
    )
    parser.add_argument("--rows-per", choices=ROWS_PER, default="rank", help="what a row travels to")
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, metavar="NAME", help="measure only these, combined and the unpaired nodes"
    )
    parser.add_argument("--device", type=float, metavar="GFLOPS", help="rate of a device for each rank")
    parser.add_argument("--skew", action="store_true", help="measure over routings of growing skew")
    parser.add_argument("--picture", metavar="FILE", help="with --skew: draw what was measured")
    options = parser.parse_args()
    if options.skew and options.sides:
        parser.error("--sides with --skew, which has sides of its own: leave one of them out")
    fitting = [name for name in SIDES if options.rows_per == "rank" or name != HALVES]
    if not set(options.sides or ()).issubset(fitting):
        parser.error(f"--sides {HALVES!r} with --rows-per expert: there is nothing to divide; leave it out")
    if options.picture and not options.skew:
        parser.error("--picture without --skew: there is nothing to draw; add --skew")
    routings = [*(_skew.ROUTINGS if options.skew else ()), *([options.routing] if options.routing else ())]
    try:
        shares = {name: _routing.shares_of(name, CONFIG.num_experts) for name in routings}
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    device = _device.SlowDevice(options.device * 1e9) if options.device else nullcontext()
    with _link.process_group(options.link), device:
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = (2, ROWS, SEQUENCE)
        data = [torch.randint(CONFIG.vocab_size, shape, generator=generator).unbind() for _ in range(MICROBATCHES)]
        if options.skew:
            skews = [measured(name, shares[name], data, options) for name in shares]
            if dist.get_rank() == 0:
                print(where(options))
                _skew.table(skews)
                if options.picture:
                    _skew.picture(skews, options.picture)
            return
        chosen = {"combined", "unpaired nodes", *(options.sides or fitting)}
        sides = {name: run for name, run in SIDES.items() if name in chosen}
        nets = {name: model(options.rows_per) for name in sides}
        for net in nets.values() if options.routing else ():
            _routing.assign(net, shares[options.routing], MICROBATCHES, seed=100 * dist.get_rank())
        steps = {name: partial(run, nets[name], data) for name, run in sides.items()}
        taken = _report.in_turn(steps, options.rounds, 1)
        recorded = {name: record(step) for name, step in steps.items()}
        if dist.get_rank() == 0:
            print(where(options))
            print(f"{MICROBATCHES} microbatches of {ROWS} x {SEQUENCE} tokens per rank")
            _report.table(taken, "combined", "s/step")
            report(taken, recorded, nets)


def where(options: argparse.Namespace) -> str:
    """Return a line that describes the ranks, the machine and the network."""
    device = f"devices of {options.device:g} GFLOP/s" if options.device else "the machine's cores"
    return f"{_report.machine()}, on {options.link or 'loopback'}, {device}, medians of {options.rounds}"


def measured(name: str, shares: _routing.Shares, data: list, options: argparse.Namespace) -> _skew.Skew:
    """Measure both overlapped schedules and the unpaired nodes under one routing. Return the times, and the
    measurements of each rank in a step of the paired schedule."""
    sides = ("combined", PAIRED, "unpaired nodes")
    nets = {side: model(options.rows_per) for side in sides}
    for net in nets.values():
        _routing.assign(net, shares, MICROBATCHES, seed=100 * dist.get_rank())
    steps = {side: partial(SIDES[side], nets[side], data) for side in sides}
    taken = _report.in_turn(steps, options.rounds, 1)
    exchanged_rows(nets[PAIRED])
    dist.barrier()
    with Timeline() as timeline:
        steps[PAIRED]()
    intervals = timeline.intervals()
    assignments, rows = sum(exchanged_rows(nets[PAIRED]).values()).tolist()
    mine = _skew.OfRank(
        computing(intervals),
        hidden_fraction(intervals),
        assignments,
        rows,
    )
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return _skew.Skew(name, PAIRED, {side: statistics.median(times) for side, times in taken.items()}, ranks)


def report(taken: dict, recorded: dict[str, Recorded], nets: dict) -> None:
    """Print the gain from delayed weight gradients, and tables of CPU time, lanes and memory."""
    hidden = {name: f"{found.lanes['exchange'][1]:.0%} hidden" for name, found in recorded.items() if found.lanes}
    for name in ("paired", PAIRED):
        if name in recorded:
            ratio = _report.ratio(taken[name], taken["unpaired nodes"])
            print(f"\n{name}: {ratio:.2f} of the unpaired nodes' step, {hidden[name]}", end="")
    if DELAYED in taken:
        gains = [now / delayed for now, delayed in zip(taken["combined"], taken[DELAYED])]
        print(
            f"\nwgrad delayed: {statistics.median(gains):.2f} times as fast as combined without ({min(gains):.2f} to "
            f"{max(gains):.2f} in single rounds); of the exchange {hidden[DELAYED]}, without {hidden['combined']}"
        )
    print(f"\n{'one more step, rank 0':25}{'core s':>9}{'/ s of unpaired':>17}")
    for name, found in recorded.items():
        share = found.processor / statistics.median(taken["unpaired nodes"])
        print(f"{name:25}{found.processor:9.3f}{share:17.2f}")
    print(f"\n{'one more step, rank 0':25}{'lane':>10}{'busy s':>9}{'hidden':>9}{'of the step':>13}")
    for name, found in recorded.items():
        for lane, (moving, share) in found.lanes.items():
            print(f"{name:25}{lane:>10}{moving:9.3f}{share:9.0%}{moving / statistics.median(taken[name]):13.0%}")
    print(f"\n{'peak transient bytes':25}{'weights':>12}{'gradients':>12}")
    for name, net in nets.items():
        peaks = [found["peak"] for found in weft.memory_report(net)["transient"].values()]
        print(f"{name:25}" + "".join(f"{peak:12,}" for peak in peaks))


if __name__ == "__main__":
    main()
