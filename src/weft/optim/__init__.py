"""Optimizers and norms over flat tensors: a few kernels for thousands of parameters."""

from weft.optim.flat import ELEMENT_WISE, flat
from weft.optim.norms import ParameterNorms, clip_grad_norm_, grad_norm, parameter_norms

__all__ = ["ELEMENT_WISE", "ParameterNorms", "clip_grad_norm_", "flat", "grad_norm", "parameter_norms"]
