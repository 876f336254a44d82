"""Whatever a file operation does, nothing that was saved is lost, and a line names the file and the rank."""

import os
from pathlib import Path

import pytest

from tests.train.command import write_config
from tests.train.faults import FAULTS, LIMIT_S, SLACK_S, meet, some
from tests.train.kills import Starts

pytestmark = pytest.mark.long

ALL = os.environ.get("WEFT_FAULTS") == "1"


def test_each_file_operation_may_fail_hang_or_end_its_process_on_each_rank(tmp_path):
    changes = {"checkpoint__every": 2, "checkpoint__keep": 1, "run__loggers": []}
    config = write_config(tmp_path, train__steps=6, train__validate_every=0, train__log_every=1, **changes)

    def starts(name):
        (tmp_path / name).mkdir()
        settings = ["--set", f"run.name={name}", "--resume-or-start"]
        return Starts(tmp_path / name, tmp_path / "runs", name, [str(config), *settings])

    whole: Path = starts("whole").to_the_end() / "checkpoints" / "step-00000006"
    outcomes = []
    for number, fault in enumerate(FAULTS if ALL else some()):
        outcomes.append(meet(starts(f"fault-{number}"), fault, whole))
        print(outcomes[-1], flush=True)
    assert all(outcome.resumed for outcome in outcomes)
    assert all(outcome.seconds < LIMIT_S + SLACK_S for outcome in outcomes)
    for outcome in outcomes:
        removes = outcome.fault.name == "remove" and outcome.fault.kind == "fail"
        if outcome.fault.kind != "end" and not removes:
            assert f"rank {outcome.fault.rank}" in outcome.said and outcome.fault.part in outcome.said, outcome
