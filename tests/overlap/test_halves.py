"""What stands alone exchanges its rows in halves: experts compute one half while the other travels."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

import weft
from tests.overlap.small import build, config, gradients, plain
from tests.overlap.test_events import Events, data
from tests.pool import distributed
from weft.moe import router_losses
from weft.overlap import forward_backward
from weft.overlap.order import BACKWARD, FORWARD

CFG = config("[*E]*[*E]", shared_expert_intermediate_size=8, aux_loss_coef=0.1)


class Sequence(Events):
    """Events in one order: (what, lane, step) of each issue and each first wait."""

    def __init__(self):
        super().__init__()
        self.said = []

    def note(self, what, ticket):
        self.said.append((what, self.lanes[ticket], ticket, self[-1]))

    def of(self, microbatch, layer, direction):
        """What an exchange of this layer saw, each transfer by its number."""
        numbers, found = {}, []
        for what, lane, ticket, step in self.said:
            if lane in ("counts", "exchange") and step[:3] == (direction, microbatch, layer):
                found.append(f"{what} {lane} {numbers.setdefault((lane, ticket), len(numbers))} in {step.slot}")
        return found


@pytest.mark.long
@distributed(2)
def test_halves_change_no_loss_and_gradients_only_by_the_order_of_sums():
    meshes = weft.init_meshes("cpu", ep=2)
    for options, delay_wgrad in (({}, False), ({"strategy": "optim_grads_params"}, True)):
        found = []
        for halves in (False, True):
            model = build(CFG, meshes, **options)
            losses = forward_backward(model, data(3), delay_wgrad=delay_wgrad, halves=halves)
            found.append((losses, gradients(model)))
        assert_close(found[1][0], found[0][0])
        for name, gradient in found[0][1].items():
            assert_close(found[1][1][name], gradient, msg=lambda text, name=name: f"{name}: {text}")
        again = build(CFG, meshes, **options)
        forward_backward(again, data(3), delay_wgrad=delay_wgrad, halves=True)
        for name, gradient in gradients(again).items():
            assert torch.equal(gradient, found[1][1][name]), "the same in every run"


@pytest.mark.slow
@distributed(2)
def test_a_microbatch_of_one_token_and_a_capacity_that_leaves_a_half_nothing():
    meshes = weft.init_meshes("cpu", ep=2)
    for cfg in (CFG, config("[*E]", capacity_factor=0.2, aux_loss_coef=0.1)):
        for shape in ((1, 1), (1, 5)):
            generator = torch.Generator().manual_seed(dist.get_rank())
            microbatches = [torch.randint(37, (2, *shape), generator=generator).unbind() for _ in range(2)]
            model, reference = build(cfg, meshes), build(cfg, meshes)
            losses = forward_backward(model, microbatches, halves=True)
            assert_close(losses, plain(reference, microbatches))
            assert_close(router_losses(model), router_losses(reference))  # once, not for each half
            expected = gradients(reference)
            for name, gradient in gradients(model).items():
                assert_close(gradient, expected[name])


@pytest.mark.slow
@distributed(2)
def test_a_half_leaves_behind_its_counts_and_the_other_while_experts_compute():
    events = Sequence()
    with events.recording():
        forward_backward(build(CFG, weft.init_meshes("cpu", ep=2)), data(3), trace=events, halves=True)
    for microbatch in (0, 2):  # the first forward and the last backward stand alone
        assert events.of(microbatch, 2, FORWARD) == [
            *("issue counts 0 in attend", "issue counts 1 in attend"),
            *("issue exchange 2 in dispatch", "issue exchange 3 in dispatch"),
            *("wait exchange 2 in experts", "wait counts 0 in experts", "issue exchange 4 in experts"),
            *("wait exchange 3 in experts", "wait counts 1 in experts"),
            *("issue exchange 5 in combine", "wait exchange 4 in finish", "wait exchange 5 in finish"),
        ]
        assert events.of(microbatch, 2, BACKWARD) == [
            *("issue exchange 0 in combine", "issue exchange 1 in combine"),
            *("wait exchange 0 in experts", "issue exchange 2 in experts", "wait exchange 1 in experts"),
            *("issue exchange 3 in dispatch", "wait exchange 2 in attend", "wait exchange 3 in attend"),
        ]
    assert len(events.of(1, 2, FORWARD)) == 2 + 2 * 2, "what has a partner goes in one piece"


@pytest.mark.slow
@distributed(2)
def test_halves_without_effect_are_refused():
    meshes = weft.init_meshes("cpu", ep=2)
    with pytest.raises(ValueError, match=r"halves=True without overlap"):
        forward_backward(build(CFG, meshes), data(2), overlap=False, halves=True)
    per_expert = build(config("[*E]", moe_rows_per="expert"), meshes)
    with pytest.raises(ValueError, match=r"halves=True, but no layer sends one row per rank"):
        forward_backward(per_expert, data(2), halves=True)
    with pytest.raises(ValueError, match=r"halves=True, but in the schedule 'paired' no microbatch runs alone"):
        forward_backward(build(CFG, meshes), data(2), schedule="paired", halves=True)
