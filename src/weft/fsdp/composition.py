"""Sharded modules among torch's other ways to be data-parallel: what torch's code sees of them, and what is refused.

around a sharded child             what happens
---------------------------------  ---------------------------------------------------------------------------
`replicate()`, both of torch's     leaves it alone: the composable registry says that it is sharded
`DistributedDataParallel`,         TypeError when they are built: they would broadcast and reduce parts that
`DataParallel`                     differ from rank to rank, and wait for each other. Sharded parameters that the
                                   former was told to ignore are left alone
torch's `fully_shard` inside or    ValueError at the outer call: one model, one of the two
outside of weft's
a parametrization of its           ValueError: it comes before `fully_shard`
parameters
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from weft.fsdp.parameter import record_of


def enter_registry(module: nn.Module) -> None:
    """Say to torch's composable functions that `module` is sharded."""
    registry = vars(module).setdefault(REGISTRY_KEY, {})
    registry["fully_shard"] = RegistryItem()


def refuse_foreign(module: nn.Module, name: str) -> None:
    """Raise ValueError for a module, `name` inside the one to be sharded, that another library's functions manage."""
    registered = [each for each in ("replicate", "fully_shard") if each in vars(module).get(REGISTRY_KEY, {})]
    if isinstance(module, TorchFSDPModule) or registered:
        what = registered[0] if registered else "fully_shard"
        raise ValueError(
            f"{name.removesuffix('.') or 'the module itself'} ({type(module).__name__}) is managed by torch's {what}: "
            "call weft.fully_shard there too, with strategy='no_shard' for what is to be replicated; or weft.drop_in() "
            "before anything is sharded"
        )


def refuse_wrappers(module: nn.Module, name: str, child: nn.Module | None) -> Any:
    """Raise for a sharded module that torch's data-parallel wrappers would reduce a second time."""
    if child is None or not isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return
    # What torch's `DistributedDataParallel` was told to leave alone.
    ignored = () if isinstance(module, nn.DataParallel) else getattr(child, "_ddp_params_and_buffers_to_ignore", ())
    for path, parameter in child.named_parameters(remove_duplicate=False):
        if path not in ignored and (record := record_of(parameter)) is not None:
            raise TypeError(
                f"{type(module).__name__} around {path!r} of {record.unit}, which is sharded: its parts differ from "
                "rank to rank. Call weft.fully_shard on the module around it instead, with strategy='no_shard' for "
                "what is to be replicated, or torch's replicate(), which leaves it alone"
            )


def refusing_sharded(init: Callable[..., None], at: int, why: str) -> Callable[..., None]:
    """`init`, a constructor of torch's, raising ValueError for a sharded parameter as its argument `at`."""

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        record = record_of(args[at]) if len(args) > at and isinstance(args[at], nn.Parameter) else None
        if record is not None:
            raise ValueError(why.format(f"parameter {record}, which weft has sharded"))
        init(self, *args, **kwargs)

    return checked
