"""A family of published models: the tables of names with which weft reads and writes the family's files."""

import dataclasses
import re
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.errors import ConversionError
from weft.models.config import HybridConfig
from weft.models.hf.depths import Depths
from weft.models.hf.fields import KEPT, MEANINGLESS, Raw, check_values, lacking
from weft.models.hf.places import PerExpert, Place, Same
from weft.models.hf.rope import FULL, SLIDING
from weft.models.kinds import fields_of
from weft.models.model import HybridModel
from weft.models.pattern import LAYER_KEYS, TERMINAL
from weft.moe.kinds import GATED
from weft.words import listed

Bound = Callable[[str, HybridConfig], Place]
"""A function that returns the place of a tensor in a layer. Its first argument is the prefix of the layer's names."""
Table = Mapping[str, str | Bound]
"""Maps weft's modules or parameters inside a layer to their names or places on disk."""

OUTER = {"embedding": "model.embed_tokens", "decoder.final_layernorm": "model.norm", "output_layer": "lm_head"}
REQUIRED = {"attention_dropout": 0.0}
UNUSED_WINDOW = 4096
"""The `sliding_window` of a config.json in which no layer has a window. Some models of transformers need a number."""


@dataclass(frozen=True)
class Family:
    """The tables of a family of published models.

    - `fields`: maps names in config.json to (name in `HybridConfig`, the family's default). The values are copied.
    - `required`: fields of config.json, each with the only value that weft supports.
    - `activation`: the field of config.json with the activation of MLPs, and its only value.
    - `kept`: other fields of config.json that are accepted. Either `read` uses them, or the result does not depend on
      them.
    - `read`: returns the fields of `HybridConfig` that are computed from config.json. They replace copied fields.
    - `write`: returns the fields of config.json that are computed from a `HybridConfig`. They replace copied fields.
    - `outer`: maps weft's modules outside of layers to names on disk.
    - `layer`: the prefix of the tensor names of a layer on disk, with {} for the layer's number.
    - `symbols_per_layer`: the number of pattern symbols that form one layer on disk, for example 2 for `[*-]`.
    - `tensors`: maps each layer symbol to the table of the tensor names in such a layer.
    - `depths`: the tensor names of prediction depths. None if weft supports no depths in this family.
    - `memory`: pairs (part of a name in these tables, the part that replaces it in transformers' `state_dict()`). Some
      files have the names of the `state_dict()`.
    """

    model_type: str
    architecture: str
    tensors: Mapping[str, Table]
    fields: Mapping[str, tuple[str, Any]]
    read: Callable[[Raw], Raw]
    write: Callable[[HybridConfig], Raw]
    layer: str = "model.layers.{}."
    outer: Mapping[str, str] = field(default_factory=lambda: OUTER)
    symbols_per_layer: int = 2
    required: Mapping[str, Any] = field(default_factory=dict)
    activation: tuple[str, str] = ("hidden_act", "silu")
    kept: frozenset[str] = frozenset()
    depths: Depths | None = None
    memory: tuple[tuple[str, str], ...] = ()

    def config(self, raw: Raw, files: Container[str] = (), ignored: Collection[str] = ()) -> HybridConfig:
        """Return the configuration that the config.json `raw` describes.

        `files`: the names of the tensors on disk. They determine the number of prediction depths. `ignored`: unknown
        fields to ignore. Raises `ConversionError` for any other unknown field that could change the result, for
        quantized weights, and for values that are invalid or that weft does not support.
        """
        raw = {name: value for name, value in raw.items() if name not in ignored}
        check_values(raw, self.fields)
        if (quantized := raw.get("quantization_config")) is not None:
            method = quantized.get("quant_method", "an unnamed method")
            raise ConversionError(
                f"quantization_config: the weights are quantized by {method!r}; use unquantized weights"
            )
        required = self._required()
        for name, value in required.items():
            if raw.get(name, value) != value:
                raise ConversionError(f"{name}={raw[name]!r}: weft's {self.model_type} has {value!r} only")
        ours = {name: raw.get(theirs, default) for theirs, (name, default) in self.fields.items()}
        with self._reading():
            ours |= self.read(raw)
            cfg = HybridConfig(**ours)
            written = self.write(cfg)
        known = {*self.fields, *required, *self.kept, *KEPT, *MEANINGLESS, *written}
        if unknown := lacking(raw, known):
            raise ConversionError(
                f"{self.model_type} has no {listed(sorted(unknown))} in weft: the result could depend on it; use "
                f"--ignore-field NAME for a field that does not change it"
            )
        if self.depths is None:
            return cfg
        with self._reading():
            symbols = self.depths.symbols(raw)
            count = self.depths.count(self._layers(cfg), len(symbols) // self.symbols_per_layer, files)
            part = f"[{symbols}]" if self.symbols_per_layer == 2 else symbols
            return dataclasses.replace(cfg, pattern=cfg.pattern + f"/{part}" * count)

    def _required(self) -> Raw:
        return dict([*REQUIRED.items(), self.activation, *self.required.items()])

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """A context that raises `ConversionError` for fields of config.json that do not describe a model."""
        try:
            yield
        except ConversionError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ConversionError(f"{self.model_type} does not describe a model: {reason}") from error

    def raw(self, cfg: HybridConfig) -> Raw:
        """Return this family's config.json for `cfg`. Raises `ConversionError` if the family cannot represent `cfg`."""
        self._check_symbols(cfg)
        theirs = {name: plain(cfg, ours) for name, (ours, _) in self.fields.items()}
        theirs = {"architectures": [self.architecture], "model_type": self.model_type} | theirs
        theirs |= {**self._required(), **self.write(cfg)}
        if cfg.parsed.depths and self.depths is not None:
            theirs[self.depths.counted] = cfg.parsed.depths
        again = self.config(theirs, self.projections(cfg))
        different = [
            f"{name}={getattr(cfg, name)!r} (it has {getattr(again, name)!r})"
            for name in relevant(cfg)
            if plain(cfg, name) != plain(again, name)
        ]
        if different:
            raise ConversionError(f"{self.model_type} cannot hold {'; '.join(different)}")
        return theirs

    def places(self, cfg: HybridConfig, *, fused: bool = False) -> dict[str, Place]:
        """Return the place on disk of each of weft's tensors, by weft's name.

        If `tensors` has one matrix per expert, `fused` says whether one tensor on disk stacks these matrices instead.
        """
        places = {name: self._place_of(name, cfg) for name in tensor_names(cfg)}
        if not fused:
            return places
        gated = cfg.hidden_act in GATED
        return {name: place.fused(gated) if isinstance(place, PerExpert) else place for name, place in places.items()}

    def _place_of(self, name: str, cfg: HybridConfig) -> Place:
        inside = re.fullmatch(r"(?:decoder|mtp\.layers\.(\d+))\.layers\.(\d+)\.(\w+)\.(.+)", name)
        trunk, length = self._layers(cfg), len(cfg.parsed.symbols[1]) // self.symbols_per_layer
        if inside is None:
            module, _, kind = name.rpartition(".")
            if (around := re.fullmatch(r"mtp\.layers\.(\d+)\.(\w+)", module)) and self.depths is not None:
                return Same(f"{self.depths.names(trunk, length, int(around[1]))[around[2]]}.{kind}")
            again = self._copies(module, trunk, length, cfg)
            tied = module == "embedding" and cfg.tie_word_embeddings
            return Same(
                f"{self.outer[module]}.{kind}",
                tuple(f"{copy}.{kind}" for copy in again),
                (f"{self.outer['output_layer']}.{kind}",) if tied else (),
            )
        depth, index, member, inner = inside.groups()
        layer = (cfg.parsed.layers if depth is None else cfg.parsed.prediction)[int(index)]
        place = next(place for place, symbol in enumerate(layer.symbols) if LAYER_KEYS[symbol] == member)
        number = (layer.physical - 1 + place) // self.symbols_per_layer
        if depth is None or self.depths is None:
            prefix = self.layer.format(number)
        else:
            prefix = self.depths.prefix(trunk, length, int(depth), number)
        return self._place(layer.symbols[place], inner, prefix, cfg)

    def projections(self, cfg: HybridConfig) -> set[str]:
        """Return the names on disk of the prediction depths' projections. `Depths.count` counts these names."""
        if self.depths is None:
            return set()
        trunk, length = self._layers(cfg), len(cfg.parsed.symbols[1]) // self.symbols_per_layer
        return {self.depths.names(trunk, length, each)["project"] + ".weight" for each in range(cfg.parsed.depths)}

    def _copies(self, module: str, trunk: int, length: int, cfg: HybridConfig) -> list[str]:
        """Return the names under which the depths store copies of `module`. For the embedding of a tied model, add the
        names of the copies of the output layer."""
        modules = [module, "output_layer"] if module == "embedding" and cfg.tie_word_embeddings else [module]
        if self.depths is None:
            return []
        return [name for each in modules for name in self.depths.copies_of(each, trunk, length, cfg.parsed.depths)]

    def _layers(self, cfg: HybridConfig) -> int:
        return len(flat(cfg)) // self.symbols_per_layer

    def _place(self, symbol: str, name: str, prefix: str, cfg: HybridConfig) -> Place:
        table = self.tensors[symbol]
        module, _, kind = name.rpartition(".")
        theirs = table.get(name)
        if theirs is None and module in table:
            theirs = f"{table[module]}.{kind}"
        if theirs is None:
            raise ConversionError(f"{self.model_type} has no tensor for {name!r} of a layer {symbol!r}")
        return theirs(prefix, cfg) if callable(theirs) else Same(prefix + theirs)

    def _check_symbols(self, cfg: HybridConfig) -> None:
        symbols, prediction, count = cfg.parsed.symbols
        if count and self.depths is None:
            raise ConversionError(f"{self.model_type} has no prediction depths (pattern {cfg.pattern!r})")
        if self.depths is not None and self.depths.most is not None and count > self.depths.most:
            raise ConversionError(f"{self.model_type} has {self.depths.most} prediction depth at most, not {count}")
        if strange := set(symbols + prediction) - set(self.tensors):
            raise ConversionError(f"{self.model_type} has no layer {listed(sorted(strange))} (pattern {cfg.pattern!r})")
        if self.symbols_per_layer == 2:
            pairs = [symbols[place : place + 2] for place in range(0, len(symbols), 2)]
            if any(len(pair) < 2 or pair[0] in TERMINAL or pair[1] not in TERMINAL for pair in pairs):
                raise ConversionError(
                    f"layers of {self.model_type} are pairs such as [*-], not those of {cfg.pattern!r}"
                )


def tensor_names(cfg: HybridConfig) -> list[str]:
    """Return weft's names of a model's tensors. Their order does not depend on how the pattern groups symbols."""
    return list(shapes_of(cfg))


def shapes_of(cfg: HybridConfig) -> dict[str, list[int]]:
    """Return the shapes of the tensors of a model of `cfg`, by name. No tensor is allocated."""
    try:
        with torch.device("meta"):
            return {name: list(tensor.shape) for name, tensor in HybridModel(cfg).state_dict().items()}
    except (MemoryError, OverflowError, RuntimeError, TypeError) as error:
        raise ConversionError(
            f"hidden_size={cfg.hidden_size}, vocab_size={cfg.vocab_size}: no tensor can be that large "
            f"({str(error).splitlines()[0][:80]}); correct config.json"
        ) from error


def flat(cfg: HybridConfig) -> str:
    """Return the pattern's symbols as one string, without `[ ] |` and without the prediction depths."""
    return "".join(layer.symbols for layer in cfg.parsed.layers)


def relevant(cfg: HybridConfig) -> list[str]:
    """Return the names of the fields on which the output of a model of `cfg` depends."""
    return [field.name for field in fields_of("".join(cfg.parsed.symbols[:2])) if field.metadata["rule"].result]


def check_layer_types(raw: Raw, layers: int, known: Collection[str], family: str) -> None:
    """Raise `ConversionError` if `layer_types` is not empty and not a list with a `known` type for each layer."""
    kinds = raw.get("layer_types")
    if not kinds:
        return
    if not isinstance(kinds, list) or len(kinds) != layers:
        given = len(kinds) if isinstance(kinds, list) else repr(kinds)
        raise ConversionError(f"layer_types: {given}, but {family} needs one for each of num_hidden_layers={layers}")
    if strange := {str(kind) for kind in kinds} - set(known):
        raise ConversionError(
            f"layer_types: weft's {family} has {listed(sorted(known))} only, not {listed(sorted(strange))}"
        )


def windows_of(raw: Raw, layers: int, family: str, default: Callable[[int], bool], window: int | None) -> Raw:
    """Return `sliding_window` and `windowed` of `HybridConfig` from `layer_types`.

    `default(number)`: whether layer `number` has a window if config.json has no `layer_types`. `window`: the size of
    the window, or None if no layer has one.
    """
    check_layer_types(raw, layers, (SLIDING, FULL), family)
    given = raw.get("layer_types")
    sliding = [default(number) for number in range(layers)] if not given else [each == SLIDING for each in given]
    numbers = tuple(number for number, slides in enumerate(sliding) if slides)
    if window is None or not numbers:
        return {"sliding_window": None, "windowed": None}
    return {"sliding_window": window, "windowed": None if len(numbers) == layers else numbers}


def written_windows(cfg: HybridConfig) -> Raw:
    """Return `sliding_window` and `layer_types` of the config.json for `cfg`: the inverse of `windows_of`."""
    windows = [cfg.window_of(number) for number in range(flat(cfg).count("*"))]
    return {
        "sliding_window": cfg.sliding_window or UNUSED_WINDOW,
        "layer_types": [FULL if each is None else SLIDING for each in windows],
    }


def experts(template: str) -> Bound:
    """Return a function that returns the `Place` of a tensor that has one matrix per expert on disk.

    `template`: the name of a matrix on disk, without the layer's prefix, with {} for the expert's number.
    """
    return lambda prefix, cfg: PerExpert(prefix + template, cfg.num_experts)


def differences(cfg: HybridConfig, other: HybridConfig) -> list[str]:
    """Return a line of text for each field that differs between `cfg` and `other` and affects the model's output.

    If the symbols of the patterns differ, the list has only the line for `pattern`. How the patterns group symbols is
    ignored.
    """
    if cfg.parsed.symbols != other.parsed.symbols:
        return [f"pattern={cfg.pattern!r}, there {other.pattern!r}"]
    return [
        f"{name}={plain(cfg, name)!r}, there {plain(other, name)!r}"
        for name in relevant(other)
        if plain(cfg, name) != plain(other, name)
    ]


def plain(cfg: HybridConfig, name: str) -> Any:
    """Return the value of field `name` in a normal form: equivalent values of `pattern`, `windowed`, `head_dim` and
    `attention_scale` have the same form."""
    if name == "pattern":
        return cfg.parsed.symbols
    if name == "windowed":
        return [cfg.window_of(number) for number in range(flat(cfg).count("*"))]
    if name == "attention_scale" and cfg.attention_scale is None:
        width = cfg.qk_nope_head_dim + cfg.qk_rope_head_dim if "+" in cfg.pattern else cfg.attention_head_dim
        return width**-0.5
    return cfg.attention_head_dim if name == "head_dim" else getattr(cfg, name)
