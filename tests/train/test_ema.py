import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.train.command import metrics, rewind, write_config
from tests.train.test_loop import StopAt, full
from weft.checkpoint import CheckpointManager
from weft.models import HybridModel, hf
from weft.train.config import load_config
from weft.train.ema import WeightAverage
from weft.train.loop import Trainer
from weft.train.run.runs import Run

DECAY = 0.9


def averaged(path, directory, stop_at, resume_from=None):
    """The averages at the end, and those that plain weights give, step by step."""
    stop, plain = StopAt(stop_at), {}
    stop.trainer = trainer = Trainer(load_config(path), Run(directory, resume_from), stop=stop, say=lambda line: None)
    weights = dict(trainer.model.named_parameters())
    plain = {name: full(weight.detach()) for name, weight in weights.items()}

    def follow(name, numbers):
        for key, weight in weights.items() if name == "step" else ():
            plain[key] = DECAY * plain[key] + (1 - DECAY) * full(weight.detach())

    trainer.moment = follow
    trainer.run()
    averages = {name: full(value) for name, value in trainer.average.state_dict().items()}
    return averages, plain, metrics(directory, "validation"), {name: full(w.detach()) for name, w in weights.items()}


def averaged_with_a_skipped_step(path, directory):
    """The averages after each step, of which the second is skipped."""
    stop, found = StopAt(3), []
    stop.trainer = trainer = Trainer(load_config(path), Run(directory), stop=stop, say=lambda line: None)
    trainer.spikes.is_one = lambda norm: trainer.position.step == 1

    def follow(name, numbers):
        if name == "step":
            assert all(parameter.grad is None for parameter in trainer.model.parameters()), "none for the next step"
            found.append({key: full(value) for key, value in trainer.average.state_dict().items()})

    trainer.moment = follow
    trainer.run()
    return found


@pytest.mark.slow
def test_a_step_that_is_skipped_does_not_count_in_the_average(pool, tmp_path):
    path = write_config(tmp_path, train__ema_decay=DECAY, train__validate_every=0, train__skip_spikes=5.0)
    first, second, third = pool.run(1, averaged_with_a_skipped_step, path, tmp_path / "run")[0]
    assert all(torch.equal(second[name], value) for name, value in first.items())
    assert not all(torch.equal(third[name], value) for name, value in first.items())


def test_averages_that_an_earlier_version_stored_in_bf16_are_loaded(tmp_path):
    model = torch.nn.Linear(2, 2).bfloat16()
    stored = {name: weight.detach() * 2 for name, weight in model.named_parameters()}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"ema": stored}, asynchronous=False)
        average = WeightAverage(model, DECAY)
        manager.load({"ema": average})
    loaded = average.state_dict()
    assert all(torch.equal(loaded[name], value.float()) for name, value in stored.items())
    average.after_step()
    assert not torch.equal(average.state_dict()["weight"], stored["weight"].float())


def test_what_is_frozen_has_no_average_and_stays():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).requires_grad_(False))
    average, frozen = WeightAverage(model, DECAY), model[1].weight.clone()
    assert set(average.state_dict()) == {"0.weight", "0.bias"}
    with torch.no_grad():
        model[0].weight.add_(1)
    trained = model[0].weight.clone()
    with pytest.raises(RuntimeError), average.in_place():
        assert torch.equal(model[1].weight, frozen) and not torch.equal(model[0].weight, trained)
        raise RuntimeError
    assert torch.equal(model[0].weight, trained), "also after a validation that fails"


def test_averages_of_narrow_weights_are_wide_and_follow_small_steps():
    weight = torch.nn.Parameter(torch.full((2,), 1.0, dtype=torch.bfloat16))
    average = WeightAverage(torch.nn.ParameterList([weight]), 0.999)
    weight.data.fill_(2.0)
    for _ in range(10):
        average.after_step()
    expected = torch.full((2,), 2 - 0.999**10)
    with average.in_place():
        assert torch.equal(weight, expected.bfloat16())
    torch.testing.assert_close(average.state_dict()["0"], expected)
    assert torch.equal(weight, torch.full((2,), 2.0, dtype=torch.bfloat16))


def test_averages_keep_their_names_if_activations_are_recomputed():
    """A resumed run may turn `train.activation_checkpointing` on or off."""
    model = torch.nn.Sequential(checkpoint_wrapper(torch.nn.Linear(2, 2)))
    assert set(WeightAverage(model, DECAY).state_dict()) == {"0.weight", "0.bias"}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_average_on_any_ranks_is_that_of_one_process(pool, tmp_path, ranks):
    path = write_config(tmp_path, train__ema_decay=DECAY, train__validate_every=2)
    averages, plain, validations, weights = pool.run(ranks, averaged, path, tmp_path / "run", 4)[0]
    assert averages.keys() == plain.keys()
    for name, value in plain.items():
        torch.testing.assert_close(averages[name], value)
        assert not torch.equal(averages[name], weights[name])
    assert all(line["ema_loss"] > line["loss"] for line in validations), "the average is behind while the loss falls"


@pytest.mark.long
def test_a_run_with_a_moving_average_resumes_bit_for_bit(pool, tmp_path):
    path = write_config(tmp_path, train__ema_decay=DECAY, train__validate_every=3, checkpoint__every=3)
    whole = pool.run(2, averaged, path, tmp_path / "run", 6)[0]
    rewind(tmp_path / "run", 3)
    parts = pool.run(2, averaged, path, tmp_path / "run", 6, 3)[0]
    assert parts[2] == whole[2]
    assert all(torch.equal(parts[0][name], value) for name, value in whole[0].items())


def averages_of_a_run_from_weights(path, weights):
    config = load_config(path, [f"run.weights={weights}", "run.name=second"])
    trainer = Trainer(config, Run(config.run.path, None), say=lambda line: None)
    found = trainer.average.state_dict()
    return all(torch.equal(full(found[name]), full(weight)) for name, weight in trainer.model.named_parameters())


def test_averages_start_at_the_weights_that_a_run_starts_from(pool, tmp_path):
    path = write_config(tmp_path, train__ema_decay=0.9, train__steps=2, train__validate_every=0)
    model = HybridModel(load_config(path).model)
    hf.save(model, tmp_path / "published")
    assert pool.run(1, averages_of_a_run_from_weights, path, tmp_path / "published")[0]
