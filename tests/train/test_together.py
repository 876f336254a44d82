"""What the trainer can do beside training, with experts spread and overlapped, and with a pipeline's stages.

The reference is the same run in one process, whose habits have tests of their own; what cannot go together is refused.
"""

from itertools import count

import pytest

from tests.fsdp import nets
from tests.train.command import committed, metrics, write_config
from weft.train import spikes
from weft.train.config import ConfigError, load_config
from weft.train.loop import Trainer
from weft.train.report import page
from weft.train.run.runs import Run

pytestmark = pytest.mark.slow

MODEL = {
    "model__pattern": "[*E][*-][*E]",
    "model__num_experts": 4,
    "model__moe_intermediate_size": 16,
    "train__gradient_clip": 0.5,
    "train__validate_every": 0,
    "checkpoint__every": 0,
}
EXPERTS = ["sharding.ep=2", "train.overlap=true", "train.delay_wgrad=true"]
STAGES = ["sharding.pp=2", "train.pipeline_schedule=dualpipev"]
TOLD = [5.0, 4.0, 3.0, 4.5, 3.5, 3.5, 3.5]
"""Losses of validations: the best is the third, and the run ends early after the sixth."""
POISONED = 5


def trained(path, folder, overrides=(), poison=False):
    """Losses and norms, weights of this rank at the end, checkpoints, and which steps changed no weight here."""
    trainer = Trainer(load_config(path, overrides), Run(folder), say=lambda line: None)
    passing, calls, seen, same = trainer.passes.run, count(), [], []

    def run(step, microbatches):
        losses = passing(step, microbatches)
        if poison and step == POISONED:
            for parameter in trainer.model.parameters():
                parameter.grad.mul_(1000)
        return losses

    def moment(name, numbers):
        if name in ("start", "step"):
            weights = nets.whole(trainer.model.state_dict())
            if seen and all(value.equal(seen[-1][name]) for name, value in weights.items()):
                same.append(trainer.position.step)
            seen.append(weights)

    if poison:
        trainer.task.validation_values = lambda loss: {"loss": loss, "nats_per_byte": TOLD[next(calls) // 2]}
    trainer.passes.run, trainer.moment = run, moment
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(spikes, "_LEAST", 3)
        patched.setattr(page, "can_draw", lambda: False)
        trainer.run()
    return metrics(folder), metrics(folder, "validation"), seen[-1], committed(folder), same


def assert_close(found, expected):
    """Losses, norms and averages of a run's first rank, weights of all, as in one process."""
    (lines, validations, *_), (own_lines, own_validations, weights, saved, same) = found[0], expected
    assert [line["step"] for line in lines] == [line["step"] for line in own_lines]
    for one, other in zip(lines + validations, own_lines + own_validations, strict=True):
        for name in {"loss", "gradient_norm", "ema_loss", "skipped_steps"} & other.keys():
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), (name, one["step"])
    for _, _, held, checkpoints, unchanged in found:
        assert checkpoints == saved and unchanged == same
        for name, value in held.items():
            assert value.allclose(weights[name], rtol=1e-3, atol=1e-5), name
    assert set().union(*(held for _, _, held, _, _ in found)) == weights.keys()


HABITS = {
    "train__skip_spikes": 20.0,
    "train__ema_decay": 0.9,
    "train__validate_every": 1,
    "train__stop_after": 3,
    "checkpoint__keep": 1,
    "checkpoint__keep_best": True,
}


@pytest.mark.long
@pytest.mark.parametrize("layout", [EXPERTS, STAGES], ids=["experts", "stages"])
def test_spikes_averages_the_best_checkpoint_and_an_early_end(pool, tmp_path, layout):
    path = write_config(tmp_path, **{**MODEL, **HABITS}, train__steps=20)
    expected = pool.run(1, trained, path, tmp_path / "one", poison=True)[0]
    found = pool.run(2, trained, path, tmp_path / "two", layout, poison=True)
    assert_close(found, expected)
    _, _, _, saved, same = expected
    assert same == [POISONED] and saved == [3, 6]


@pytest.fixture(scope="module")
def in_one_process(pool, tmp_path_factory):
    """The run that most ways must equal."""
    folder = tmp_path_factory.mktemp("alone")
    return pool.run(1, trained, write_config(folder, **MODEL, train__steps=3), folder / "one")[0]


@pytest.mark.parametrize(
    "ranks, changes, ways",
    [
        pytest.param(2, {"optimizer__name": "Muon"}, [], marks=pytest.mark.long),
        pytest.param(4, {}, ["sharding.dp_replicate=2", "train.microbatch_size=1"], marks=pytest.mark.long),
        pytest.param(2, {}, ["sharding.offload=true"], marks=pytest.mark.long),
        pytest.param(2, {}, ["optimizer.flat=true"], marks=pytest.mark.long),
    ],
    ids=["muon", "hsdp", "offload", "flat"],
)
def test_optimizers_and_ways_of_sharding(pool, in_one_process, tmp_path, ranks, changes, ways):
    path = write_config(tmp_path, **{**MODEL, **changes}, train__steps=3)
    expected = pool.run(1, trained, path, tmp_path / "one")[0] if changes else in_one_process
    for name, layout in (("experts", EXPERTS), ("stages", STAGES)):
        assert_close(pool.run(ranks, trained, path, tmp_path / name, [*layout, *ways]), expected)


@pytest.mark.parametrize("layout", [EXPERTS, STAGES], ids=["experts", "stages"])
@pytest.mark.parametrize("change", ["train.compile=inductor", "train.activation_checkpointing=true"])
def test_what_needs_whole_layers_is_refused_where_they_run_in_parts(tmp_path, layout, change):
    path = write_config(tmp_path, **MODEL)
    with pytest.raises(ConfigError, match="stages"):
        load_config(path, [*layout, change])
