"""`load_state_dict(assign=True)` of sharded modules: parameters take the values, buffers the tensors.

in the state dict        what happens
-----------------------  ---------------------------------------------------------------------------------------
a plain tensor           each rank copies its part
a DTensor                likewise, however it is cut: one from `distribute_tensor(t, p.device_mesh, p.placements)`
                         too. Collective
of another dtype         ValueError: a flat buffer keeps its dtype, and an assignment would have changed it
a buffer                 assigned, as torch does it
"""

import torch
from torch import nn

from weft.dtensor.uneven import UnevenDTensor


def copy_assigned(
    module: nn.Module, state_dict: dict, prefix: str, local_metadata: dict, strict: bool, *lists: list
) -> None:
    """Before `module` assigns what is in `state_dict`: copy it into the sharded parameters, which assign themselves."""
    if not local_metadata.get("assign_to_params_buffers"):
        return
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if not isinstance(parameter, UnevenDTensor) or not isinstance(value, torch.Tensor):
            continue
        if value.shape != parameter.shape:  # torch names those
            continue
        if value.dtype != parameter.dtype:
            raise ValueError(
                f"load_state_dict(assign=True): {prefix + name!r} is {value.dtype}, and the sharded parameter "
                f"{parameter.dtype}, which it keeps: leave out assign, which casts, or cast the state dict, or convert "
                "the module before fully_shard"
            )
        if value is not parameter:
            with torch.no_grad():
                parameter.copy_(value)
        state_dict[prefix + name] = parameter
