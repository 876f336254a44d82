"""Buffers such as running statistics follow a rule over the ranks, and resume bit for bit."""

import pytest
import torch
from torch import nn

from tests.pool import distributed
from tests.train.command import assert_same_contents, contents
from weft.models import HybridConfig, HybridModel
from weft.train import Trainer
from weft.train.buffers import Buffers, buffers_of
from weft.train.config import ConfigError


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def build():
    torch.manual_seed(0)
    return Normalised()


def loss(model, batch):
    return model(batch).square().mean()


def batches(rank, ranks):
    generator = torch.Generator().manual_seed(7 + rank)
    return [torch.randn(4, 4, generator=generator) + rank for _ in range(4)]


def trained(folder, rule, steps, **options):
    config = {
        "train": {
            "steps": steps,
            "global_batch_size": 8,
            "microbatch_size": 4,
            "validate_every": 0,
            "buffers": rule,
        },
        "schedule": {"shape": "constant"},
        "run": {"directory": str(folder), "loggers": []},
    }
    trainer = Trainer(
        model=build, loss=loss, data=batches, validation=batches, config=config, say=lambda line: None, **options
    )
    trainer.run()
    return trainer


def statistics(trainer):
    return trainer.model.norm.running_mean.tolist()


def train_both_ways(folder, rule):
    """The statistics of this rank: of an undisturbed run, and of one that was stopped and resumed."""
    whole = trained(folder / "whole", rule, 4)
    trained(folder / "parts", rule, 2)
    resumed = trained(folder / "parts", rule, 4, resume=True)
    return statistics(whole), statistics(resumed)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["broadcast", "mean", "own"])
def test_a_model_with_running_statistics_resumes_bit_for_bit_by_its_rule(pool, tmp_path, rule):
    (whole, resumed), (other_whole, other_resumed) = pool.run(2, train_both_ways, tmp_path, rule)
    assert whole == resumed and other_whole == other_resumed
    assert (whole == other_whole) == (rule != "own")
    last = "default/checkpoints/step-00000004"
    assert_same_contents(contents(tmp_path / "whole" / last), contents(tmp_path / "parts" / last))
    (alone,) = pool.run(1, resume_alone, tmp_path / "parts", rule)
    assert alone == whole  # on another number of ranks, rank 0's


def resume_alone(folder, rule):
    return statistics(trained_alone(folder, rule))


def trained_alone(folder, rule):
    from weft.checkpoint import CheckpointManager, ModelState

    model = build()
    state = {"model": ModelState(model)}
    if rule == "own":
        state["buffers"] = Buffers(model, rule)
    CheckpointManager(folder / "default" / "checkpoints").load(state)

    class Trained:
        pass

    Trained.model = model
    return Trained


@distributed(2)
def test_the_mean_is_that_of_all_ranks_and_counts_are_those_of_rank_0():
    import torch.distributed as dist

    model = build()
    model.norm.running_mean.fill_(float(dist.get_rank()))
    model.norm.num_batches_tracked.fill_(3 + dist.get_rank())
    Buffers(model, "mean").after_step()
    assert model.norm.running_mean.tolist() == [0.5] * 8
    assert model.norm.num_batches_tracked.item() == 3


def test_a_rule_on_a_model_of_a_pattern_is_refused():
    with torch.device("meta"):
        model = HybridModel(HybridConfig(pattern="[*-]"))
    with pytest.raises(ConfigError, match=r'train\.buffers = "mean": has no effect on a model that a pattern'):
        buffers_of(model, "mean")
    assert buffers_of(model, "broadcast") is None
