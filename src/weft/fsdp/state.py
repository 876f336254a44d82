"""`fully_shard.state(module)`: the attributes of a sharded module's state that torch's code uses.

used by torch.distributed.pipelining to reduce a stage's gradients weft
-----------------------------------------------------------------  ------------------------------------------------
state._state_ctx.all_states: of all units of the model             one state, with all units' groups
state._fsdp_param_groups: each with post_backward()                post_backward() does nothing: the next line does
state._root_post_backward_final_callback()                         reduces gradients that no sync has reduced
"""

from types import SimpleNamespace
from typing import Any

from torch import nn

from weft.fsdp.module import FSDPModule, runtime_of


class ShardedState:
    """The state of the model that a sharded module belongs to."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._state_ctx = SimpleNamespace(all_states=[self])

    @property
    def _fsdp_param_groups(self) -> list[Any]:
        groups = [group for unit in runtime_of(self._module).units for group in unit.groups]
        return [SimpleNamespace(post_backward=_nothing, group=group) for group in groups]

    def _root_post_backward_final_callback(self) -> None:
        runtime_of(self._module).finish_deferred()


def state_of(module: nn.Module) -> ShardedState | None:
    """Return the state of a sharded module, as torch's `fully_shard.state` does; None for another module."""
    return ShardedState(module) if isinstance(module, FSDPModule) else None


def _nothing() -> None:
    """Do nothing: `_root_post_backward_final_callback` reduces all groups."""
