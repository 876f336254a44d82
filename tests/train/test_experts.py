"""Training with experts on several ranks, the exchange under computation."""

import re
import tomllib
from pathlib import Path

import pytest
import torch

from tests.fsdp import nets
from tests.train.command import assert_same_contents, contents, metrics, weft, write_config
from tests.train.test_loop import reference, train_on
from weft.train import passes
from weft.train.config import load_config
from weft.train.files import parse_json
from weft.train.loop import Trainer
from weft.train.run.runs import Run

pytestmark = pytest.mark.slow

SETTINGS = {
    "model__pattern": "[*E][*-][*E]",
    "model__num_experts": 4,
    "model__moe_intermediate_size": 16,
    "model__aux_loss_coef": 0.05,
    "model__expert_bias": True,
    "train__expert_bias_rate": 0.01,
    "train__overlap": True,
    "train__delay_wgrad": True,
    "train__log_every": 1,
    "sharding__ep": 2,
}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_overlapped_training_of_spread_experts_is_training_in_one_process(pool, tmp_path, ranks):
    path = write_config(tmp_path, **SETTINGS, train__gradient_clip=0.5, train__validate_every=5, checkpoint__every=0)
    records, validation_loss, weights = reference(path, 5)
    lines, validations, model, _, _ = pool.run(
        ranks, train_on, path, tmp_path / "run", ["train.microbatch_size=1"], stop_at=5
    )[0]
    assert len(lines) == 5
    for line, expected in zip(lines, records):
        assert line["router_loss"] > 0
        torch.testing.assert_close(line["loss"] + line["router_loss"], expected["loss"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(line["gradient_norm"], expected["gradient_norm"], rtol=1e-5, atol=1e-6)
    assert validations[-1]["loss"] == pytest.approx(validation_loss, rel=1e-5)  # without what routers add
    assert model.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(model[name], value, rtol=1e-4, atol=1e-5, msg=name)
    assert model["decoder.layers.0.mlp.router.expert_bias"].abs().max() > 0
    loads = metrics(tmp_path / "run", "experts")
    assert [line["step"] for line in loads] == [1, 2, 3, 4, 5]
    assert all(line["load"].keys() == {"decoder.layers.0.mlp", "decoder.layers.2.mlp"} for line in loads)
    assert all(sum(load) == 8 * 16 * 2 for line in loads for load in line["load"].values())
    exchanged = [rows for line in loads for rows in line["exchanged"].values()]
    assert len(exchanged) == 5 * 2 and all(0 < rows < assignments < 8 * 16 * 2 for assignments, rows in exchanged)


@pytest.mark.long
def test_loads_are_those_of_the_step_that_is_logged(pool, tmp_path):
    kept = {name: value for name, value in SETTINGS.items() if not name.startswith(("model__expert_b", "train__"))}
    path = write_config(tmp_path, **kept, train__validate_every=0, train__log_every=2, checkpoint__every=0)
    pool.run(2, train_on, path, tmp_path / "run", stop_at=2)
    (line,) = metrics(tmp_path / "run", "experts")
    assert [sum(load) for load in line["load"].values()] == [8 * 16 * 2] * 2
    assert all(0 < rows < assignments < 1.5 * 8 * 16 for assignments, rows in line["exchanged"].values())


SMALL = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "mamba_num_heads": 2,
    "mamba_head_dim": 8,
    "ssm_state_size": 4,
    "chunk_size": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
}
ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_hybrid_of_make_train_hybrid_goes_on_bit_for_bit(pool, tmp_path):
    """Mamba, attention, spread experts and a depth, overlapped: as configured, but with experts in the depth too."""
    with (ROOT / "configs" / "stdlib-hybrid.toml").open("rb") as file:
        given = tomllib.load(file)
    model = {**given["model"], **SMALL, "pattern": given["model"]["pattern"].replace("/[*-]", "/[*E]")}
    assert model["pattern"] != given["model"]["pattern"]
    kept = {"overlap": True, "delay_wgrad": True, "log_every": 1, "validate_every": 2, "steps": 4}
    path = write_config(
        tmp_path,
        **{f"model__{name}": value for name, value in model.items()},
        **{f"sharding__{name}": value for name, value in given["sharding"].items()},
        **{f"train__{name}": value for name, value in kept.items()},
        checkpoint__every=2,
    )
    assert all(given["train"][name] for name in ("overlap", "delay_wgrad")) and given["sharding"]["ep"] == 2
    whole = pool.run(2, train_on, path, tmp_path / "run", stop_at=4)[0]
    pool.run(2, train_on, path, tmp_path / "parts", stop_at=2)
    parts = pool.run(2, train_on, path, tmp_path / "parts", stop_at=4, resume_from=2)[0]
    assert parts[:2] == whole[:2] and len(whole[0]) == 4
    assert all(line["loss_depth_1"] > 0 for line in whole[0])
    for mine, theirs in zip(parts[2:4], whole[2:4]):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def predictions(path, directory, overrides):
    """What the model of a checkpoint says of some tokens, and its state."""
    trainer = Trainer(load_config(path, overrides), Run(directory, 8), say=lambda line: None)
    trainer.saves.close()
    tokens = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(5))
    trainer.model.eval()
    with torch.no_grad():
        logits = trainer.model(tokens)
    return logits, nets.whole(trainer.model.state_dict())


def last_step(path, directory):
    """How the only step of a run was scheduled, and how long each rank computed in it."""
    given, schedule = [], passes.forward_backward

    def scheduled(*args, **kwargs):
        given.append(kwargs)
        return schedule(*args, **kwargs)

    passes.forward_backward = scheduled
    try:
        trainer = Trainer(load_config(path), Run(directory), say=lambda line: None)
        trainer.run()
    finally:
        passes.forward_backward = schedule
    return [(each["halves"], each["schedule"]) for each in given], trainer.passes.computed


@pytest.mark.long
@pytest.mark.parametrize(
    "setting, given",
    [({"train__halves": True}, (True, None)), ({"train__pipeline_schedule": "paired"}, (False, "paired"))],
)
def test_what_stands_alone_is_exchanged_as_the_run_says_and_each_rank_tells_how_long_it_computed(
    pool, tmp_path, setting, given
):
    settings = {"train__microbatch_size": 1, "train__steps": 1, "checkpoint__every": 0, **setting}
    path = write_config(tmp_path, **SETTINGS, **settings)
    found = pool.run(2, last_step, path, tmp_path / "run")
    assert [how for how, _ in found] == [[given], [given]]
    (first, second), others = found[0][1], found[1][1]
    assert [first, second] == others and first > 0 and second > 0
    assert parse_json((tmp_path / "run" / "facts.json").read_text())["computed"] == [first, second]


@pytest.mark.long
def test_a_run_resumes_bit_for_bit_in_new_processes_and_its_checkpoint_loads_with_experts_anywhere(pool, tmp_path):
    path = write_config(tmp_path, **SETTINGS, train__steps=4, train__validate_every=2)
    whole, parts = tmp_path / "whole", tmp_path / "runs" / "tiny"
    pool.run(2, train_on, path, whole, stop_at=4)
    pool.run(2, train_on, path, parts, stop_at=2)
    resumed = weft("train", path, "--ranks", 2, "--resume", parts, pictures=True, OMP_NUM_THREADS="1")
    assert resumed.returncode == 0, resumed.stderr
    assert f"resuming {parts} from step 2" in resumed.stdout
    assert re.search(r"tokens were in transit between ranks for \d+ ms, \d+% of it under computation", resumed.stdout)
    assert (parts / "experts.svg").exists() and (parts / "lanes.svg").exists()
    for kind in ("train", "validation", "experts"):
        assert metrics(parts, kind) == metrics(whole, kind)
    assert_same_contents(*(contents(run / "checkpoints" / "step-00000004") for run in (parts, whole)))

    logits, state = pool.run(2, predictions, path, whole, [])[0]
    assert state["decoder.layers.0.mlp.experts.gate_proj"].shape == (4, 16, 16)
    one_place = ["sharding.ep=1", "train.overlap=false", "train.delay_wgrad=false"]
    for ranks, changes in ((2, one_place), (4, [])):
        others, other_state = pool.run(ranks, predictions, path, whole, [*changes, "train.microbatch_size=1"])[0]
        assert other_state.keys() == state.keys()
        assert all(torch.equal(other_state[name], value) for name, value in state.items())
        torch.testing.assert_close(others, logits)
