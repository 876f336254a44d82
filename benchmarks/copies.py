"""The cost of copying a run's state to host memory, compared with a checkpoint on disk.

    weft bench copies --ranks 2

The benchmark measures the time until `save` returns, when the state has been copied to the host, and the time until the
background thread has written and committed the state. A copy every N steps adds the first time to one step in N. No
round starts after 60 seconds.
"""

import os
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from _report import parser
from torch import nn

import weft
from weft.checkpoint import CheckpointManager, ModelState, OptimizerState
from weft.checkpoint.manifest import Manifest, readable_size
from weft.comm.groups import first_rank_s
from weft.train.run.memory import HOST_MEMORY

LONGEST_S = 60.0
"""No round begins after this time, in seconds."""


def main() -> None:
    """Save to disk and to memory alternately; print the medians of both times."""
    command = parser(__doc__, rounds=7)
    command.add_argument("--width", type=int, default=1024, help="of the four square layers that are saved")
    options = command.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net = weft.fully_shard(nn.Sequential(*(nn.Linear(options.width, options.width) for _ in range(4))))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, options.width)).sum().backward()
    optimizer.step()
    state = {"model": ModelState(net), "optimizer": OptimizerState(net, optimizer)}

    places = {"disk": Path.cwd(), "memory": HOST_MEMORY}
    folders = {
        name: Path(first_rank_s(tempfile.mkdtemp(prefix="weft-bench-", dir=place) if dist.get_rank() == 0 else ""))
        for name, place in places.items()
    }
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in places}
    managers = {name: CheckpointManager(folder, keep=1) for name, folder in folders.items()}
    began = time.monotonic()
    for step in range(1, options.rounds + 2):
        if step > 2 and first_rank_s(time.monotonic() - began > LONGEST_S, what="whether time is up"):
            break
        done = step
        for name, manager in managers.items():
            dist.barrier()
            begin = time.perf_counter()
            manager.save(step, state)
            returned = time.perf_counter() - begin
            manager.wait()
            if step > 1:
                taken[name].append((returned, time.perf_counter() - begin))
    size = Manifest.read(folders["memory"] / f"step-{done:08d}").bytes
    for manager in managers.values():
        manager.close()
    if dist.get_rank() == 0:
        machine = f"{os.cpu_count()} cores {platform.machine()}"
        rounds = f"{dist.get_world_size()} ranks, {done - 1} rounds"
        print(f"{rounds}, state of {readable_size(size)}, torch {torch.__version__}, {machine}")
        print(f"{'to':8}{'ms in the training thread':>27}{'ms until it is there':>22}")
        for name, pairs in taken.items():
            returned, there = (statistics.median(column) * 1e3 for column in zip(*pairs))
            print(f"{name:8}{returned:27.1f}{there:22.1f}")
        for folder in folders.values():
            shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
