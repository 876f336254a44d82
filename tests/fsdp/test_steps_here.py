"""A rank takes part in what others wait for with weights of as many steps as theirs."""

from types import SimpleNamespace

import pytest
import torch

from tests.fsdp import nets
from tests.pool import distributed
from weft.comm.watch.hang_detector import hang_detector
from weft.fsdp.runtime.helper import Steps


def test_a_rank_that_has_not_stepped_yet_sends_nothing_to_one_that_has():
    said = {}
    watch = SimpleNamespace(note=said.__setitem__)
    trained, frozen = SimpleNamespace(trainable=True, version=3), SimpleNamespace(trainable=False, version=3)
    here = Steps([trained, frozen], 7)
    here.begin_pass(watch)
    assert said == {"weft/steps/7": 0} and here.reached(said)
    ahead = {"weft/steps/7": 1}
    assert not here.reached(ahead)  # the other rank has ended the backward that this one is in
    here.expect()
    frozen.version += 1
    assert not here.reached(ahead) and here.reached({})
    trained.version += 1
    assert here.reached(ahead)
    here.begin_pass(watch)
    assert said == ahead
    here.expect()
    here.begin_pass(watch)  # without a step: the weights are those of before
    assert said == ahead and here.reached({"weft/steps/7": 2})


def test_after_a_pass_that_failed_ranks_do_not_count():
    here = Steps([SimpleNamespace(trainable=True, version=0)], 7)
    here.forget()
    assert here.reached({"weft/steps/7": 5})


@distributed(2)
def test_a_model_says_how_many_steps_its_weights_have_until_a_pass_fails():
    net, tokens = nets.shard(nets.make()), nets.data(1, 4)[0]

    def said() -> int:
        with torch.no_grad():
            net(tokens)
        return max(number for key, number in hang_detector().issued.items() if key.startswith("weft/steps/"))

    for steps in range(3):
        assert said() == steps
        nets.loss_of(net, tokens).backward()
        with torch.no_grad():
            net.gain.mul_(0.5)
    with pytest.raises(TypeError):
        net(None)
    assert said() == 0
