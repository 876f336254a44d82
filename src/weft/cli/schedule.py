"""`weft schedule`: draws a pipeline schedule, and saves it as a picture or a table."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.pipeline import Costs, Simulation

_MOST_ACTIONS = 100_000
_MOST_BOXES = 3_000


def draw(options: argparse.Namespace) -> int:
    """Check the pipeline schedule that `options` name, print a drawing of it, and return the exit code. With --save,
    also write the schedule to a file, as a picture or a table."""
    from rich.console import Console

    from weft.pipeline import check, format_table, table
    from weft.pipeline.drawing import Drawing

    target = Path(options.save) if options.save else None
    if target is not None and target.suffix not in (".png", ".txt"):
        raise ValueError(f"--save {target}: must end in .png for a picture, or in .txt for a table that can be edited")
    _check_size(options, picture=target is not None and target.suffix == ".png")
    made = table(options.name, ranks=options.pp, chunks=options.chunks, microbatches=options.microbatches)
    found = check(made, _costs(options))
    if not 0 < found.time < math.inf:
        raise ValueError(
            f"--costs {options.costs}: give the whole schedule the time {found.time:g}; pass times such as 1,1,1"
        )
    if target is not None and target.suffix == ".png":
        _save_picture(found, target)
    elif target is not None:
        _write(target, format_table(made).encode())
    Console().print(Drawing(found))
    return 0


def _check_size(options: argparse.Namespace, *, picture: bool) -> None:
    """Raise ValueError for tables that are too large to simulate, or to draw as a picture."""
    actions = 2 * (options.chunks or 1) * (options.microbatches or 1)  # at least this many on a rank
    wanted = f"--microbatches {options.microbatches}"
    if actions * (options.pp or 1) > _MOST_ACTIONS:
        raise ValueError(
            f"{wanted}: {actions * (options.pp or 1):,} actions or more, but at most {_MOST_ACTIONS:,} are simulated; "
            f"use fewer microbatches: a schedule repeats itself"
        )
    if picture and actions > _MOST_BOXES:
        raise ValueError(
            f"{wanted} --save {options.save}: {actions:,} actions on each rank, but a picture has room for "
            f"{_MOST_BOXES:,}; use fewer microbatches, or save a table (.txt)"
        )


def _costs(options: argparse.Namespace) -> "Costs":
    from weft.pipeline import Costs

    try:
        forward, inputs, weights = map(float, options.costs.split(","))
    except ValueError:
        raise ValueError(f"--costs {options.costs}: must be three numbers, such as 1,1,1") from None
    return Costs(forward, inputs, weights, pair=options.pair, transfer=options.transfer)


def _save_picture(found: "Simulation", target: Path) -> None:
    try:
        from weft.train.report import figures, pipeline_figure
    except ImportError as error:
        raise ValueError(f"--save {target}: a picture needs matplotlib ({error}); install weft[train]") from error
    _write(target, figures.render(pipeline_figure.pipeline(found), figures.LIGHT, pipeline_figure.size(found), "png"))


def _write(target: Path, content: bytes) -> None:
    try:
        target.write_bytes(content)
    except OSError as error:
        raise ValueError(f"--save {target}: cannot be written: {error.strerror}") from error
