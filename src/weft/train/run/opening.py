"""Opens a run's directory for all ranks, and checks for requests to stop before the first step."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from weft.comm.collectives import reduce_now
from weft.comm.groups import broadcast_object
from weft.train.config import TrainConfig
from weft.train.errors import ConfigError
from weft.train.run.failures import Interrupted
from weft.train.run.runs import Run, open_run, remove_if_unused
from weft.train.run.stop import StopRequest


def open_run_together(config: TrainConfig, resume: str | bool, command: str | None, **kind: bool) -> Run:
    """Call `open_run` on the first rank only. All ranks return the run that it returns, or raise its ConfigError.
    Collective.

    `kind`: the arguments `or_start` and `own_task` of `open_run`.
    """
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = open_run(config.run, resume, command, **kind)
        except ConfigError as error:
            answer[1] = error
    answer = broadcast_object(answer, what="which run to open")
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


@contextmanager
def beginning(run: Run) -> Iterator[None]:
    """A context for the construction of a trainer. If the construction fails, removes the directory of a new run."""
    try:
        yield
    except BaseException:
        if dist.get_rank() == 0:
            remove_if_unused(run)
        raise


def agree_to_begin(stop: StopRequest, step: int, device: torch.device) -> None:
    """Before the first step, raise Interrupted on all ranks if any rank was asked to stop. Otherwise set
    `stop.is_training`. Collective.

    `step`: the step from which the run resumes, or 0.
    """
    asked = torch.tensor(float(stop.requested), device=device)
    reduce_now(asked, dist.ReduceOp.SUM, None, "whether anything asked to stop")
    if asked.item():
        raise Interrupted(f"stopped before step {step + 1}")
    stop.is_training = True
