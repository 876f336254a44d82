"""Where the families have prediction depths, which their files may hold and `config.json` may be silent about.

    family                 a layer of depth k has the prefix        its norms and projection
    ---------------------  ---------------------------------------  --------------------------------------------------
    DeepSeek-V3, GLM-4.5   model.layers.{layers of the trunk + k}.  enorm, hnorm, eh_proj, shared_head.norm there, and
                                                                    copies: embed_tokens, shared_head.head
    Qwen3-Next, Qwen3.5    mtp.layers.{k}.                          mtp.{pre_fc_norm_embedding,pre_fc_norm_hidden,fc}
                                                                    and mtp.norm: there is one depth at most
    Nemotron-H             mtp.layers.{k * layers of a depth + i}.  enorm, hnorm, eh_proj in the first of them,
                                                                    final_layernorm in the last

A depth is made exactly when its weights are there.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

NEXT = {"embedding_norm": "{first}enorm", "hidden_norm": "{first}hnorm", "project": "{first}eh_proj"}


@dataclass(frozen=True)
class Depths:
    """The depths of a family.

    `symbols`: of one depth, in a model of that config.json. `prefix`: of the layer at `place` of depth `number`, in a
    model of `trunk` layers with `length` layers in a depth. `around`: our modules outside of a depth's layers to
    theirs, where {first} and {last} are the prefixes of its layers. `copies`: modules of the model that each depth has
    again. `most`: how many depths there may be. `counted`: the field of config.json that says how many there are.
    """

    symbols: Callable[[dict[str, Any]], str]
    prefix: Callable[[int, int, int, int], str]
    around: Mapping[str, str]
    copies: Mapping[str, str] = field(default_factory=dict)
    most: int | None = None
    counted: str = "num_nextn_predict_layers"

    def names(self, trunk: int, length: int, number: int) -> dict[str, str]:
        """Our modules around the layers of depth `number` to theirs."""
        first, last = (self.prefix(trunk, length, number, place) for place in (0, length - 1))
        return {ours: theirs.format(first=first, last=last) for ours, theirs in self.around.items()}

    def copies_of(self, module: str, trunk: int, length: int, count: int) -> list[str]:
        """The names under which each of `count` depths has a `module` of the model again."""
        if module not in self.copies:
            return []
        return [self.copies[module].format(first=self.prefix(trunk, length, number, 0)) for number in range(count)]

    def count(self, trunk: int, length: int, files: Container[str]) -> int:
        """The number of depths whose weights are in `files`."""
        found = 0
        while self.names(trunk, length, found)["project"] + ".weight" in files:
            found += 1
            if found == self.most:
                break
        return found


def behind_the_trunk(symbols: str) -> Depths:
    """Depths that are numbered as if they were layers of the trunk."""
    return Depths(
        symbols=lambda raw: symbols,
        prefix=lambda trunk, length, number, place: f"model.layers.{trunk + number}.",
        around={**NEXT, "final_layernorm": "{last}shared_head.norm"},
        copies={"embedding": "{first}embed_tokens", "output_layer": "{first}shared_head.head"},
    )


def single(symbols: str, counted: str = "num_nextn_predict_layers") -> Depths:
    """One depth, apart from the trunk."""
    return Depths(
        symbols=lambda raw: symbols,
        prefix=lambda trunk, length, number, place: f"mtp.layers.{number}.",
        around={
            "embedding_norm": "mtp.pre_fc_norm_embedding",
            "hidden_norm": "mtp.pre_fc_norm_hidden",
            "project": "mtp.fc",
            "final_layernorm": "mtp.norm",
        },
        most=1,
        counted=counted,
    )


def layer_by_layer(symbols: Callable[[dict[str, Any]], str]) -> Depths:
    """Depths whose layers are numbered through, and hold what is around them."""
    return Depths(
        symbols=symbols,
        prefix=lambda trunk, length, number, place: f"mtp.layers.{number * length + place}.",
        around={**NEXT, "final_layernorm": "{last}final_layernorm"},
    )
