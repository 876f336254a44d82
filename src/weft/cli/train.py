"""`weft train`: starts ranks, or joins ranks that torchrun or SLURM started."""

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from weft.words import counted

if TYPE_CHECKING:
    from weft.train.run.world import Place

EXAMPLE = Path(__file__).parents[1] / "train" / "example.toml"


def start(options: argparse.Namespace) -> int:
    """Start the ranks, and return the exit code when the training has ended.

    If a launcher has started this process as one of the ranks, train as that rank instead, and exit with its exit code.
    """
    from weft.train.config import ConfigError, load_config
    from weft.train.run.launch import launch
    from weft.train.run.runs import open_run, resuming
    from weft.train.run.world import place_from

    config_path = _find_configuration(options)
    if options.resume_or_start:
        if options.resume:
            raise ConfigError("--resume-or-start finds the run itself: leave --resume out")
        options.resume = True
    place = place_from(os.environ)
    _check_ranks(options, place)
    _check_weights(options, config_path)
    _check_trust(options, config_path)
    command = _command(options)
    if place is not None:
        from weft.train.run.worker import work

        work(place, config_path, options.overrides, options.resume, command, or_start=options.resume_or_start)

    ranks = options.ranks or _local_devices() or 1
    config = load_config(config_path, options.overrides)
    config.validate(ranks)
    every = config.checkpoint.memory_every
    if every and not options.restarts:
        raise ConfigError(
            f"checkpoint.memory_every = {every}: has no effect without restarts; add --restarts 5, or set "
            "checkpoint.memory_every = 0"
        )
    if options.restart_ranks is not None:
        config.validate(options.restart_ranks)
    run = open_run(config.run, options.resume, _command(options, configured=False), or_start=options.resume_or_start)
    return launch(
        options.arguments,
        ranks,
        run,
        resuming(command, run.directory),
        restarts=options.restarts,
        restart_ranks=options.restart_ranks or ranks,
        keeps_copies=every > 0,
    )


def _find_configuration(options: argparse.Namespace) -> str:
    """Return the path of the configuration that `--example`, CONFIG.toml or `--resume` names. Also set
    `options.config` to this path. If the path is in the run that `--resume` names, `options.config` stays None."""
    from weft.checkpoint.storage import require_exists
    from weft.train.config import ConfigError
    from weft.train.run.runs import CONFIG, refuse_no_run, refuse_other_directories, run_directory

    if options.example:
        if options.config is not None:
            raise ConfigError(f"--example {options.config}: both name a configuration; leave one of them out")
        options.config = str(EXAMPLE)
    if options.config is not None:
        return options.config
    if not isinstance(options.resume, str):
        raise ConfigError(
            "no configuration is named: weft train CONFIG.toml, weft train --example, or weft train --resume "
            "RUN_DIRECTORY"
        )
    directory = run_directory(options.resume)
    if directory.is_dir():
        refuse_other_directories(directory, f"--resume {options.resume}")
        refuse_no_run(directory, f"--resume {options.resume}")
        return str(directory / CONFIG)
    fix = "name the directory of a run, or a CONFIG.toml"
    require_exists(directory, fix, f"--resume {options.resume}")
    if Path(options.resume).suffix != ".toml":
        raise ConfigError(f"--resume {options.resume}: is not a directory; {fix}")
    options.config, options.resume = options.resume, True  # `--resume CONFIG.toml`: the path names the configuration
    return options.config


def _check_ranks(options: argparse.Namespace, place: "Place | None") -> None:
    """Raise ConfigError for numbers of ranks and restarts that contradict each other or the launcher."""
    from weft.train.config import ConfigError

    if options.ranks is not None and options.ranks < 1:
        raise ConfigError(f"--ranks {options.ranks}: must be at least 1")
    for name, value, least in (("restarts", options.restarts, 0), ("restart-ranks", options.restart_ranks, 1)):
        if value is not None and value < least:
            raise ConfigError(f"--{name} {value}: must be at least {least}")
    if options.restart_ranks is not None and not options.restarts:
        raise ConfigError(f"--restart-ranks {options.restart_ranks}: has no effect without --restarts; add --restarts")
    if place is not None and place.launcher != "weft" and options.restarts:
        raise ConfigError(
            f"--restarts {options.restarts}: {place.launcher} restarts ranks itself; use its restarts with "
            f"--resume-or-start, and leave --restarts out"
        )
    if place is not None and options.ranks not in (None, place.ranks):
        raise ConfigError(
            f"--ranks {options.ranks}: {place.launcher} has already started {counted(place.ranks, 'rank')}; leave "
            f"--ranks out"
        )


def _check_weights(options: argparse.Namespace, config_path: str) -> None:
    """Add `--from` to the overrides. Raise ConfigError if weights are given for a run that resumes.

    With `--resume-or-start`, weights are allowed, because the run may start anew."""
    from weft.train.config import ConfigError, load_config

    if options.weights is not None:
        options.overrides.append(f"run.weights={options.weights}")
    weights = [override for override in options.overrides if _is_weights(override)]
    if not weights or options.resume_or_start:
        return
    if options.resume or load_config(config_path, options.overrides).run.resume:
        given = f"--set {weights[-1]}" if options.weights is None else f"--from {options.weights}"
        raise ConfigError(
            f"{given}: has no effect on a resumed run, which uses its own weights; leave it out, or start a new "
            "run without --resume"
        )


def _check_trust(options: argparse.Namespace, config_path: str) -> None:
    """Raise ConfigError if the configuration comes from the run that `--resume` names, and names code that the user has
    not trusted."""
    from weft.train.config import load_config
    from weft.train.run.launch import RUN
    from weft.train.run.trust import require_trust

    if options.config is not None or RUN in os.environ:  # the process that started this rank has checked
        return
    configured = load_config(config_path, options.overrides)
    asked = f"--resume {options.resume}"
    require_trust(Path(config_path).parent, configured, options.overrides, trust=options.trust, asked=asked)


def _local_devices() -> int:
    import torch  # this import takes seconds; with --ranks it is not needed

    return torch.cuda.device_count()


def _command(options: argparse.Namespace, *, configured: bool = True) -> str:
    """Return the command line that resumes this run, but without --resume, which `resuming` adds.

    --from is left out, because only new runs load weights. --trust is left out too. Under torchrun, the command line
    starts with torchrun. `configured`: False leaves out the configuration and all settings, so that the command line
    resumes any run with the run's own configuration.
    """
    from weft.train.run.world import torchrun_of

    launcher = torchrun_of(os.environ)
    words = [*launcher, "-m", "weft", "train"] if launcher else ["weft", "train"]
    if configured:
        words += ["--example"] if options.example else [options.config] if options.config else []
        for override in options.overrides:
            if not _is_weights(override):
                words += ["--set", override]
    if options.ranks:
        words += ["--ranks", str(options.ranks)]
    if options.restarts:
        words += ["--restarts", str(options.restarts)]
    if options.restart_ranks is not None:
        words += ["--restart-ranks", str(options.restart_ranks)]
    return shlex.join(words)


def _is_weights(override: str) -> bool:
    return override.partition("=")[0].strip() == "run.weights"
