"""Optimizers and norms over flat tensors: a handful of kernels for thousands of parameters."""

from weft.optim.flat import ELEMENT_WISE, clip_grad_norm_, flat, grad_norm

__all__ = ["ELEMENT_WISE", "clip_grad_norm_", "flat", "grad_norm"]
