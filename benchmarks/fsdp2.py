"""weft, torch FSDP2 and DDP on one model, interleaved in one run, together with lower bounds for any sharding library.

    weft bench fsdp2 --ranks 2
    weft bench fsdp2 --ranks 4 -- --link 4gbit      # as root: a network of limited bandwidth between the ranks

The model communicates much and computes little: eight MLP blocks with 67 M parameters in total, 128 rows per rank. A
step is forward, backward and AdamW. The variants alternate within each round, so that a slow phase of the machine
affects all of them. The time of a round is that of the slowest rank; a variant's figure is the median over rounds.

The lower bounds are

- the computation without communication
- the gathers and reductions of ZeRO-3 without computation
- the CPU time of both on all ranks, divided by the number of cores that the ranks use; overlap cannot reduce it
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
    """Return a function that runs only the communication of a step: two gathers and a reduction per block. At most two
    operations are in flight."""
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
    """Return the seconds that the cores need for one `work()` of all ranks, including gloo's threads. The result is the
    mean over `times` calls.

    Kernel time that is spent on packets outside of the processes is not included.
    """
    dist.barrier()
    begin = time.process_time()
    for _ in range(times):
        work()
    taken = torch.tensor((time.process_time() - begin) / times)
    dist.all_reduce(taken)
    return float(taken) / min(dist.get_world_size(), os.cpu_count() or 1)


def main() -> None:
    """Measure all variants; print on rank 0 the seconds per step and weft's ratio to each."""
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
