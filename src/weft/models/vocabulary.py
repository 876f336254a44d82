"""The next-token loss over logits that are cut along the vocabulary: no rank has all logits.

Ranks all-reduce the largest logit of each row, then the sum of the row's exponentials and the logit of its label.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.collectives import reduce_now
from weft.models.loss import IGNORED_LABEL, check_labels, rows_at_a_time

WHAT = "scores of tensor-parallel ranks"


def require_tokens(name: str, tokens: Tensor, vocab_size: int) -> None:
    """Raise RuntimeError if an element of `tokens` is negative or at least `vocab_size`. On an accelerator, the next
    synchronization raises the error.

    Without this check, such an element would raise no error: no rank would find it in its part of the vocabulary.
    `name`: the name of `tokens` in the message.
    """
    inside = (tokens >= 0) & (tokens < vocab_size)
    torch._assert_async(inside.all(), f"{name} outside of the vocabulary: must be from 0 to {vocab_size - 1}")


def cut_cross_entropy(logits: Tensor, labels: Tensor, first: int, vocab_size: int, group: dist.ProcessGroup) -> Tensor:
    """Return `weft.models.loss.cross_entropy` of logits whose vocabulary is split over the ranks of `group`.

    `logits`: [..., entries], the logits of this rank's part of the vocabulary, which begins with token number `first`.
    `labels`: [...], equal on all ranks. Every rank returns the same loss. Backward returns the complete gradient of
    this rank's logits, which needs no sum over the ranks. Collective.
    """
    check_labels(logits, labels)
    require_tokens("labels", labels.masked_fill(labels == IGNORED_LABEL, 0), vocab_size)
    return _CutCrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), first, group)


class _CutCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        precision = torch.promote_types(logits_NV.dtype, torch.float32)
        kept_N1 = (labels_N != IGNORED_LABEL)[:, None]
        places_N1 = labels_N[:, None] - first
        here_N1 = kept_N1 & (places_N1 >= 0) & (places_N1 < logits_NV.shape[1])
        places_N1 = places_N1.where(here_N1, 0)

        largest_N1 = logits_NV.amax(-1, keepdim=True).to(precision)
        reduce_now(largest_N1, dist.ReduceOp.MAX, group, WHAT)
        found_N2 = torch.empty(len(logits_NV), 2, dtype=precision, device=logits_NV.device)
        for rows in rows_at_a_time(logits_NV):
            scores = logits_NV[rows].to(precision) - largest_N1[rows]
            found_N2[rows, 1:] = scores.gather(-1, places_N1[rows]).where(here_N1[rows], 0.0)
            found_N2[rows, :1] = scores.exp_().sum(-1, keepdim=True)
        reduce_now(found_N2, dist.ReduceOp.SUM, group, WHAT)
        total_N1, picked_N1 = found_N2.split(1, dim=1)

        count = kept_N1.sum()
        if ctx.needs_input_grad[0]:
            gradient = torch.empty_like(logits_NV)
            for rows in rows_at_a_time(logits_NV):
                scores = (logits_NV[rows].to(precision) - largest_N1[rows]).exp_()
                scores.mul_(kept_N1[rows] / total_N1[rows])
                scores.scatter_add_(-1, places_N1[rows], -here_N1[rows].to(precision))
                gradient[rows] = scores
            ctx.save_for_backward(gradient, count)
        return (total_N1.log() - picked_N1).where(kept_N1, 0.0).sum() / count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor) -> Any:
        gradient, count = ctx.saved_tensors
        scale = loss_gradient / count.clamp(min=1)
        return (gradient.to(scale.dtype) * scale).to(gradient.dtype), None, None, None
