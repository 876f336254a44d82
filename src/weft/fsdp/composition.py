"""Refuses combinations of sharded modules with torch's other data-parallel APIs that would not work.

- Both versions of torch's `replicate()` skip sharded children, because the composable registry lists them.
- `DistributedDataParallel` must be told to ignore sharded parameters. Otherwise it would broadcast and reduce shards
  that differ between ranks, or deadlock. `DataParallel` has no such option, and is always refused.
- A model can use torch's `fully_shard` or weft's, but not both.
- Optimizers take sharded parameters, not gathered ones.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from weft.fsdp.parameter import record_of


def refuse_foreign(module: nn.Module, name: str) -> None:
    """Raise ValueError if torch's `replicate` or `fully_shard` was called on `module`. `name`: its name in errors."""
    registered = [each for each in ("replicate", "fully_shard") if each in vars(module).get(REGISTRY_KEY, {})]
    if isinstance(module, TorchFSDPModule) or registered:
        what = registered[0] if registered else "fully_shard"
        raise ValueError(
            f"{name or 'the module itself'} ({type(module).__name__}) is managed by torch's {what}: "
            "call weft.fully_shard there too, with strategy='no_shard' for modules to replicate, or weft.drop_in() "
            "before anything is sharded"
        )


def refuse_wrappers(module: nn.Module, name: str, child: nn.Module | None) -> Any:
    """Raise TypeError if `module` is torch's DDP or DataParallel and would manage sharded parameters of `child`."""
    if child is None or not isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return
    # The parameters that `DistributedDataParallel` was told to ignore.
    ignored = () if isinstance(module, nn.DataParallel) else getattr(child, "_ddp_params_and_buffers_to_ignore", ())
    for path, parameter in child.named_parameters(remove_duplicate=False):
        if path not in ignored and (record := record_of(parameter)) is not None:
            raise TypeError(
                f"{type(module).__name__} around {path!r} of {record.unit}, which is sharded: its parts differ from "
                "rank to rank. Call weft.fully_shard on the module around it instead, with strategy='no_shard' for "
                "modules to replicate, or torch's replicate(), which ignores it"
            )


def refusing_sharded(init: Callable[..., None], at: int, why: str) -> Callable[..., None]:
    """Wrap `init`, a constructor of torch. If argument number `at` (counted from 0, without self) is a sharded
    parameter, the wrapper raises ValueError with the text `why`."""

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        record = record_of(args[at]) if len(args) > at and isinstance(args[at], nn.Parameter) else None
        if record is not None:
            raise ValueError(why.format(f"parameter {record}, which weft has sharded"))
        init(self, *args, **kwargs)

    return checked


def refusing_gathered(add: Callable[[Any, dict], None]) -> Callable[[Any, dict], None]:
    """Wrap `Optimizer.add_param_group` to raise ValueError for gathered parameters, which an optimizer cannot train."""

    @functools.wraps(add)
    def checked(self: Any, param_group: dict) -> None:
        add(self, param_group)
        for parameter in self.param_groups[-1]["params"]:
            if (record := record_of(parameter)) is not None and record.full is parameter:
                del self.param_groups[-1]
                raise ValueError(
                    f"{type(self).__name__} got the gathered parameter {record}, which is registered under unshard(), "
                    "and would train nothing: call reshard() first, then pass model.parameters()"
                )

    return checked
