"""Puts a network of limited bandwidth between the ranks of one machine. Needs root and iproute2.

                    +-------- bridge ("hub") --------+
      tbf rate ->   |                |               |   <- tbf rate
                 rank 0           rank 1          rank 2     one network namespace each

Each rank's link is limited in both directions. The ranks rendezvous through a file instead of a port.
"""

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

SUBNET = "10.231.77"
CLONE_NEWNET = 0x40000000
BURST_SECONDS = 0.002
"""The burst that an idle link may send at once, in seconds at its rate. It is short compared with a transfer, so that
pauses do not make later transfers faster."""


@contextmanager
def process_group(rate: str | None) -> Iterator[None]:
    """Create the process group of this run: over a link of `rate` per rank ("4gbit", as in tc) or, if it is None, over
    loopback. On exit, also after an exception, the links are removed."""
    if rate is None:
        dist.init_process_group("gloo")
        try:
            yield
        finally:
            dist.destroy_process_group()
        return
    if reason := _missing():
        raise SystemExit(f"--link {rate}: {reason}")
    rank, ranks, name = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), f"weft{os.environ['MASTER_PORT']}"
    folder = f"/tmp/weft-link-{name}"
    try:
        _join(rate, rank, ranks, name, folder)
        yield
        dist.destroy_process_group()
    finally:
        if rank == 0:
            for namespace in [f"{name}-{other}" for other in range(ranks)] + [f"{name}-hub"]:
                subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)


def seconds_for(nbytes: float, rate: str) -> float:
    """Return the seconds that a link of `rate` takes to send `nbytes` bytes in one direction."""
    number, unit = float(rate.rstrip("kmgbit")), rate.lstrip("0123456789.")
    return nbytes * 8 / (number * {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}[unit])


def _missing() -> str | None:
    if os.geteuid() != 0:
        return "needs root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "needs the commands ip and tc (iproute2)"
    return None


def _join(rate: str, rank: int, ranks: int, name: str, folder: str) -> None:
    """Move this process into its network namespace, which rank 0 creates, and create the process group."""
    ready = os.path.join(folder, "ready")
    if rank == 0:
        os.makedirs(folder)
        _build(rate, ranks, name)
        open(ready, "w").close()
    while not os.path.exists(ready):
        time.sleep(0.01)
    descriptor = os.open(f"/run/netns/{name}-{rank}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group(
        "gloo", store=dist.FileStore(os.path.join(folder, "store"), ranks), rank=rank, world_size=ranks
    )


def _build(rate: str, ranks: int, name: str) -> None:
    hub = f"{name}-hub"
    _run(f"ip netns add {hub}")
    _run(f"ip -n {hub} link add br0 type bridge")
    _run(f"ip -n {hub} link set br0 up")
    for rank in range(ranks):
        inside = f"{name}-{rank}"
        _run(f"ip netns add {inside}")
        _run(f"ip -n {inside} link add eth0 type veth peer name port{rank} netns {hub}")
        _run(f"ip -n {inside} addr add {SUBNET}.{rank + 1}/24 dev eth0")
        _run(f"ip -n {inside} link set lo up")
        _run(f"ip -n {inside} link set eth0 up")
        _run(f"ip -n {hub} link set port{rank} master br0 up")
        burst = int(BURST_SECONDS / seconds_for(1, rate))
        limit = f"root tbf rate {rate} burst {burst} latency 100ms"
        _run(f"tc -n {inside} qdisc add dev eth0 {limit}")
        _run(f"tc -n {hub} qdisc add dev port{rank} {limit}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr.strip()}")
