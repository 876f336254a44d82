"""weft compared with torch FSDP2 and DDP on one GPU: host time per unit, launches, steps, memory, overlap.

weft bench gpu --ranks 1
weft bench gpu --ranks 2                        # real ranks that share the GPU
WEFT_REHEARSE=1 weft bench gpu --ranks 1        # tiny sizes on the CPU: shows that it runs, not how fast

ranks    host time, overlap of gathers and reductions  launches, memory and time of a step
-------  --------------------------------------------  ---------------------------------------------------------
1        a fake process group of eight ranks: units    over NCCL, without other ranks
         are gathered and reduced without transfers.
         For the overlap, copies replace transfers
several  -                                             over gloo, which copies through the host, because NCCL
                                                       needs a GPU for each rank. Sharding, messages and waits
                                                       are real; the times are not those of a network
"""

import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import NamedTuple
from unittest import mock

import _report
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

import weft
from weft.comm import collectives
from weft.comm.ranges import span
from weft.comm.transport import Pending
from weft.debug.timeline import Timeline
from weft.overlap.hidden import busy, overlap

REHEARSES = not torch.cuda.is_available() and os.environ.get("WEFT_REHEARSE") == "1"
DEVICE = "cpu" if REHEARSES else "cuda"
UNITS, TINY = (4, 8) if REHEARSES else (64, 8)
PRETENDED = 8


class Size(NamedTuple):
    """The size of a Transformer, and the rows that it processes."""

    layers: int
    width: int
    heads: int
    rows: int
    length: int


LARGE = Size(2, 32, 2, 2, 8) if REHEARSES else Size(12, 1024, 16, 4, 512)
SMALL = Size(2, 16, 2, 1, 4) if REHEARSES else Size(24, 256, 4, 2, 64)
SIZES = {"small": SMALL, "large": LARGE}
"""Steps of small layers are bound by host time, which graphs reduce."""


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if not REHEARSES:
        torch.cuda.synchronize()


@contextmanager
def pretended(ranks: int) -> Iterator[None]:
    """Create a process group in which all other ranks are fake."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(net: nn.Sequential, fully_shard: Callable | None) -> nn.Module:
    """Shard each layer as one unit, then the root. If `fully_shard` is None, leave the model unsharded."""
    if fully_shard is not None:
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
    return net


def graphed(net: nn.Sequential) -> nn.Module:
    """Shard with weft like `sharded`, and capture each layer in a graph."""
    for layer in net:
        weft.fully_shard(layer)
    graphs = weft.Graphs(modules=[name for name, _ in net.named_children()], backend="tape" if REHEARSES else "cuda")
    return weft.fully_shard(net, runtime=weft.RuntimeOptions(graphs=graphs))


def tiny(wrap: Callable[[nn.Sequential], nn.Module]) -> Callable[[], float]:
    """Return a function that issues forward and backward of many tiny layers, and returns the host's seconds."""
    net = wrap(nn.Sequential(*(nn.Linear(TINY, TINY) for _ in range(UNITS))).to(DEVICE))
    rows = torch.ones(2, TINY, device=DEVICE)

    def issue() -> float:
        synchronize()
        begin = time.perf_counter()
        net(rows).sum().backward()
        taken = time.perf_counter() - begin
        net.zero_grad()
        return taken

    return issue


def transformer(wrap: Callable[[nn.Sequential], nn.Module], size: Size) -> nn.Module:
    """Return a Transformer in fp32; the large one has 151 M parameters."""
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(
            size.width, size.heads, 4 * size.width, dropout=0.0, batch_first=True, norm_first=True
        )
        for _ in range(size.layers)
    ]
    return wrap(nn.Sequential(*layers).to(DEVICE))


def step_of(net: nn.Module, size: Size) -> Callable[[], None]:
    """Return a function that runs forward, backward and AdamW, and waits until the GPU has finished."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    rows = torch.randn(size.rows, size.length, size.width, device=DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        with span("compute", "forward and backward"):
            net(rows).square().mean().backward()
        optimizer.step()
        synchronize()

    return step


def launches(step: Callable[[], None]) -> int:
    """Return how many operations the host launches on the GPU in a step: kernels, copies, fills."""
    activities = [ProfilerActivity.CPU, *([] if REHEARSES else [ProfilerActivity.CUDA])]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Profiler clears events")  # this profile has only one cycle
        with profile(activities=activities) as recorded:
            step()
    started = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
    return sum(event.count for event in recorded.key_averages() if event.key.startswith(started))


def allocated(of: Callable[[], None] | None = None) -> int:
    """Return the bytes allocated on the GPU now, or their peak while `of` runs."""
    if REHEARSES:
        return 0
    if of is None:
        gc.collect()  # frees earlier models now, not while this one is measured
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    of()
    return torch.cuda.max_memory_allocated()


def host_time(rounds: int) -> None:
    """Print microseconds of host time per unit and step, minus those of the plain layers."""
    with pretended(PRETENDED):
        sides = {name: tiny(SIDES[name]) for name in ("weft", "graphs", "FSDP2", "plain")}
        for issue in sides.values():
            for _ in range(8):  # graphs are captured by then
                issue()
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, issue in sides.items():
                taken[name].append(min(issue() for _ in range(5)))
        own = {name: [t - p for t, p in zip(taken[name], taken["plain"])] for name in ("weft", "graphs", "FSDP2")}
        print(f"\nhost time, {UNITS} tiny units, fake process group of {PRETENDED} ranks")
        _report.table(own, "weft", "us/unit", 1e6 / UNITS)


def lanes() -> None:
    """Print how long gathers and reductions run, and how much of that overlaps with computation."""

    def all_gather(full: torch.Tensor, source: torch.Tensor, group: object, tag: int) -> Pending:
        full.view(PRETENDED, -1)[1:].copy_(source)
        return Pending()

    def reduce_scatter(output: torch.Tensor, partial: torch.Tensor, *rest: object, **options: object) -> Pending:
        torch.sum(partial.view(PRETENDED, -1), 0, out=output)
        return Pending()

    with (
        pretended(PRETENDED),
        mock.patch.object(collectives, "all_gather", all_gather),
        mock.patch.object(collectives, "reduce_scatter", reduce_scatter),
    ):
        each = weft.RuntimeOptions(bucket_bytes=0)  # one message per unit, because bundles use other lanes
        wrap = partial(sharded, fully_shard=partial(weft.fully_shard, runtime=each))
        step = step_of(transformer(wrap, LARGE), LARGE)
        for _ in range(3):
            step()
        with Timeline() as timeline:
            step()
    intervals = timeline.intervals()
    print("\nlanes of one step; a copy on the device replaces each transfer between ranks")
    print(f"{'lane':10}{'ms':>10}{'overlapped with compute':>30}")
    for lane in ("gather", "reduce"):
        taken = busy(intervals, lane)
        print(f"{lane:10}{taken * 1e3:10.2f}{overlap(intervals, lane, 'compute') / taken:30.0%}")
    print(f"both lanes at once: {overlap(intervals, 'gather', 'reduce') * 1e3:.2f} ms")


SIDES: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "weft": partial(sharded, fully_shard=weft.fully_shard),
    "graphs": graphed,
    "FSDP2": partial(sharded, fully_shard=torch_fully_shard),
    "DDP": DistributedDataParallel,
    "plain": partial(sharded, fully_shard=None),
}


def steps(rounds: int, backend: str) -> None:
    """Measure seconds per step, launches and peak memory of this rank; the first rank prints them."""
    dist.init_process_group(backend, timeout=timedelta(minutes=2))
    try:
        ranks, say = dist.get_world_size(), print if dist.get_rank() == 0 else _say_nothing
        over = "one rank over NCCL" if ranks == 1 else f"first of {ranks} ranks that share the card, over gloo"
        for name, size in [*SIZES.items()][: 2 if ranks == 1 else 1]:  # over gloo, large layers would take minutes
            shape = f"{size.layers} {name} transformer layers of width {size.width}, {size.rows} x {size.length} rows"
            compare(f"{shape}, {over}", size, rounds, say)
    finally:
        dist.destroy_process_group()


def compare(title: str, size: Size, rounds: int, say: Callable[[str], None]) -> None:
    """Compare all variants on layers of one size. A variant that cannot run prints the reason; weft must run."""
    say(f"\nlaunches and memory of a step, {title}")
    say(f"{'side':10}{'launches':>10}{'peak MiB':>12}{'replays':>10}")
    able = {}
    for name, wrap in SIDES.items():
        try:
            started, peak, replays = launches_and_peak(wrap, size)
        except RuntimeError as error:
            if name == "weft":
                raise
            say(f"{name:10} cannot: {str(error).splitlines()[0]}")
            continue
        able[name] = wrap
        say(f"{name:10}{started:10}{peak / 2**20:12,.0f}{replays:10}")
    say(f"\ntime of a step of these layers, medians of {rounds}")
    each = {name: step_of(transformer(wrap, size), size) for name, wrap in able.items()}
    for _ in range(8 if "graphs" in each else 0):
        each["graphs"]()  # captured before it is timed
    taken = _report.in_turn(each, rounds, 5)
    if dist.get_rank() == 0:
        _report.table(taken, "weft", "ms/step", 1e3)


def launches_and_peak(wrap: Callable[[nn.Sequential], nn.Module], size: Size) -> tuple[int, int, int]:
    """Return the launches, the peak memory in bytes, and the number of replays of a warmed-up step."""
    before = allocated()
    net = transformer(wrap, size)
    step = step_of(net, size)
    for _ in range(8):  # eager, captured, replayed
        step()
    peak = allocated(of=step) - before
    replays = replays_of(net, wrap)
    started = launches(step)
    replays = replays_of(net, wrap) - replays
    if wrap is graphed and not replays:
        warnings.warn(f"nothing was replayed: {weft.graph_report(net)['eager']}", stacklevel=2)
    return started, peak, replays


def replays_of(net: nn.Module, wrap: Callable) -> int:
    """Return the number of replays so far; 0 without graphs."""
    return weft.graph_report(net)["replays"] if wrap is graphed else 0


def _say_nothing(line: str) -> None:
    pass


def main() -> None:
    """Run all measurements on the first GPU, one after another."""
    options = _report.parser(__doc__, rounds=1 if REHEARSES else 3).parse_args()
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if REHEARSES:
        card = "a rehearsal without a card: no figure means anything"
    elif torch.cuda.is_available():
        torch.cuda.set_device(0)
        torch.cuda.init()  # otherwise, a mesh would select the card with the rank's number
        card = torch.cuda.get_device_name()
    else:
        raise SystemExit("no GPU here: this benchmark needs one")
    if rank == 0:
        print(f"{card}, torch {torch.__version__}, CUDA {torch.version.cuda}, medians of {options.rounds}")
    if ranks == 1:
        host_time(options.rounds)
        lanes()
    steps(options.rounds, "cpu:gloo,cuda:nccl" if ranks == 1 and not REHEARSES else "gloo")


if __name__ == "__main__":
    main()
