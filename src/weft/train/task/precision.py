"""`train.precision` as the policy that units have."""

import torch

import weft


def mixed_precision(name: str) -> weft.MixedPrecisionPolicy:
    """ "fp32", or "bf16": computed and gathered in bf16, reduced and kept in fp32."""
    if name == "bf16":
        return weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return weft.MixedPrecisionPolicy()
