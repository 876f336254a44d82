"""The configuration of a hybrid model."""

import dataclasses
from dataclasses import dataclass

from weft.models.kinds import Kinds, classes_of
from weft.models.kinds.attention import Attention
from weft.models.kinds.fields import check_values
from weft.models.pattern import Pattern, parse


@dataclass(frozen=True)
class HybridConfig(Kinds):
    """The configuration of a hybrid model: the fields for all models and for each kind of layer.

    `weft.models.kinds` defines the fields. The constructor raises ValueError for an invalid value. The error states the
    rule that the value breaks.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise ValueError(f"pattern={self.pattern!r}: the pattern is a string, such as '[*-][*-]'")
        parse(self.pattern)
        check_values(self)
        for each in classes_of(self.pattern):
            if "check" in vars(each):
                vars(each)["check"](self)
        for field in dataclasses.fields(self):
            if isinstance(value := getattr(self, field.name), list):
                object.__setattr__(self, field.name, tuple(value))

    @property
    def parsed(self) -> Pattern:
        """The parsed pattern."""
        return parse(self.pattern)

    @property
    def rotated(self) -> int:
        """The number of elements of a head that are rotated."""
        return self.rotary_width if Attention in classes_of(self.pattern) else self.qk_rope_head_dim
