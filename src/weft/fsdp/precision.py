"""The dtypes of main weights, computation, communication and gradients.

main weights  --cast-->  gathered weights  -->  forward, backward  -->  gradients
main_params_dtype        param_dtype                                       |
     ^                                                          reduce_dtype, in messages
     |                                                                     v
  optimizer  <-------------------------------------------------  main gradients: main_grads_dtype
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy as _TorchMixedPrecisionPolicy

from weft.dtensor.uneven import UnevenDTensor
from weft.fsdp.trees import map_tensors, tensors_in
from weft.quantize import Quantization

_COMPUTED_IN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a unit. None keeps the dtype of the parameter or tensor, unless a line below says otherwise.

    - `param_dtype`: dtype of the gathered weights and of the computation.
    - `reduce_dtype`: dtype in which gradients are reduced. None: `param_dtype`.
    - `output_dtype`: dtype to which floating-point outputs of the module are cast.
    - `cast_forward_inputs`: whether floating-point inputs are cast to `param_dtype`.
    - `main_params_dtype`: dtype of the weights that the optimizer updates. None: the parameter's, or float32 for
      a quantized parameter that is not frozen.
    - `main_grads_dtype`: dtype of `.grad`, in which gradients accumulate. None: `main_params_dtype`.
    - `param_quantization`: a recipe of `weft.quantize`. Weights are gathered in its format, and dequantized for use
      unless the recipe has `compute="scaled"`. None: weights are not quantized.
    - `quantize(name, parameter)`: returns whether to quantize a parameter. `name` is its name in the sharded module.
      None: quantize parameters with two or three dimensions, except embeddings and experts' biases. If the recipe has
      `compute="scaled"`, None quantizes only the weights of linear layers and experts.

    Raises ValueError for dtypes other than float64, float32, bfloat16 and float16, and for `quantize` without
    `param_quantization`; TypeError if `param_quantization` is not a recipe.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    main_params_dtype: torch.dtype | None = None
    main_grads_dtype: torch.dtype | None = None
    param_quantization: Quantization | None = None
    quantize: Callable[[str, torch.nn.Parameter], bool] | None = None

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "main_params_dtype", "main_grads_dtype"):
            if (dtype := getattr(self, name)) is not None and dtype not in _COMPUTED_IN:
                raise ValueError(f"{name}={dtype!r}: choose one of {', '.join(map(str, _COMPUTED_IN))}, or None")
        if self.param_quantization is not None and not isinstance(self.param_quantization, Quantization):
            raise TypeError(
                f"param_quantization={self.param_quantization!r}: pass a recipe, such as weft.quantize.mx(32)"
            )
        if self.quantize is not None and self.param_quantization is None:
            raise ValueError("quantize= selects parameters for param_quantization: pass a recipe too, or leave it out")

    def resolve(
        self, dtype: torch.dtype, *, keep: bool = False, quantized: bool = False, frozen: bool = False
    ) -> "Recipe":
        """Return the dtypes for a parameter of dtype `dtype`. `keep`: the parameter keeps its dtype. `quantized`: it is
        gathered in `param_quantization`. `frozen`: no optimizer updates it. Raises ValueError for an `mx` format with
        compute dtype float16, because the scales of `mx` exceed the range of float16."""
        if keep or not dtype.is_floating_point:
            return Recipe(dtype, dtype, dtype, dtype)
        compute = self.param_dtype or dtype
        narrow = self.param_quantization if quantized else None
        main = self.main_params_dtype or (dtype if narrow is None or frozen else torch.float32)
        if narrow is not None and narrow.kind == "mx" and compute == torch.float16:
            raise ValueError(
                f"param_quantization={narrow} with weights that compute in {compute}: its scales exceed the range of "
                "float16; choose param_dtype=torch.bfloat16, or rowwise()"
            )
        return Recipe(main, compute, self.reduce_dtype or compute, self.main_grads_dtype or main, narrow)

    def cast_inputs(self, values: Any) -> Any:
        """Return `values`, a pytree, with floating-point tensors cast to `param_dtype` if the policy casts inputs."""
        if self.param_dtype is None or not self.cast_forward_inputs:
            return values
        return map_tensors(_cast_to(self.param_dtype), values)

    def cast_output(self, values: Any) -> Any:
        """Return `values`, a pytree or dataclass, with floating-point tensors cast to `output_dtype` if it is set.
        Raises TypeError if no tensor could be cast, because weft cannot rebuild the objects that hold the tensors."""
        if self.output_dtype is None:
            return values
        cast = map_tensors(_cast_to(self.output_dtype), values, in_dataclasses=True)
        if cast is values and not isinstance(values, torch.Tensor):
            found = [tensor for tensor in tensors_in(values, hidden=True) if tensor.is_floating_point()]
            if found and all(tensor.dtype != self.output_dtype for tensor in found):
                raise TypeError(
                    f"output_dtype={self.output_dtype}: the tensors of a {type(values).__name__} cannot be replaced; "
                    "return a dataclass, or register the class with torch.utils._pytree.register_pytree_node"
                )
        return cast


def keep_dtype(parameter: torch.nn.Parameter) -> None:
    """Keep a parameter's own dtype in main weights, gathers, computation and gradients, under any policy of its unit.

    Call it before `fully_shard`, for parameters that need more precision than the policy gives, such as the decays of a
    recurrence. Raises TypeError for anything but a parameter, ValueError for a sharded parameter.
    """
    if not isinstance(parameter, torch.nn.Parameter):
        raise TypeError(f"keep_dtype got a {type(parameter).__name__}: call it with each parameter, not with a module")
    if isinstance(parameter, UnevenDTensor):
        raise ValueError(
            f"keep_dtype of a sharded parameter of shape {tuple(parameter.shape)}: its unit has its dtypes since "
            "fully_shard; call keep_dtype before"
        )
    vars(parameter)["keeps_dtype"] = True


def keeps_dtype(parameter: torch.nn.Parameter) -> bool:
    """Return whether `parameter` was passed to `keep_dtype`."""
    return getattr(parameter, "keeps_dtype", False)


def _cast_to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


@dataclass(frozen=True)
class Recipe:
    """The dtypes that a policy gives to a parameter. `quantization`: the format of gathered weights, if quantized."""

    main: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    main_grad: torch.dtype
    quantization: Quantization | None = None

    @property
    def gathered(self) -> torch.dtype:
        """The dtype of full weights: the compute dtype, or float8 if matrix products read the quantized weights."""
        return torch.float8_e4m3fn if self.quantization is not None and self.quantization.is_scaled else self.compute

    @property
    def smallest_itemsize(self) -> int:
        """The smallest element size, in bytes, of the dtypes `main`, `compute` and `reduce`; 1 with quantization."""
        dtypes = self.main, self.compute, self.reduce
        return 1 if self.quantization is not None else min(dtype.itemsize for dtype in dtypes)

    @cached_property
    def narrows(self) -> bool:
        """Whether a gradient may overflow in the reduce dtype. Then it is first packed in the dtype `main_grad`."""
        return has_less_range(self.reduce, self.compute)


def has_less_range(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Return whether finite values of dtype `wide` may become infinite in `narrow`. True even if `wide` is float32
    and `narrow` is bfloat16, whose range is slightly smaller."""
    return torch.finfo(narrow).max < torch.finfo(wide).max


def precision_of(policy: Any) -> MixedPrecisionPolicy:
    """Return `policy`, weft's or torch's `MixedPrecisionPolicy`, as weft's. Raises TypeError for any other object."""
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    if isinstance(policy, _TorchMixedPrecisionPolicy):
        return MixedPrecisionPolicy(
            policy.param_dtype, policy.reduce_dtype, policy.output_dtype, policy.cast_forward_inputs
        )
    raise TypeError(f"mp_policy={policy!r}: pass a weft.MixedPrecisionPolicy or torch's")
