"""The tensor names of prediction depths (multi-token prediction modules) in the files of each family.

    family                 prefix of layer i of depth k (from 0)    norms and projection of the depth
    ---------------------  ---------------------------------------  --------------------------------------------------
    DeepSeek-V3, GLM       model.layers.{main layers + k}.          with the same prefix: enorm, hnorm, eh_proj,
                                                                    shared_head.norm; copies: embed_tokens,
                                                                    shared_head.head
    Qwen3-Next, Qwen3.5    mtp.layers.{k}.                          mtp.{pre_fc_norm_embedding,pre_fc_norm_hidden,fc}
                                                                    and mtp.norm: there is at most one depth
    Nemotron-H             mtp.layers.{k * layers of a depth + i}.  enorm, hnorm, eh_proj in the first layer,
                                                                    final_layernorm in the last layer

The weights in the files determine the number of depths, even if `config.json` does not mention depths.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

NEXT = {"embedding_norm": "{first}enorm", "hidden_norm": "{first}hnorm", "project": "{first}eh_proj"}


@dataclass(frozen=True)
class Depths:
    """The tensor names of a family's prediction depths (multi-token prediction modules).

    - `symbols(config_json)`: returns the pattern symbols of each depth, such as "*E".
    - `prefix(trunk, length, number, place)`: returns the name prefix of layer `place` in depth `number`, both counted
      from 0. On disk, the main model has `trunk` layers, and each depth has `length` layers.
    - `around`: the modules of a depth outside of its layers. Maps weft's names to names on disk. In a name on disk,
      {first} and {last} stand for the prefixes of the depth's first and last layer.
    - `copies`: modules of the main model of which every depth may store a copy. Maps weft's names to names on disk.
    - `most`: the maximum number of depths. None: no limit.
    - `counted`: the field of config.json with the number of depths.
    """

    symbols: Callable[[dict[str, Any]], str]
    prefix: Callable[[int, int, int, int], str]
    around: Mapping[str, str]
    copies: Mapping[str, str] = field(default_factory=dict)
    most: int | None = None
    counted: str = "num_nextn_predict_layers"

    def names(self, trunk: int, length: int, number: int) -> dict[str, str]:
        """Return a copy of `around` with the prefixes of depth `number` in place of {first} and {last}."""
        first, last = (self.prefix(trunk, length, number, place) for place in (0, length - 1))
        return {ours: theirs.format(first=first, last=last) for ours, theirs in self.around.items()}

    def copies_of(self, module: str, trunk: int, length: int, count: int) -> list[str]:
        """Return the names on disk under which `count` depths store their copies of the main model's `module`."""
        if module not in self.copies:
            return []
        return [self.copies[module].format(first=self.prefix(trunk, length, number, 0)) for number in range(count)]

    def count(self, trunk: int, length: int, files: Container[str]) -> int:
        """Return the number of depths whose weights are in `files`."""
        found = 0
        while self.names(trunk, length, found)["project"] + ".weight" in files:
            found += 1
            if found == self.most:
                break
        return found


def behind_the_trunk(symbols: str) -> Depths:
    """Return the `Depths` for one layer per depth. On disk, these layers are numbered after those of the main model."""
    return Depths(
        symbols=lambda raw: symbols,
        prefix=lambda trunk, length, number, place: f"model.layers.{trunk + number}.",
        around={**NEXT, "final_layernorm": "{last}shared_head.norm"},
        copies={"embedding": "{first}embed_tokens", "output_layer": "{first}shared_head.head"},
    )


def single(symbols: str, counted: str = "num_nextn_predict_layers") -> Depths:
    """Return the `Depths` for at most one depth. Its names on disk start with `mtp.`."""
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
    """Return the `Depths` for layers that are numbered consecutively across all depths. On disk, a depth's first layer
    also has the projection and the norms of the projection's inputs. The last layer also has the final norm."""
    return Depths(
        symbols=symbols,
        prefix=lambda trunk, length, number, place: f"mtp.layers.{number * length + place}.",
        around={**NEXT, "final_layernorm": "{last}final_layernorm"},
    )
