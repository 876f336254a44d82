"""A network of limited rate between the ranks of one machine, for benchmarks: root and iproute2 needed.

                    +-------- bridge ("hub") --------+
      tbf rate ->   |                |               |   <- tbf rate
                 rank 0           rank 1          rank 2     one network namespace each

Every rank's link is limited in both directions; the ranks meet through a file instead of a port.
"""

import ctypes
import os
import shutil
import subprocess

import torch.distributed as dist

SUBNET = "10.231.77"
CLONE_NEWNET = 0x40000000


def available() -> str | None:
    """Why no link can be made here, or None."""
    if os.geteuid() != 0:
        return "needs root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "needs the commands ip and tc (iproute2)"
    return None


def join_limited_network(rate: str, rank: int, ranks: int, name: str) -> None:
    """Move this process behind a link of `rate` (tc's notation, "4gbit"), then start the process group.

    `name`: the same on all ranks and unused on the machine. Rank 0 makes the network and takes it down at exit.
    """
    folder = f"/tmp/weft-link-{name}"
    ready = os.path.join(folder, "ready")
    if rank == 0:
        os.makedirs(folder)
        _build(rate, ranks, name)
        open(ready, "w").close()
    while not os.path.exists(ready):
        pass
    descriptor = os.open(f"/run/netns/{name}-{rank}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group(
        "gloo", store=dist.FileStore(os.path.join(folder, "store"), ranks), rank=rank, world_size=ranks
    )


def take_down(rank: int, ranks: int, name: str) -> None:
    """Remove the network; on rank 0, after the process group is destroyed."""
    if rank == 0:
        for namespace in [f"{name}-{other}" for other in range(ranks)] + [f"{name}-hub"]:
            subprocess.run(["ip", "netns", "del", namespace], check=False)
        shutil.rmtree(f"/tmp/weft-link-{name}", ignore_errors=True)


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
        limit = f"root tbf rate {rate} burst 1mb latency 100ms"
        _run(f"tc -n {inside} qdisc add dev eth0 {limit}")
        _run(f"tc -n {hub} qdisc add dev port{rank} {limit}")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr.strip()}")
