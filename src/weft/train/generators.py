"""Random generators that a run draws from."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from weft.checkpoint import RandomState
from weft.train.errors import ConfigError
from weft.words import counted


class Generators:
    """The global random generators, as in `RandomState`, and the own generators of a loader and of its samplers.

    The generators of worker processes that persist are not included.
    """

    def __init__(self, source: Any) -> None:
        self._source, self._random = source, RandomState()

    def state(self) -> dict[str, Any]:
        return {**self._random.state_dict(), "own": [each.get_state() for each in self._own()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the generators to `state`. Raises ConfigError if the loader now has more or fewer generators."""
        own, states = self._own(), state.get("own", [])
        if len(own) != len(states):
            raise ConfigError(
                f"data: has {counted(len(own), 'random generator')} of its own (loader and samplers), and had "
                f"{len(states)} when its position was saved; resume with the data that it was saved with"
            )
        self._random.load_state_dict(state)
        for generator, state_then in zip(own, states):
            generator.set_state(state_then)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the generators when this context ends. A loader may make its generator inside of it."""
        random, own = self._random.state_dict(), [(each, each.get_state()) for each in self._own()]
        try:
            yield
        finally:
            self._random.load_state_dict(random)
            for generator, state_then in own:
                generator.set_state(state_then)

    def _own(self) -> list[torch.Generator]:
        found = (getattr(each, "generator", None) for each in with_samplers(self._source))
        return list(dict.fromkeys(each for each in found if isinstance(each, torch.Generator)))


def with_samplers(source: Any) -> list[Any]:
    """Return a source of microbatches and, if it is a loader, its samplers."""
    batches = getattr(source, "batch_sampler", None)
    found = [source, getattr(source, "sampler", None), batches, getattr(batches, "sampler", None)]
    return [each for each in found if each is not None]
