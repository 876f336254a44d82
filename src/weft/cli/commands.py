"""Most commands, one function each. Each function takes the parsed options and returns the exit code."""

import argparse
import math
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from weft.words import choice_of, counted

_BESIDE = 10
"""The niceness of the process that writes a live report."""


def config(options: argparse.Namespace) -> int:
    """Print every setting with its default. With --check, instead check a configuration file, and whether its data
    exist. With --from, instead print the [model] section of a run, a checkpoint or a model directory.

    Raises ValueError for invalid settings, an invalid number of ranks, or options that do not belong together.
    """
    from weft.train.config import load_config
    from weft.train.settings import as_markdown, as_toml

    if options.ignored and options.source is None:
        raise ValueError(f"--ignore-field {options.ignored[0]}: only applies to --from DIRECTORY")
    if options.ranks is not None and options.check is None:
        raise ValueError(f"--ranks {options.ranks}: needs a configuration; name one with --check FILE")
    if options.source is not None:
        print(_model_section(options.source, options.ignored), end="")
    elif options.check is not None:
        from weft.train.data import find_texts  # imports torch, which takes seconds

        ranks = 1 if options.ranks is None else options.ranks
        if ranks < 1:
            raise ValueError(f"--ranks {ranks}: must be at least 1")
        checked = load_config(options.check)
        checked.validate(ranks)
        if not checked.data.factory:
            find_texts(checked.data, checked.run.directory, checked.data.paths)
        print(f"{options.check}: fine on {counted(ranks, 'rank')}")
    else:
        print(as_markdown() if options.markdown else as_toml(), end="")
    return 0


def check(options: argparse.Namespace) -> int:
    """Run forward, backward and clipping of a small copy of a configuration on one rank, and on `--ranks` ranks (or
    fewer), which are threads of this process. Print the differences between the results.

    Returns 1 if there are differences. Raises ValueError for an invalid number of ranks or invalid settings.
    """
    from weft.train.check import check as checked
    from weft.train.config import load_config

    if options.ranks < 1:
        raise ValueError(f"--ranks {options.ranks}: must be at least 1")
    loaded = load_config(options.config, options.overrides)
    loaded.validate(options.ranks)
    result = checked(loaded, options.ranks)
    mesh = " x ".join(f"{name} {size}" for name, size in result.axes.items() if size > 1) or "one rank"
    print(f"one step of a small copy on {counted(result.ranks, 'rank')} in one process: {mesh}")
    if result.unseen:
        print(f"not checked, because their gradient is 0: {', '.join(result.unseen)}")
    for number, line in enumerate(result.found, start=1):
        print(f"{number}. {line}")
    if not result.found:
        print(
            f"{options.config}: {counted(result.parameters, 'parameter')}, all equal to those on one rank: weights, "
            f"gradients, norm, messages"
        )
    return 1 if result.found else 0


def _model_section(source: str, ignored: list[str]) -> str:
    """Return the [model] section of a run, a checkpoint or a model directory, without the settings that have their
    defaults."""
    import dataclasses

    from weft.models import HybridConfig
    from weft.train.source import Source
    from weft.train.toml_values import plain, show

    cfg, defaults = Source(source, ignored=ignored).model_config, HybridConfig()
    lines = ["# settings that are not listed have their defaults, which `weft config` prints", "[model]"]
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if value != getattr(defaults, field.name) or field.name == "pattern":
            lines.append(f"# {field.name}: none" if value is None else f"{field.name} = {show(plain(value))}")
    return "\n".join(lines) + "\n"


def evaluate(options: argparse.Namespace) -> int:
    """Print the validation losses of a run's checkpoint."""
    from weft.train import evaluate as losses

    values = losses.evaluate(
        Path(options.path),
        step=options.step,
        average=options.ema,
        overrides=options.overrides,
        trust=options.trust,
        say=partial(warn, options),
    )
    shown = {name: f"{value:.6g}" for name, value in values.items()}
    loss = shown.pop("loss")
    if per_byte := shown.pop("nats_per_byte", ""):
        loss = f"{loss} nats/token, {per_byte} nats/byte" if loss != per_byte else f"{loss} nats/byte"
    del shown["step"]
    own = (f"{name.replace('_', ' ')} {value}" for name, value in shown.items())
    print(f"step {values['step']:.0f}", f"validation loss {loss}", *own, sep="  ")
    return 0


def report(options: argparse.Namespace) -> int:
    """Write the report of a run from the files in its directory, and print the path of the report. Raises ValueError if
    the directory is not a run directory, or if the value of --live is invalid."""
    from weft.checkpoint.storage import require_exists
    from weft.train.record.metrics import FILE
    from weft.train.report import write_report

    run = Path(options.path)
    require_exists(run, "name the directory of a run")
    if not (run / FILE).is_file():
        raise ValueError(f"{run}: contains no {FILE}; name the directory of a run")
    if not 0 <= options.live < math.inf:
        raise ValueError(f"--live {options.live}: must be a number of seconds, or 0 for a page that does not reload")
    if options.live:
        os.nice(_BESIDE)  # give the training run priority on the processor
    print(write_report(run, live_s=options.live))
    return 0


def inspect(options: argparse.Namespace) -> int:
    """Print the contents of a checkpoint or a run. With --verify, also compare all files with their checksums."""
    from weft.checkpoint.inspect import show

    show(Path(options.path), verify_content=options.verify)
    return 0


def convert(options: argparse.Namespace) -> int:
    """Convert a directory of Hugging Face files to weft's own format, or a directory in weft's own format, a run or a
    checkpoint to Hugging Face files."""
    from weft.models import HybridModel, hf
    from weft.train.source import Source

    hf.refuse_used(Path(options.target))
    source = Source(options.source, partial(warn, options), ignored=options.ignored)
    if source.run is None:
        print(hf.convert(options.source, options.target, options.family, ignored=options.ignored))
        return 0
    tokenizer, target = source.tokenizer_file, Path(options.target) / "tokenizer.json"
    if tokenizer is not None and not tokenizer.is_file():
        raise ValueError(
            f"data.tokenizer = {str(tokenizer)!r}, the tokenizer of this run, is not a file here; start the command in "
            "the directory from which the run was started, or put the file there"
        )
    model = HybridModel(source.model_config)
    source.load(model)
    hf.save(model, options.target, options.family)
    came = "the files that it came with" if source.origin else "no other files"
    if tokenizer is not None and not (target.is_file() and target.read_bytes() == tokenizer.read_bytes()):
        shutil.copyfile(tokenizer, target)
        came = f"{tokenizer.name} of data.tokenizer"
    print(f"{options.target}: {counted(len(model.state_dict()), 'tensor')}, and {came}")
    return 0


def pattern(options: argparse.Namespace) -> int:
    """Print a table of the layers that a model's pattern describes, with their numbers of parameters. If the pattern
    is invalid, print it with the error marked, and return 2."""
    import dataclasses

    from rich.console import Console
    from rich.table import Table

    from weft.models import HybridConfig
    from weft.models.pattern import PatternError
    from weft.models.table import Row, rows_of
    from weft.train.config import load_config

    sizes = load_config(options.config).model if options.config else HybridConfig()
    if not isinstance(sizes, HybridConfig):
        raise ValueError(f"{options.config}: uses your own model, {sizes.factory}, which has no pattern")
    try:
        rows, total = rows_of(dataclasses.replace(sizes, pattern=options.pattern))
    except PatternError as error:
        begin = f"weft {options.command}: "
        print(begin + error.shown.replace("\n", "\n" + " " * len(begin)), file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 110)
    table = Table(padding=(0, int(console.width >= 96)))  # a narrow terminal has no room for blanks beside the lines
    for field in dataclasses.fields(Row):
        whole = field.name in ("unit", "parameters")
        table.add_column(field.name, justify="right" if field.type is int else "left", no_wrap=whole)
    for row in rows:
        table.add_row(*(f"{value:,}" if name == "parameters" else str(value) for name, value in vars(row).items()))
    table.add_section()
    inside = sum(row.parameters for row in rows)
    for what, count in {"all layers": inside, "embedding, others": total - inside, "whole model": total}.items():
        table.add_row("", what, *[""] * 4, f"{count:,}")
    console.print(table)
    return 0


def bench(options: argparse.Namespace) -> int:
    """Run a benchmark of the repository on this machine, with one process per rank. Raises ValueError for an unknown
    name, or if the number of ranks is below 1."""
    if options.ranks < 1:
        raise ValueError(f"--ranks {options.ranks}: must be at least 1")
    folders = [Path(__file__).resolve().parents[3] / "benchmarks", Path.cwd() / "benchmarks"]
    found = {
        path.stem: path
        for folder in reversed(folders)
        if folder.is_dir()
        for path in sorted(folder.glob("*.py"))
        if not path.name.startswith("_")
    }
    if options.name not in found:
        fix = choice_of(options.name, found) if found else "none is here; run this in a checkout of the repository"
        raise ValueError(f"{options.name!r} is not a benchmark; {fix}")
    return subprocess.call(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(options.ranks), str(found[options.name])),
            *options.beyond,
        ],
        env={"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // options.ranks)), **os.environ},
    )


def warn(options: argparse.Namespace, line: str) -> None:
    """Print a line of the command to stderr."""
    print(f"weft {options.command}: {line}", file=sys.stderr, flush=True)
