import json
import sys

import pytest

from weft.cli import main
from weft.train.record.metrics import FILE, Metrics, read_metrics


@pytest.fixture(autouse=True)
def without_tensorboard(request, monkeypatch):
    """Its import takes seconds; the one test that is about it takes them."""
    if "tensorboard" not in request.node.name:
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)


def write(folder, steps, **settings):
    with Metrics(folder, **settings) as metrics:
        for step in steps:
            metrics.log(step, "train", loss=1 / step)
            if step % 5 == 0:
                metrics.log(step, "validation", loss=2.0)


def steps_of(folder, kind="train"):
    return [record["step"] for record in read_metrics(folder) if record["kind"] == kind]


def test_what_is_logged_is_read_back_at_once_and_in_order(tmp_path):
    with Metrics(tmp_path / "run") as metrics:
        metrics.log(1, "train", loss=2.5, lr=1e-4)
        assert read_metrics(tmp_path / "run") == [{"step": 1, "kind": "train", "loss": 2.5, "lr": 1e-4}]
        metrics.log(1, "validation", loss=3.0)
        assert [record["kind"] for record in read_metrics(tmp_path / "run")] == ["train", "validation"]


@pytest.mark.parametrize("resumed", [1, 7, 10, 12])
def test_a_resumed_run_writes_no_step_twice(tmp_path, resumed):
    write(tmp_path, range(1, 13))
    write(tmp_path, range(resumed + 1, 21), resumed_step=resumed)
    assert steps_of(tmp_path) == list(range(1, 21))
    assert steps_of(tmp_path, "validation") == [5, 10, 15, 20]


def test_a_new_run_in_an_old_folder_starts_over(tmp_path):
    write(tmp_path, range(1, 13))
    write(tmp_path, range(1, 4))
    assert steps_of(tmp_path) == [1, 2, 3]


def test_a_line_that_a_killed_process_left_half_written_is_passed_over_and_removed(tmp_path):
    write(tmp_path, range(1, 5))
    path = tmp_path / FILE
    path.write_text(path.read_text()[:-9])
    assert steps_of(tmp_path) == [1, 2, 3]
    write(tmp_path, range(4, 6), resumed_step=3)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        '{"step": 3, "kind": "train", "loss": "abc"}',
        '{"step": 3, "kind": "train", "loss": [{"a": 1}]}',
        '{"step": true, "kind": "train", "loss": 1.0}',
        '{"step": 3, "kind": 4, "loss": 1.0}',
        '{"step": 3, "kind": "experts", "load": [1]}',
        '{"step": 3, "kind": "norms", "weight": {"a": "b"}}',
    ],
)
def test_a_line_with_something_else_where_numbers_belong_is_passed_over(tmp_path, line):
    write(tmp_path, range(1, 3))
    with (tmp_path / FILE).open("a") as lines:
        lines.write(line + "\n")
    assert steps_of(tmp_path) == [1, 2] and len(read_metrics(tmp_path)) == 2
    assert main(["report", str(tmp_path)]) == 0


def test_numbers_that_are_not_finite_stay_readable_for_every_json_reader(tmp_path):
    def refuse(constant):
        raise AssertionError(constant)

    with Metrics(tmp_path) as metrics:
        metrics.log(1, "train", loss=float("nan"), gradient_norm=float("inf"))
    record = json.loads((tmp_path / FILE).read_text(), parse_constant=refuse)
    assert record["loss"] is None and record["gradient_norm"] is None


def test_ranks_that_are_not_enabled_write_nothing(tmp_path):
    write(tmp_path / "run", range(1, 5), enabled=False)
    assert not (tmp_path / "run").exists()
    assert read_metrics(tmp_path / "run") == []


def test_what_installs_the_missing_board_is_said(tmp_path):
    with Metrics(tmp_path) as metrics:
        assert "weft[train]" in metrics.note


@pytest.mark.slow
def test_tensorboard_shows_the_same_numbers_and_forgets_those_after_the_resumed_step(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, range(1, 13))
    write(tmp_path, range(8, 15), resumed_step=7)
    with Metrics(tmp_path, resumed_step=14) as metrics:
        metrics.log_experts(14, {"layer": [5, 0, 3]})
    assert read_metrics(tmp_path)[-1] == {"step": 14, "kind": "experts", "load": {"layer": [5, 0, 3]}}
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    shown = events.Scalars("train/loss")
    assert [event.step for event in shown] == list(range(1, 15))
    assert [event.value for event in shown] == pytest.approx([1 / step for step in range(1, 15)])
    (load,) = events.Histograms("experts/layer")
    assert (load.step, load.histogram_value.bucket) == (14, [5, 0, 3])


@pytest.mark.parametrize(
    "broken", [b'{"step": 3, "ki', b'{"step": 3, "kin\n', b"\0\0\0\0\n", b"\xff\xfe\n", b"7\n", b"{}\n"]
)
def test_an_incomplete_last_line_is_removed(tmp_path, broken):
    with Metrics(tmp_path) as metrics:
        for step in (1, 2):
            metrics.log(step, "train", loss=1.0)
    with (tmp_path / "metrics.jsonl").open("ab") as stream:
        stream.write(broken)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]
    with Metrics(tmp_path, resumed_step=2) as metrics:
        metrics.log(3, "train", loss=1.0)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
