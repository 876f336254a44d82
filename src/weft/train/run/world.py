"""This process's place among the ranks of its run, and how they join."""

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
"""Environment variable: the file over which ranks that `weft train` started itself meet."""


@dataclass(frozen=True)
class Place:
    """One rank's place, as the launcher's environment describes it."""

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    """Ranks on this host."""
    launcher: Literal["weft", "torchrun", "slurm"]
    init_method: str
    """Where the ranks meet: file:///… or tcp://host:port."""

    def device(self) -> "torch.device":
        """The accelerator of this rank, or the CPU where there is none.

        Raises ConfigError where some ranks of this host would have to share an accelerator.
        """
        import torch

        count = torch.cuda.device_count()
        if count == 0:
            return torch.device("cpu")
        if count < self.local_ranks:
            raise ConfigError(
                f"{self.local_ranks} ranks on this host, which has {count} GPU: each rank needs one; start "
                f"{count}, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
            )
        return torch.device("cuda", self.local_rank)

    def join(self, device: "torch.device", *, patience: float, stop: StopRequest, say: Callable[[str], None]) -> None:
        """Start the default process group with all other ranks; waits for them as `meet` does."""
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
    """Start a default process group of this process alone, and end it with the interpreter."""
    import torch.distributed as dist

    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    end_with_interpreter()


def end_with_interpreter() -> None:
    """End the present default process group when the interpreter ends, unless it has ended before.

    gloo's threads may abort an interpreter that ends before them."""
    import torch.distributed as dist

    from weft.mesh import forget_meshes

    begun = weakref.ref(dist.group.WORLD)  # who ends it before, ends its threads

    def end() -> None:
        if dist.is_initialized() and dist.group.WORLD is begun():
            forget_meshes()
            dist.destroy_process_group()

    atexit.register(end)


def place_from(environment: Mapping[str, str]) -> Place | None:
    """The place that torchrun, SLURM or `weft train` itself gave this process; None without one."""
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
        host = environment.get("MASTER_ADDR") or first_host(environment.get("SLURM_NODELIST", "localhost"))
        # The job's number keeps two jobs on one host apart.
        port = environment.get("MASTER_PORT") or str(20_000 + int(environment.get("SLURM_JOB_ID", "0")) % 20_000)
        ranks = int(environment["SLURM_NTASKS"])
        nodes = int(environment.get("SLURM_NNODES", "1"))
        return Place(
            int(environment["SLURM_PROCID"]),
            ranks,
            int(environment["SLURM_LOCALID"]),
            -(-ranks // nodes),
            "slurm",
            f"tcp://{host}:{port}",
        )
    return None


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list: "gpu[07-09,12],cpu1" -> "gpu07"."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodelist)
    if match is None:
        raise ConfigError(f"SLURM_NODELIST = {nodelist!r}: names no host")
    return "".join(part or "" for part in match.groups())
