"""The choice of the transport that moves tensors between the ranks of a group.

    tensors on             backend        transport
    --------------------   -----------    ------------------------------
    a device with streams  nccl           `BuiltIn`, with averages
    CPU                    gloo           `Gloo`
    either                 any other      that of its module, or `BuiltIn`

The transport of a backend is `TRANSPORT` of the module `weft.comm.<backend>`, so adding one takes one file. Only this
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
"""The backend for tensors in CPU memory."""
_DEVICES = {"cpu": HOSTS, "cuda": f"cpu:{HOSTS},cuda:nccl"}


class Transports(dict[str, Transport]):
    """Transports by the backend's name, each imported when it is first needed."""

    def __missing__(self, backend: str) -> Transport:
        name = f"{__package__}.{backend}"
        try:
            found = getattr(import_module(name), "TRANSPORT", _other)
        except ModuleNotFoundError as error:
            if not name.startswith(str(error.name)):  # the module exists, and one of its own imports is missing
                raise
            found = _other
        self[backend] = found
        return found


TRANSPORTS = Transports()
"""Transports by the backend's name. A package may add the transport of a backend that it has registered with torch."""
_other: Transport = BuiltIn()
_instead: Transport | None = None


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that moves tensors on `device` between the ranks of `group`; "" if there is none.

    A group may have one backend per device type, as with torch's default "cpu:gloo,cuda:nccl".
    """
    try:
        return group._get_backend(device).name()
    except RuntimeError:
        return ""


def transport_of(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """Return the transport that moves tensors on `device` between the ranks of `group`."""
    if _instead is not None:
        return _instead
    backend = backend_of(group, device)
    if backend == HOSTS and (device.type != "cpu" or streams.has_streams(device)):
        return _other
    return TRANSPORTS[backend]


@contextmanager
def moving_by(transport: Transport) -> Iterator[None]:
    """Use `transport` for all groups inside the context: for tests of how the engine uses capabilities."""
    global _instead
    _instead, before = transport, _instead
    try:
        yield
    finally:
        _instead = before


def world() -> dist.ProcessGroup:
    """Return the default process group."""
    assert dist.group.WORLD is not None, "there is no process group"
    return dist.group.WORLD


def backend_for(device: torch.device) -> str:
    """Return the backend for `init_process_group` if the ranks compute on `device`."""
    return _DEVICES[device.type]


def reaches_devices() -> bool:
    """Return whether the default process group moves tensors that are not in CPU memory."""
    return dist.get_backend() != HOSTS


def is_pretended(group: dist.ProcessGroup) -> bool:
    """Return whether the backend is torch's "fake", in which the other ranks do not exist."""
    return backend_of(group, torch.device("cpu")) == "fake"
