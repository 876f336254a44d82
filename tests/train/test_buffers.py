"""Buffers such as running statistics follow a rule over the ranks, and resume bit for bit."""

import shutil

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

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


def batches(rank, ranks, number=4):
    generator = torch.Generator().manual_seed(7 + rank)
    made = [torch.randn(4, 4, generator=generator) + rank for _ in range(number)]
    for count, batch in enumerate(made):
        batch[0, 0] = count
    return made


def trained(folder, rule, steps, *, loss=loss, data=batches, run=True, size=8, skip=0.0, **options):
    config = {
        "train": {
            "steps": steps,
            "global_batch_size": size,
            "microbatch_size": 4,
            "validate_every": 0,
            "buffers": rule,
            "skip_spikes": skip,
        },
        "schedule": {"shape": "constant"},
        "run": {"directory": str(folder), "loggers": []},
    }
    trainer = Trainer(
        model=build, loss=loss, data=data, validation=batches, config=config, say=lambda line: None, **options
    )
    if run:
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


@pytest.mark.long
@pytest.mark.parametrize("rule", ["broadcast", "mean", "own"])
def test_a_model_with_running_statistics_resumes_bit_for_bit_by_its_rule(pool, tmp_path, rule):
    (whole, resumed), (other_whole, other_resumed) = pool.run(2, train_both_ways, tmp_path, rule)
    assert whole == resumed and other_whole == other_resumed
    assert (whole == other_whole) == (rule != "own")
    last = "default/checkpoints/step-00000004"
    assert_same_contents(contents(tmp_path / "whole" / last), contents(tmp_path / "parts" / last))


def changed_to_own(folder):
    """The statistics of this rank at the end of a run, and when a run with each rank's own resumes from there."""
    before = statistics(trained(folder, "broadcast", 2))
    again = trained(folder, "own", 3, resume=True, run=False)
    begun = statistics(again)
    again.run()
    return before, begun, statistics(again), statistics(trained(folder, "own", 4, resume=True, run=False))


@distributed(1)
def test_buffers_inside_of_recomputed_blocks_have_the_names_of_others():
    model = nn.ModuleDict({"seen": nn.BatchNorm1d(3), "block": checkpoint_wrapper(nn.BatchNorm1d(3))})
    names = Buffers(model, "own").state_dict()["buffers"].keys()
    assert {name.partition(".")[0] for name in names} == {"seen", "block"}
    assert not any("_checkpoint_wrapped_module" in name for name in names)


@pytest.mark.slow
def test_each_rank_can_have_its_own_buffers_from_a_resume_on(pool, tmp_path):
    first, second = pool.run(2, changed_to_own, tmp_path)
    assert first[0] == first[1] == second[0] == second[1]
    assert first[2] == first[3] != second[2] == second[3]


seen = []


def loss_of_seen(model, batch):
    seen.append(int(batch[0, 0]))
    return loss(model, batch)


def in_turn(rank, ranks):
    return batches(0, 1, number=12)[rank::ranks]


def train_on(folder, rule, steps):
    """(statistics when it begins, microbatches of this rank, statistics at the end, its loss of one batch then)."""
    seen.clear()
    trainer = trained(folder, rule, steps, loss=loss_of_seen, data=in_turn, resume=steps > 2, run=False, size=16)
    begun = statistics(trainer)
    trainer.run()
    trainer.model.eval()
    evaluated = loss(trainer.model, batches(0, 1)[0]).item()
    return begun, [*seen], statistics(trainer), evaluated


@pytest.mark.long
@pytest.mark.parametrize("rule", ["broadcast", "own"])
def test_on_another_number_of_ranks_all_begin_with_rank_0s_and_see_the_microbatches_that_follow(pool, tmp_path, rule):
    (_, _, saved, _), *_ = pool.run(2, train_on, tmp_path / "2", rule, 2)
    for ranks in (1, 4):
        shutil.copytree(tmp_path / "2", tmp_path / f"{ranks}")
        shutil.copytree(tmp_path / "2", tmp_path / f"{ranks} again")
        found = pool.run(ranks, train_on, tmp_path / f"{ranks}", rule, 4)
        assert [begun for begun, *_ in found] == [saved] * ranks
        assert found == pool.run(ranks, train_on, tmp_path / f"{ranks} again", rule, 4)
        third, fourth = (
            {each for _, taken, *_ in found for each in taken[at : at + 4 // ranks]} for at in (0, 4 // ranks)
        )
        assert third == {8, 9, 10, 11} and fourth == {0, 1, 2, 3}  # of the next pass
        if rule == "broadcast":
            assert len({loss for *_, loss in found}) == 1, "it evaluates alike on all ranks"


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
    with pytest.raises(ConfigError, match=r'train\.buffers = "mean": has no effect on a model described by a pattern'):
        buffers_of(model, "mean")
    assert buffers_of(model, "broadcast") is None


def test_a_buffer_that_was_replaced_is_saved():
    net = nn.Module()
    net.register_buffer("seen", torch.zeros(2))
    buffers = Buffers(net, "own")
    net.seen = torch.ones(2)
    assert buffers.state_dict()["buffers"]["seen"].tolist() == [1.0, 1.0]


def buffers_around_a_skipped_step(folder):
    """The buffers after each step, of which the 22nd has a batch with a NaN and is skipped."""
    found = []

    def spoiled(model, batch):
        return loss(model, batch * (torch.nan if model.training and len(found) == 21 else 1))

    def keep(trainer, numbers):
        found.append((numbers["skipped_steps"], [buffer.clone() for buffer in trainer.model.buffers()]))

    trained(folder, "broadcast", 23, loss=spoiled, size=4, skip=100.0, callbacks={"step": keep})
    return found[20:]


@pytest.mark.slow
def test_a_skipped_step_changes_no_buffer(pool, tmp_path):
    (before, kept), (skipped, same), (_, other) = pool.run(1, buffers_around_a_skipped_step, tmp_path)[0]
    assert (before, skipped) == (0, 1)
    for one, two, three in zip(kept, same, other, strict=True):
        assert torch.equal(one, two) and not torch.equal(one, three) and three.isfinite().all()
