"""Optimizers over flat tensors give the numbers of the same optimizer over parameters."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import weft
from tests.fsdp import nets
from tests.pool import distributed
from weft.optim.run import FlatRun

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


def small(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim < 2


def per_parameter(optimizer, net, **options):
    """The optimizer as torch has it, with the same two groups."""
    decayed = [p for name, p in net.named_parameters() if not small(name, p)]
    plain = [p for name, p in net.named_parameters() if small(name, p)]
    return optimizer([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], **options)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy"), [(2, "no_shard"), (2, "optim"), (4, "optim_grads_params")])
@distributed()
def test_steps_are_those_of_one_process(strategy):
    """One strategy with each of the optimizers; what differs between the others is not the optimizer's."""
    batches = nets.data(3, 4)
    ways: list[tuple[type[torch.optim.Optimizer], dict]] = [
        (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}),
        (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}),
        (torch.optim.SGD, {"lr": 1e-2, "weight_decay": 0.1, "momentum": 0.9}),
    ]
    if dist.get_world_size() > 2 or strategy != "optim_grads_params":
        ways = [ways[STRATEGIES.index(strategy) % 3]]
    for optimizer, options in ways:
        plain = nets.train(nets.make(), batches, optimizer=partial(per_parameter, optimizer, **options))
        net = nets.shard(nets.make(), strategy=strategy)
        flat = nets.train_here(
            net,
            batches,
            optimizer=partial(weft.optim.flat, optimizer, no_decay=small, **options),
            clip=weft.optim.clip_grad_norm_,
        )
        torch.testing.assert_close(flat["weights"], plain["weights"])
        torch.testing.assert_close(flat["norms"], plain["norms"])


@distributed(2)
def test_it_runs_over_fewer_tensors_and_keeps_the_class():
    net = nets.shard(nets.make())
    optimizer = weft.optim.flat(torch.optim.AdamW, net, lr=1e-2)
    assert isinstance(optimizer, torch.optim.AdamW)
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(tensors) == len(net.blocks) + 1 < len(list(net.parameters()))
    torch.optim.lr_scheduler.LinearLR(optimizer).step()


class Halves(nn.Module):
    """Two layers of which only the first is used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@distributed(2)
def test_a_parameter_without_gradient_keeps_its_value_and_its_state():
    torch.manual_seed(0)
    model = weft.fully_shard(Halves())
    before = nets.whole(dict(model.named_parameters()))
    optimizer = weft.optim.flat(torch.optim.AdamW, model, lr=1e-2, weight_decay=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(nets.full(parameter), before[name]) == name.startswith("unused")
    state = optimizer.state_dict()["state"]
    assert not state["unused.weight"]  # as the ordinary optimizer has none
    assert nets.full(state["used.weight"]["exp_avg"]).any()


@pytest.mark.slow
@distributed(2, 4, long=4)
def test_state_loads_under_another_strategy_and_training_continues_alike():
    def build(strategy):
        net = nets.shard(nets.make(), strategy=strategy)
        return net, weft.optim.flat(torch.optim.AdamW, net, no_decay=small, lr=1e-2, weight_decay=0.1)

    batches = nets.data(6, 4)
    net, optimizer = build("optim_grads_params")
    nets.train_here(net, batches[:3], optimizer=lambda _: optimizer)
    other, resumed = build("optim")
    weights = nets.whole(net.state_dict())
    other.load_state_dict(weights)
    state = optimizer.state_dict()
    state["state"] = {
        name: {key: nets.full(value) for key, value in entries.items()} for name, entries in state["state"].items()
    }
    resumed.load_state_dict(state)
    first = nets.train_here(net, batches[3:], optimizer=lambda _: optimizer)
    second = nets.train_here(other, batches[3:], optimizer=lambda _: resumed)
    torch.testing.assert_close(first, second)


@pytest.mark.slow
@distributed(2)
def test_closures_make_the_gradients_and_assigned_gradients_are_clipped():
    torch.manual_seed(0)
    plain, model = Halves(), Halves()
    model.load_state_dict(plain.state_dict())
    weft.fully_shard(model)

    def step(net, optimizer, clip):
        def closure():
            optimizer.zero_grad()
            loss = net(torch.ones(2, 5)).square().sum()
            loss.backward()
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * 3
            clip(net)
            return loss

        return optimizer.step(closure).detach()

    one = torch.optim.SGD(plain.parameters(), lr=0.1)
    other = weft.optim.flat(torch.optim.SGD, model, lr=0.1)
    for _ in range(2):
        expected = step(plain, one, lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1.0))
        torch.testing.assert_close(step(model, other, lambda net: weft.optim.clip_grad_norm_(net, 1.0)), expected)
    weights = nets.whole(model.state_dict())
    torch.testing.assert_close(weights, dict(plain.state_dict()))


def here(rows: torch.Tensor) -> torch.Tensor:
    """This rank's part of a batch."""
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


def make_alike(cls, **options) -> tuple[nn.Module, nn.Module]:
    """The same module twice, the second one sharded."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(cls(**options))
    return made[0], weft.fully_shard(made[1])


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return nets.whole(dict(model.named_parameters()))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *inputs) -> None:
    optimizer.zero_grad()
    model(*inputs).square().mean().backward()
    optimizer.step()


class Branch(Halves):
    """The second layer runs when it is asked for."""

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        x = self.used(x)
        return self.unused(x) if both else x


@pytest.mark.slow
@pytest.mark.parametrize("name", [*weft.optim.ELEMENT_WISE, pytest.param("LBFGS", marks=pytest.mark.long)])
@distributed(2)
def test_every_element_wise_optimizer_steps_as_over_parameters(name):
    optimizer = getattr(torch.optim, name)
    plain, sharded = make_alike(Branch)
    _, model = make_alike(Branch)
    runs = [(net, optimizer(net.parameters(), lr=1e-2)) for net in (plain, sharded)]
    if name != "LBFGS":  # which looks at all parameters at once
        runs.append((model, weft.optim.flat(optimizer, model, lr=1e-2)))
    for seed in range(4):
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        for net, stepping in runs:
            rows = batch if net is plain else here(batch)

            def closure(net=net, stepping=stepping, rows=rows):
                stepping.zero_grad()
                loss = net(rows).square().mean()
                loss.backward()
                return loss

            stepping.step(closure)
    for net, _ in runs[1:]:
        torch.testing.assert_close(weights_of(net), weights_of(plain))


@distributed(2)
def test_an_optimizer_with_state_of_rows_and_columns_refuses_what_is_cut():
    _, model = make_alike(Branch)
    with pytest.raises(TypeError, match=r"to a plain one of .* needs parameters that are whole"):
        step(model, torch.optim.Adafactor(model.parameters()), torch.ones(2, 5))


@pytest.mark.slow
@distributed(2)
def test_a_parameter_counts_the_steps_in_which_it_had_a_gradient():
    _, model = make_alike(Branch)
    per_parameter, _ = make_alike(Branch)
    weft.fully_shard(per_parameter)
    one = torch.optim.AdamW(per_parameter.parameters(), lr=0.1)
    other = weft.optim.flat(torch.optim.AdamW, model, lr=0.1)
    for both in (True, False, True, False, True):
        for net, optimizer in ((per_parameter, one), (model, other)):
            step(net, optimizer, here(torch.ones(4, 5)), both)
        for parameter, expected in zip(model.parameters(), per_parameter.parameters()):
            assert torch.equal(nets.full(parameter), nets.full(expected))
    state = other.state_dict()
    assert {name: int(entry["step"]) for name, entry in state["state"].items()} == {
        "used.weight": 5,
        "used.bias": 5,
        "unused.weight": 3,
        "unused.bias": 3,
    }
    _, again = make_alike(Branch)
    again.load_state_dict(nets.whole(model.state_dict()))
    resumed = weft.optim.flat(torch.optim.AdamW, again, lr=0.1)
    resumed.load_state_dict(state)
    for net, optimizer in ((again, resumed), (model, other)):
        step(net, optimizer, here(torch.ones(4, 5)))
    assert all(torch.equal(nets.full(a), nets.full(b)) for a, b in zip(again.parameters(), model.parameters()))


@pytest.mark.slow
@distributed(4)
def test_no_flat_tensor_of_a_step_is_empty():
    """Only matrices decay, so runs are short, and ranks hold nothing of some of them."""
    plain, model = make_alike(Branch)
    decays = [{"params": [p], "weight_decay": 0.1 * (p.ndim > 1)} for p in plain.parameters()]
    one = torch.optim.AdamW(decays, lr=0.1, fused=True)
    other = weft.optim.flat(torch.optim.AdamW, model, no_decay=lambda name, p: p.ndim < 2, lr=0.1, weight_decay=0.1)
    stepped, drop_gradient = [], FlatRun.drop_gradient

    def looking(run):
        if run.flat.grad is not None:
            stepped.append((run.flat.numel(), run.flat.grad.numel()))
        drop_gradient(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlatRun, "drop_gradient", looking)
        for both in (False, True, True):  # some have no gradient at first, which divides runs
            step(plain, one, torch.ones(8, 5), both)
            step(model, other, here(torch.ones(8, 5)), both)
    assert stepped and all(weights == gradients > 0 for weights, gradients in stepped)
    empty = torch.tensor(sum(not parameter.to_local().numel() for parameter in model.parameters()))
    dist.all_reduce(empty)
    assert empty, "no rank was without a part"
    torch.testing.assert_close(weights_of(model), weights_of(plain))
    for name, parameter in plain.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            actual = nets.full(other.state_dict()["state"][name][key])
            torch.testing.assert_close(actual, one.state[parameter][key])


@pytest.mark.slow
@distributed(2)
def test_parameters_that_are_unfrozen_later_are_stepped():
    plain, model = nets.make(), nets.make()
    for net in (plain, model):
        net.blocks[0].requires_grad_(False)
    nets.shard(model)
    one, other = torch.optim.AdamW(plain.parameters(), lr=0.1), weft.optim.flat(torch.optim.AdamW, model, lr=0.1)
    for number, batch in enumerate(nets.data(4, 4)):
        for net, optimizer, rows in ((plain, one, batch), (model, other, here(batch))):
            net.blocks[0].requires_grad_(number > 1)
            optimizer.zero_grad()
            nets.loss_of(net, rows).backward()
            optimizer.step()
    torch.testing.assert_close(weights_of(model), weights_of(plain))
    assert int(other.state_dict()["state"]["blocks.0.norm.weight"]["step"]) == 2

    half = Halves()
    half.used.requires_grad_(False)
    weft.fully_shard(half.unused)
    optimizer = weft.optim.flat(torch.optim.AdamW, half)
    half.used.requires_grad_(True)
    half(torch.ones(2, 5)).sum().backward()
    with pytest.raises(ValueError, match=r"used\.weight, used\.bias: not sharded.*shard the root"):
        optimizer.step()


@pytest.mark.parametrize("fused", [False, True])
@distributed(2)
def test_a_gradient_scaler_unscales_and_skips_on_all_ranks_alike(fused):
    plain, model = make_alike(Halves)
    one = per_parameter(torch.optim.AdamW, plain, lr=0.1)
    other = weft.optim.flat(torch.optim.AdamW, model, no_decay=small, lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in range(4):
        rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
        plain.zero_grad()
        plain(rows).square().mean().backward()
        model.zero_grad()
        scaler.scale(model(here(rows)).square().mean()).backward()
        if number == 2:
            before, scale = weights_of(model), scaler.get_scale()
            part = model.used.weight.grad.to_local()
            if dist.get_rank() == 0:
                part.view(-1)[0] = math.inf
            scaler.step(other)
            scaler.update()
            assert scaler.get_scale() == scale / 2
            torch.testing.assert_close(weights_of(model), before, rtol=0, atol=0)
            continue
        if number % 2:
            scaler.unscale_(other)
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            torch.testing.assert_close(weft.optim.clip_grad_norm_(model, 0.1), expected)
        one.step()
        scaler.step(other)
        scaler.update()
        torch.testing.assert_close(weights_of(model), weights_of(plain))


@distributed(2)
def test_a_scaler_skips_alike_where_ranks_have_other_experts():
    meshes = weft.init_meshes("cpu", ep=2)
    for flat in (False, True):
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        weft.fully_shard(model[1], mesh=meshes.expert)
        weft.fully_shard(model, mesh=meshes.dense, strategy="no_shard")
        optimizer = (
            weft.optim.flat(torch.optim.SGD, model, lr=0.1) if flat else torch.optim.SGD(model.parameters(), lr=0.1)
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(model(torch.ones(2, 5)).sum()).backward()
        if dist.get_rank() == 0:
            model[1].weight.grad.to_local().fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0


@distributed(2)
def test_gradients_of_flat_tensors_are_those_of_the_parameters():
    plain, model = make_alike(Branch)
    optimizer = weft.optim.flat(torch.optim.SGD, model, no_decay=small, lr=0.1)
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    assert all(tensor.grad is None for tensor in tensors)
    rows = torch.randn(4, 5)
    plain(rows).square().mean().backward()
    model(here(rows)).square().mean().backward()
    for parameter in (*plain.parameters(), *model.parameters()):
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 3  # in memory of its own
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(nets.full(nn.utils.clip_grad_norm_(tensors, 0.1)), expected)
    for tensor in tensors:
        tensor.grad = tensor.grad * 2
    optimizer.step()
    for parameter, other in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(nets.full(parameter), other.detach() - 0.2 * other.grad)
    tensors[0].grad = None
    assert model.used.weight.grad is None
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("once"))
    torch.optim.SGD(plain.parameters())  # makes torch put hooks around the step of the class as well
    optimizer.step()
    assert calls == ["once"]


@distributed(2)
def test_a_held_gradient_of_a_flat_tensor_does_not_change_by_another_backward():
    _, model = make_alike(Branch)
    optimizer = weft.optim.flat(torch.optim.SGD, model, lr=0.1)
    rows = torch.randn(4, 5)
    model(here(rows)).square().mean().backward()
    (held,) = [tensor.grad for group in optimizer.param_groups for tensor in group["params"]][:1]
    before = held.to_local().clone()
    optimizer.zero_grad()
    model(here(2 * rows)).square().mean().backward()
    torch.testing.assert_close(held.to_local(), before, rtol=0, atol=0)


@pytest.mark.slow
@distributed(2)
def test_gradients_of_flat_tensors_span_the_slices_of_tensor_parallelism():
    plain, model = make_alike_sequence(), make_alike_sequence()
    meshes = weft.init_meshes("cpu", tp=2)
    parallelize_module(model, meshes.tp, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    weft.fully_shard(model, mesh=meshes.dense)
    optimizer = weft.optim.flat(torch.optim.SGD, model, no_decay=small, lr=0.1)
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    for net in (plain, model):
        net(torch.ones(2, 4)).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 9.0)
    torch.testing.assert_close(nets.full(nn.utils.clip_grad_norm_(tensors, 9.0)), expected)
    wholes = sorted(tensor.grad.full_tensor().numel() for tensor in tensors)
    assert wholes == sorted(parameter.numel() for parameter in plain.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    if dist.get_rank() == 0:
        model[0].weight.grad.to_local().fill_(math.inf)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0


def make_alike_sequence() -> nn.Sequential:
    """The same two layers each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


class Complex(nn.Module):
    """A complex parameter of which one rank has nothing, and an ordinary one."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(1, dtype=torch.complex64))
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.turn).abs()


@pytest.mark.slow
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@distributed(2)
def test_norms_count_complex_unsharded_and_frozen_gradients(norm_type):
    for clip in (nn.utils.clip_grad_norm_, weft.optim.clip_grad_norm_):
        plain, model = make_alike(Complex)
        rows = torch.randn(4, 3)
        for net, mine in ((plain, rows), (model, here(rows))):
            net(mine).mean().backward()
        parts = [None, None]
        dist.all_gather_object(parts, model.turn.to_local().numel())
        assert sorted(parts) == [0, 1]
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
        norm = clip(model if clip is weft.optim.clip_grad_norm_ else model.parameters(), 0.1, norm_type)
        torch.testing.assert_close(nets.full(norm), expected)
        for parameter, other in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(nets.full(parameter.grad), other.grad)
    assert all(entry.gradient is not None for entry in weft.parameter_norms(model).values())

    plain, *others = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(4))
    ignoring, root_plain, bare = others
    for other in others:
        other.load_state_dict(plain.state_dict())
    weft.fully_shard(ignoring, ignored_params=[ignoring[1].weight])
    weft.fully_shard(root_plain[0], ignored_params=[*root_plain[1].parameters()])
    weft.fully_shard(bare, ignored_params={*bare.parameters()})
    plain(torch.ones(2, 3)).sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1, norm_type)
    for model in others:
        model(torch.ones(2, 3)).sum().backward()
        model[0].requires_grad_(False)  # its gradients are still there
        torch.testing.assert_close(weft.optim.clip_grad_norm_(model, 0.1, norm_type), expected)
        for parameter, other in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(nets.full(parameter.grad), other.grad)


@distributed(2)
def test_unreduced_gradients_are_stepped_and_clipped():
    plain, model = make_alike(Halves)
    optimizer = weft.optim.flat(torch.optim.SGD, model, lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    norm = weft.optim.clip_grad_norm_(model, 1.0)
    torch.testing.assert_close(norm, torch.tensor(60.0).sqrt())
    optimizer.step()
    torch.testing.assert_close(nets.full(model.used.bias), plain.used.bias.detach() - 1 / norm)


@distributed(2)
def test_state_of_the_ordinary_optimizer_loads_by_its_names():
    plain, model = make_alike(Halves)
    named = torch.optim.AdamW(plain.named_parameters(), lr=0.1)
    flat = weft.optim.flat(torch.optim.AdamW, model, lr=0.2)
    step(plain, named, torch.ones(2, 5))
    model.load_state_dict(plain.state_dict())
    flat.load_state_dict(named.state_dict())
    assert "param_names" not in flat.param_groups[0]
    for net, optimizer in ((plain, named), (model, flat)):
        step(net, optimizer, torch.ones(2, 5))
    torch.testing.assert_close(weights_of(model), weights_of(plain))
    _, model = make_alike(Branch)
    sharded, flat = torch.optim.AdamW(model.parameters(), lr=0.1), weft.optim.flat(torch.optim.AdamW, model)
    step(model, sharded, torch.ones(2, 5))
    flat.load_state_dict(get_optimizer_state_dict(model, sharded))
    assert torch.equal(
        nets.full(flat.state_dict()["state"]["used.weight"]["exp_avg"]),
        nets.full(sharded.state[model.used.weight]["exp_avg"]),
    )
    with pytest.raises(ValueError, match=r"numbers in place of parameter names.*named_parameters.*get_optimizer_state"):
        flat.load_state_dict(torch.optim.AdamW(plain.parameters()).state_dict())


@distributed(2)
def test_a_state_without_momentum_replaces_one_with_it():
    plain, model = make_alike(Halves)
    flat = weft.optim.flat(torch.optim.SGD, model, lr=0.1, momentum=0.9)
    before = flat.state_dict()
    nothing = {name: {"momentum_buffer": None} for name in before["state"]}  # as some versions of torch save it
    for state in (nothing, before["state"]):
        step(model, flat, torch.ones(2, 5))
        flat.load_state_dict({**before, "state": state})
        assert flat.state_dict()["state"] == state
    model.load_state_dict(plain.state_dict())
    for net, optimizer in ((plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)), (model, flat)):
        step(net, optimizer, torch.ones(2, 5))
    torch.testing.assert_close(weights_of(model), weights_of(plain))


@distributed(2)
def test_wrong_use_is_named():
    net = nets.shard(nets.make())
    for optimizer in (torch.optim.Muon, torch.optim.Adafactor, torch.optim.LBFGS):
        with pytest.raises(ValueError, match=f"{optimizer.__name__} is not element-wise"):
            weft.optim.flat(optimizer, net)
    with pytest.raises(ValueError, match="Linear has no sharded module"):
        weft.optim.flat(torch.optim.AdamW, nn.Linear(2, 2))
    with pytest.raises(TypeError, match="got generator, not a module: pass the sharded model itself"):
        weft.optim.flat(torch.optim.AdamW, net.parameters())
    for wrong in ("AdamW", torch.optim.AdamW(net.parameters())):
        with pytest.raises(
            TypeError, match=f"got {type(wrong).__name__}, not a class: pass a class such as torch.optim"
        ):
            weft.optim.flat(wrong, net)
    blocks_only = nets.make()
    weft.fully_shard(blocks_only.blocks[0])
    with pytest.raises(ValueError, match=r"embedding\.weight.*not sharded.*shard the root"):
        weft.optim.flat(torch.optim.AdamW, blocks_only)
    state = weft.optim.flat(torch.optim.AdamW, net).state_dict()
    del state["state"]["gain"]
    with pytest.raises(ValueError, match=r"missing \['gain'\]"):
        weft.optim.flat(torch.optim.AdamW, net).load_state_dict(state)
    state["state"] |= {"gain": {}, "loss": {}}
    with pytest.raises(ValueError, match=r"missing \[\], unexpected \['loss'\]"):
        weft.optim.flat(torch.optim.AdamW, net).load_state_dict(state)
    del state["state"]["loss"]
    state["param_groups"].append({**state["param_groups"][0], "params": []})
    with pytest.raises(ValueError, match="2 saved, 1 here: pass flat"):
        weft.optim.flat(torch.optim.AdamW, net).load_state_dict(state)
    half = weft.MixedPrecisionPolicy(main_params_dtype=torch.bfloat16, main_grads_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"AdamW does not take gradients in torch\.float16 for weights in torch\.bflo"):
        weft.optim.flat(torch.optim.AdamW, nets.shard(nets.make(), mp_policy=half))
    optimizer = weft.optim.flat(torch.optim.AdamW, net, no_decay=small)
    with pytest.raises(ValueError, match="FlatAdamW always has all parameters of its model: after you add"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    other = weft.optim.flat(torch.optim.AdamW, net, no_decay=lambda name, p: small(name, p) or name.startswith("emb"))
    with pytest.raises(ValueError, match=r"embedding\.weight from 0 to 1: pass flat\(\) the no_decay"):
        other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="2 saved, 1 here"):
        weft.optim.flat(torch.optim.AdamW, net).load_state_dict(optimizer.state_dict())
    with pytest.raises(TypeError, match="got generator, not a module: pass the sharded model itself"):
        weft.optim.clip_grad_norm_(net.parameters(), 1.0)
    with pytest.raises(ValueError, match="norm_type=0: choose a positive number"):
        weft.optim.grad_norm(net, 0)
    with pytest.raises(ValueError, match="norm_type='x': choose a positive number"):
        weft.optim.grad_norm(net, "x")
    for wrong in (-1, None, math.nan):
        with pytest.raises(ValueError, match=f"max_norm={wrong}: choose a number of at least 0"):
            weft.optim.clip_grad_norm_(net, wrong)
    nets.loss_of(net, nets.data(1, 4)[0]).backward()
    net.gain.grad.to_local().fill_(math.nan)
    with pytest.raises(RuntimeError, match=r"norm of order 2\.0 of all gradients is nan"):
        weft.optim.clip_grad_norm_(net, 1.0, error_if_nonfinite=True)


@distributed(2)
def test_hooks_of_state_dicts_run():
    net, called = nets.shard(nets.make()), []
    optimizer = weft.optim.flat(torch.optim.SGD, net, lr=0.1)
    optimizer.register_state_dict_pre_hook(lambda optimizer: called.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda optimizer, state: {**state, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: called.append(state.pop("extra")))
    optimizer.register_load_state_dict_post_hook(lambda optimizer: called.append("after loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["before saving", 1, "after loading"]


@distributed(2)
def test_a_largest_norm_of_zero_clears_gradients():
    net = nets.shard(nets.make())
    nets.loss_of(net, nets.data(1, 4)[0]).backward()
    assert weft.optim.clip_grad_norm_(net, 0.0) > 0
    assert weft.optim.grad_norm(net) == 0


@distributed(2)
def test_gradients_are_zeroed_where_asked():
    net = nets.shard(nets.make())
    optimizer = weft.optim.flat(torch.optim.SGD, net, lr=0.1)
    nets.loss_of(net, nets.data(1, 4)[0]).backward()
    optimizer.zero_grad(set_to_none=False)
    assert net.gain.grad is not None and weft.optim.grad_norm(net) == 0


@distributed(2)
def test_a_frozen_unsharded_parameter_may_have_a_gradient():
    half = Halves()
    half.used.requires_grad_(False)
    weft.fully_shard(half.unused)
    half.used.weight.grad = torch.ones_like(half.used.weight)
    weft.optim.flat(torch.optim.AdamW, half).step()


@distributed(2)
def test_an_assigned_gradient_reaches_only_members_that_had_one():
    _, model = make_alike(Branch)
    flat = weft.optim.flat(torch.optim.SGD, model, lr=0.1, weight_decay=0.1)
    model(here(torch.ones(4, 5)), False).sum().backward()
    for group in flat.param_groups:
        for each in group["params"]:
            if each.grad is not None:
                each.grad = each.grad * 0.5
    assert model.used.weight.grad is not None and model.unused.weight.grad is None
    (tensor,) = flat.param_groups[0]["params"]
    flat.zero_grad()
    tensor.grad = torch.ones_like(tensor)
    assert all(nets.full(parameter.grad).eq(1).all() for parameter in model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2)  # in memory of its own
    assert tensor.grad.to_local().eq(2).all()
    _, fresh = make_alike(Branch)
    flat = weft.optim.flat(torch.optim.SGD, fresh)
    (tensor,) = flat.param_groups[0]["params"]
    tensor.grad = torch.ones_like(tensor)
    assert nets.full(fresh.unused.bias.grad).eq(1).all()


@distributed(2)
def test_gradients_of_flat_tensors_that_every_rank_has_count_once():
    net = nets.shard(nets.make(), strategy="no_shard")
    flat = weft.optim.flat(torch.optim.SGD, net, lr=0.1)
    nets.loss_of(net, nets.data(1, 4)[0]).backward()
    tensors = [tensor for group in flat.param_groups for tensor in group["params"]]
    norm = nn.utils.get_total_norm([tensor.grad for tensor in tensors])
    torch.testing.assert_close(nets.full(norm), weft.optim.grad_norm(net))


@distributed(2)
def test_gradients_that_wait_for_their_reduction_are_in_no_norm():
    _, model = make_alike(Branch)
    model(torch.ones(2, 5)).sum().backward()
    norm = weft.optim.grad_norm(model)
    model.unshard()
    model.used.weight.sum().backward()
    assert torch.equal(weft.optim.grad_norm(model), norm)


class Counting(Halves):
    """With a parameter that can never be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.arange(3), requires_grad=False)


@distributed(2)
def test_a_state_may_lack_what_is_frozen_and_parameters_of_integers_are_left_out():
    _, model = make_alike(Counting)
    model.unused.requires_grad_(False)
    flat = weft.optim.flat(torch.optim.AdamW, model, lr=0.1)
    step(model, flat, here(torch.ones(4, 5)))
    saved = flat.state_dict()
    assert not saved["state"]["unused.weight"] and "count" not in saved["state"]
    state = {name: entry for name, entry in saved["state"].items() if entry}
    other = weft.optim.flat(torch.optim.AdamW, model, lr=0.1)
    other.load_state_dict({**saved, "state": state})
    found = other.state_dict()["state"]
    assert found.keys() == saved["state"].keys() and not found["unused.bias"]
    assert torch.equal(nets.full(found["used.bias"]["exp_avg"]), nets.full(state["used.bias"]["exp_avg"]))


@distributed(4)
def test_norms_count_what_is_not_sliced_once():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.LayerNorm(4))
    parallelize_module(net[0], mesh["tp"], ColwiseParallel())
    weft.fully_shard(net, mesh=mesh["dp"])
    assert weft.parameter_norms(net)["1.weight"].weight == pytest.approx(2.0)
    for number, parameter in enumerate(net.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1)
    assert weft.optim.grad_norm(net).item() == pytest.approx(math.sqrt(16 * 1 + 4 * 4 + 4 * 9))
    net[0].weight.grad.to_local().mul_(5 if dist.get_rank() % 2 else 1)  # the slice of one tensor-parallel rank
    assert weft.optim.grad_norm(net, math.inf).item() == 5
