"""One rank of `weft train`, whoever started it."""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from weft.checkpoint import CheckpointError
from weft.train.config import load_config
from weft.train.loop import Trainer, open_run_together
from weft.train.run.launch import CONTROL, RUN, Kind, report_failure
from weft.train.run.runs import Run, resuming
from weft.train.run.stop import StopRequest
from weft.train.run.world import Place


def work(
    place: Place, path: str, overrides: list[str], resume: str | bool, command: str, *, or_start: bool = False
) -> NoReturn:
    """Train as the rank at `place` and end the process with the exit code that the command line promises.

    command: what a person types to start the same run again, without `--resume`.
    """
    stop = StopRequest()
    stop.listen(int(os.environ[CONTROL]) if CONTROL in os.environ else None)
    supervised = RUN in os.environ
    run = _given_run() if supervised else None
    constructed = False
    try:
        config = load_config(path, overrides)
        device = place.device()
        place.join(device)
        if run is None:
            run = open_run_together(config, resume or config.run.resume, command, or_start=or_start)
        trainer = Trainer(config, run, device=device, stop=stop)
        constructed = True
        if run.note:
            trainer.say(run.note)
        complete = trainer.run()
        if not complete:
            trainer.say(
                f"stopped at step {trainer.position.step} of {config.train.steps}, which is saved; "
                f"go on with: {resuming(command, run.directory)}"
            )
        dist.destroy_process_group()
        code = 0
    except Exception as error:
        wrong = isinstance(error, ValueError) and not constructed
        refused = isinstance(error, CheckpointError) and not constructed
        if supervised and run is not None:
            kind: Kind = "configuration" if wrong else "refused" if refused else "failure"
            report_failure(run.directory, place.rank, kind, error)
        elif wrong or refused:
            print(f"weft train: rank {place.rank}: {' '.join(str(error).split())}", file=sys.stderr)
        else:
            print(f"weft train: rank {place.rank} failed:\n{traceback.format_exc()}", file=sys.stderr)
        code = 2 if wrong else 1
    sys.stdout.flush()
    sys.stderr.flush()
    # The ordinary way out takes down threads of communication: it can wait for ranks that this one let
    # down, and has been seen to abort after all was done.
    os._exit(code)


def _given_run() -> Run:
    fields = json.loads(os.environ[RUN])
    return Run(Path(fields["directory"]), fields["step"], fields["note"])
