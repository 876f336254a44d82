"""Selects fast kernels of other packages, if they are installed and usable.

    symbol  name        function                                              usable on
    M, P    mamba_ssm   ops.triton.ssd_combined.mamba_chunk_scan_combined     CUDA
    G       fla         ops.gated_delta_rule.chunk_gated_delta_rule           CUDA, in half precision, with key heads
                                                                              up to 256 wide

For the symbols of layers see `weft.models.pattern`. What is used, by the setting of the layer:

    setting           if the kernel is usable   if it is not usable
    "auto"            the kernel                torch's operations; the reason is logged once
    a kernel's name   the kernel                the layer's forward raises `KernelError`
    "torch"           torch's operations        torch's operations

Results of the kernels and of torch's operations differ by rounding. Decoding steps of one position use no kernel.

No kernel is usable with context parallelism. "auto" then uses torch's operations and logs nothing. With a kernel's
name, the constructor of `HybridModel` raises `ValueError`.
"""

import importlib
import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from weft.errors import KernelError
from weft.models.context import Borders, Slices

SCAN = ("mamba_ssm", "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
RULE = ("fla", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
DEVICES = ("cuda",)
"""The device types on which the kernels run."""
HALVES, WIDEST = (torch.bfloat16, torch.float16), 256
"""The dtypes that fla accepts, and the largest width of a key head."""

log = logging.getLogger(__name__)


def fast_scan(asked: str, chunked: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes the recurrence of Mamba-2 with the kernel that `asked` selects.

    `asked`: "auto", "torch" or "mamba_ssm" (see the top of this file). `chunked`: `ssd_chunked`, which is called if no
    kernel is used. The returned function takes the arguments of `ssd_chunked` up to `chunk_size`, then `documents`.
    """
    return partial(_scan, asked, chunked)  # unlike a closure, it can be pickled


def _scan(
    asked: str,
    chunked: Callable[..., Any],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor | None,
    size: int,
    documents: Borders | None = None,
) -> Any:
    if isinstance(documents, Slices):
        _refuse_slices(asked, SCAN)
        x, dt, B, C = map(documents.rows, (x, dt, B, C))
        y, last = chunked(x, dt, A, B, C, None, size, slices=documents)
        return documents.unrows(y), last
    kernel = _chosen(asked, SCAN, x)
    numbers = None if documents is None else documents.numbers(x.device)
    if kernel is None:
        return chunked(x, dt, A, B, C, state, size, numbers)
    given = {"chunk_size": size, "initial_states": state, "return_final_states": True}
    if numbers is not None:
        given["seq_idx"] = numbers.int()
    y, last = kernel(x, dt, A, B, C, **given)
    return y.to(dt.dtype), last


def fast_rule(asked: str, chunked: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes the delta rule with the kernel that `asked` selects.

    `asked`: "auto", "torch" or "fla" (see the top of this file). `chunked`: `delta_chunked`, which is called if no
    kernel is used. The returned function takes the arguments of `delta_chunked` up to the state, then `documents`.
    """
    return partial(_rule, asked, chunked)  # unlike a closure, it can be pickled


def _rule(
    asked: str,
    chunked: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None,
    documents: Borders | None = None,
) -> Any:
    if isinstance(documents, Slices):
        _refuse_slices(asked, RULE)
        o, last = chunked(*map(documents.rows, (q, k, v, g, beta)), slices=documents)
        return documents.unrows(o), last
    kernel = _chosen(asked, RULE, q, _not_for_fla(q))
    if kernel is None:
        return chunked(q, k, v, g, beta, state, None if documents is None else documents.numbers(q.device))
    q, k = (each.repeat_interleave(v.shape[2] // each.shape[2], dim=2) for each in (q, k))
    given = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    shape = v.shape
    if documents is not None:  # fla takes documents of one row only
        given["cu_seqlens"] = documents.cu_seqlens(q.device).long()
        q, k, v, g, beta = (each.flatten(0, 1)[None] for each in (q, k, v, g, beta))
    o, last = kernel(q, k, v, g=g, beta=beta, **given)
    return o.view(shape).to(g.dtype), last


def _refuse_slices(asked: str, place: tuple[str, str, str]) -> None:
    if asked == place[0]:
        raise KernelError(f"{place[0]} cannot be used: it does not support context ranks; choose 'auto' or 'torch'")


def _not_for_fla(q: Tensor) -> str:
    """Return why fla does not accept queries like `q`, or "" if it accepts them."""
    if q.dtype not in HALVES:
        return f"it computes in half precision, but the tensors are {str(q.dtype).removeprefix('torch.')}"
    if q.shape[-1] > WIDEST:
        return f"its key heads are at most {WIDEST} wide, but these are {q.shape[-1]} wide"
    return ""


def _chosen(asked: str, place: tuple[str, str, str], x: Tensor, unfit: str = "") -> Callable[..., Any] | None:
    if asked == "torch":
        return None
    kernel, reason = _found(place)
    if kernel is not None and x.device.type not in DEVICES:
        reason = f"it runs on CUDA, but the tensors are on {x.device.type}"
    reason = reason or unfit
    if not reason:
        return kernel
    if asked == place[0]:
        raise KernelError(f"{place[0]} cannot be used: {reason}; choose 'auto' or 'torch'")
    _tell(f"{place[0]} is not used: {reason}; torch's operations are used instead")
    return None


@cache
def _found(place: tuple[str, str, str]) -> tuple[Callable[..., Any] | None, str]:
    """Import a kernel and return it, or None and the reason why it is missing."""
    name, module, function = place
    try:
        return getattr(importlib.import_module(module), function), ""
    except ModuleNotFoundError as error:
        missing = error.name or name
        return None, "it is not installed" if missing == name else f"it needs {missing}, which is not installed"
    except Exception as error:  # a package for another version of CUDA or torch may raise anything
        return None, f"it cannot be imported ({type(error).__name__}: {str(error).partition(chr(10))[0]})"


@cache
def _tell(line: str) -> None:
    log.info(line)
