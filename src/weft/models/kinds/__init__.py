"""The kinds of layers: configuration fields with defaults, rules and docstrings. No file of this folder imports torch.

To add a kind, add a file here and a file in `weft.models.layers`. Add the class of its fields to the bases of `Kinds`.
For tensor and context parallelism, also add the kind to the tables of `weft.models.tensor_parallel` and
`weft.models.shared`.
"""

import dataclasses
import inspect

from weft.models.kinds.attention import Attention
from weft.models.kinds.delta_net import DeltaNet
from weft.models.kinds.experts import Experts
from weft.models.kinds.kimi_delta import KimiDelta
from weft.models.kinds.latent_attention import LatentAttention
from weft.models.kinds.mamba2 import Mamba2
from weft.models.kinds.mlp import MLP
from weft.models.kinds.parallel import Parallel
from weft.models.kinds.trunk import KINDS_OF, Trunk


@dataclasses.dataclass(frozen=True)
class Kinds(Experts, MLP, KimiDelta, DeltaNet, Parallel, Mamba2, LatentAttention, Attention):
    """The fields of all kinds of layers. The fields of the last base class come first."""


KINDS = {KINDS_OF[each].symbol: KINDS_OF[each] for each in reversed(Kinds.__bases__)}
"""Maps each symbol to its kind of layer."""
CLASSES: list[type[Trunk]] = [each for each in reversed(Kinds.__mro__) if issubclass(each, Trunk) and each is not Kinds]
"""All classes that declare fields, bases first."""


def classes_of(symbols: str) -> list[type[Trunk]]:
    """Return the classes whose fields a pattern with these `symbols` uses, including `Trunk`."""
    used = [each for each in CLASSES if each in KINDS_OF and KINDS_OF[each].symbol in symbols]
    return [each for each in CLASSES if each is Trunk or any(issubclass(kind, each) for kind in used)]


def fields_of(symbols: str) -> list[dataclasses.Field]:
    """Return the fields that a pattern with these `symbols` uses."""
    names = {name for each in classes_of(symbols) for name in inspect.get_annotations(each)}
    return [field for field in dataclasses.fields(Kinds) if field.name in names]
