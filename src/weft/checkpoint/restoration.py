"""Restores the objects of a training run from a checkpoint.

    what happens                                        an error means
    --------------------------------------------------  ---------------------------------------------------------------
    each object says what it can load (`state_dict`)    the object is at fault: returned, on all ranks
    names, shapes and dtypes are compared               the checkpoint is of another model or other options: raised
    data other than tensors is read                     the checkpoint is damaged: raised
    each object compares this data (`check_load`)       the object cannot load the checkpoint: returned, on all ranks
    tensors are read into the tensors of the objects    the checkpoint is damaged: raised
    each object loads the result (`load_state_dict`)    the object is at fault: returned, on all ranks

Nothing in the objects is changed before the fifth row.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from weft.checkpoint.loading import CheckpointMismatch, LoadPlanner, Stored, compare, stored_below
from weft.checkpoint.ranks import Ranks
from weft.checkpoint.reading import Reader, plain_errors
from weft.checkpoint.staging import flatten, unflatten
from weft.checkpoint.state import is_stateful, prefix_of, state_dict_of


def restore(state: Mapping[str, Any], reader: Reader, ranks: Ranks) -> Exception | None:
    """Fill `state` (name -> Stateful or state dict) from a checkpoint. Collective. Return the error that an object of
    `state` raised, because such an error does not mean that the checkpoint is damaged. Raises CheckpointError if the
    checkpoint is damaged, and CheckpointMismatch if it does not fit."""
    restoration = _Restoration(state, reader, ranks)
    return restoration.failed(restoration.expect) or restoration.fill()


class _Restoration:
    def __init__(self, state: Mapping[str, Any], reader: Reader, ranks: Ranks) -> None:
        self._state = state
        self._reader = reader
        self._ranks = ranks
        self._resharded = reader.manifest.ranks != ranks.size
        self._templates: dict[str, tuple[str, Mapping[str, Any]]] = {}
        """The prefix of each object's keys and its state dict, by the object's name in `state`."""
        self._expected: dict[str, Any] = {}
        """What the objects load, by key in the checkpoint."""
        self._stored: dict[str, Stored] = {}
        """What the checkpoint contains of the objects, by key."""

    def failed(self, action: Callable[[str, Any], None]) -> Exception | None:
        """Call `action` with the name and the value of each object. Return the first error on any rank."""
        failed: Exception | None = None
        for name, value in self._state.items():
            try:
                action(name, value)
            except Exception as error:  # the next objects still follow: their methods may wait for the other ranks
                failed = failed or error
        return self._ranks.failed_anywhere(failed)

    def expect(self, name: str, value: Any) -> None:
        """Find what the object loads."""
        prefix = prefix_of(name, value, rank=0 if self._resharded else self._ranks.rank)
        below = stored_below(self._reader.metadata, prefix)
        self._stored |= {prefix + key: entry for key, entry in below.items()}
        if hasattr(value, "prepare_load"):
            value.prepare_load(below)
        self._templates[name] = (prefix, state_dict_of(name, value))
        self._expected |= flatten(self._templates[name][1], prefix)

    def fill(self) -> Exception | None:
        """Compare what the objects load with the checkpoint, read it, and load it into the objects."""
        everywhere = {key for keys in self._ranks.of_all(list(self._expected)) for key in keys}
        mismatch: Exception | None = None
        try:
            compare(str(self._reader.checkpoint), self._expected, self._stored, everywhere)
        except CheckpointMismatch as error:
            mismatch = error
        self._ranks.raise_everywhere(mismatch)
        of_tensors = {key for key in self._expected if isinstance(self._stored[key], TensorStorageMetadata)}
        # Plain data first, because objects compare it before a tensor of `state` is overwritten.
        plain = self._read({key: value for key, value in self._expected.items() if key not in of_tensors})
        if (failed := self.failed(partial(self._check, plain))) is not None:
            return failed
        tensors = self._read({key: value for key, value in self._expected.items() if key in of_tensors})
        return self.failed(partial(self._load, {**plain, **tensors}))

    def _read(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Return `entries` with the stored values. Tensors are filled in place. A CheckpointError means that the
        checkpoint is damaged; other errors do not."""
        planner = LoadPlanner()
        with plain_errors(unchanged=True):
            dcp.load(
                entries,
                storage_reader=self._reader,
                planner=planner,
                process_group=self._ranks.group,
                no_dist=self._ranks.group is None,
            )
        return {**entries, **planner.loaded}

    def _check(self, plain: Mapping[str, Any], name: str, value: Any) -> None:
        if hasattr(value, "check_load"):
            prefix, _ = self._templates[name]
            value.check_load({key.removeprefix(prefix): plain[key] for key in plain if key.startswith(prefix)})

    def _load(self, loaded: Mapping[str, Any], name: str, value: Any) -> None:
        prefix, template = self._templates[name]
        content = unflatten(template, loaded, prefix)
        if getattr(value, "per_rank", False) and self._resharded:
            value.load_from_other_ranks(content, self._ranks.rank, self._ranks.size)
        elif is_stateful(value):
            value.load_state_dict(content)
        else:
            value.update(content)
