"""The command line: weft train | eval | report | config | sample | convert | pattern | schedule | inspect | bench."""

import argparse
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from weft.train.run.output import outlive_readers

if TYPE_CHECKING:
    from weft.pipeline import Costs, Simulation

EXIT_CODES = """exit code: 0 success, 1 failure at run time, 2 wrong call or configuration, \
3 interrupted and saved: go on with --resume"""

_MOST_ACTIONS = 100_000
_MOST_BOXES = 3_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 success, 1 failure at run time, 2 wrong call, 3 interrupted."""
    outlive_readers()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    options, unknown = _parser().parse_known_args(own)
    command = f"weft {options.command}"
    if unknown:
        words, fix = shlex.join(unknown), f"see {command} --help"
        if options.command == "bench":
            fix = f"what is for the benchmark goes behind --, as in {command} {options.name} -- {words}"
        print(f"{command}: unrecognized arguments: {words}; {fix}", file=sys.stderr)
        return 2
    if len(own) < len(arguments) and options.command != "bench":
        _parser().error(f"-- has no meaning for {options.command}")
    try:
        return options.run(options, arguments)
    except ValueError as error:
        print(f"{command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 1


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version
        from platform import python_version

        print(f"weft {version('weft')}, Python {python_version()}, torch {version('torch')}")
        parser.exit()


class _Completion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, _: object, shell: Any, __: object = None) -> NoReturn:
        from weft.completion import script

        print(script(parser, shell), end="")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="weft", description="Sharded training for large PyTorch models.", epilog=EXIT_CODES)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the versions of weft, Python and torch")
    parser.add_argument(
        "--completion",
        action=_Completion,
        choices=("bash", "zsh", "fish"),
        help="print what makes this shell complete commands, options and settings",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a model that a TOML file describes", epilog=EXIT_CODES)
    train.add_argument("config", nargs="?", metavar="CONFIG.toml")
    train.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.NAME=VALUE",
        help="change one setting; can be given several times",
    )
    train.add_argument(
        "--ranks",
        type=int,
        help="local processes to start (default: one for each GPU, or one); not under torchrun or SLURM",
    )
    train.add_argument(
        "--resume",
        nargs="?",
        const=True,
        default=False,
        metavar="RUN_DIRECTORY",
        help="go on from the newest intact checkpoint of that run, with its configuration unless one is named, or of "
        "the newest run of the configured name",
    )
    train.add_argument(
        "--resume-or-start",
        action="store_true",
        help="as --resume; a new run where there is nothing to resume (for schedulers that start a job again)",
    )
    train.add_argument(
        "--from",
        dest="weights",
        metavar="DIRECTORY",
        help="start from the weights alone of a run, a checkpoint or a model's directory; as run.weights does",
    )
    train.set_defaults(run=_train)

    sample = commands.add_parser("sample", help="continue a text with a trained model", epilog=EXIT_CODES)
    sample.add_argument("source", metavar="SOURCE", help="a run, a checkpoint or a model's directory")
    sample.add_argument("--prompt", default="\n", help="the text to continue (default: a line's end)")
    sample.add_argument("--tokens", type=int, default=200, help="how many to add at most (default: 200)")
    sample.add_argument("--temperature", type=float, default=0.8, help="0 takes the best token (default: 0.8)")
    sample.add_argument("--top-p", type=float, default=0.95, help="draw from the best with this share (default: 0.95)")
    sample.add_argument("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    sample.set_defaults(run=_sample)

    inspect = commands.add_parser("inspect", help="show what a checkpoint or a run directory holds", epilog=EXIT_CODES)
    inspect.add_argument("path", metavar="CHECKPOINT_OR_RUN_DIR")
    inspect.add_argument("--verify", action="store_true", help="read every file and compare its checksum")
    inspect.set_defaults(run=_inspect)

    convert = commands.add_parser(
        "convert",
        help="turn a directory of Hugging Face files into weft's own, or that or a run into Hugging Face files",
        epilog=EXIT_CODES,
    )
    convert.add_argument("source", metavar="SOURCE", help="a model's directory, a run, or a checkpoint")
    convert.add_argument("target", metavar="TARGET", help="a new directory")
    convert.add_argument("--family", help="what to write, such as llama (default: what it came from, or what fits)")
    convert.set_defaults(run=_convert)

    pattern = commands.add_parser("pattern", help="show the layers of a pattern", epilog=EXIT_CODES)
    pattern.add_argument("pattern", metavar="PATTERN", help='such as "M[*-]|M[*E]"')
    pattern.add_argument("--config", metavar="CONFIG.toml", help="where the sizes come from (default: the defaults)")
    pattern.set_defaults(run=_pattern)

    schedule = commands.add_parser(
        "schedule", help="draw the schedule of a pipeline, with what it costs", epilog=EXIT_CODES
    )
    schedule.add_argument("name", metavar="NAME_OR_FILE", help="such as 1f1b or dualpipev, or a file with a table")
    schedule.add_argument("--pp", type=int, help="pipeline ranks")
    schedule.add_argument("--microbatches", type=int, help="into how many a batch is cut")
    schedule.add_argument("--chunks", type=int, help="stages on each rank (default: what the schedule usually has)")
    schedule.add_argument(
        "--costs",
        default="1,1,1",
        metavar="F,I,W",
        help="times of one stage: forward, gradients of inputs, gradients of weights (default: 1,1,1)",
    )
    schedule.add_argument(
        "--pair",
        type=float,
        default=1.0,
        help="time of a forward and a backward that run as a pair, over that of one after the other (default: 1)",
    )
    schedule.add_argument("--transfer", type=float, default=0.0, help="time from one rank to another (default: 0)")
    schedule.add_argument("--save", metavar="FILE", help="as a picture, FILE.png, or as a table to change, FILE.txt")
    schedule.set_defaults(run=_schedule)

    config = commands.add_parser(
        "config", help="show every setting with its default, as a TOML file", epilog=EXIT_CODES
    )
    instead = config.add_mutually_exclusive_group()
    instead.add_argument("--check", metavar="FILE", help="say whether FILE is a configuration that can run")
    config.add_argument("--ranks", type=int, help="with --check: the number of ranks that it is for (default: 1)")
    instead.add_argument("--markdown", action="store_true", help="as a table")
    config.set_defaults(run=_config)

    evaluate = commands.add_parser(
        "eval", help="the validation loss of a run's newest intact checkpoint", epilog=EXIT_CODES
    )
    evaluate.add_argument("path", metavar="RUN_DIRECTORY")
    evaluate.add_argument("--step", type=int, help="of the checkpoint of this step")
    evaluate.add_argument("--ema", action="store_true", help="of the moving average of the weights")
    evaluate.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.NAME=VALUE",
        help="change one setting, such as data.paths; can be given several times",
    )
    evaluate.set_defaults(run=_eval)

    report = commands.add_parser("report", help="write the report of a run again", epilog=EXIT_CODES)
    report.add_argument("path", metavar="RUN_DIRECTORY")
    report.set_defaults(run=_report)

    bench = commands.add_parser(
        "bench",
        help="run a benchmark of this repository",
        epilog="What follows -- goes to the benchmark itself. " + EXIT_CODES,
    )
    bench.add_argument("name", metavar="NAME", help="of a file in benchmarks/, such as fsdp2")
    bench.add_argument("--ranks", type=int, default=2, help="local processes (default: 2)")
    bench.set_defaults(run=_bench)
    return parser


def _train(options: argparse.Namespace, arguments: list[str]) -> int:
    from weft.train.config import ConfigError, load_config
    from weft.train.run.changes import CONFIG
    from weft.train.run.launch import launch
    from weft.train.run.runs import open_run, refuse_folder_of_runs, remove_if_unused, resuming
    from weft.train.run.world import place_from

    config_path = options.config
    if config_path is None and isinstance(options.resume, str):
        if Path(options.resume).is_dir():
            refuse_folder_of_runs(Path(options.resume))
            config_path = str(Path(options.resume) / CONFIG)
        else:  # `--resume CONFIG.toml`: the only path there is names the configuration
            if Path(options.resume).suffix != ".toml":
                raise ConfigError(f"--resume {options.resume}: is no directory; name that of a run, or a CONFIG.toml")
            config_path = options.config = options.resume
            options.resume = True
    if config_path is None:
        raise ConfigError("no configuration is named: weft train CONFIG.toml, or weft train --resume RUN_DIRECTORY")
    if options.resume_or_start:
        if options.resume:
            raise ConfigError("--resume-or-start looks for the run itself: leave --resume out")
        options.resume = True
    if options.ranks is not None and options.ranks < 1:
        raise ConfigError(f"--ranks {options.ranks}: must be at least 1")
    place = place_from(os.environ)
    if place is not None and options.ranks not in (None, place.ranks):
        raise ConfigError(
            f"--ranks {options.ranks}: {place.launcher} has started {place.ranks} ranks already; leave --ranks out"
        )
    if options.weights is not None:
        options.overrides.append(f"run.weights={options.weights}")
    command = _command(options, with_ranks=place is None or place.launcher == "weft")
    if place is not None:
        from weft.train.run.worker import work

        work(place, config_path, options.overrides, options.resume, command, or_start=options.resume_or_start)

    ranks = options.ranks or _local_devices() or 1
    config = load_config(config_path, options.overrides)
    config.validate(ranks)
    run = open_run(config.run, options.resume or config.run.resume, command, or_start=options.resume_or_start)
    code = launch(arguments, ranks, run, resuming(command, run.directory))
    if code in (2, 3):
        remove_if_unused(run)
    return code


def _local_devices() -> int:
    import torch  # takes seconds, which whoever says --ranks need not wait

    return torch.cuda.device_count()


def _command(options: argparse.Namespace, *, with_ranks: bool) -> str:
    """What a person types to start the same again, without --resume."""
    words = ["weft", "train", *([options.config] if options.config else [])]
    for override in options.overrides:
        words += ["--set", override]
    if with_ranks and options.ranks:
        words += ["--ranks", str(options.ranks)]
    return shlex.join(words)


def _config(options: argparse.Namespace, arguments: list[str]) -> int:
    from weft.train.config import load_config
    from weft.train.settings import as_markdown, as_toml

    if options.check is not None:
        ranks = 1 if options.ranks is None else options.ranks
        if ranks < 1:
            raise ValueError(f"--ranks {ranks}: must be at least 1")
        load_config(options.check).validate(ranks)
        print(f"{options.check}: fine on {ranks} rank{'s' * (ranks > 1)}")
    elif options.ranks is not None:
        raise ValueError(f"--ranks {options.ranks}: is for a configuration; name it with --check FILE")
    else:
        print(as_markdown() if options.markdown else as_toml(), end="")
    return 0


def _eval(options: argparse.Namespace, arguments: list[str]) -> int:
    from weft.checkpoint import CheckpointError
    from weft.train.evaluate import evaluate

    try:
        values = evaluate(Path(options.path), step=options.step, average=options.ema, overrides=options.overrides)
    except CheckpointError as error:
        print(f"weft eval: {error}", file=sys.stderr)
        return 1
    print("  ".join(f"{name.replace('_', ' ')} {value:.6g}" for name, value in values.items()))
    return 0


def _report(options: argparse.Namespace, arguments: list[str]) -> int:
    from weft.train.record.metrics import FILE
    from weft.train.report import write_report
    from weft.train.report.facts import read_facts

    run = Path(options.path)
    if not (run / FILE).is_file():
        raise ValueError(f"{run}: holds no {FILE}; name the directory of a run")
    facts = read_facts(run)
    print(write_report(run, **{name: facts[name] for name in ("description", "memory", "baseline") if name in facts}))
    return 0


def _inspect(options: argparse.Namespace, arguments: list[str]) -> int:
    from weft.checkpoint import CheckpointError
    from weft.checkpoint.inspect import show

    try:
        show(Path(options.path), verify_content=options.verify)
    except CheckpointError as error:
        print(f"weft inspect: {error}", file=sys.stderr)
        return 1
    return 0


def _sample(options: argparse.Namespace, arguments: list[str]) -> int:
    from weft.checkpoint.directory import CheckpointError
    from weft.train.source import Source

    for name, good, rule in (
        ("tokens", options.tokens >= 0, "must be at least 0"),
        ("temperature", 0 <= options.temperature < math.inf, "must be at least 0, which takes the best token"),
        ("top-p", 0 < options.top_p <= 1, "must be more than 0 and at most 1"),
    ):
        if not good:
            raise ValueError(f"--{name} {getattr(options, name.replace('-', '_'))}: {rule}")
    begun = False
    try:
        for part in Source(options.source).continued(
            options.prompt,
            tokens=options.tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
        ):
            begun = True
            print(part, end="", flush=True)
    except CheckpointError as error:
        print(f"weft sample: {error}", file=sys.stderr)
        return 1
    finally:
        if begun:
            print()
    return 0


def _convert(options: argparse.Namespace, arguments: list[str]) -> int:
    from weft.checkpoint import CheckpointError
    from weft.checkpoint.manifest import MANIFEST
    from weft.models import HybridModel, hf
    from weft.train.run.runs import CHECKPOINTS
    from weft.train.source import Source

    if not any((Path(options.source) / name).exists() for name in (CHECKPOINTS, MANIFEST)):
        hf.convert(options.source, options.target, options.family)
        return 0
    try:
        source = Source(options.source)
        model = HybridModel(source.model_config)
        source.load(model)
    except CheckpointError as error:
        print(f"weft convert: {error}", file=sys.stderr)
        return 1
    hf.save(model, options.target, options.family)
    return 0


def _pattern(options: argparse.Namespace, arguments: list[str]) -> int:
    import dataclasses

    from rich.console import Console
    from rich.table import Table

    from weft.models import HybridConfig
    from weft.models.pattern import PatternError
    from weft.models.table import Row, rows_of
    from weft.train.config import load_config

    sizes = load_config(options.config).model if options.config else HybridConfig()
    if not isinstance(sizes, HybridConfig):
        raise ValueError(f"{options.config}: has a model of one's own, {sizes.factory}, which has no pattern")
    try:
        rows = rows_of(dataclasses.replace(sizes, pattern=options.pattern))
    except PatternError as error:
        print(error.shown, file=sys.stderr)
        return 2
    table = Table()
    for field in dataclasses.fields(Row):
        table.add_column(field.name, justify="right" if field.type is int else "left")
    for row in rows:
        table.add_row(*(f"{value:,}" if name == "parameters" else str(value) for name, value in vars(row).items()))
    table.add_section()
    table.add_row(*[""] * 6, f"{sum(row.parameters for row in rows):,}")
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    return 0


def _schedule(options: argparse.Namespace, arguments: list[str]) -> int:
    from rich.console import Console

    from weft.pipeline import check, format_table, table
    from weft.pipeline.drawing import Drawing

    target = Path(options.save) if options.save else None
    if target is not None and target.suffix not in (".png", ".txt"):
        raise ValueError(f"--save {target}: must end in .png, for a picture, or .txt, for a table to change")
    _check_size(options, picture=target is not None and target.suffix == ".png")
    made = table(options.name, ranks=options.pp, chunks=options.chunks, microbatches=options.microbatches)
    found = check(made, _costs(options))
    if target is not None and target.suffix == ".png":
        _save_picture(found, target)
    elif target is not None:
        _write(target, format_table(made).encode())
    Console().print(Drawing(found))
    return 0


def _check_size(options: argparse.Namespace, *, picture: bool) -> None:
    """Refuse what would take minutes, or boxes of less than a pixel."""
    actions = 2 * (options.chunks or 1) * (options.microbatches or 1)  # of a rank, or more
    wanted = f"--microbatches {options.microbatches}"
    if actions * (options.pp or 1) > _MOST_ACTIONS:
        raise ValueError(
            f"{wanted}: {actions * (options.pp or 1):,} actions or more, and at most {_MOST_ACTIONS:,} are simulated; "
            "take fewer: a schedule repeats itself"
        )
    if picture and actions > _MOST_BOXES:
        raise ValueError(
            f"{wanted} --save {options.save}: {actions:,} actions of a rank, and a picture has room for "
            f"{_MOST_BOXES:,}; take fewer, or save a table (.txt)"
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


def _bench(options: argparse.Namespace, arguments: list[str]) -> int:
    if options.ranks < 1:
        raise ValueError(f"--ranks {options.ranks}: must be at least 1")
    folders = [Path(__file__).resolve().parents[2] / "benchmarks", Path.cwd() / "benchmarks"]
    found = {
        path.stem: path
        for folder in reversed(folders)
        if folder.is_dir()
        for path in sorted(folder.glob("*.py"))
        if not path.name.startswith("_")
    }
    if options.name not in found:
        known = ", ".join(found) or "none here; run this in a checkout of the repository"
        raise ValueError(f"{options.name!r} is no benchmark; there are: {known}")
    return subprocess.call(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(options.ranks), str(found[options.name])),
            *(arguments[arguments.index("--") + 1 :] if "--" in arguments else []),
        ],
        env={"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // options.ranks)), **os.environ},
    )
