"""The parser of the command line. Each command imports what it needs, so that `--help` is fast."""

import argparse
import sys
from typing import Any, NoReturn

import weft
from weft.cli import commands, generation
from weft.cli.completion import SHELLS, script
from weft.cli.schedule import draw
from weft.cli.train import start
from weft.words import choice_of

EXIT_CODES = """exit code: 0 success, 1 failure at run time, 2 invalid command or configuration, \
3 interrupted and saved: resume with --resume, 4 interrupted before anything was saved"""


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)  # a misspelled option must not be taken for another one

    def error(self, message: str) -> None:  # type: ignore[override]
        more = "" if message.endswith("?") else f"; see {self.prog} --help"
        print(f"{self.prog}: {message}{more}", file=sys.stderr)
        raise SystemExit(2)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            what = "/".join(action.option_strings) or action.dest
            raise argparse.ArgumentError(None, f"unknown {what} {value!r}; {choice_of(value, action.choices)}")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version
        from platform import python_version

        print(f"weft {weft.__version__}, Python {python_version()}, torch {version('torch')}")
        parser.exit()


class _Completion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, _: object, shell: Any, __: object = None) -> NoReturn:
        print(script(parser, shell), end="")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Call `options.run(options)` to execute the command of the parsed `options`."""
    parser = _Parser(prog="weft", description="Sharded training for large PyTorch models.", epilog=EXIT_CODES)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions of weft, Python and torch")
    parser.add_argument(
        "--completion",
        action=_Completion,
        choices=SHELLS,
        help="print the script with which this shell completes commands, options and settings",
    )
    known = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    every = (
        _train,
        _check,
        _sample,
        _chat,
        _inspect,
        _convert,
        _pattern,
        _schedule,
        _config,
        _evaluate,
        _report,
        _bench,
    )
    for add in every:
        add(known)
    return parser


def _add_set(command: argparse.ArgumentParser, example: str = "") -> None:
    command.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="SECTION.NAME=VALUE",
        help=f"change one setting{example}; can be given several times",
    )


def _add_trust(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--trust",
        action="store_true",
        help="import the code that the configuration of a copied run directory names",
    )


def _train(known: Any) -> None:
    train = known.add_parser("train", help="train a model that a TOML file describes", epilog=EXIT_CODES)
    train.add_argument("config", nargs="?", metavar="CONFIG.toml")
    train.add_argument(
        "--example",
        action="store_true",
        help="use the configuration included in weft: a small language model on the source text of Python's standard "
        "library",
    )
    _add_set(train)
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
        help="resume from the newest intact checkpoint of RUN_DIRECTORY or, without it, of the newest run with the "
        "configured name; uses the run's configuration unless you name one",
    )
    train.add_argument(
        "--resume-or-start",
        action="store_true",
        help="like --resume, but start a new run if there is nothing to resume (for schedulers that restart jobs)",
    )
    train.add_argument(
        "--from",
        dest="weights",
        metavar="DIRECTORY",
        help="start a new run from the weights of a run, a checkpoint or a model's directory, like run.weights",
    )
    train.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="K",
        help="when a rank dies or hangs, restart all ranks from the newest checkpoint, up to K times (default: 0)",
    )
    train.add_argument(
        "--restart-ranks",
        type=int,
        metavar="N",
        help="with --restarts: ranks after a restart (default: all)",
    )
    _add_trust(train)
    train.set_defaults(run=start)


def _check(known: Any) -> None:
    check = known.add_parser(
        "check",
        help="run a step of a small copy of a configuration on one rank and on several, and compare them",
        epilog=EXIT_CODES,
    )
    check.add_argument("config", metavar="CONFIG.toml")
    check.add_argument("--ranks", type=int, default=1, help="the number of ranks to check for (default: 1)")
    _add_set(check)
    check.set_defaults(run=commands.check)


def _sample(known: Any) -> None:
    sample = known.add_parser("sample", help="continue a text with a trained model", epilog=EXIT_CODES)
    sample.add_argument("source", metavar="SOURCE", help="a run, a checkpoint or a model's directory")
    sample.add_argument(
        "--prompt",
        action="append",
        help="the text to continue (default: a line break); can be given several times, and all texts are continued "
        "together",
    )
    _add_generation(sample)
    sample.set_defaults(run=_with_prompt)


def _with_prompt(options: argparse.Namespace) -> int:
    options.prompt = options.prompt or ["\n"]  # argparse appends to a default
    return generation.sample(options)


def _chat(known: Any) -> None:
    chat = known.add_parser("chat", help="talk with a model that has a chat template", epilog=EXIT_CODES)
    chat.add_argument("source", metavar="SOURCE", help="a run, a checkpoint or a model's directory")
    chat.add_argument("--system", default="", help="the system message of the conversation (default: none)")
    _add_generation(chat)
    chat.set_defaults(run=generation.chat)


def _add_generation(command: argparse.ArgumentParser) -> None:
    own = "the model's own, else"
    command.add_argument("--tokens", type=int, default=200, help="the maximum number of new tokens (default: 200)")
    command.add_argument("--temperature", type=float, help=f"0 chooses the most likely token (default: {own} 0.8)")
    command.add_argument("--top-k", type=int, help=f"number of most likely tokens to sample from (default: {own} all)")
    command.add_argument(
        "--top-p", type=float, help=f"total probability of the tokens to sample from (default: {own} 0.95)"
    )
    command.add_argument("--seed", type=int, default=0, help="seed of the random choices (default: 0)")
    _add_ignored(command)


def _add_ignored(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--ignore-field",
        action="append",
        default=[],
        dest="ignored",
        metavar="NAME",
        help="ignore this field of config.json, which weft does not know; can be given several times",
    )


def _inspect(known: Any) -> None:
    inspect = known.add_parser(
        "inspect", help="show the contents of a checkpoint or a run directory", epilog=EXIT_CODES
    )
    inspect.add_argument("path", metavar="CHECKPOINT_OR_RUN_DIR")
    inspect.add_argument("--verify", action="store_true", help="read every file and compare its checksum")
    inspect.set_defaults(run=commands.inspect)


def _convert(known: Any) -> None:
    convert = known.add_parser(
        "convert",
        help="convert Hugging Face files to weft's own format, or weft's format or a run to Hugging Face files",
        epilog=EXIT_CODES,
    )
    convert.add_argument("source", metavar="SOURCE", help="a model's directory, a run, or a checkpoint")
    convert.add_argument("target", metavar="TARGET", help="a new directory")
    convert.add_argument(
        "--family",
        help="model type to write (default: the source's type, or one that fits)",
    )
    _add_ignored(convert)
    convert.set_defaults(run=commands.convert)


def _pattern(known: Any) -> None:
    pattern = known.add_parser("pattern", help="show the layers of a pattern", epilog=EXIT_CODES)
    pattern.add_argument("pattern", metavar="PATTERN", help='such as "M[*-]|M[*E]"')
    pattern.add_argument(
        "--config", metavar="CONFIG.toml", help="a configuration to read the sizes from (default: the default sizes)"
    )
    pattern.set_defaults(run=commands.pattern)


def _schedule(known: Any) -> None:
    schedule = known.add_parser("schedule", help="draw the schedule of a pipeline, with its cost", epilog=EXIT_CODES)
    schedule.add_argument("name", metavar="NAME_OR_FILE", help="a schedule, such as dualpipev, or a file with a table")
    schedule.add_argument("--pp", type=int, help="pipeline ranks")
    schedule.add_argument("--microbatches", type=int, help="the number of microbatches of a step")
    schedule.add_argument("--chunks", type=int, help="stages on each rank (default: the schedule's)")
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
        help="time of a pair of a forward and a backward, relative to running one after the other (default: 1)",
    )
    schedule.add_argument("--transfer", type=float, default=0.0, help="time of a message between ranks (default: 0)")
    schedule.add_argument("--save", metavar="FILE", help="write a picture (FILE.png) or an editable table (FILE.txt)")
    schedule.set_defaults(run=draw)


def _config(known: Any) -> None:
    config = known.add_parser("config", help="show every setting with its default, as a TOML file", epilog=EXIT_CODES)
    instead = config.add_mutually_exclusive_group()
    instead.add_argument("--check", metavar="FILE", help="check whether FILE is a configuration that can run")
    config.add_argument("--ranks", type=int, help="with --check: the number of ranks to check for (default: 1)")
    instead.add_argument("--markdown", action="store_true", help="print all settings as a Markdown table")
    instead.add_argument(
        "--from",
        dest="source",
        metavar="DIRECTORY",
        help="print the [model] of a model's directory or of a run, without the settings that have their defaults",
    )
    _add_ignored(config)
    config.set_defaults(run=commands.config)


def _evaluate(known: Any) -> None:
    evaluate = known.add_parser(
        "eval", help="print the validation loss of a run's newest intact checkpoint", epilog=EXIT_CODES
    )
    evaluate.add_argument("path", metavar="RUN_DIRECTORY")
    evaluate.add_argument("--step", type=int, help="evaluate the checkpoint of this step (default: the newest)")
    evaluate.add_argument("--ema", action="store_true", help="use the moving average of the weights")
    _add_set(evaluate, ", such as data.paths")
    _add_trust(evaluate)
    evaluate.set_defaults(run=commands.evaluate)


def _report(known: Any) -> None:
    report = known.add_parser("report", help="write the report of a run again", epilog=EXIT_CODES)
    report.add_argument("path", metavar="RUN_DIRECTORY")
    report.add_argument(
        "--live",
        type=float,
        default=0,
        metavar="S",
        help="while the run trains: reload the page every S seconds",
    )
    report.set_defaults(run=commands.report)


def _bench(known: Any) -> None:
    bench = known.add_parser(
        "bench",
        help="run a benchmark of this repository",
        epilog="Arguments after -- are passed to the benchmark. " + EXIT_CODES,
    )
    bench.add_argument("name", metavar="NAME", help="name of a file in benchmarks/, such as fsdp2")
    bench.add_argument("--ranks", type=int, default=2, help="local processes (default: 2)")
    bench.set_defaults(run=commands.bench)
