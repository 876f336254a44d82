"""Which transport moves tensors between the ranks of a group.

    tensors on             backend        transport
    --------------------   -----------    ------------------------------
    a device with streams  nccl           `BuiltIn`, with averages
    CPU                    gloo           `Gloo`
    either                 any other      that of its module, or `BuiltIn`

The transport of a backend is `TRANSPORT` of the module `weft.comm.<backend>`, so another one is one file. Only this
file and `groups`, which makes groups, know backends by name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import torch
import torch.distributed as dist

from weft.comm import streams
from weft.comm.builtin import BuiltIn
from weft.comm.transport import Transport

HOSTS = "gloo"
"""The backend for what lies in the memory of hosts."""
_DEVICES = {"cpu": HOSTS, "cuda": f"cpu:{HOSTS},cuda:nccl"}


class Transports(dict[str, Transport]):
    """Transports by backend, each imported when it is needed first."""

    def __missing__(self, backend: str) -> Transport:
        name = f"{__package__}.{backend}"
        try:
            found = getattr(import_module(name), "TRANSPORT", _other)
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):  # the module is there, and misses another one
                raise
            found = _other
        self[backend] = found
        return found


TRANSPORTS = Transports()
"""By the name of the backend. A package may add the transport of a backend that it has registered with torch."""
_other: Transport = BuiltIn()
_instead: Transport | None = None


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The name of what moves tensors on `device` between the ranks of `group`, "" for nothing.

    A group may have one backend for each kind of device: torch's default, "cpu:gloo,cuda:nccl", is of that kind.
    """
    try:
        return group._get_backend(device).name()
    except RuntimeError:
        return ""


def transport_of(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """What moves tensors on `device` between the ranks of `group`."""
    if _instead is not None:
        return _instead
    backend = backend_of(group, device)
    if backend == HOSTS and (device.type != "cpu" or streams.has_streams(device)):
        return _other
    return TRANSPORTS[backend]


@contextmanager
def moving_by(transport: Transport) -> Iterator[None]:
    """Inside, `transport` moves everything, on every rank: for tests of what the engine makes of its capabilities."""
    global _instead
    _instead, before = transport, _instead
    try:
        yield
    finally:
        _instead = before


def world() -> dist.ProcessGroup:
    """The default process group."""
    assert dist.group.WORLD is not None, "there is no process group"
    return dist.group.WORLD


def backend_for(device: torch.device) -> str:
    """The backend to start a process group with whose ranks compute on `device`."""
    return _DEVICES[device.type]


def reaches_devices() -> bool:
    """Whether the default process group moves tensors that are not in CPU memory."""
    return dist.get_backend() != HOSTS


def is_pretended(group: dist.ProcessGroup) -> bool:
    """Whether the other ranks do not exist, but count as being all like this one."""
    return backend_of(group, torch.device("cpu")) == "fake"
