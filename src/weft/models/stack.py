"""Stacks of logical layers."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from weft.mesh import Meshes
from weft.models.config import HybridConfig
from weft.models.context import Borders
from weft.models.layers import Beside, Cache, RMSNorm, dispatcher_of, layer_class, rotary_of
from weft.models.pattern import LAYER_KEYS, TERMINAL, LogicalLayer
from weft.models.tensor_parallel import TensorRanks, cuts_of, ends_of, share, tensor_ranks
from weft.moe import Dispatcher
from weft.moe.source import WeightSource
from weft.overlap import Crossing, run_stages
from weft.overlap.layer import beside_forward


class Layer(nn.Module):
    """One logical layer: a single block, or a group of blocks. A block is the module of one symbol of the pattern.

    The class follows the protocol `weft.overlap.StagedLayer`. If the last block is an MLP (`-`) or experts (`E`), it is
    the terminal block, and all blocks before it run in the stage `attend`. Otherwise all blocks run in `attend`.
    """

    def __init__(
        self,
        cfg: HybridConfig,
        layer: LogicalLayer,
        source: WeightSource,
        beside: Beside,
        ranks: TensorRanks | None = None,
    ) -> None:
        super().__init__()
        self.symbols = layer.symbols
        for number, symbol in enumerate(layer.symbols, start=layer.physical):
            # Seeded by the number of the physical layer, so that initial weights do not depend on how the pattern
            # groups layers.
            block: Any = layer_class(symbol)(cfg, source / str(number), beside)
            if ranks is not None:
                share(block, cuts_of(symbol, cfg, ranks.experts), ranks)
                block.share(ranks)
            if ("experts" if symbol in TERMINAL else "attend") in cfg.recompute:
                block.recompute()
            self.add_module(LAYER_KEYS[symbol], block)

    def forward(
        self, x_BSD: Tensor, cache: Cache | None = None, documents: Borders | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, S, D] and the layer's auxiliary loss, a scalar or None.

        With a cache, `x_BSD` has only the positions after the cached positions (see `HybridModel.forward`).
        """
        return run_stages(self, x_BSD, **_given(cache=cache, documents=documents))

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of the layer's stages, in order (see `weft.overlap.StagedLayer`)."""
        if self._terminal is None:
            return ("attend",)
        if self.dispatcher is None:
            return ("attend", "experts", "finish")
        return ("attend", "dispatch", "experts", "combine", "finish")

    @property
    def dispatcher(self) -> Dispatcher | None:
        """The dispatcher that sends tokens to experts on other ranks, or None if no expert of this layer is on another
        rank."""
        moves = self._terminal.dispatcher if self._terminal is not None else None
        return moves if moves is not None and len(moves.experts) < moves.num_experts else None

    @property
    def _terminal(self) -> Any:
        """The MLP or the experts at the end of the layer, or None if it has neither."""
        if self.symbols[-1] not in TERMINAL:
            return None
        key = LAYER_KEYS[self.symbols[-1]]
        terminal = getattr(self, key)
        if hasattr(terminal, "_checkpoint_wrapped_module"):
            raise ValueError(
                f"{key} is inside an activation checkpoint, which the stages of its layer would bypass: set "
                f"HybridConfig(recompute=('experts',)), or checkpoint the whole layer"
            )
        return terminal

    def attend(self, x_BSD: Tensor, cache: Cache | None = None, documents: Borders | None = None) -> Crossing:
        """Run the blocks before the terminal block, then that block's norm and, if it has experts, its router and its
        shared expert. Without a terminal block, run all blocks."""
        terminal = self._terminal
        if terminal is not None and (what := beside_forward(terminal)):
            raise ValueError(
                f"{LAYER_KEYS[self.symbols[-1]]} ({type(terminal).__name__}) {what}, but its layer calls the parts of "
                f"this module, not the module: {'compile' if 'compiled' in what else 'put hooks on'} the layer or the "
                f"modules inside"
            )
        if documents is not None and documents.is_plain:
            documents = None
        for block in self.children():
            if block is not terminal:
                state = None if cache is None else cache.setdefault(block, {})
                x_BSD = block(x_BSD, state, documents)
        return Crossing(x_BSD) if terminal is None else terminal.split(x_BSD)

    def experts(self, rows: Tensor, handle: Any) -> Tensor:
        """Run the MLP, or the experts of this rank, on `rows`."""
        return self._terminal.run_experts(rows, handle)

    def finish(self, rows: Tensor, kept: dict[str, Tensor], handle: Any) -> Tensor:
        """Add the terminal block's output to the residual stream, and return the sum, [B, S, D]. The terminal block's
        output is the MLP's output, or the weighted sum of the experts' outputs plus the shared expert's output."""
        return self._terminal.join(rows, kept, handle)

    def expert_modules(self) -> Sequence[nn.Module]:
        """Return the modules that only `experts` calls."""
        return [] if self._terminal is None else self._terminal.expert_modules()


class Layers(nn.ModuleList):
    """This rank's layers of a stack. A layer's name is its number in the whole stack, but an index counts only this
    rank's layers. On a rank with the layers 4 to 7, `layers[0]` has the name "4"."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        return self._modules[list(self._modules)[index]]

    def __setitem__(self, index: int, layer: nn.Module) -> None:
        self._modules[list(self._modules)[index]] = layer


class Stack(nn.Module):
    """Logical layers in order, and a final norm.

    `here`: the indices of the `layers` that this rank has. None: all. `ends`: whether this rank has the final norm.
    """

    scaling_by_length: Mapping[str, Any] | None
    """The `rope_scaling`, if its rotation depends on the length of a sequence. Otherwise None."""

    def __init__(
        self,
        cfg: HybridConfig,
        layers: Sequence[LogicalLayer],
        source: WeightSource,
        meshes: Meshes | None,
        *,
        here: Sequence[int] | None = None,
        ends: bool = True,
    ) -> None:
        super().__init__()
        self.ranks = tensor_ranks(meshes)
        symbols = "".join(layer.symbols for layer in layers)
        rotary = rotary_of(cfg, symbols)
        self.scaling_by_length = rotary.scaling if rotary is not None and rotary.is_by_length else None
        dispatcher = dispatcher_of(cfg, meshes) if "E" in symbols else None
        self.layers: Any = Layers()
        for number in range(len(layers)) if here is None else here:
            attentions = symbols[: layers[number].physical - 1].count("*")
            beside = Beside(rotary, dispatcher, attentions)
            self.layers.add_module(str(number), Layer(cfg, layers[number], source, beside, self.ranks))
        self.final_layernorm: Any = None
        if ends:
            self.final_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps, zero_centered=cfg.zero_centered_norm)
            if self.ranks is not None:
                share(self.final_layernorm, ends_of(cfg), self.ranks, "final_layernorm")

    def forward(
        self, x_BSD: Tensor, cache: Cache | None = None, documents: Borders | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the layers, without the final norm. Return the last layer's output [B, S, D] and the layers' auxiliary
        losses, a list of scalars."""
        losses, beside = [], _given(cache=cache, documents=documents)
        for layer in self.layers:
            x_BSD, loss = layer(x_BSD, **beside)
            if loss is not None:
                losses.append(loss)
        return x_BSD, losses


def _given(**beside: Any) -> dict[str, Any]:
    return {name: value for name, value in beside.items() if value is not None}
