"""Habits that people bring along: what they do to modules and parameters after sharding works, or says why not."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import weft
import weft.debug
from tests.fsdp import nets
from tests.pool import distributed
from weft.comm import backends
from weft.comm.builtin import BuiltIn
from weft.fsdp.module import runtime_of, units_under


@distributed(2)
def test_moving_to_where_it_is_changes_nothing_and_converting_is_refused():
    net = nets.shard(nets.make())
    parameters = list(net.parameters())
    assert net.to("cpu") is net and net.float() is net
    assert all(one is other for one, other in zip(net.parameters(), parameters))
    with pytest.raises(
        ValueError, match=r"would change from torch.float32 on cpu to torch.bfloat16.*MixedPrecisionPolicy"
    ):
        net.bfloat16()
    assert all(one is other for one, other in zip(net.parameters(), parameters))
    nets.loss_of(net, nets.data(1, 4)[0]).backward()


@distributed(2)
def test_deepcopy_is_refused():
    with pytest.raises(TypeError, match="deepcopy of the sharded Net: copy the module before fully_shard"):
        copy.deepcopy(nets.shard(nets.make()))


@pytest.mark.slow
@distributed(2)
def test_freezing_and_unfreezing_after_sharding_counts():
    plain, net = nets.make(), nets.shard(nets.make())
    for freeze in (True, False):
        for model in (plain, net):
            model.zero_grad()
            for parameter in model.blocks[0].parameters():
                parameter.requires_grad_(not freeze)
            nets.loss_of(model, nets.data(1, 4)[0]).backward()
        gradients = {name: p.grad for name, p in plain.named_parameters()}
        for name, parameter in net.named_parameters():
            assert (parameter.grad is None) == (gradients[name] is None), name
            if parameter.grad is not None:
                torch.testing.assert_close(nets.full(parameter.grad), gradients[name])


@distributed(2)
def test_hooks_on_accumulated_gradients_run_once_with_the_reduced_gradient():
    net = nets.shard(nets.make())
    seen = {}
    for name, parameter in net.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.setdefault(name, []).append(p.grad))
    nets.loss_of(net, nets.data(1, 4)[0]).backward()
    assert {name: [p.grad] for name, p in net.named_parameters()} == seen


@distributed(2)
def test_a_hook_on_an_accumulated_gradient_may_remove_itself():
    for net in (nets.make(), nets.shard(nets.make())):
        seen = []
        for parameter in net.parameters():
            once = parameter.register_post_accumulate_grad_hook(
                lambda p, seen=seen: (seen.append(p), p.once.remove())[1]
            )
            parameter.once = once
            parameter.register_post_accumulate_grad_hook(seen.append)
        for _ in range(2):
            nets.loss_of(net, nets.data(1, 4)[0]).backward()
        assert len(seen) == 3 * len([*net.parameters()])


@distributed(2)
def test_random_initialisation_in_place_draws_what_one_process_draws():
    plain, net = nets.make(), nets.shard(nets.make())
    for model in (plain, net):
        torch.manual_seed(3)
        for parameter in model.parameters():
            nn.init.normal_(parameter) if parameter.ndim < 2 else nn.init.kaiming_uniform_(parameter)
    for (name, parameter), expected in zip(net.named_parameters(), plain.parameters()):
        torch.testing.assert_close(nets.full(parameter), expected.detach(), rtol=0, atol=0, msg=name)


@pytest.mark.slow
@distributed(2, 4)
def test_a_gradient_scaler_skips_a_step_on_every_rank_if_one_rank_has_an_infinite_gradient():
    net = nets.shard(nets.make())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for infinite in (False, True):
        before = [nets.full(p) for p in net.parameters()]
        optimizer.zero_grad()
        scaler.scale(nets.loss_of(net, nets.data(1, 4)[0])).backward()
        if infinite:
            largest = next(p for p in net.parameters() if p.ndim == 2)
            local = largest.grad.to_local()
            if local.numel() and largest.grad.part == 0:
                local.view(-1)[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(nets.full(p), old) for p, old in zip(net.parameters(), before))
        assert same == infinite


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@distributed(2)
def test_weights_may_be_written_in_any_way_between_passes(strategy, dtype):
    ways = {
        "in place": lambda p: p.mul_(2),
        "of the local part": lambda p: p.to_local().mul_(2),
        "of the data": lambda p: p.data.mul_(2),
        "of the data's local part": lambda p: p.data.to_local().mul_(2),
    }
    policy = weft.MixedPrecisionPolicy(param_dtype=dtype)
    model = weft.fully_shard(nn.Linear(5, 5, bias=False), strategy=strategy, mp_policy=policy)
    x = torch.randn(2, 5)
    with torch.no_grad():
        for name, write in ways.items():
            before = model(x)
            write(model.weight)
            torch.testing.assert_close(model(x), 2 * before, msg=name)


SHARES = [("no_shard", None), ("optim", None), ("optim_grads", None), ("optim_grads_params", "optim")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("strategy", "outer"), SHARES)
@distributed(2)
def test_a_frozen_model_that_gradients_go_through_has_its_weights_of_now(strategy, outer, dtype):
    """Such as a teacher, whose weights follow those of a student."""
    options = {"mesh": init_device_mesh("cpu", (2, 1)), "outer_strategy": outer} if outer else {}
    policy = weft.MixedPrecisionPolicy(param_dtype=dtype)
    model = nn.Linear(5, 5, bias=False).requires_grad_(False)
    weft.fully_shard(model, strategy=strategy, mp_policy=policy, **options)
    x = torch.randn(2, 5, requires_grad=True)
    for _ in range(2):
        before = model(x)
        before.sum().backward()
        with torch.no_grad():
            model.weight.mul_(2)
        torch.testing.assert_close(model(x), 2 * before)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
@distributed(2)
def test_weights_that_are_loaded_or_stepped_between_microbatches_are_seen_at_once(strategy):
    def forward_and_backward() -> torch.Tensor:
        y = model(x)
        y.sum().backward()
        return y.detach()

    policy = weft.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = weft.fully_shard(nn.Linear(5, 5, bias=False), strategy=strategy, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.randn(2, 5)
    model.set_is_last_backward(False)
    before = forward_and_backward()
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()})
    torch.testing.assert_close(forward_and_backward(), 2 * before)
    if strategy.startswith("optim_grads"):  # the others have no gradient to step with yet
        optimizer.step()
        stepped = x.bfloat16() @ model.weight.full_tensor().bfloat16().t()
        torch.testing.assert_close(forward_and_backward(), stepped)
    with torch.no_grad():
        model.weight.mul_(3)
        whole = model.weight.full_tensor().bfloat16()
        torch.testing.assert_close(model(x), x.bfloat16() @ whole.t())  # an evaluation


def gathered(model):
    return weft.memory_report(model)["transient"]["gathered weights"]["live"]


@distributed(2)
def test_a_weight_that_leaves_its_unit_is_refused_where_it_leaves():
    class Returning(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple:
            return super().forward(x), self.weight.t()

    for keep in (True, False):
        model = nn.Sequential(Returning(5, 5))
        weft.fully_shard(model[0], reshard_after_forward=not keep)
        weft.fully_shard(model)
        for _ in range(2):
            if keep:
                output, weight = model(torch.randn(2, 5))
                (output.sum() + weight.sum()).backward()
                with torch.no_grad():
                    _, weight = model(torch.randn(2, 5))
                assert gathered(model) > 0 and torch.equal(weight, model[0].weight.full_tensor().t())
                model(torch.randn(2, 5))[0].sum().backward()
                assert gathered(model) == 0
                continue
            with pytest.raises(RuntimeError, match=r"0 \(Returning\) returned .* of its gathered weights.*clone"):
                model(torch.randn(2, 5))


@distributed(2)
def test_an_input_that_a_unit_does_not_use_has_no_gradient():
    class Ignoring(nn.Linear):
        def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    model = weft.fully_shard(Ignoring(5, 5))
    x, other = (torch.randn(2, 5, requires_grad=True) for _ in range(2))
    model(x, other).sum().backward()
    assert x.grad is not None and other.grad is None


@distributed(2)
def test_a_forward_may_leave_out_modules_of_a_unit():
    def make():
        torch.manual_seed(0)
        return nn.ModuleDict({"one": nn.Linear(5, 5), "other": nn.Linear(5, 5)})

    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = make()

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            x = self.parts["one"](x)
            return self.parts["other"](x) if both else x

    plain, model = Some(), Some()
    weft.fully_shard([model.parts["one"], model.parts["other"]])
    weft.fully_shard(model)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (plain, model)]
    x = torch.randn(4, 5)
    for step in range(5):
        losses = []
        for net, optimizer in zip((plain, model), optimizers):
            loss = net(x, both=step % 2 == 0).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0])
        assert weft.memory_report(model)["transient"]["gathered weights"]["live"] == 0


@distributed(2)
def test_without_the_check_of_collectives_the_gradients_are_the_same():
    class OneRankUses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.rare = nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(40))

        def forward(self) -> torch.Tensor:
            return self.weight.sum() + (self.rare.sum() if dist.get_rank() == 0 else 0.0)

    for check in (True, False):
        model = weft.fully_shard(OneRankUses(), runtime=weft.RuntimeOptions(check_collectives=check))
        model().backward()
        torch.testing.assert_close(nets.full(model.weight.grad), torch.ones(40))
        torch.testing.assert_close(nets.full(model.rare.grad), torch.full((40,), 0.5))


@distributed(2)
def test_a_unit_that_backward_does_not_need_is_not_gathered_for_it():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 11))

    tokens = nets.data(1, 4)[0]
    plain, model = make(), make()
    for part in (*model, model):
        weft.fully_shard(part)
    runtime, visits = runtime_of(model), []
    use, runtime.use = runtime.use, lambda unit, *how: (visits.append(unit.name), use(unit, *how))
    plain(tokens).square().mean().backward()
    for needed in (True, False):
        model[0].set_unshard_in_backward(needed)
        visits.clear()
        model.zero_grad()
        model(tokens).square().mean().backward()
        assert visits.count("0") == 1 + needed
        torch.testing.assert_close(nets.full(model[0].weight.grad), plain[0].weight.grad)


@pytest.mark.slow
@distributed(2)
def test_a_unit_that_forces_sums_asks_the_backend_for_no_average():
    asked, reduce_scatter = [], dist.reduce_scatter_tensor

    def noted(*args, op, **options):
        asked.append(op)
        return reduce_scatter(*args, op=op, **options)

    with weft.debug.check_streams():  # not by direct sends
        net = nets.shard(nets.make())
        net.blocks[1].set_force_sum_reduction_for_comms(True)
        loss = nets.loss_of(net, nets.data(1, 4)[0])
        averaging = mock.patch.object(backends, "INSTEAD", BuiltIn(averages=True))
        with averaging, mock.patch.object(dist, "reduce_scatter_tensor", noted):
            loss.backward()
    average, total = dist.ReduceOp.AVG, dist.ReduceOp.SUM
    assert asked == [average, total, average, average]
    together = nets.shard(nets.make(), strategy="optim_grads", runtime=weft.RuntimeOptions(bucket_bytes=1 << 20))
    together.blocks[1].set_force_sum_reduction_for_comms(True)
    nets.loss_of(together, nets.data(1, 4)[0]).backward()
    kinds = [group.gradients.bucket_kind for unit in units_under(together) for group in unit.groups]
    assert sorted(kind is None for kind in kinds) == [False, False, False, True], "it never shares a message"


@distributed(2)
def test_an_outer_strategy_together_with_placements_is_refused():
    with pytest.raises(ValueError, match="the placements already define it"):
        weft.fully_shard(nn.Linear(2, 2), strategy=weft.Placements(*[Shard(0)] * 3), outer_strategy="optim")


@pytest.mark.slow
@distributed(2)
def test_flat_optimizers_see_gradients_that_the_user_replaced():
    results = []
    for flat in (False, True):
        net = nets.shard(nets.make())
        make = weft.optim.flat if flat else lambda cls, model, **options: cls(model.parameters(), **options)
        optimizer = make(torch.optim.SGD, net, lr=0.1)
        nets.loss_of(net, nets.data(1, 4)[0]).backward()
        for parameter in net.parameters():
            parameter.grad = parameter.grad * 2
        net.gain.grad = None
        norm = (
            weft.optim.grad_norm(net)
            if flat
            else nets.full(nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None]))
        )
        optimizer.step()
        results.append({"norm": norm, **nets.whole(dict(net.named_parameters()))})
    torch.testing.assert_close(results[1], results[0])
