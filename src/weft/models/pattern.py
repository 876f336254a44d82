"""The pattern language: one string that describes a stack of layers.

    symbol   layer                        key in a checkpoint
    M        Mamba-2                      mixer
    G        gated delta net              mixer
    *        self-attention (GQA, RoPE)   self_attention
    +        multi-head latent attention  self_attention
    P        attention and Mamba-2        mixer
    K        Kimi delta attention         mixer
    -        dense MLP                    mlp
    E        mixture of experts           mlp

    [ ]      a group: its symbols form one logical layer
    |        pipeline segment border, in the main part only
    /        start of a multi-token-prediction part; each part is one prediction depth

A physical layer is one symbol. Physical layers are numbered from 1. A logical layer is a group, or a symbol outside of
groups. Logical layers are numbered from 0. The pattern `M[*-]|M[*E]/[*E]` has two pipeline segments with two logical
layers each, and one prediction depth with one logical layer.

In a group, only the last symbol can be `-` or `E`, and no two symbols have the same key. Neither the main part nor a
prediction part has `+` together with `*` or `P`. All prediction parts are alike. A `/` at the end of the pattern has no
effect.
"""

from dataclasses import dataclass

from weft.errors import PatternError
from weft.models.kinds import KINDS
from weft.words import counted

LAYER_NAMES = {symbol: kind.title for symbol, kind in KINDS.items()}
LAYER_KEYS = {symbol: kind.key for symbol, kind in KINDS.items()}
TERMINAL = "-E"


@dataclass(frozen=True)
class LogicalLayer:
    """A logical layer (a group, or a symbol outside of groups) in the main part or a prediction part of a pattern.

    `index`: the number of the layer in the part, from 0. `symbols`: the symbols of the layer. `physical`: the number of
    the layer's first symbol in the part, from 1.
    """

    index: int
    symbols: str
    physical: int


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern.

    `text`: the pattern as written. `segments`: the logical layers of each pipeline segment of the main part (before the
    first `/`). `prediction`: the logical layers of one prediction part; all prediction parts are alike. `depths`: the
    number of prediction parts.
    """

    text: str
    segments: tuple[tuple[LogicalLayer, ...], ...]
    prediction: tuple[LogicalLayer, ...] = ()
    depths: int = 0

    @property
    def layers(self) -> tuple[LogicalLayer, ...]:
        """The logical layers of all segments of the main part, in order."""
        return tuple(layer for segment in self.segments for layer in segment)

    @property
    def symbols(self) -> tuple[str, str, int]:
        """The tuple (layer symbols of the main part, layer symbols of one prediction part, number of depths)."""
        main, prediction = ("".join(layer.symbols for layer in part) for part in (self.layers, self.prediction))
        return main, prediction, self.depths

    def stage(self, pp_rank: int, chunk: int = 0, *, pp_size: int) -> tuple[LogicalLayer, ...]:
        """Return the logical layers of chunk `chunk` of pipeline rank `pp_rank`, both counted from 0.

        The chunks of rank r of `pp_size` are the segments r, r + pp_size, r + 2 pp_size, ... (the placement "loop").

        Raises `PatternError` if the number of segments is not a multiple of `pp_size`, and `ValueError` for a rank or a
        chunk that does not exist.
        """
        count = len(self.segments)
        if pp_size < 1 or count % pp_size:
            borders = [place for place, sign in enumerate(self.text) if sign == "|"]
            raise PatternError(
                self.text,
                borders[-1] if borders else 0,
                "|" if borders else self.text,
                f"{counted(count, 'pipeline segment')} cannot be distributed over pp={pp_size} ranks; add '|' "
                f"until the number of segments is a multiple of {pp_size}",
            )
        for name, value, end in (("pp_rank", pp_rank, pp_size), ("chunk", chunk, count // pp_size)):
            if not 0 <= value < end:
                raise ValueError(f"{name}={value}: pattern {self.text!r} on pp={pp_size} ranks has 0 to {end - 1}")
        return self.segments[chunk * pp_size + pp_rank]


def parse(text: str) -> Pattern:
    """Parse a pattern. Raises `PatternError` if the pattern breaks a rule. The error states the rule, the characters
    that break the rule, and the position of these characters (from 0)."""
    main: list[list[LogicalLayer]] = [[]]
    depths: list[list[LogicalLayer]] = []
    part = main  # the current part: the segments of the main part, or one list for a prediction part
    opened: int | None = None
    attention: str | None = None  # the kind of attention that this part uses

    def add(symbols: str) -> None:
        before = [layer for segment in part for layer in segment]
        physical = 1 + sum(len(layer.symbols) for layer in before)
        part[-1].append(LogicalLayer(len(before), symbols, physical))

    for position, sign in enumerate(text):

        def error(rule: str, at: int = position) -> PatternError:
            return PatternError(text, at, text[at], rule)

        if sign in "|/" and opened is not None:
            raise error("a group ends with ']' before the next segment or prediction part starts")
        if sign == "[":
            if opened is not None:
                raise error("groups do not nest; close the group before opening the next")
            opened = position
        elif sign == "]":
            if opened is None:
                raise error("']' closes a group; put its '[' before it")
            if position == opened + 1:
                raise PatternError(text, opened, "[]", "a group needs at least one layer")
            add(text[opened + 1 : position])
            opened = None
        elif sign == "|":
            if part is not main:
                raise error("only the main part, before the first '/', can be cut into pipeline segments")
            main.append([])
        elif sign == "/":
            depths.append([])
            part = [depths[-1]]
            attention = None
        elif sign not in LAYER_KEYS:
            known = " ".join(LAYER_KEYS)
            raise error(f"unknown symbol; layers are {known}, and the other symbols are [ ] | /")
        else:
            if sign in "*+P":
                heads = "+" if sign == "+" else "*"
                if attention not in (None, heads):
                    raise error("a part can use either '*' (or 'P') or '+', not both")
                attention = heads
            if opened is None:
                add(sign)
                continue
            members = text[opened + 1 : position]
            if members and members[-1] in TERMINAL:
                raise error(f"{members[-1]!r} must be the last layer of its group", position - 1)
            if LAYER_KEYS[sign] in {LAYER_KEYS[member] for member in members}:
                raise error(f"two members of one group would share the checkpoint key {LAYER_KEYS[sign]!r}")
    if opened is not None:
        raise PatternError(text, opened, text[opened:], "'[' opens a group; put its ']' after its last layer")
    if not any(main):
        rule = "the main part needs at least one layer; a segment may be empty, but not all of them"
        raise PatternError(text, 0, text[:1], rule)
    return Pattern(text, tuple(map(tuple, main)), *_prediction(text, depths))


def _prediction(text: str, depths: list[list[LogicalLayer]]) -> tuple[tuple[LogicalLayer, ...], int]:
    if depths and not depths[-1]:  # a trailing "/" means no depth
        depths = depths[:-1]
    if not depths:
        return (), 0
    position = text.index("/") + 1
    for layers in depths:
        written = text[position:].partition("/")[0]
        if not layers:
            raise PatternError(text, position - 1, "/", "a prediction part needs at least one layer")
        if layers != depths[0]:
            raise PatternError(text, position, written, "every prediction part must be written like the first")
        position += len(written) + 1
    return tuple(depths[0]), len(depths)
