"""`load_state_dict(assign=True)` of sharded modules: values are copied into parameters, and buffers are assigned.

in the state dict        what happens
-----------------------  ---------------------------------------------------------------------------------------
a plain tensor           each rank copies its part
a DTensor                each rank copies its part, for any placements, such as those of
                         `distribute_tensor(t, p.device_mesh, p.placements)`. Collective
another dtype            ValueError: a flat buffer keeps its dtype, and an assignment would have changed it
a buffer                 assigned, as torch does it
"""

import torch
from torch import nn

from weft.dtensor.uneven import UnevenDTensor


def copy_assigned(
    module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict, strict: bool, *lists: list
) -> None:
    """Copy values of `state_dict` into sharded parameters, and replace the values by these parameters in `state_dict`.

    This is a hook that runs before `module` assigns the entries of `state_dict`.
    """
    if not local_metadata.get("assign_to_params_buffers"):
        return
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if not isinstance(parameter, UnevenDTensor) or not isinstance(value, torch.Tensor):
            continue
        if value.shape != parameter.shape:  # torch reports these
            continue
        if value.dtype != parameter.dtype:
            raise ValueError(
                f"load_state_dict(assign=True): {prefix + name!r} is {value.dtype}, but the sharded parameter is "
                f"{parameter.dtype} and cannot change: leave out assign, so that the values are cast, or cast the "
                f"state dict, or convert the module before fully_shard"
            )
        if value is not parameter:
            with torch.no_grad():
                parameter.copy_(value)
        state_dict[prefix + name] = parameter
