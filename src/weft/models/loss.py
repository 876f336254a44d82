"""The next-token loss."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

IGNORED_LABEL = -100

# Elements per chunk of the loss: as many as a core's cache holds, or enough to keep an accelerator busy.
CHUNK = {"cpu": 1 << 16}
DEFAULT_CHUNK = 1 << 26


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy over the labels that are not -100.

    `logits`: [..., vocabulary]. `labels`: [...] int64. Returns a scalar, which is NaN if every label is -100. The
    loss is computed in float32, or in float64 for float64 logits.

    If `logits` require a gradient, forward also computes the gradient and stores it in the dtype of `logits`. It works
    on some rows at a time, so temporary copies of logits have only these rows (see `rows_at_a_time`).

    Backward scales the gradient in place, so a loss can be backpropagated only once, even with `retain_graph`. A second
    backward raises `RuntimeError`.
    """
    check_labels(logits, labels)
    return _CrossEntropy.apply(logits.flatten(0, -2), labels.flatten())


def check_labels(logits: Tensor, labels: Tensor) -> None:
    """Raise `ValueError` if `labels` [...] do not have one label for each position of `logits` [..., vocabulary]."""
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)} and logits {tuple(logits.shape)}: one label "
            f"per position; mark positions without one with {IGNORED_LABEL}"
        )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        precision = torch.promote_types(logits_NV.dtype, torch.float32)
        kept_N1 = (labels_N != IGNORED_LABEL)[:, None]
        targets_N1 = labels_N[:, None].where(kept_N1, 0)
        ones_N1 = kept_N1.to(precision)
        gradient = torch.empty_like(logits_NV) if ctx.needs_input_grad[0] else None

        losses_N1 = torch.empty_like(ones_N1)
        for part in rows_at_a_time(logits_NV):
            scores = logits_NV[part].to(precision)
            scores = scores - scores.amax(-1, keepdim=True)
            picked = scores.gather(-1, targets_N1[part])
            total = scores.exp_().sum(-1, keepdim=True)
            losses_N1[part] = total.log() - picked
            if gradient is not None:
                scores.mul_(ones_N1[part] / total)
                scores.scatter_add_(-1, targets_N1[part], -ones_N1[part])
                gradient[part] = scores
        count = kept_N1.sum()
        if gradient is not None:
            ctx.save_for_backward(gradient, count)
            ctx.spent = False
        return losses_N1.where(kept_N1, 0.0).sum() / count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.spent:
            raise RuntimeError(
                "a cross-entropy loss can be backpropagated only once; compute the loss again for a second backward"
            )
        ctx.spent = True
        gradient, count = ctx.saved_tensors
        # The factor (1 / count, times the gradient of the loss) is applied here in full precision. If it were rounded
        # to half precision first, it would bias every gradient, and small gradients would underflow in float16.
        scale = loss_gradient / count.clamp(min=1)
        for part in rows_at_a_time(gradient):
            gradient[part] = gradient[part].to(scale.dtype).mul_(scale)
        return gradient, None


def rows_at_a_time(x_NV: Tensor) -> Iterator[slice]:
    """Return slices that divide the rows of `x_NV`. Each has at most `CHUNK[device type]` elements (`DEFAULT_CHUNK` for
    types not in `CHUNK`), but at least one row."""
    rows = max(1, CHUNK.get(x_NV.device.type, DEFAULT_CHUNK) // x_NV.shape[-1])
    return (slice(start, start + rows) for start in range(0, len(x_NV), rows))
