"""The router, which chooses the experts of each token and the weight of each expert.

logits  = W x (+ b)                                 in fp32 or wider, even if the model's dtype is narrower
scores  = softmax(logits) or sigmoid(logits)
choice  = scores (+ bias), in the best groups only  the top k are chosen, without a gradient
weights = scores of the chosen (/ their sum) * scaling_factor
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.moe.parts import part
from weft.moe.require import is_number, require, require_size
from weft.moe.source import INITIAL_STD, WeightSource

SCORES = ("softmax", "sigmoid")
TINY = 1e-20
"""Added to sums of scores before a division, because all sigmoids may be 0."""


class Routing(NamedTuple):
    """The router's choice of k experts for each of batch * seq tokens. Each choice of an expert for a token is an
    assignment.

    - `experts` [tokens, k] int64: the numbers of the chosen experts, best first. Experts are compared by their scores
      (with `expert_bias`, scores plus bias). Of two equally good experts, the one with the lower number comes first.
    - `weights` [tokens, k] fp32 (fp64 for fp64 tokens), differentiable: the weight of each chosen expert. 0 for dropped
      assignments.
    - `loss`: the sum of the balance loss and the z-loss, each times its coefficient, a scalar. None if both
      coefficients are 0.
    - `counts` [num_experts] int64: the number of assignments to each expert, without those that are dropped. With
      `pad_to_capacity`, rows of padding are counted too.
    - `kept` [tokens, k] bool: False for assignments that the capacity drops. None without a capacity.
    """

    experts: Tensor
    weights: Tensor
    loss: Tensor | None
    counts: Tensor
    kept: Tensor | None


class Router(nn.Module):
    """Top-k router (Shazeer et al. 2017, arXiv:1701.06538): chooses each token's experts and their weights.

    Args:
        hidden_size: the width of tokens.
        num_experts: the number of experts.
        top_k: the number of experts for each token.
        bias: add a learned bias to the logits.
        score: the function from logits to scores, "softmax" (Mixtral, arXiv:2401.04088) or "sigmoid" (DeepSeek-V3,
            arXiv:2412.19437).
        norm_topk_prob: divide the weights of a token's experts by their sum. With `top_k=1` the weight is then
            constant, and the router learns only from auxiliary losses.
        scaling_factor: multiply the weights by this factor.
        num_groups: divide the experts into this many groups, and choose a token's experts only from the token's best
            groups. A group's score is the sum of the scores (with `expert_bias`, scores plus bias) of its two best
            experts (DeepSeek-V3, section 2.1.2).
        topk_groups: the number of groups from which a token's experts are chosen.
        expert_bias: choose the experts by the sum of their scores and a buffer `expert_bias`. The weights do not
            contain the bias. Call `update_bias` after each optimizer step, as `weft.train` does. It changes the buffer
            so that the load becomes balanced (auxiliary-loss-free balancing, arXiv:2408.15664). The buffer is always
            fp32.
        aux_loss_coef: the coefficient of the balance loss of DeepSeek-V3 (equations 17 to 20). The loss of a sequence
            is the sum over experts of f * P. f is the expert's number of assignments (dropped ones included), divided
            by the mean of these numbers over experts. P is the expert's score, divided by the sum of the token's scores
            and averaged over tokens. The loss of a batch is the mean over its sequences. With context parallelism, a
            rank's part of a sequence counts as a sequence.
        z_loss_coef: the coefficient of the z-loss, which is the mean of logsumexp(logits)^2 over tokens (ST-MoE,
            arXiv:2202.08906, equation 5).
        capacity_factor: an expert accepts at most ceil(factor * seq * k / num_experts) assignments of a sequence. It
            accepts those with the highest scores, and among equal scores the earlier ones. The others are dropped and
            contribute nothing (GShard, arXiv:2006.16668). The limit is per sequence, so that the result does not depend
            on the rest of the batch. Default: no limit.
        pad_to_capacity: add rows of zeros until each expert has as many rows as it accepts, so that shapes do not
            depend on the choice of experts. This option needs `capacity_factor`.
        source: the source of the initial weights.
    """

    graph_scopes: ClassVar = {"forward": ("moe_router", None)}
    over_positions: Callable[[Tensor], Tensor] | None = None
    """Gathers a tensor from the tensor-parallel ranks that route positions of the same sequences; [...] ->
    [ranks, ...]. Differentiable. None if this rank routes all positions."""
    expert_bias: Tensor | None
    added_loss: Tensor
    """The sum of the losses of training forwards since `weft.moe.router_losses` last reset this buffer, fp32."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        bias: bool = False,
        score: str = "softmax",
        norm_topk_prob: bool = True,
        scaling_factor: float = 1.0,
        num_groups: int = 1,
        topk_groups: int = 1,
        expert_bias: bool = False,
        aux_loss_coef: float = 0.0,
        z_loss_coef: float = 0.0,
        capacity_factor: float | None = None,
        pad_to_capacity: bool = False,
        source: WeightSource | None = None,
    ) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden_size, "num_experts": num_experts, "top_k": top_k}
        for name, size in {**sizes, "num_groups": num_groups, "topk_groups": topk_groups}.items():
            require_size(name, size)
        require("top_k", top_k, top_k <= num_experts, f"at most num_experts={num_experts}")
        require("score", score, score in SCORES, "'softmax' or 'sigmoid'")
        for name, coef in (("aux_loss_coef", aux_loss_coef), ("z_loss_coef", z_loss_coef)):
            require(name, coef, is_number(coef) and coef >= 0, "a number, 0 for no such loss")
        fits = capacity_factor is None or (is_number(capacity_factor) and capacity_factor > 0)
        require("capacity_factor", capacity_factor, fits, "a positive number, or None to drop nothing")
        fits = capacity_factor is not None or not pad_to_capacity
        require("pad_to_capacity", pad_to_capacity, fits, "False without a capacity; set capacity_factor")
        fits = is_number(scaling_factor) and scaling_factor > 0
        require("scaling_factor", scaling_factor, fits, "a positive number")
        _require_groups(num_experts, top_k, num_groups, topk_groups)

        self.num_experts = num_experts
        self.top_k = top_k
        self.score = score
        self.norm_topk_prob = norm_topk_prob
        self.scaling_factor = scaling_factor
        self.num_groups = num_groups
        self.topk_groups = topk_groups
        self.aux_loss_coef = aux_loss_coef
        self.z_loss_coef = z_loss_coef
        self.capacity_factor = capacity_factor
        self.pad_to_capacity = pad_to_capacity
        self.source = source or WeightSource()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(num_experts)) if bias else None
        added = torch.empty(num_experts, dtype=torch.float32) if expert_bias else None
        self.register_buffer("expert_bias", added)
        self.register_buffer("added_loss", torch.empty((), dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial weight, and set the biases and `added_loss` to 0."""
        self.source.normal_(self.weight, INITIAL_STD)
        nn.init.zeros_(self.added_loss)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.expert_bias is not None:
            nn.init.zeros_(self.expert_bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Keep buffers in fp32 when the module is cast, because a narrower dtype would lose small additions."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, kept in before.items():
            moved = self._buffers[name]
            if kept is not None and moved is not None and moved.dtype != kept.dtype:
                self._buffers[name] = kept.to(moved.device)
        return self

    def share_positions(self, over_positions: Callable[[Tensor], Tensor]) -> None:
        """Let `forward` compute the losses over the positions of several tensor-parallel ranks.

        `over_positions`: gathers a tensor from these ranks (see the attribute of this name)."""
        self.over_positions = over_positions
        vars(self)["graph_scopes"] = {"_scored": ("moe_router", None)}  # leaves out the exchange of means

    def forward(self, hidden: Tensor) -> Routing:
        """Route the tokens of `hidden`, [batch, seq, hidden]. Raises ValueError if `hidden` is not 3-D."""
        if hidden.dim() != 3:
            raise ValueError(
                f"hidden has the shape {tuple(hidden.shape)}: experts take [batch, seq, hidden], because losses and "
                f"capacity are per sequence; hidden.unsqueeze(0) is one sequence of all tokens"
            )
        experts, weights, counts, kept, *means = self._scored(hidden)
        return Routing(experts, weights, self._loss(hidden.shape[1], *means), counts, kept)

    def _scored(self, hidden: Tensor) -> tuple[Any, ...]:
        """Return the fields of a `Routing` except `loss`, then the arguments `load`, `mean`, `squares` of `_loss`."""
        batch, seq, _ = hidden.shape
        precision = torch.promote_types(hidden.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            weight, bias = part(self, "weight"), part(self, "bias")
            bias = None if bias is None else bias.to(precision)
            logits = F.linear(hidden.flatten(0, 1).to(precision), weight.to(precision), bias)
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        experts = self._choose(scores.detach())
        chosen = scores.gather(-1, experts)
        weights = chosen
        if self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        weights = weights * self.scaling_factor

        of_sequence = (batch, seq * self.top_k)
        load = count(experts.view(of_sequence), self.num_experts)  # [batch, num_experts]
        means = (load, *self._means(logits, scores, batch, seq))
        if self.capacity_factor is None:
            return experts, weights, load.sum(0), None, *means
        capacity = self.capacity(seq)
        kept = _keep_best(chosen.detach().view(of_sequence), experts.view(of_sequence), load, capacity)
        kept = kept.view_as(experts)
        if self.pad_to_capacity:
            counts = load.new_full((self.num_experts,), batch * capacity)
        else:
            counts = load.clamp(max=capacity).sum(0)
        return experts, weights.masked_fill(~kept, 0), counts, kept, *means

    def capacity(self, seq: int) -> int:
        """Return the maximum number of assignments that an expert accepts from a sequence of `seq` tokens.

        The router must have a `capacity_factor`.
        """
        assert self.capacity_factor is not None
        return math.ceil(self.capacity_factor * seq * self.top_k / self.num_experts)

    @torch.no_grad()
    def update_bias(self, global_counts: Tensor, rate: float) -> None:
        """Add `rate` to the `expert_bias` of each expert with fewer assignments than the mean over all experts.
        Subtract `rate` from the `expert_bias` of each expert with more.

        `global_counts`: [num_experts], the number of assignments to each expert in one step, summed over all
        data-parallel ranks (see `load_statistics`). Raises RuntimeError for a router without `expert_bias`.
        """
        if self.expert_bias is None:
            raise RuntimeError("this router has no expert bias to update; build it with expert_bias=True")
        counts = global_counts.to(self.expert_bias)
        self.expert_bias.add_(torch.sign(counts.mean() - counts), alpha=rate)

    def _choose(self, scores: Tensor) -> Tensor:
        """Return the k best experts of each token, best first. Of two equally good experts, the one with the lower
        number comes first."""
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
        if self.topk_groups < self.num_groups:
            grouped = scores.unflatten(-1, (self.num_groups, -1))
            best_two = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
            chosen = _best(best_two, self.topk_groups)
            outside = torch.ones_like(best_two, dtype=torch.bool).scatter_(-1, chosen, False)
            scores = grouped.masked_fill(outside.unsqueeze(-1), -math.inf).flatten(-2)
        return _best(scores, self.top_k)

    def _means(self, logits: Tensor, scores: Tensor, batch: int, seq: int) -> tuple[Tensor | None, Tensor | None]:
        """Return two results for this rank's tokens, each None if its coefficient is 0. The first: each expert's share
        of a token's scores, averaged over the tokens of each sequence, [batch, num_experts] (for `aux_loss_coef`). The
        second: the z-loss times `z_loss_coef`."""
        # Sums divided by counts, not means: a rank without tokens has a loss of 0, not NaN.
        mean = squares = None
        if self.aux_loss_coef:
            shares = scores if self.score == "softmax" else scores / (scores.sum(-1, keepdim=True) + TINY)
            mean = shares.view(batch, seq, self.num_experts).sum(1) / max(1, seq)
        if self.z_loss_coef:
            squares = logits.logsumexp(-1).square().sum() * (self.z_loss_coef / max(1, logits.shape[0]))
        return mean, squares

    def _loss(self, seq: int, load: Tensor, mean: Tensor | None, squares: Tensor | None) -> Tensor | None:
        terms = []
        if mean is not None:
            if self.over_positions is not None:
                loads = self.over_positions(load)
                load, seq, mean = loads.sum(0), seq * len(loads), self.over_positions(mean).mean(0)
            frequency = load * (self.num_experts / (self.top_k * max(1, seq)))
            terms.append((frequency * mean).sum() * (self.aux_loss_coef / max(1, load.shape[0])))
        if squares is not None:
            terms.append(squares if self.over_positions is None else self.over_positions(squares[None]).mean())
        return sum(terms[1:], terms[0]) if terms else None

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, num_experts={self.num_experts}, top_k={self.top_k}, score={self.score!r}"


def count(experts: Tensor, num_experts: int) -> Tensor:
    """Count how often each expert occurs in each row; [rows, n] -> [rows, num_experts] int64."""
    zeros = experts.new_zeros(experts.shape[0], num_experts)
    return zeros.scatter_add_(-1, experts, torch.ones_like(experts))


def _best(scores: Tensor, k: int) -> Tensor:
    # torch.topk promises no order among equals.
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


def _keep_best(scores: Tensor, experts: Tensor, load: Tensor, capacity: int) -> Tensor:
    """Return whether each assignment is among the `capacity` best assignments of its sequence to its expert, [batch, n]
    bool. `scores`, `experts`: [batch, n]. `load`: the number of assignments to each expert, [batch, num_experts]."""
    by_score = scores.argsort(dim=-1, descending=True, stable=True)
    experts, by_expert = experts.gather(-1, by_score).sort(dim=-1, stable=True)
    starts = load.cumsum(-1) - load
    rank = torch.arange(experts.shape[-1], device=experts.device) - starts.gather(-1, experts)
    return torch.empty_like(experts, dtype=torch.bool).scatter_(-1, by_score.gather(-1, by_expert), rank < capacity)


def _require_groups(num_experts: int, top_k: int, num_groups: int, topk_groups: int) -> None:
    require("num_groups", num_groups, num_experts % num_groups == 0, f"a divisor of num_experts={num_experts}")
    require("topk_groups", topk_groups, topk_groups <= num_groups, f"at most num_groups={num_groups}")
    size = num_experts // num_groups
    if topk_groups * size < top_k:
        raise ValueError(
            f"topk_groups={topk_groups} groups of {size} experts (num_experts={num_experts}, num_groups="
            f"{num_groups}) leave only {topk_groups * size} experts for top_k={top_k}: choose more groups or a "
            f"smaller top_k"
        )
