"""The mixture-of-experts layer: router, exchange, experts, exchange back."""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from weft.fsdp.driver import in_backward
from weft.moe.dispatch import Dispatcher, Halves, Handle, LocalDispatcher, exchange
from weft.moe.experts import GroupedExperts
from weft.moe.kinds import CLAMP, Clamp
from weft.moe.linear import Linear
from weft.moe.mlp import FeedForward
from weft.moe.permutation import Permutation, by_expert, padded, permutation, reorder, spread, weigh
from weft.moe.require import require, require_size
from weft.moe.router import Router, Routing, count
from weft.moe.source import WeightSource
from weft.moe.visits import arrange, gather, goes_in_halves, halved, open_up, pack, visits_of, width_of


class Sent(NamedTuple):
    """The results of `MoE.send`.

    - `rows` [rows, width]: the rows to send (for the width see `Dispatcher.dispatch`).
    - `weights` [tokens, k]: the routing weights. None with `rows_per="rank"`: the rows then contain them.
    - `shared` [batch, seq, hidden]: the shared expert's output. None if the layer has no shared expert.
    - `loss`: the router's loss, a scalar or None (see `Routing`).
    - `handle`: the sizes and the order of the exchange (see `weft.moe.Handle`).
    """

    rows: Tensor
    weights: Tensor | None
    shared: Tensor | None
    loss: Tensor | None
    handle: Handle


class MoE(nn.Module):
    """Mixture-of-experts layer: `top_k` of `num_experts` experts process each token.

    The experts are spread over the ranks of the dispatcher. `forward` calls `send`, `exchange` (dispatch),
    `run_experts`, `exchange` (combine) and `receive`. A schedule of `weft.overlap` calls these parts separately, with
    the dispatcher's `dispatch` and `combine` in place of `exchange`.

    Args:
        hidden_size: the width of tokens.
        intermediate_size: the inner width of each routed expert.
        num_experts: the number of routed experts, on all ranks together.
        top_k: the number of experts for each token.
        dispatcher: sends tokens to the ranks of their experts, and the outputs back. Layers with the same number of
            experts can share one dispatcher. Default: all experts are on this rank.
        act: the kind of all MLPs (see `weft.moe.mlp`).
        clamp: the constants of "clamped_swiglu".
        bias: whether the shared expert and the latent projections have biases.
        experts_bias: whether the routed experts have biases.
        router_bias: whether the router has a bias.
        latent_size: the width of tokens in the exchange and in the routed experts. A linear layer projects tokens to
            this width before the exchange, and another projects the weighted sums of experts' outputs back to
            `hidden_size` (Nemotron-H). In the documented shapes of rows, "hidden" means this width. Default:
            `hidden_size`, without projections.
        shared_intermediate_size: the inner width of an expert that processes every token. 0: no such expert.
        shared_expert_gate: multiply the shared expert's output by a learned sigmoid (Qwen2-MoE, arXiv:2407.10671).
        backend: the backend of `GroupedExperts`.
        source: the source of the initial weights.
        **router_options: arguments of `Router`.
    """

    graph_scopes: ClassVar = {
        "_sorted": ("moe_preprocess", ("latent_in",)),
        "_shared": ("mlp", ("shared_expert", "shared_expert_gate")),
    }
    """The methods that `weft.Graphs` may capture: for each, the name of its scope, and the modules that it uses (None:
    all)."""
    other_positions: DeviceMesh | None = None
    """The mesh of tensor-parallel ranks that route the other positions of the same sequences, or None."""
    load: Tensor
    """The number of assignments to each expert in training forwards, [num_experts] int64."""
    exchanged: Tensor
    """Two counts over training forwards, [2] int64: assignments to experts on other ranks, and rows sent for them."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        dispatcher: Dispatcher | None = None,
        act: str = "silu",
        clamp: Clamp = CLAMP,
        bias: bool = False,
        experts_bias: bool = False,
        router_bias: bool = False,
        latent_size: int | None = None,
        shared_intermediate_size: int = 0,
        shared_expert_gate: bool = False,
        backend: str = "grouped_mm",
        source: WeightSource | None = None,
        **router_options: Any,
    ) -> None:
        super().__init__()
        source = source or WeightSource()
        self.router = Router(
            hidden_size, num_experts, top_k, bias=router_bias, source=source / "router", **router_options
        )
        self.dispatcher = dispatcher or LocalDispatcher(num_experts)
        if self.router.pad_to_capacity and self.dispatcher.rows_per == "rank":
            raise ValueError('pad_to_capacity=True pads the rows of experts: use a dispatcher with rows_per="expert"')
        held = self.dispatcher.num_experts
        require("num_experts", num_experts, num_experts == held, f"the dispatcher's, {held}")
        size = shared_intermediate_size
        require_size("shared_intermediate_size", size, 0, "an integer, 0 for no shared expert")
        if shared_expert_gate and not size:
            raise ValueError("shared_expert_gate=True: there is no shared expert to gate; set shared_intermediate_size")
        self.experts = GroupedExperts(
            len(self.dispatcher.experts),
            latent_size or hidden_size,
            intermediate_size,
            act=act,
            clamp=clamp,
            bias=experts_bias,
            backend=backend,
            first_expert=self.dispatcher.experts.start,
            source=source / "experts",
        )
        self.experts.has_fixed_rows = self.router.pad_to_capacity
        self.experts.differs_between_ranks = len(self.dispatcher.experts) < held
        self.latent_in = self.latent_out = None
        if latent_size is not None:
            require_size("latent_size", latent_size)
            self.latent_in = Linear(hidden_size, latent_size, source / "latent_in", bias=bias)
            self.latent_out = Linear(latent_size, hidden_size, source / "latent_out", bias=bias)
        self.shared_expert = (
            FeedForward(hidden_size, size, source / "shared_expert", act=act, clamp=clamp, bias=bias) if size else None
        )
        self.shared_expert_gate = Linear(hidden_size, 1, source / "shared_expert_gate") if shared_expert_gate else None
        self.register_buffer("load", torch.empty(num_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("exchanged", torch.empty(2, dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def graph_refused(self, scope: str) -> str | None:
        """Return why `weft.Graphs` cannot capture this module's scope `scope` in a CUDA graph, or None if it can."""
        if scope != "moe_preprocess":
            return None
        if self.router.capacity_factor is not None and not self.router.pad_to_capacity:
            return "with a capacity_factor the host reads the number of remaining rows; set pad_to_capacity"
        return "with one row per rank the host reads the number of rows" if self.dispatcher.rows_per == "rank" else None

    def reset_parameters(self) -> None:
        """Set `load` and `exchanged` to 0. Submodules are not reset: they have their own `reset_parameters`."""
        nn.init.zeros_(self.load)
        nn.init.zeros_(self.exchanged)

    def send(self, hidden: Tensor) -> Sent:
        """Route the tokens and build the rows to send. The shared expert runs while the ranks exchange row counts."""
        routing = self.router(hidden)
        return (self._send_per_rank if self.dispatcher.rows_per == "rank" else self._send_per_expert)(hidden, routing)

    def _send_per_expert(self, hidden: Tensor, routing: Routing) -> Sent:
        handle = self.dispatcher.plan(routing.counts)
        self._record(routing)
        shared = self._shared(hidden) if self.shared_expert is not None else None
        rows = None
        if routing.kept is not None and not self.router.pad_to_capacity:  # known only after the exchange
            handle.ready()
            rows = handle.sent
        sent, assignments, places = self._sorted(hidden, routing.experts, routing.kept, rows)
        shape, is_padded = (hidden.shape[0], hidden.shape[1]), self.router.pad_to_capacity
        handle.permutation = Permutation(assignments, places, routing.kept, shape, is_padded)
        return Sent(sent, routing.weights, shared, routing.loss, handle)

    def _sorted(
        self, hidden: Tensor, experts: Tensor, kept: Tensor | None, rows: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rows to send (sorted by expert), the assignment of each row, and the row of each assignment.

        `rows`: the number of kept assignments. None: all are kept, or `pad_to_capacity` determines the number of rows.
        """
        shape, router = (hidden.shape[0], hidden.shape[1]), self.router
        if router.pad_to_capacity and kept is not None:
            places = padded(experts, kept, router.num_experts, shape[0] * router.capacity(shape[1]), shape)
        else:
            order = by_expert(experts, kept, router.num_experts)
            places = permutation(order, order.numel() if rows is None else rows, kept, router.top_k, shape)
        return spread(self._narrowed(hidden).flatten(0, 1), places), places.assignments, places.rows

    def _send_per_rank(self, hidden: Tensor, routing: Routing) -> Sent:
        local, shape = len(self.dispatcher.experts), (hidden.shape[0], hidden.shape[1])
        routings = halved(routing) if goes_in_halves() else [routing]
        sizes = [len(each.experts) for each in routings]
        visits = [visits_of(each, self.router.num_experts // local, local, shape) for each in routings]
        handles = [self.dispatcher.plan(each.counts, goes.counts) for each, goes in zip(routings, visits)]
        for each, goes, handle in zip(routings, visits, handles):
            handle.visits = goes
            self._record(each, goes.counts, losses=each is routings[0])
        shared = self._shared(hidden) if self.shared_expert is not None else None
        tokens = self._narrowed(hidden).flatten(0, 1).split(sizes)
        rows = [pack(some, each.weights, goes) for some, each, goes in zip(tokens, routings, visits)]
        if len(rows) == 1:
            return Sent(rows[0], None, shared, routing.loss, handles[0])
        return Sent(torch.cat(rows), None, shared, routing.loss, Halves(handles, [len(each) for each in rows], shape))

    def run_experts(self, rows: Tensor, handle: Handle) -> Tensor:
        """Apply this rank's experts to the rows that arrived; [received, width] -> [received, hidden].

        With `rows_per="rank"`, a row stands for all of a token's experts on this rank. The result for the row is then
        the weighted sum of these experts' outputs.
        """
        if handle.visits is None:
            rows = reorder(rows, handle.by_expert, handle.by_arrival)
            return reorder(self.compute(rows, handle.offsets), handle.by_arrival, handle.by_expert)
        local, dtype = len(self.dispatcher.experts), handle.visits.dtype
        if handle.arrived is None:
            width = width_of(self.router.top_k, local)
            handle.arrived = arrange(rows, width, dtype, local, handle.assignments)
        rows, weights = open_up(rows, handle.arrived, dtype)
        return weigh(self.compute(rows, handle.offsets), weights, handle.arrived, exact=False)

    def compute(self, rows: Tensor, offsets: Tensor) -> Tensor:
        """Apply this rank's experts to sorted rows (see `GroupedExperts.forward`); [rows, hidden] -> [rows, hidden]."""
        return self.experts(rows, offsets)

    def receive(self, rows: Tensor, weights: Tensor | None, shared: Tensor | None, handle: Handle) -> Tensor:
        """Return the layer's output from the rows that came back; [rows, hidden] -> [batch, seq, hidden].

        A token's output is the sum of its rows, weighted by `weights`. With `rows_per="rank"`, `weights` is None,
        because `run_experts` has applied the weights. If the layer has a `latent_size`, the sum is projected back to
        `hidden_size`. `shared` is added if it is not None.
        """
        if isinstance(handle, Halves):
            parts = zip(rows.split(handle.sizes), handle.parts)
            sums = [gather(some, part.visits) for some, part in parts if part.visits is not None]
            shape, output = handle.shape, torch.cat(sums)
        elif handle.visits is not None:
            shape, output = handle.visits.permutation.shape, gather(rows, handle.visits)
        else:
            assert handle.permutation is not None and weights is not None
            shape, output = handle.permutation.shape, weigh(rows, weights, handle.permutation)
        output = output.unflatten(0, shape)
        if self.latent_out is not None:
            output = self.latent_out(output)
        return output if shared is None else output + shared

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run the layer; [batch, seq, hidden] -> ([batch, seq, hidden], loss). The loss is the router's, a scalar or
        None (see `Routing`)."""
        rows, weights, shared, loss, handle = self.send(hidden)
        rows = exchange(rows, self.dispatcher, handle, "dispatch")
        rows = self.run_experts(rows, handle)
        rows = exchange(rows, self.dispatcher, handle, "combine")
        return self.receive(rows, weights, shared, handle), loss

    def _narrowed(self, hidden: Tensor) -> Tensor:
        return hidden if self.latent_in is None else self.latent_in(hidden)

    def _shared(self, hidden: Tensor) -> Tensor:
        assert self.shared_expert is not None
        # With this view, autograd sums the gradients of the uses below before it adds the gradients of other uses of
        # `hidden`. The order of additions is then the same with and without a CUDA graph.
        hidden = hidden.view_as(hidden)
        shared = self.shared_expert(hidden)
        if self.shared_expert_gate is not None:
            shared = self.shared_expert_gate(hidden).sigmoid() * shared
        return shared

    @torch.no_grad()
    def _record(self, routing: Routing, rows: Tensor | None = None, *, losses: bool = True) -> None:
        # A forward inside a backward is a recomputation: its tokens were counted in the first forward.
        if self.training and not in_backward():
            whole = routing.kept is None
            self.load += routing.counts if whole else count(routing.experts.view(1, -1), self.load.numel())[0]
            held = self.dispatcher.experts
            if len(held) < self.load.numel():
                counts, rows_to = routing.counts, routing.counts
                if self.router.pad_to_capacity and routing.kept is not None:
                    kept = routing.experts.masked_fill(~routing.kept, self.load.numel())
                    counts = count(kept.view(1, -1), self.load.numel() + 1)[0, :-1]
                away, left = (each.sum() - each[held.start : held.stop].sum() for each in (counts, rows_to))
                if rows is not None:
                    left = rows.sum() - rows[held.start // len(held)]
                self.exchanged += torch.stack([away, left])
            if losses and routing.loss is not None:
                self.router.added_loss += routing.loss
