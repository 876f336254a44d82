"""Expert parallelism: the combined schedule, the same nodes one after another, and plain forward and backward.

    weft bench experts --ranks 2 -- --link 500mbit      # as root: a network of limited rate between the ranks
    weft bench experts --ranks 2                        # loopback: the exchange costs little, and so does hiding it

Four attention layers with eight experts each, two per token, spread over all ranks, everything sharded (ZeRO-3). A step
is forward and backward of all microbatches. The sides take turns within each round; a round's time is that of the
slowest rank, a side's figure the median over rounds. An exchange counts as hidden while this rank computes, and as
exposed while it waits for communication of whatever kind.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

import _link
import torch
import torch.distributed as dist

import weft
from weft.comm.timeline import Timeline, busy
from weft.models import HybridConfig, HybridModel
from weft.overlap import forward_backward, hidden_fraction

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


def model() -> HybridModel:
    """4 M parameters, three quarters of them in experts."""
    meshes = weft.init_meshes("cpu", ep=dist.get_world_size())
    torch.manual_seed(0)
    runtime = weft.RuntimeOptions(separate_all_gather_group=True)
    return weft.models.shard(HybridModel(CONFIG, meshes=meshes), meshes, runtime=runtime)


def plain(net: HybridModel, microbatches: list) -> None:
    """The model's own forward and backward, one microbatch after the other."""
    for tokens, labels in microbatches:
        net(tokens, labels).backward()


SIDES: dict[str, Callable[[HybridModel, list], object]] = {
    "combined": forward_backward,
    "combined, wgrad delayed": lambda net, data: forward_backward(net, data, delay_wgrad=True),
    "unpaired nodes": lambda net, data: forward_backward(net, data, overlap=False),
    "plain": plain,
}


def seconds(step: Callable[[], object]) -> float:
    """Seconds of the slowest rank for one step."""
    dist.barrier()
    begin = time.perf_counter()
    step()
    taken = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def lanes(step: Callable[[], object]) -> dict[str, float]:
    """Seconds of each lane, and the part of it that was hidden, in one more step on this rank."""
    dist.barrier()
    with Timeline() as timeline:
        step()
    intervals = timeline.intervals()
    return {
        lane: (busy(intervals, lane), hidden_fraction(intervals, lane))
        for lane in ("exchange", "gather", "reduce")
        if busy(intervals, lane)
    }


def main() -> None:
    """Measure and print, on rank 0, seconds per step, ratios, and what was hidden."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--link", metavar="RATE", help='limit each rank\'s network to this rate, as in "500mbit"')
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    network = f"weft{os.environ['MASTER_PORT']}"
    if options.link:
        if reason := _link.available():
            raise SystemExit(f"--link {options.link}: {reason}")
        _link.join_limited_network(options.link, rank, ranks, network)
    else:
        dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(rank)
    shape = (2, ROWS, SEQUENCE)
    data = [torch.randint(CONFIG.vocab_size, shape, generator=generator).unbind() for _ in range(MICROBATCHES)]

    nets = {name: model() for name in SIDES}
    steps = {name: lambda run=run, net=nets[name]: run(net, data) for name, run in SIDES.items()}
    for step in steps.values():
        seconds(step)
    rounds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            rounds[name].append(seconds(step))
    recorded = {name: lanes(steps[name]) for name in steps}
    if rank == 0:
        report(rounds, recorded, nets, options.link)
    dist.destroy_process_group()
    if options.link:
        _link.take_down(rank, ranks, network)


def report(rounds: dict, recorded: dict, nets: dict, link: str | None) -> None:
    """A table of medians and ratios, and one of lanes and memory."""
    machine = f"{os.cpu_count()} cores {platform.machine()}"
    print(
        f"{dist.get_world_size()} ranks, 1 thread each, gloo on {link or 'loopback'}, torch {torch.__version__}, "
        f"{machine}; {MICROBATCHES} microbatches of {ROWS} x {SEQUENCE} tokens per rank"
    )
    print(f"{'side':25}{'s/step':>8}{'min':>8}{'max':>8}{'side / combined':>17}")
    for name, times in rounds.items():
        ratio = statistics.median(theirs / ours for ours, theirs in zip(rounds["combined"], times))
        print(f"{name:25}{statistics.median(times):8.3f}{min(times):8.3f}{max(times):8.3f}{ratio:17.2f}")
    print(f"\n{'one more step, rank 0':25}{'lane':>10}{'busy s':>9}{'hidden':>9}{'of the step':>13}")
    for name, found in recorded.items():
        for lane, (moving, hidden) in found.items():
            share = moving / statistics.median(rounds[name])
            print(f"{name:25}{lane:>10}{moving:9.3f}{hidden:9.0%}{share:13.0%}")
    print(f"\n{'peak transient bytes':25}{'weights':>12}{'gradients':>12}")
    for name, net in nets.items():
        peaks = {role: found["peak"] for role, found in weft.memory_report(net)["transient"].items()}
        print(f"{name:25}" + "".join(f"{peak:12,}" for peak in peaks.values()))


if __name__ == "__main__":
    main()
