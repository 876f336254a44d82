"""The order in which a pass updates model weights from main weights.

The optimizer updates main weights, and gathers read model weights. Model weights that are kept separately from the main
weights are updated once per step:

    unit                 0         1         2         3        the units that the pass may use, by number
    gather or use of 0   update    update                       0, and the next: its transfer overlaps with computation
    gather of 2                              update    update   2, and the next
    end of the pass                                             the units left, whether they ran or not

Ranks whose passes may use the same units update all of these units, in the same order, even if a rank runs only some
of them. The runtime applies these rules to units, and `layout.walk` applies them to numbers of bytes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any


class RefreshOrder(ABC):
    """Decides which units are updated now. `ahead`: the units that this pass has not brought up to date yet, whether
    outdated or not, in the same order on all ranks. `made`: the units that this pass has brought up to date."""

    def __init__(self) -> None:
        self.ahead: dict[Any, None] = {}
        self.made: list[Any] = []

    @abstractmethod
    def is_outdated(self, unit: Any) -> bool:
        """Return whether model weights of `unit` are outdated."""

    @abstractmethod
    def refresh(self, unit: Any) -> None:
        """Start to update the outdated model weights of `unit`, if there are any."""

    def begin(self, units: Iterable[Any]) -> None:
        """Begin a pass that may use `units`, which are in the same order on all ranks."""
        self.ahead.update(dict.fromkeys(units))

    def forget(self) -> None:
        """End a pass without further updates."""
        self.ahead.clear()
        self.made.clear()

    def is_due(self, unit: Any) -> bool:
        """Return whether `unit` is in `ahead`, or has outdated model weights that only another rank's pass uses."""
        return unit in self.ahead or self.is_outdated(unit)

    def update_to(self, unit: Any) -> None:
        """Update the units of `ahead` up to `unit`. If `unit` is outdated but not in `ahead`, because only another
        rank's pass uses it, update it. Then, if the latest unit that was updated is `unit`, also update the next unit
        of `ahead`, whose transfer overlaps with computation."""
        if unit in self.ahead:
            while self._next() is not unit:
                pass
        elif self.is_due(unit):
            self._make(unit)
        if self.ahead and self.made and self.made[-1] is unit:
            self._next()

    def update_rest(self) -> list[Any]:
        """Update the units left in `ahead`. Return all units that the pass has brought up to date, and forget them."""
        while self.ahead:
            self._next()
        made, self.made = self.made, []
        return made

    def _next(self) -> Any:
        unit = next(iter(self.ahead))
        del self.ahead[unit]
        self._make(unit)
        return unit

    def _make(self, unit: Any) -> None:
        self.refresh(unit)
        self.made.append(unit)
