"""The command line of weft.

weft train | check | eval | report | config | sample | chat | convert | pattern | schedule | inspect | bench"""

import argparse
import shlex
import sys
from collections.abc import Sequence

from weft.cli.completion import commands_of, options_of
from weft.cli.parser import make_parser
from weft.train.errors import is_refusal
from weft.train.run.output import outlive_readers
from weft.words import nearest


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code:

    - 0: success
    - 1: a failure at run time, faults that `weft check` found, or an interrupted command other than `weft train`
    - 2: unrecognized arguments or an invalid configuration
    - 3: training was interrupted, and its last step is saved
    - 4: training was interrupted before anything was saved

    `weft bench` returns the exit code of torchrun.

    `arguments`: the words after `weft`. Default: the arguments of this process. Raises SystemExit with code 2 for an
    invalid command, and with code 0 after `--help`, `--version` or `--completion`.
    """
    outlive_readers()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    parser = make_parser()
    options, unknown = parser.parse_known_args(own)
    command = f"weft {options.command}"
    if unknown:
        words, fix = shlex.join(unknown), f"see {command} --help"
        if options.command == "bench":
            fix = f"put the benchmark's own arguments after --, as in {command} {options.name} -- {words}"
        elif hasattr(options, "overrides") and (settings := _as_settings(unknown)):
            fix = f"change settings with {shlex.join(word for each in settings for word in ('--set', each))}"
        elif near := _nearest_option(unknown, commands_of(parser)[options.command][0]):
            fix = f"did you mean {near}?"
        print(f"{command}: unrecognized arguments: {words}; {fix}", file=sys.stderr)
        return 2
    options.arguments, options.beyond = arguments, arguments[len(own) + 1 :]
    if len(own) < len(arguments) and options.command != "bench":
        parser.error(f"-- has no meaning for {options.command}")
    try:
        return options.run(options)
    except ValueError as error:
        if not is_refusal(error):
            raise
        print(f"{command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        from weft.errors import CheckpointError, StorageError

        if not isinstance(error, (CheckpointError, StorageError)):
            raise
        print(f"{command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if options.command != "train":
            return 1
        resumes = options.resume and not options.resume_or_start  # the latter may have nothing to resume
        saved = "the checkpoints of the run are unchanged" if resumes else "nothing was saved"
        print(f"{command}: interrupted before the first step; {saved}", file=sys.stderr)
        return 3 if resumes else 4


def _as_settings(unknown: Sequence[str]) -> list[str]:
    """Return the `unknown` arguments as settings, such as train.steps=5 for --train.steps 5. Return [] if an
    argument is not part of a setting, or if a setting has no value."""
    found: list[str] = []
    for word in unknown:
        name, has_value, _ = word.partition("=")
        if word.startswith("--") and "." in name:
            found.append(word.removeprefix("--"))
        elif has_value and not word.startswith("-"):
            found.append(word)
        elif found and "=" not in found[-1] and not word.startswith("--"):
            found[-1] += f"={word}"
        else:
            return []
    return found if all("=" in each for each in found) else []


def _nearest_option(unknown: Sequence[str], command: argparse.ArgumentParser) -> str | None:
    """Return the option of `command` that one of the `unknown` arguments resembles, or None."""
    known = [option.name.removeprefix("--") for option in options_of(command)]  # all options resemble each other by it
    mistyped = (word.partition("=")[0].removeprefix("--") for word in unknown if word.startswith("--"))
    return next((f"--{near}" for word in mistyped for near in nearest(word, known, cutoff=0.7)), None)
