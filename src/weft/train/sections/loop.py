"""[train]: the training loop."""

from dataclasses import dataclass
from typing import Literal

from weft.train.sections.rules import require


@dataclass(frozen=True)
class LoopConfig:
    """[train]: steps, batch sizes, precision and periodic actions."""

    steps: int = 1000
    """Optimizer steps of the whole run."""
    global_batch_size: int = 32
    """Sequences per optimizer step, over all ranks and microbatches."""
    microbatch_size: int = 8
    """Sequences in one forward pass of a rank."""
    precision: Literal["fp32", "bf16", "fp8", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4"] = "fp32"
    """Dtype of gathered weights and computation; fp8*, mxfp8, nvfp4 compute in bf16. "fp32" casts nothing."""
    unquantized_ends: int = 0
    """With a quantized `precision`: number of layers at each end of the model whose weights are gathered in bf16."""
    seed: int = 0
    """Seed of the initial weights and of the global random generators; the order of a text has `data.seed`."""
    validate_every: int = 100
    """Steps between two validations; 0: only one, at the end."""
    validation_batches: int = 4
    """Size of the fixed validation set, in global batches."""
    sample: str = ""
    """Text that the model continues after each validation, for the terminal and the report; empty: none."""
    sample_tokens: int = 64
    """With `sample`: largest number of tokens to add, each the most likely one."""
    ema_decay: float = 0.0
    """Decay of a moving average of the weights, which is also validated and saved; 0: no average."""
    stop_after: int = 0
    """The run ends after this many consecutive validations without a new lowest loss; 0: never."""
    gradient_clip: float = 1.0
    """Largest norm of the whole gradient; 0: no clipping."""
    skip_spikes: float = 0.0
    """Skip steps with a gradient norm above this multiple of the median of the last 100 unskipped steps; 0: never."""
    log_every: int = 10
    """Steps between printed lines (if the output is not a terminal) and between records of the experts' loads."""
    parameter_norms_every: int = 0
    """Steps between two records of the norm of each parameter and of its gradient; 0: none."""
    quantization_shares_every: int = 0
    """With a quantized `precision`: steps between records of each unit's saturated and underflowed weights; 0: none."""
    profile_step: int = 0
    """First step that torch's profiler records; each rank writes a trace. 0: none."""
    profile_steps: int = 3
    """With `profile_step`: number of steps to record."""
    peak_tflops: float = 0.0
    """Peak speed of one device in 10^12 operations per second, for the logged utilization (mfu); 0: not logged."""
    activation_checkpointing: bool = False
    """Recompute the activations of each layer in backward instead of saving them."""
    pipeline_schedule: str = ""
    """Name or file; empty: "combined" (overlap), "interleaved" (chunks > 1) or "1f1b". With pp = 1, only "paired"."""
    recompute_every: int = 1
    """With `activation_checkpointing`: recompute every n-th layer."""
    keep_products: bool = False
    """With `activation_checkpointing`: save outputs of matrix products, convolutions, attention; recompute the rest."""
    compile: str = ""
    """Backend of `torch.compile`, such as "inductor", applied to each layer separately; empty: none."""
    overlap: bool = False
    """Overlap the token exchange of one microbatch with the computation of another (`weft.overlap`)."""
    delay_wgrad: bool = False
    """With `overlap`: compute weight gradients separately, while tokens are exchanged."""
    early_release: bool = False
    """With `overlap`: free a layer's activations earlier, which takes less memory but hides less communication."""
    halves: bool = False
    """With `overlap`: exchange the tokens of an unpaired microbatch in two halves; experts start on the first half."""
    check: bool = False
    """Before the first step, run `weft check`: compare one step of a small copy on several ranks and on one rank."""
    watchdog: float = 600.0
    """Seconds without progress after which the run ends and names the rank that hangs; 0: never."""
    buffers: Literal["broadcast", "mean", "own"] = "broadcast"
    """Your model's buffers (running statistics) after a step: "broadcast" (of rank 0), "mean", or each rank's "own"."""
    cross_documents: bool = False
    """With `data.packing = "whole"`: let the documents of a sequence attend to each other."""
    expert_bias_rate: float = 1e-3
    """With `model.expert_bias`: how much a step raises biases of experts below the mean load and lowers those above."""

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch_size", "microbatch_size", "validation_batches", "log_every"):
            require(f"train.{name}", getattr(self, name), getattr(self, name) >= 1, "must be at least 1")
        for name, off in (("recompute_every", 1), ("keep_products", False)):
            value = getattr(self, name)
            without = "has no effect without train.activation_checkpointing = true; set that, or leave it out"
            require(f"train.{name}", value, self.activation_checkpointing or value == off, without)
        require("train.recompute_every", self.recompute_every, self.recompute_every >= 1, "must be at least 1")
        rule = "must be at least 1"
        require("train.sample_tokens", self.sample_tokens, self.sample_tokens >= 1, rule)
        rule = "has no effect without train.sample; set that, or leave it out"
        require("train.sample_tokens", self.sample_tokens, self.sample != "" or self.sample_tokens == 64, rule)
        require(
            "train.compile",
            self.compile,
            not (self.compile and self.overlap),
            "compiles whole layers, but train.overlap runs them in stages; choose one of the two",
        )
        for name in (
            *("seed", "validate_every", "stop_after", "gradient_clip", "parameter_norms_every", "watchdog"),
            *("profile_step", "peak_tflops"),
        ):
            require(f"train.{name}", getattr(self, name), getattr(self, name) >= 0, "must not be negative")
        require(
            "train.skip_spikes",
            self.skip_spikes,
            self.skip_spikes == 0 or self.skip_spikes > 1,
            "must be above 1, because 1 skips half of all steps; 5 skips clear outliers, 0 skips nothing",
        )
        require(
            "train.stop_after",
            self.stop_after,
            not self.stop_after or self.validate_every > 0,
            "counts validations, but train.validate_every = 0 validates only at the end; set that, or leave it out",
        )
        require("train.profile_steps", self.profile_steps, self.profile_steps >= 1, "must be at least 1")
        require(
            "train.profile_steps",
            self.profile_steps,
            self.profile_step > 0 or self.profile_steps == 3,
            "has no effect without train.profile_step; set that, or leave it out",
        )
        require(
            "train.profile_step",
            self.profile_step,
            self.profile_step <= self.steps,
            f"must be at most train.steps = {self.steps}; lower it",
        )
        require("train.seed", self.seed, self.seed < 1 << 40, "must be below 2**40; choose a smaller number")
        require("train.ema_decay", self.ema_decay, 0 <= self.ema_decay < 1, "must be at least 0 and less than 1")
        require("train.expert_bias_rate", self.expert_bias_rate, self.expert_bias_rate > 0, "must be positive")
        require(
            "train.unquantized_ends",
            self.unquantized_ends,
            self.unquantized_ends >= 0 and (not self.unquantized_ends or self.precision not in ("fp32", "bf16")),
            'is a number of layers and has no effect without a quantized train.precision, such as "mxfp8"',
        )
        every = self.quantization_shares_every
        require(
            "train.quantization_shares_every",
            every,
            every >= 0 and (not every or self.precision not in ("fp32", "bf16")),
            'is a number of steps and has no effect without a quantized train.precision, such as "mxfp8"',
        )
        for name in ("delay_wgrad", "early_release", "halves"):
            value = getattr(self, name)
            require(f"train.{name}", value, self.overlap or not value, "has no effect without train.overlap = true")
        require(
            "train.overlap",
            self.overlap,
            not (self.overlap and self.activation_checkpointing),
            "runs layers in stages, but train.activation_checkpointing recomputes whole layers; leave that out and "
            'recompute inside the stages: model.recompute = ["attend"]',
        )
