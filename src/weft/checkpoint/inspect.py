"""Tables of the contents of a checkpoint or a run directory."""

import math
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from weft.checkpoint.directory import committed_steps, debris, path_of
from weft.checkpoint.manifest import MANIFEST, CheckpointError, CheckpointGone, readable_size
from weft.checkpoint.reading import describe
from weft.checkpoint.storage import require_exists
from weft.words import counted

_ONE_LINE = 10_000
"""The width of output that does not go to a terminal, large enough that keys are not wrapped and can be searched."""


def show(path: Path, *, verify_content: bool = False) -> None:
    """Print tables about `path`: a checkpoint, a folder of checkpoints, or a run directory.

    For a checkpoint, the tables list its tensors. For a folder of checkpoints or a run directory, a table lists the
    checkpoints and marks the damaged ones, and a summary describes the newest intact one.

    The presence and the lengths of all files are checked. With `verify_content`, every file is also read and compared
    with its checksums. Raises CheckpointError if a checkpoint is damaged; for a folder or a run directory, only after
    the tables are printed. Raises ValueError if `path` is not a checkpoint and contains none, not even an incomplete
    one.
    """
    console = Console(width=None if sys.stdout.isatty() else _ONE_LINE)
    if (path / MANIFEST).is_file():
        _show_checkpoint(path, verify_content, console)
        return
    require_exists(path, "name a checkpoint or the directory of a run")
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    steps, rest = committed_steps(folder), debris(folder)
    if not steps and not rest:
        raise ValueError(
            f"{path}: contains no checkpoint; name a checkpoint (…/step-00000010) or the directory of a run"
        )
    overview = Table("checkpoint", "step", "ranks", "size", "state")
    damaged: dict[int, CheckpointError] = {}
    for step in steps:
        name = path_of(folder, step).name
        try:
            manifest, _ = describe(path_of(folder, step), content=verify_content)
        except CheckpointGone:  # a training run has replaced it by a newer one
            continue
        except CheckpointError as error:
            damaged[step] = error
            overview.add_row(name, f"{step:,}", "", "", "damaged: a resume skips it")
            continue
        state = "committed, checksums equal" if verify_content else "committed"
        overview.add_row(name, f"{step:,}", str(manifest.ranks), readable_size(manifest.bytes), state)
    for left in rest:
        overview.add_row(left.name, "", "", "", "not complete: ignored, removed by the next save")
    _print_title(console, str(folder))
    console.print(overview)
    while steps := [step for step in committed_steps(folder) if step not in damaged]:
        with suppress(CheckpointGone):
            newest = path_of(folder, steps[-1])
            _show_checkpoint(newest, False, console, lists=False)
            console.print(f"weft inspect {newest} lists its tensors", highlight=False, markup=False, soft_wrap=True)
            break
    if damaged:
        raise CheckpointError("; ".join(map(str, damaged.values())))


def _show_checkpoint(path: Path, verify_content: bool, console: Console, *, lists: bool = True) -> None:
    manifest, metadata = describe(path, content=verify_content)
    tensors = Table()
    tensors.add_column("key", overflow="fold")
    tensors.add_column("dtype", no_wrap=True)
    tensors.add_column("shape", no_wrap=True, justify="right")
    tensors.add_column("placement", no_wrap=True)
    tensors.add_column("bytes", no_wrap=True, justify="right")
    others = []
    totals: dict[str, int] = defaultdict(int)
    for key, entry in sorted(metadata.state_dict_metadata.items()):
        if not isinstance(entry, TensorStorageMetadata):
            others.append(key)
            continue
        dtype = entry.properties.dtype
        size = math.prod(entry.size) * dtype.itemsize
        totals[key.partition(".")[0]] += size
        shape = " x ".join(map(str, entry.size)) or "scalar"
        tensors.add_row(escape(key), str(dtype).removeprefix("torch."), shape, _placement(entry), readable_size(size))
    checked = ", checksums equal" if verify_content else ""
    console.print(
        f"{path}: step {manifest.step:,}, written by {counted(manifest.ranks, 'rank')}, "
        f"{counted(len(manifest.files), 'file')}, {readable_size(manifest.bytes)}, committed{checked}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if lists:
        _print_title(console, "tensors")
        console.print(tensors)
        console.print("plain data: " + ", ".join(others), highlight=False, markup=False)
    summary = ", ".join(f"{name} {readable_size(size)}" for name, size in totals.items())
    console.print(f"{counted(tensors.row_count, 'tensor')}: {summary}", highlight=False, markup=False)


def _print_title(console: Console, title: str) -> None:
    """Print the title of a table. A title that is part of a table would be padded with blanks to the table's width."""
    console.print(title, style="table.title", highlight=False, markup=False, soft_wrap=True)


def _placement(entry: TensorStorageMetadata) -> str:
    """Describe how the tensor is stored: whole, in parts along one dimension, or in other rectangular parts."""
    if len(entry.chunks) == 1:
        return "whole"
    cut = [dim for dim, size in enumerate(entry.size) if any(chunk.sizes[dim] != size for chunk in entry.chunks)]
    return f"{len(entry.chunks)} x dim {cut[0]}" if len(cut) == 1 else f"{len(entry.chunks)} boxes"
