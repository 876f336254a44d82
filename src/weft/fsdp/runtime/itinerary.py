"""The order in which units are acquired, recorded in one pass and followed in the next.

Every pass (a forward with gradients, one without, a backward) is recorded anew while the record of the last pass of its
kind predicts what comes next. A pass that leaves the record is served on demand to its end: prediction changes speed,
never results.
"""

from collections.abc import Iterator, Sequence


class Itinerary:
    """The units, by number, of the pass under way, and those of the last one as its prediction.

    `depth`: how many of them are gathered ahead where no byte budget says otherwise.
    """

    def __init__(self, expected: Sequence[int] = (), depth: int = 1) -> None:
        self.depth = depth
        self.expected = list(expected)
        self.visited: list[int] = []
        self.on_track = True

    def begin(self) -> None:
        """Start a pass; the one before becomes the prediction."""
        if self.visited:
            self.expected = self.visited
        self.visited = []
        self.on_track = True

    def visit(self, unit: int) -> None:
        """Note the next unit."""
        position = len(self.visited)
        self.visited.append(unit)
        if position >= len(self.expected) or self.expected[position] != unit:
            self.on_track = False

    def ahead(self) -> Iterator[int]:
        """The units predicted to follow; none once the pass has left the record."""
        if self.on_track:
            for position in range(len(self.visited), len(self.expected)):
                yield self.expected[position]

    @property
    def latest(self) -> list[int]:
        """The last pass of this kind, as far as it came."""
        return self.visited or self.expected

    def forget(self) -> None:
        """Drop the record: the pass was not what a pass should be."""
        self.expected = []
        self.visited = []
