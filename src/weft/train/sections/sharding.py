"""[sharding]: how the model and its state are sharded over the ranks."""

import math
from dataclasses import dataclass
from typing import Literal

from weft.train.sections.rules import require


@dataclass(frozen=True)
class ShardingConfig:
    """[sharding]: sharding strategy, parallelism and options of the runtime."""

    strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = "optim_grads_params"
    """What to shard: "no_shard", "optim" (optimizer state), "optim_grads" (gradients too), "optim_grads_params"."""
    dp_shard: int = -1
    """Shards are spread over `dp_shard` x `cp` ranks; -1: dp_shard = all ranks / (pp x tp x cp x dp_replicate)."""
    dp_replicate: int = 1
    """Number of groups of `dp_shard` x `cp` ranks. Each group has a full copy of the state (HSDP)."""
    outer_strategy: Literal["no_shard", "optim"] = "no_shard"
    """With `dp_replicate`: "optim" also shards the optimizer state over the groups (HFSDP)."""
    ep: int = 1
    """Number of ranks over which the experts are spread. Must divide dp_replicate x dp_shard x cp x tp / etp."""
    cp: int = 1
    """Number of ranks that share every sequence (context parallelism). Each rank has two slices of each sequence."""
    tp: int = 1
    """Number of tensor-parallel ranks. They split heads, widths and the vocabulary and, between layers, positions."""
    etp: int | None = None
    """Number of ranks over which each expert is sharded: `tp`, or 1 for whole experts; unset: `tp`."""
    pp: int = 1
    """Number of pipeline ranks. Layers are divided at `|` in the pattern, or into segments of about equal cost."""
    chunks: int | None = None
    """With `pp`: stages per rank; unset: segments of the pattern / `pp`, or without `|` the schedule's default."""
    reshard_after_forward: bool | int | None = None
    """Whether to free weights after forward, or over how many ranks to reshard; unset: free all except the root's."""
    offload: bool = False
    """Keep sharded weights, gradients and optimizer state in CPU memory."""
    prefetch_bytes: int | None = None
    """Most bytes of weights gathered ahead; unset: the next unit or bucket, or two units with `overlap` or `pp`."""
    bucket_bytes: int | None = None
    """Adjacent units of up to this many bytes in total are gathered and reduced together; 0: none; unset: automatic."""
    max_live_reduce_buffers: int = 2
    """Number of units whose unreduced gradients may be in memory at once; with 1, backward waits for each reduction."""
    separate_all_gather_group: bool = False
    """Use separate communicators for gathers, so that gathers run concurrently with reductions."""
    allocator: Literal["trace", "caching"] = "trace"
    """ "trace": gathered weights and gradients use two slabs, first planned in step 1; "caching": torch's allocator."""
    check_collectives: bool = True
    """After each backward, compare the collectives that the ranks issued."""
    graphs: tuple[str, ...] = ()
    """Scopes to capture in graphs: "attn", "mamba", "mlp", "moe_router", "moe_preprocess", "experts", "finish"."""
    graphs_backend: Literal["cuda", "tape"] = "cuda"
    """With `graphs`: "cuda", or on the CPU "tape", which replays operators one by one and saves no time."""

    def __post_init__(self) -> None:
        require("sharding.ep", self.ep, self.ep >= 1, "must be a number of ranks; 1 keeps every expert on every rank")
        require(
            "sharding.cp", self.cp, self.cp >= 1, "must be a number of ranks; 1 keeps whole sequences on every rank"
        )
        require("sharding.tp", self.tp, self.tp >= 1, "must be a number of ranks; 1 keeps whole layers on every rank")
        fits = sorted({1, self.tp})
        rule = f"must be 1 or sharding.tp = {self.tp}; choose from {fits}"
        require("sharding.etp", self.etp, self.etp is None or self.etp in fits, rule)
        require("sharding.pp", self.pp, self.pp >= 1, "must be a number of ranks; 1 keeps all layers on every rank")
        require("sharding.chunks", self.chunks, (self.chunks or 1) >= 1, "must be at least 1")
        without = "has no effect with sharding.pp = 1"
        require("sharding.chunks", self.chunks, self.chunks is None or self.pp > 1, without)
        require(
            "sharding.dp_shard",
            self.dp_shard,
            self.dp_shard == -1 or self.dp_shard >= 1,
            "must be a number of ranks, or -1 for all of them",
        )
        require(
            "sharding.dp_replicate",
            self.dp_replicate,
            self.dp_replicate >= 1,
            "must be at least 1; 1 means a single replica",
        )
        require(
            "sharding.outer_strategy",
            self.outer_strategy,
            self.dp_replicate > 1 or self.outer_strategy == "no_shard",
            "has no effect with a single replica; set sharding.dp_replicate = 2 or more, or leave it out",
        )
        require(
            "sharding.outer_strategy",
            self.outer_strategy,
            self.strategy != "no_shard" or self.outer_strategy == "no_shard",
            'cannot shard with sharding.strategy = "no_shard", which keeps everything whole; choose another strategy',
        )
        choice = self.reshard_after_forward
        require(
            "sharding.reshard_after_forward",
            choice,
            choice is None or self.strategy == "optim_grads_params",
            'has no effect if each rank keeps all weights; set sharding.strategy = "optim_grads_params"',
        )
        require(
            "sharding.reshard_after_forward",
            choice,
            choice is None or choice >= 1 or choice is False,
            "must be true, false, or a number of ranks that is at least 1",
        )

        for name in ("prefetch_bytes", "bucket_bytes"):
            size = getattr(self, name)
            require(f"sharding.{name}", size, size is None or size >= 0, "must be a number of bytes, 0 or more")
        most = self.max_live_reduce_buffers
        require("sharding.max_live_reduce_buffers", most, most >= 1, "must be at least 1")
        known = ("attn", "mamba", "mlp", "moe_router", "moe_preprocess", "experts", "finish")
        unknown = [scope for scope in self.graphs if scope not in known]
        require(
            "sharding.graphs",
            list(self.graphs),
            not unknown,
            f"must contain only names from {list(known)}, not {unknown}",
        )
        pair = "moe_preprocess" not in self.graphs or "moe_router" in self.graphs
        require("sharding.graphs", list(self.graphs), pair, 'must contain "moe_router" if it contains "moe_preprocess"')
        fixed = not self.graphs or self.allocator == "trace"
        require(
            "sharding.graphs", list(self.graphs), fixed, 'needs sharding.allocator = "trace", which has fixed addresses'
        )
        used = bool(self.graphs) or self.graphs_backend == "cuda"
        require("sharding.graphs_backend", self.graphs_backend, used, "has no effect without sharding.graphs")

    @property
    def expert_ranks(self) -> int:
        """The number of ranks over which each expert is sharded: `etp` or, if that is unset, `tp`."""
        return self.tp if self.etp is None else self.etp

    def check(self, ranks: int) -> None:
        """Raise ConfigError for settings that do not fit `ranks`, the number of data-parallel ranks times `cp`."""
        fits = [size for size in range(1, ranks + 1) if ranks % size == 0]
        require(
            "sharding.cp", self.cp, self.cp in fits, f"must divide the number of ranks, {ranks}; choose from {fits}"
        )
        among = ranks * self.tp // self.expert_ranks  # whole experts are spread over tensor-parallel ranks too
        fits = [size for size in range(1, among + 1) if among % size == 0]
        cuts = [f"sharding.{name} = {size}" for name, size in (("pp", self.pp), ("tp", self.expert_ranks)) if size > 1]
        beside = f" (all ranks / {' / '.join(cuts)})" if cuts else ""
        rule = f"must divide the number of ranks, {among}{beside}; choose from {fits}"
        require("sharding.ep", self.ep, self.ep in fits, rule)
        everyone, ranks, copies = ranks, ranks // self.cp, self.dp_replicate
        fits = [size for size in range(1, ranks + 1) if ranks % size == 0]
        require(
            "sharding.dp_replicate",
            copies,
            copies in fits,
            f"must divide the number of ranks, {ranks}; choose from {fits}",
        )
        shards = ranks // copies
        before = f"{ranks}" if self.cp == 1 else f"{everyone} / sharding.cp = {ranks}"
        share = before if copies == 1 else f"{ranks} / sharding.dp_replicate = {shards}"
        require(
            "sharding.dp_shard",
            self.dp_shard,
            self.dp_shard in (-1, shards),
            f"must be the number of ranks, {share}, or -1 for all of them",
        )
        shards *= self.cp
        # Experts are sharded over fewer ranks; their units reshard over the same number of ranks as others.
        spread = shards * self.tp // self.expert_ranks
        least = math.gcd(shards, spread // self.ep) if self.ep > 1 and spread % self.ep == 0 else shards
        choice = self.reshard_after_forward
        sizes = [size for size in range(1, least + 1) if least % size == 0]
        require(
            "sharding.reshard_after_forward",
            choice,
            choice is None or isinstance(choice, bool) or choice in sizes,
            f"must divide the number of ranks that share the weights, {least}; choose from {sizes}, true or false",
        )
