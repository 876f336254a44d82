"""Training in stages is training in one process, and a run may go on with other stages."""

from itertools import pairwise
from unittest.mock import patch

import pytest
import torch

from tests.train.command import committed, metrics, write_config
from tests.train.test_loop import reference, train_on
from weft.train.record.progress import format_count
from weft.train.report.facts import read_facts
from weft.train.report.stages import read_stages

pytestmark = pytest.mark.slow

MODEL = {
    "model__pattern": "[*E][*-][*E]",
    "model__num_experts": 4,
    "model__moe_intermediate_size": 16,
    "model__expert_bias": True,
}


@pytest.mark.parametrize(
    "ranks, changes",
    [
        (2, ["train.pipeline_schedule=dualpipev", "model.tie_word_embeddings=true"]),
        pytest.param(2, ["sharding.chunks=1", "model.tie_word_embeddings=true"], marks=pytest.mark.long),
        pytest.param(4, ["train.overlap=true", "sharding.ep=2", "train.microbatch_size=1"], marks=pytest.mark.long),
    ],
)
def test_training_in_stages_is_training_in_one_process(pool, tmp_path, ranks, changes):
    settings = {**MODEL, "train__gradient_clip": 0.5, "train__validate_every": 3, "checkpoint__every": 0}
    if any("tie" in change for change in changes):
        settings["model__tie_word_embeddings"] = True
    path = write_config(tmp_path, **settings)
    records, validation_loss, weights = reference(path, 3)
    answers = pool.run(ranks, train_on, path, tmp_path / "run", ["sharding.pp=2", *changes], stop_at=3)
    lines, validations, *_ = answers[0]
    assert len(lines) == 3
    for line, expected in zip(lines, records):
        for name, value in expected.items():
            torch.testing.assert_close(line[name], value, rtol=1e-5, atol=1e-6, msg=name)
    assert validations[-1]["loss"] == pytest.approx(validation_loss, rel=1e-5)
    held = [model.keys() for _, _, model, _, _ in answers]
    assert set().union(*held) == weights.keys() != held[0]
    for _, _, model, _, _ in answers:
        for name, value in model.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5, msg=name)
    loads = metrics(tmp_path / "run", "experts")
    assert all(line["load"].keys() == {"decoder.layers.0.mlp", "decoder.layers.2.mlp"} for line in loads)
    assert f"{format_count(sum(value.numel() for value in weights.values()))} parameters" in " ".join(answers[0][-1])


@pytest.mark.long
def test_losses_of_routers_are_logged_apart_where_stages_have_them(pool, tmp_path):
    """Each stage knows the losses of its own routers, and the last one alone the cross-entropy."""
    path = write_config(
        tmp_path, **MODEL, model__aux_loss_coef=0.05, train__validate_every=0, checkpoint__every=0, train__steps=3
    )
    records, _, _ = reference(path, 3)
    lines = pool.run(2, train_on, path, tmp_path / "run", ["sharding.pp=2"], stop_at=3)[0][0]
    plain = pool.run(1, train_on, path, tmp_path / "plain", stop_at=3)[0][0]
    for line, alone, expected in zip(lines, plain, records):
        assert line["router_loss"] > 0.01
        torch.testing.assert_close(line["loss"] + line["router_loss"], expected["loss"], rtol=1e-5, atol=1e-6)
        for name in ("loss", "router_loss"):
            torch.testing.assert_close(line[name], alone[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.long
def test_a_run_resumes_with_other_stages(pool, tmp_path):
    path = write_config(tmp_path, **MODEL, train__validate_every=0, checkpoint__every=2)
    pool.run(2, train_on, path, tmp_path / "whole", stop_at=6)
    pool.run(2, train_on, path, tmp_path / "parts", ["sharding.pp=2"], stop_at=2)
    pool.run(2, train_on, path, tmp_path / "parts", [], stop_at=4, resume_from=2)
    v = ["sharding.pp=2", "train.pipeline_schedule=zbv"]
    pool.run(2, train_on, path, tmp_path / "parts", v, stop_at=6, resume_from=4)
    for one, other in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "parts"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-4)


@pytest.mark.long
def test_stages_without_a_matrix_of_its_own_go_on_with_muon_in_one_piece(pool, tmp_path):
    path = write_config(tmp_path, model__pattern="[*-][*-]|", train__validate_every=0, checkpoint__every=2)
    muon = ["optimizer.name=Muon", "optimizer.lr=0.01"]
    pool.run(2, train_on, path, tmp_path / "whole", muon, stop_at=4)
    pool.run(2, train_on, path, tmp_path / "parts", [*muon, "sharding.pp=2"], stop_at=2)
    pool.run(2, train_on, path, tmp_path / "parts", muon, stop_at=4, resume_from=2)
    for one, other in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "parts"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)  # Muon iterates in bf16


@pytest.mark.long
def test_the_report_has_the_stages_one_under_another(pool, tmp_path):
    """Each rank's actions are in the order of its table, and none begins before what it needs has been computed."""
    path = write_config(tmp_path, train__steps=2, train__validate_every=0, checkpoint__every=0, **MODEL)
    changes = ["sharding.pp=2", "train.pipeline_schedule=dualpipev", "sharding.strategy=optim_grads"]
    pool.run(2, train_on, path, tmp_path / "run", changes, stop_at=2, pictures=True)
    stages = read_stages(tmp_path / "run")
    assert stages.table.name == "dualpipev" and stages.table.microbatches == 4
    for entries, spans in zip(stages.table.ranks, stages.spans, strict=True):
        assert len(entries) == len(spans)
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
    assert 0 < stages.idle_share < 1
    ends = {
        (action.microbatch, stages.table.stage(rank, action.chunk)): span
        for rank, (entries, spans) in enumerate(zip(stages.table.ranks, stages.spans))
        for entry, span in zip(entries, spans)
        for action in entry
        if action.kind == "F"
    }
    assert all(ends[m, stage][1] > ends[m, stage - 1][0] for m, stage in ends if stage)
    assert (tmp_path / "run" / "stages.svg").exists()
    facts = read_facts(tmp_path / "run")
    first, last = facts["description"].split("rank 1 of the pipeline")
    assert "rank 0 of the pipeline" in first and "decoder.layers.0" in first and "decoder.layers.1" in last
    assert [each["persistent"]["optimizer state"] > 0 for each in facts["memory"]] == [True, True]


def train_with_a_measurement_that_fails(path, directory, changes):
    with patch("weft.train.report.account.measured", side_effect=ValueError("no such\nmicrobatch")):
        return train_on(path, directory, changes, stop_at=2)[-1]


@pytest.mark.long
def test_a_step_that_cannot_be_measured_or_kept_ends_no_run_and_a_line_says_why(pool, tmp_path):
    path = write_config(tmp_path, train__steps=2, train__validate_every=0, checkpoint__every=0, **MODEL)
    changes = ["sharding.pp=2", "train.pipeline_schedule=dualpipev", "sharding.strategy=optim_grads"]
    (tmp_path / "kept" / "timeline.json").mkdir(parents=True)
    kept = pool.run(2, train_on, path, tmp_path / "kept", changes, stop_at=2)[0][-1]
    measured = pool.run(2, train_with_a_measurement_that_fails, path, tmp_path / "measured", changes)[0]
    for said, run, why in (
        (kept, tmp_path / "kept", "StorageError: rank 0: "),
        (measured, tmp_path / "measured", "ValueError: no such microbatch"),
    ):
        assert said[-1].startswith(f"{run}: its report cannot be written ({why}")
        assert said[-1].endswith(f"; correct the cause, then: weft report {run}")
        assert committed(run) == [2]
