"""The rank of this process in the run, from the launcher's environment variables, and the default process group."""

import atexit
import re
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from weft.train.errors import ConfigError
from weft.train.run.stop import StopRequest

if TYPE_CHECKING:
    import torch

STORE = "WEFT_STORE"
"""The environment variable that names the FileStore of ranks that `weft train` started."""


@dataclass(frozen=True)
class Place:
    """The rank of this process, the number of ranks and their store, from the launcher's environment variables."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    """The number of ranks on this host."""
    launcher: Literal["weft", "torchrun", "slurm"]
    init_method: str
    """The address of the ranks' store: file:///… or tcp://host:port."""

    def device(self) -> "torch.device":
        """Return the accelerator of this rank, or the CPU if there is no accelerator.

        Raises ConfigError if several ranks of this host would have to share an accelerator.
        """
        import torch

        count = torch.cuda.device_count()
        if count == 0:
            return torch.device("cpu")
        if count < self.local_ranks:
            raise ConfigError(
                f"{self.local_ranks} ranks on this host, which has {count} GPU: each rank needs its own; start "
                f"{count}, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
            )
        return torch.device("cuda", self.local_rank)

    def join(self, device: "torch.device", *, patience: float, stop: StopRequest, say: Callable[[str], None]) -> None:
        """Wait for all ranks, then initialize the default process group. If `device` is a GPU, first make it the
        current device. `patience`, `stop`, `say`: as in `meet`."""
        import torch
        import torch.distributed as dist

        from weft.comm.backends import backend_for
        from weft.train.run.meeting import meet

        def begin(store: dist.Store) -> None:
            dist.init_process_group(backend_for(device), store=store, rank=self.rank, world_size=self.ranks)

        if device.type == "cuda":
            torch.cuda.set_device(device)
        meet(self.init_method, self.rank, self.ranks, patience=patience, stop=stop, say=say, begin=begin)


def begin_alone() -> None:
    """Initialize a default process group of this process alone. It is destroyed when the interpreter exits."""
    import torch.distributed as dist

    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    end_with_interpreter()


def end_with_interpreter() -> None:
    """Destroy the current default process group when the interpreter exits, unless it was destroyed before.

    Without this, threads of gloo would still run, and might abort the interpreter during its exit.
    """
    import torch.distributed as dist

    from weft.mesh import forget_meshes

    begun = weakref.ref(dist.group.WORLD)  # weak, so that destroying the group earlier ends its threads

    def end() -> None:
        if dist.is_initialized() and dist.group.WORLD is begun():
            forget_meshes()
            dist.destroy_process_group()

    atexit.register(end)


def place_from(environment: Mapping[str, str]) -> Place | None:
    """Return the `Place` of this process that torchrun, SLURM or `weft train` describes in `environment`. Return None
    without a launcher, and for a SLURM job of one task.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local = int(environment.get("LOCAL_RANK", rank)), int(environment.get("LOCAL_WORLD_SIZE", ranks))
        if STORE in environment:
            return Place(rank, ranks, *local, "weft", f"file://{environment[STORE]}")
        if "MASTER_ADDR" in environment:
            port = environment.get("MASTER_PORT", "29500")
            return Place(rank, ranks, *local, "torchrun", f"tcp://{environment['MASTER_ADDR']}:{port}")
    slurm = [environment.get(f"SLURM_{name}") for name in ("PROCID", "NTASKS", "LOCALID")]
    if None not in slurm and environment["SLURM_NTASKS"] != "1":
        # The hosts of this `srun` are a part of those of the job, and rank 0 is on the first of them.
        hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "localhost")
        host = environment.get("MASTER_ADDR") or first_host(hosts)
        # The port depends on the ids of the job and of the `srun`, so that two of them on one host do not collide.
        job, step = (int(environment.get(f"SLURM_{name}_ID", "0")) for name in ("JOB", "STEP"))
        port = environment.get("MASTER_PORT") or str(20_000 + (job + 7919 * step) % 20_000)
        ranks = int(environment["SLURM_NTASKS"])
        nodes = int(environment.get("SLURM_STEP_NUM_NODES") or environment.get("SLURM_NNODES", "1"))
        return Place(
            int(environment["SLURM_PROCID"]),
            ranks,
            int(environment["SLURM_LOCALID"]),
            -(-ranks // nodes),
            "slurm",
            f"tcp://{host}:{port}",
        )
    return None


def torchrun_of(environment: Mapping[str, str]) -> list[str]:
    """Return the torchrun command that started this process, up to the program. Empty if torchrun did not start it.

    With several hosts, the command names the host of rank 0 and torchrun's default port, because the environment does
    not contain the address at which the hosts met.
    """
    if not {"TORCHELASTIC_RUN_ID", "RANK"} <= environment.keys() or STORE in environment:
        return []
    hosts, local = environment.get("GROUP_WORLD_SIZE", "1"), environment.get("LOCAL_WORLD_SIZE", "1")
    if hosts == "1":
        return ["torchrun", "--nproc-per-node", local]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{environment.get('MASTER_ADDR', 'localhost')}:29500"]
    return ["torchrun", "--nnodes", hosts, "--nproc-per-node", local, *meeting]


def first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list: "gpu[07-09,12],cpu1" -> "gpu07"."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodelist)
    if match is None:
        raise ConfigError(f"the list of SLURM's hosts {nodelist!r} names no host")
    return "".join(part or "" for part in match.groups())
