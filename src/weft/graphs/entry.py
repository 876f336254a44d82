"""`weft.Graphs`: the user's options, from which the engine of a model creates its table of graphed calls."""

from dataclasses import dataclass

import torch
from torch import nn

from weft.graphs.settings import Settings
from weft.graphs.table import Engine, GraphTable


@dataclass(frozen=True)
class Graphs(Settings):
    """Capture parts of a model and replay them: a replay takes one launch per part, not one per operator.

    - `scopes`: parts of the layers of `weft.models`: "attn", "mamba", "mlp" (dense, and the shared expert),
      "moe_router", "moe_preprocess" (only with "moe_router"), "experts" (only with `pad_to_capacity`) and "finish".
    - `modules`: further modules, by their names in the root's `named_modules()`, or by a predicate of name and module.
      Each module must be part of one unit, and contain no other unit.
    - `warmup`: the number of passes that run eagerly after each new memory plan.
    - `backend`: "cuda" (None means the same) or "tape". "tape" replays the operators one by one on the CPU. This tests
      captures without a GPU, but saves no time.
    """

    def table(self, root: nn.Module, engine: Engine, device: torch.device) -> GraphTable:
        """See `weft.fsdp.runtime.options.Captures`."""
        return GraphTable(self, root, engine, device)
