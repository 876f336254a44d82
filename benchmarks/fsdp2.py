"""weft, torch FSDP2 and DDP: one model, interleaved in one run, and beside them what no sharding can beat.

    weft bench fsdp2 --ranks 2
    weft bench fsdp2 --ranks 4 -- --link 4gbit      # as root: a network of limited rate between the ranks

The model is communication-heavy: eight MLP blocks, 67 M parameters in fp32, 128 rows per rank. A step is forward,
backward and AdamW. The sides take turns within each round, so that a machine that drifts drifts for all of them; a
round's time is that of the slowest rank, a side's figure the median over rounds. Two sides are limits: the computation
without communication, and the gathers and reductions of ZeRO-3 without computation. What hides the one under the other
still takes cores for both: that is a third limit.
"""

import os
import statistics
import time
from collections.abc import Callable

import _link
import _mlp
import _report
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

import weft
from weft.comm import collectives
from weft.comm.lanes import Lane


def transfers() -> Callable[[], None]:
    """The communication of one step and nothing else: two gathers and a reduction of every block, two at a time."""
    group, ranks, rank, device = dist.group.WORLD, dist.get_world_size(), dist.get_rank(), torch.device("cpu")
    numel = int(_mlp.bytes_sent(1) / 4 / _mlp.BLOCKS) // (ranks - 1) * ranks
    whole = [torch.zeros(numel) for _ in range(2)]
    shard, inbox = (
        torch.zeros(numel // ranks),
        torch.zeros(collectives.inbox_numel(collectives.reduce_scatter, numel, group, device)),
    )
    gather, reduce = Lane("gather", device), Lane("reduce", device)

    def step() -> None:
        tickets = []
        for number in range(2 * _mlp.BLOCKS):
            full = whole[number % 2]
            tickets.append(gather.run(collectives.all_gather, full, full.view(ranks, -1)[rank], group))
            if number >= _mlp.BLOCKS:
                options = {"scale": 1 / ranks, "accumulate": False, "inbox": inbox}
                tickets.append(reduce.run(collectives.reduce_scatter, shard, full, group, **options))
            while len(tickets) > 1:
                tickets.pop(0).wait()
        tickets.pop().wait()

    return step


SIDES: dict[str, Callable[[], Callable[[], None]]] = {
    "weft": lambda: _mlp.step_of(_mlp.sharded(_mlp.model(), weft.fully_shard)),
    "FSDP2": lambda: _mlp.step_of(_mlp.sharded(_mlp.model(), torch_fully_shard)),
    "DDP": lambda: _mlp.step_of(DistributedDataParallel(_mlp.model())),
    "compute alone": lambda: _mlp.step_of(_mlp.model()),
    "transfers alone": transfers,
}
LIMITS = ("compute alone", "transfers alone")


def processor_seconds(work: Callable[[], None], times: int) -> float:
    """Seconds that the cores need for one `work()` of all ranks, threads of gloo included: the mean over `times`.

    What the kernel does to packets apart from the processes is not in it.
    """
    dist.barrier()
    begin = time.process_time()
    for _ in range(times):
        work()
    taken = torch.tensor((time.process_time() - begin) / times)
    dist.all_reduce(taken)
    return float(taken) / min(dist.get_world_size(), os.cpu_count() or 1)


def main() -> None:
    """Measure and print, on rank 0, seconds per step and the ratios of weft to each side."""
    options = _report.parser(__doc__, steps=2, link="4gbit").parse_args()
    torch.set_num_threads(1)
    with _link.process_group(options.link):
        sides = {name: make() for name, make in SIDES.items()}
        taken = _report.in_turn(sides, options.rounds, options.steps)
        of_cores = sum(processor_seconds(sides[name], options.rounds * options.steps) for name in LIMITS)
        if dist.get_rank() == 0:
            print(f"{_report.machine()}, on {options.link or 'loopback'}, medians of {options.rounds}")
            _report.table(taken, "weft", "s/step")
            limit = max(statistics.median(taken[side]) for side in LIMITS)
            print(f"limit, all of the shorter hidden under the longer: {limit:.2f} s")
            print(f"limit of the cores, what both take of them: {of_cores:.2f} s")
            if options.link:
                print(f"bytes of a step over the link: {_link.seconds_for(_mlp.bytes_sent(3), options.link):.2f} s")


if __name__ == "__main__":
    main()
