"""Checks whether parameters can be sharded.

a parameter                                       at fully_shard
------------------------------------------------  ---------------------------------------------------------------
plain, or of a subclass without own operators     sharded
a DTensor of a tensor-parallel plan               sharded: this rank's slice is cut further
of a lazy module, without a shape                 ValueError
of a subclass that implements operators           ValueError: a flat buffer would lose the class
annotated by the package spmd_types               ValueError: the annotation says how its gradient is reduced
with hooks on its gradient, or an optimizer that  ValueError: they would never run
runs in backward
on another device                                 ValueError
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from weft.dtensor.tensor_parallel import TensorParallel, tensor_parallel_of
from weft.dtensor.uneven import UnevenDTensor
from weft.fsdp.gradients.in_vain import never_runs
from weft.fsdp.originals import Original

_ANNOTATION = "_local_type"
"""The attribute in which spmd_types stores the type of a plain tensor on each mesh axis."""


def checked_parameter(
    parameter: nn.Parameter, mesh: DeviceMesh, device: torch.device, where: str, replicas: Collection[str] = ()
) -> TensorParallel | None:
    """Return the tensor-parallel placement of a parameter, None for a plain one; raise ValueError if it cannot be
    sharded.

    `where`: its name in errors. `replicas`: the names of the data-parallel axes, for DTensors over a whole mesh.
    """
    if isinstance(parameter, (UnevenDTensor, Original)):
        raise ValueError(f"{where} is already sharded, by a unit that no longer exists: build the module again")
    if is_lazy(parameter):
        raise ValueError(f"{where} has no shape yet: run one forward of the module before fully_shard")
    _refuse_own_operators(parameter, where)
    if _ANNOTATION in vars(parameter):
        raise ValueError(
            f"{where} is annotated by spmd_types as {vars(parameter)[_ANNOTATION]}, which says over which axes its "
            f"gradient is reduced. Sharding would lose this: pass it as a DTensor, as torchtitan does with "
            "parallelism.spmd_backend 'partial_dtensor' or 'full_dtensor'"
        )
    if why := never_runs(parameter):
        raise ValueError(f"{where}: {why}")
    if parameter.device.type not in (device.type, "cpu", "meta"):  # from the CPU only this rank's part is copied
        raise ValueError(
            f"{where} is on {parameter.device}, the mesh is for {device.type}: move the module to {device.type} or "
            "the CPU before fully_shard"
        )
    return tensor_parallel_of(parameter, mesh, where, replicas)


def _refuse_own_operators(parameter: nn.Parameter, where: str) -> None:
    """Raise ValueError for a tensor whose class implements operators, because flat buffers store plain elements."""
    tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    kind: Any = type(tensor)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or _function_of(kind) not in _PLAIN_FUNCTIONS:
        protocol = " and its fsdp_pre_all_gather would never be called" if hasattr(kind, "fsdp_pre_all_gather") else ""
        raise ValueError(
            f"{where} is a {kind.__name__}, a tensor subclass with its own operators: flat buffers hold plain "
            f"elements, so its class would be lost{protocol}. Name it in ignored_params, or keep the weight plain, as "
            f"torchao's float8 training does with enable_fsdp_float8_all_gather=False and its int8 training with "
            f"module_swap=True"
        )


def _function_of(kind: Any) -> Any:
    return getattr(kind.__torch_function__, "__func__", kind.__torch_function__)


_PLAIN_FUNCTIONS = [_function_of(kind) for kind in (torch.Tensor, nn.Parameter)]
