"""Chooses the transport of tensors between the ranks of a group.

    tensors on             backend        transport
    --------------------   -----------    ------------------------------
    a device with streams  nccl           `BuiltIn`, with averages
    CPU                    gloo           `Gloo`; inside `weft.debug.check_streams`, `BuiltIn`
    any device but CPU     gloo           `CopyingGloo`, through CPU memory
    any device             any other      `TRANSPORT` of the backend's module, or `BuiltIn`

The transport of a backend is `TRANSPORT` of the module `weft.comm.<backend>`, so a new transport needs only one new
file.
"""

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
    """Transports by the name of the backend. Each is imported when it is first needed."""

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
"""Transports by the name of the backend. A package that registers a backend with torch may add its transport here."""
_other: Transport = BuiltIn()
INSTEAD: Transport | None = None
"""For tests: the transport of all groups."""


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend of `group` for tensors on `device`, or "" if the group has none for them. A group
    may have a backend for each device type, as with torch's default, "cpu:gloo,cuda:nccl"."""
    try:
        return group._get_backend(device).name()
    except RuntimeError:
        return ""


def transport_of(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """Return the transport that moves tensors on `device` between the ranks of `group`."""
    if INSTEAD is not None:
        return INSTEAD
    backend = backend_of(group, device)
    if backend == HOSTS and device.type != "cpu":
        return TRANSPORTS[f"{HOSTS}.copying"]
    if backend == HOSTS and streams.has_streams(device):
        return _other
    return TRANSPORTS[backend]


def world() -> dist.ProcessGroup:
    """Return the default process group."""
    assert dist.group.WORLD is not None, "there is no process group"
    return dist.group.WORLD


def backend_for(device: torch.device) -> str:
    """Return the backend to pass to `init_process_group` for ranks that compute on `device`."""
    return _DEVICES[device.type]


def reaches_devices() -> bool:
    """Return whether the default process group has a backend other than gloo, which sends only from CPU memory."""
    return dist.get_backend() != HOSTS


def is_pretended(group: dist.ProcessGroup) -> bool:
    """Return whether `group` has torch's "fake" backend. The other ranks of such a group do not exist. Their values are
    assumed to equal those of this rank."""
    return backend_of(group, torch.device("cpu")) == "fake"


_LOST = ("connection closed", "connection reset", "broken pipe", "socket", "nccl", "gloo", "timed out")


def is_lost_connection(error: BaseException) -> bool:
    """Return whether the text of `error` reports only that the connection to another rank is lost, and no cause."""
    said = str(error).lower()
    return isinstance(error, RuntimeError) and not isinstance(error, OSError) and any(word in said for word in _LOST)
