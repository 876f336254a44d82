"""Copies the state of a run, so that a background thread can write the copy while training continues.

Distributed Checkpoint divides the state into items (`WriteItem`). An item is either a box, which is a rectangular part
of a tensor, or other data. Each rank copies the items that it holds.
"""

import io
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from weft.checkpoint.loading import unpack
from weft.checkpoint.manifest import one_line, readable_size
from weft.checkpoint.metadata import LONGEST_PLAIN


def flatten(state: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings with string keys into one dictionary, and join nested keys by dots.

    Any value that is not such a mapping is a leaf. Every key of the result begins with `prefix`. Raises ValueError if
    two leaves get the same key.
    """
    flat: dict[str, Any] = {}
    for key, value in _leaves(state, prefix):
        if key in flat:
            raise ValueError(f"two entries of the state have the key {key!r}: rename one of them")
        flat[key] = value
    return flat


def unflatten(template: Mapping[str, Any], flat: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a copy of `template` with each leaf replaced by its value in `flat`. The inverse of `flatten`."""
    return {
        key: unflatten(value, flat, f"{prefix}{key}.") if _is_branch(value) else flat[f"{prefix}{key}"]
        for key, value in template.items()
    }


def _leaves(state: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if _is_branch(value):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_branch(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


class Staged(SavePlanner):
    """A copy in host memory of the state that this rank holds. It is also the planner for `dcp.save`."""

    def __init__(self, items: list[WriteItem], data: dict[MetadataIndex, Any]) -> None:
        self.items = items
        self.data = data
        self._global = DefaultSavePlanner(flatten_state_dict=False)

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self._global.set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self.items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return self._global.create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self.data[write_item.index]


class Stager:
    """Copies state to host memory. Tensors on an accelerator are copied to pinned memory, which the next save
    reuses."""

    def __init__(self) -> None:
        self._pinned: dict[MetadataIndex, torch.Tensor] = {}

    def stage(self, flat: Mapping[str, Any]) -> Staged:
        """Copy the values in `flat` to host memory, and return the copy when it is complete. Only this rank's part of a
        sharded tensor is copied.

        Raises TypeError or ValueError for what a load would refuse. A load accepts keys of printable characters, dense
        tensors and, for each key, at most 256 MiB of plain data (numbers, strings, bytes, lists, tuples, sets,
        dictionaries, None).
        """
        if strange := [key for key in flat if not key.isprintable()]:
            raise ValueError(
                f"the state's key {strange[0]!r} contains a character that cannot be printed, which a load would "
                f"refuse: rename it"
            )
        planner = DefaultSavePlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(flat))
        items: list[WriteItem] = []
        data: dict[MetadataIndex, Any] = {}
        on_accelerator = False
        for item in planner.create_local_plan().items:
            if item.type == WriteItemType.BYTE_IO:
                data[item.index] = _plain_bytes(item.index.fqn, flat[item.index.fqn])
            else:
                if _is_empty_part(item):
                    continue
                source = planner.resolve_data(item)
                assert isinstance(source, torch.Tensor)
                on_accelerator |= source.device.type != "cpu"
                data[item.index] = self._host_copy(item.index, source.detach())
                if type(data[item.index]) is not torch.Tensor:
                    raise _unloadable(item.index.fqn, source)
            items.append(item)
        if on_accelerator:
            torch.accelerator.synchronize()
        return Staged(items, data)

    def _host_copy(self, index: MetadataIndex, source: torch.Tensor) -> torch.Tensor:
        if source.layout != torch.strided or source.is_quantized or source.is_meta:
            raise _unloadable(index.fqn, source)
        if source.device.type == "cpu":
            return source.clone(memory_format=torch.contiguous_format)
        target = self._pinned.get(index)
        if target is None or target.shape != source.shape or target.dtype != source.dtype:
            target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._pinned[index] = target
        return target.copy_(source, non_blocking=True)


def _is_empty_part(item: WriteItem) -> bool:
    # Distributed Checkpoint identifies the boxes of a tensor by their offsets alone, so an empty box could
    # replace a real one with the same offsets.
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) == 0 < math.prod(item.tensor_data.size)


def _unloadable(key: str, tensor: torch.Tensor) -> TypeError:
    return TypeError(
        f"the state {key!r} is a {type(tensor).__name__} with {tensor.layout} and {tensor.dtype} on {tensor.device}, "
        f"which a load would refuse: a checkpoint can hold only dense tensors. Convert it, for example with "
        f"to_dense() or dequantize()"
    )


def _plain_bytes(key: str, value: Any) -> io.BytesIO:
    try:
        packed = _packed(value)
    except Exception as error:
        culprit = _culprit(value)
        what = "is a" if culprit is value else "contains a"
        raise TypeError(
            f"the state {key!r} {what} {type(culprit).__name__}, which a load would refuse ({one_line(error)}): a "
            f"checkpoint can hold only dense tensors and plain data (numbers, strings, bytes, lists, tuples, "
            f"dictionaries, None). Convert it, or leave it out; a DTensor must be a value of its own in a dictionary "
            f"with string keys"
        ) from error
    if (length := packed.getbuffer().nbytes) > LONGEST_PLAIN:
        raise ValueError(
            f"the state {key!r} takes {readable_size(length)}, and a load refuses plain data above "
            f"{readable_size(LONGEST_PLAIN)}: make it a tensor, or divide it over several keys of a dictionary"
        )
    return packed


def _packed(value: Any) -> io.BytesIO:
    """Return the bytes of `value`. Raise the error that a load of these bytes would raise."""
    stream = io.BytesIO()
    torch.save(value, stream)
    unpack(stream)
    stream.seek(0)
    return stream


def _culprit(value: Any) -> Any:
    """Return the innermost part of `value` that cannot be loaded. `value`: data that cannot be loaded."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    for part in parts:
        try:
            _packed(part)
        except Exception:
            return _culprit(part)
    return value
