"""`weft.Graphs`: the user's options, from which the runtime of a model creates its `GraphTable`."""

from dataclasses import dataclass

import torch
from torch import nn

from weft.graphs.settings import Settings
from weft.graphs.table import Engine, GraphTable


@dataclass(frozen=True)
class Graphs(Settings):
    """Settings of `RuntimeOptions(graphs=...)`: capture parts of a model in CUDA graphs, and replay them.

    A replay launches one graph per part, not one kernel per operator.

    - `scopes`: the parts of the layers of `weft.models` to capture. Default: all of these.
        - "attn", "mamba"
        - "mlp": dense MLPs, and the shared expert
        - "moe_router"
        - "moe_preprocess": the sorting of rows by expert. It needs "moe_router". It is not captured with one row per
          rank (`rows_per="rank"`), nor with a `capacity_factor` but without `pad_to_capacity`.
        - "experts": not captured without `pad_to_capacity`
        - "finish": the sum of the experts' outputs, and the residual sum. For experts, it is not captured with one row
          per rank.
    - `modules`: further modules to capture: their names in the root's `named_modules()`, or a predicate of name and
      module. A chosen module must not contain another chosen module or a separately sharded one (a unit).
    - `warmup`: the number of passes that run eagerly before parts are captured. A forward with its backward, an
      evaluation and a call of a schedule count as one pass each. The count starts again with each new memory plan (the
      layout of the buffers for gathered weights).
    - `backend`: "cuda" (None means the same) or "tape". "tape" replays the operators one by one on the CPU. Use it
      to test captures without a GPU. It saves no time.
    """

    def table(self, root: nn.Module, engine: Engine, device: torch.device) -> GraphTable:
        """See `weft.fsdp.runtime.options.Captures`."""
        return GraphTable(self, root, engine, device)
