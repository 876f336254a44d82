"""`weft train`: starts ranks, or joins ranks that torchrun or SLURM started."""

import argparse
import os
import shlex
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "train" / "example.toml"


def start(options: argparse.Namespace) -> int:
    """Train and return the exit code. A process that is a rank exits with that code instead."""
    from weft.train.config import ConfigError, load_config
    from weft.train.run.launch import RUN, launch
    from weft.train.run.runs import CONFIG, open_run, refuse_no_run, refuse_other_directories, resuming, run_directory
    from weft.train.run.trust import require_trust
    from weft.train.run.world import place_from

    if options.example:
        if options.config is not None:
            raise ConfigError(f"--example {options.config}: both name a configuration; leave one of them out")
        options.config = str(EXAMPLE)
    config_path = options.config
    if config_path is None and isinstance(options.resume, str):
        directory = run_directory(options.resume)
        if directory.is_dir():
            refuse_other_directories(directory, f"--resume {options.resume}")
            refuse_no_run(directory, f"--resume {options.resume}")
            config_path = str(directory / CONFIG)
        else:  # `--resume CONFIG.toml`: the path names the configuration
            if Path(options.resume).suffix != ".toml":
                raise ConfigError(
                    f"--resume {options.resume}: is not a directory; name the directory of a run, or a CONFIG.toml"
                )
            config_path = options.config = options.resume
            options.resume = True
    if config_path is None:
        raise ConfigError(
            "no configuration is named: weft train CONFIG.toml, weft train --example, or weft train --resume "
            "RUN_DIRECTORY"
        )
    if options.resume_or_start:
        if options.resume:
            raise ConfigError("--resume-or-start finds the run itself: leave --resume out")
        options.resume = True
    if options.ranks is not None and options.ranks < 1:
        raise ConfigError(f"--ranks {options.ranks}: must be at least 1")
    place = place_from(os.environ)
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
            f"--ranks {options.ranks}: {place.launcher} has already started {place.ranks} ranks; leave --ranks out"
        )
    if options.weights is not None:
        options.overrides.append(f"run.weights={options.weights}")
    weights = [override for override in options.overrides if _is_weights(override)]
    goes_on = bool(weights) and (options.resume or load_config(config_path, options.overrides).run.resume)
    if goes_on and not options.resume_or_start:
        given = f"--set {weights[-1]}" if options.weights is None else f"--from {options.weights}"
        raise ConfigError(
            f"{given}: has no effect on a resumed run, which uses its own weights; leave it out, or start a new "
            "run without --resume"
        )
    if options.config is None and RUN not in os.environ:  # the process that started this rank has checked
        configured = load_config(config_path, options.overrides)
        asked = f"--resume {options.resume}"
        require_trust(Path(config_path).parent, configured, options.overrides, trust=options.trust, asked=asked)
    command = _command(options, with_ranks=place is None or place.launcher == "weft")
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
    run = open_run(config.run, options.resume, command, or_start=options.resume_or_start)
    return launch(
        options.arguments,
        ranks,
        run,
        resuming(command, run.directory),
        restarts=options.restarts,
        restart_ranks=options.restart_ranks or ranks,
        keeps_copies=every > 0,
    )


def _local_devices() -> int:
    import torch  # takes seconds, which --ranks makes unnecessary

    return torch.cuda.device_count()


def _command(options: argparse.Namespace, *, with_ranks: bool) -> str:
    """Return the command that resumes this run. It has no --resume, and no --from, because only new runs load
    weights."""
    named = ["--example"] if options.example else [options.config] if options.config else []
    words = ["weft", "train", *named]
    for override in options.overrides:
        if not _is_weights(override):
            words += ["--set", override]
    if with_ranks and options.ranks:
        words += ["--ranks", str(options.ranks)]
    if options.restarts:
        words += ["--restarts", str(options.restarts)]
    if options.restart_ranks is not None:
        words += ["--restart-ranks", str(options.restart_ranks)]
    return shlex.join(words)


def _is_weights(override: str) -> bool:
    return override.partition("=")[0].strip() == "run.weights"
