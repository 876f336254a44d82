"""The layer, on one process and spread over several, against its definition."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from tests.moe.reference import enlarge, plain
from tests.pool import distributed
from weft.moe import AllToAll, MoE, load_statistics, router_losses, statistics
from weft.moe.kinds import ROWS_PER

# Whole vectors of the processor in every row: what is left over at a tensor's end is computed with other roundings.
HIDDEN, INNER, EXPERTS, K, SEQ = 32, 32, 8, 3, 7

LAYERS = {
    "plain": {},
    "sigmoid, groups, shared": {
        "score": "sigmoid",
        "num_groups": 4,
        "topk_groups": 2,
        "scaling_factor": 2.5,
        "expert_bias": True,
        "shared_intermediate_size": 8,
    },
    "losses": {"aux_loss_coef": 0.3, "z_loss_coef": 0.2, "norm_topk_prob": False},
    "capacity": {"capacity_factor": 0.7, "aux_loss_coef": 0.3},
    "gated shared": {"shared_intermediate_size": 12, "shared_expert_gate": True},
    "unused experts, idle ranks": {"score": "sigmoid", "expert_bias": True, "aux_loss_coef": 0.1},
    "one after another": {"backend": "loop"},
}
SPREAD = {**LAYERS, "latent": {"latent_size": 16}}
IDLE = LAYERS["unused experts, idle ranks"]


def make(options, dispatcher=None):
    """A layer with the same weights wherever it is.

    Logits are exact in fp32, so that they do not depend on how many rows are multiplied at once.
    """
    torch.manual_seed(5)
    layer = MoE(HIDDEN, INNER, EXPERTS, K, dispatcher=dispatcher, **options)
    enlarge(layer)
    with torch.no_grad():
        layer.router.weight.copy_((layer.router.weight * 8).round() / 8)
    if layer.router.expert_bias is not None:
        bias = torch.linspace(-0.2, 0.3, EXPERTS)
        if options is IDLE:
            bias[EXPERTS // 2 :] -= 10  # so that half of the ranks get no token
        layer.router.expert_bias.copy_(bias)
    return layer


def batch(sequences=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-16, 17, (sequences, SEQ, HIDDEN), generator=generator) / 8


def backward(output, loss, scale=1.0):
    """Of an objective in which every element of the output weighs differently."""
    factors = torch.linspace(0.5, 1.5, SEQ * HIDDEN).view(SEQ, HIDDEN)
    objective = (output * factors).square().sum() / factors.numel()
    (objective + (0 if loss is None else loss * scale)).backward()


@pytest.fixture
def only_deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_the_layer_is_its_definition(options, only_deterministic):
    layer = make(options)
    hidden = batch().requires_grad_()
    output, loss = layer(hidden)
    backward(output, loss)
    found = {name: weight.grad for name, weight in layer.named_parameters()} | {"hidden": hidden.grad}

    layer.zero_grad()
    same = batch().requires_grad_()
    expected, expected_loss, _ = plain(layer, same)
    backward(expected, expected_loss)
    assert_close(output, expected)
    assert_close(loss, expected_loss)
    for name, weight in [*layer.named_parameters(), ("hidden", same)]:
        assert_close(found[name], weight.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
@distributed(2, 4, long=4)
def test_experts_over_ranks_equal_one_process_with_all_of_them():
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for rows_per, options in itertools.product(ROWS_PER, SPREAD.values()):
        dispatcher = AllToAll(dist.group.WORLD, EXPERTS, rows_per=rows_per)
        whole, layer = make(options), make(options, dispatcher)
        everything = batch().requires_grad_()
        expected, expected_loss = whole(everything)
        backward(expected, expected_loss, scale=ranks)

        mine = batch().chunk(ranks)[rank].requires_grad_()
        output, loss = layer(mine)
        backward(output, loss)

        # Other layers multiply other numbers of rows at once, and one row per rank adds up in another order.
        exact = rows_per == "expert" and layer.shared_expert is None and layer.latent_in is None
        if exact:
            assert torch.equal(output, expected.chunk(ranks)[rank])
        assert_close(output, expected.chunk(ranks)[rank])
        assert_close(mine.grad, everything.grad.chunk(ranks)[rank])
        if loss is not None:
            total = loss.detach().clone()
            dist.all_reduce(total)
            assert_close(total / ranks, expected_loss)
        gradients = {name: weight.grad for name, weight in whole.named_parameters()}
        for name, weight in layer.named_parameters():
            if name.startswith("experts."):
                expected_gradient = gradients[name][dispatcher.experts.start : dispatcher.experts.stop]
                if exact:
                    assert torch.equal(weight.grad, expected_gradient)
                assert_close(weight.grad, expected_gradient)
            else:
                dist.all_reduce(weight.grad)
                assert_close(weight.grad, gradients[name])
        loads = load_statistics(layer, group=dist.group.WORLD)[""]
        assert torch.equal(loads, load_statistics(whole)[""])
        assert loads.sum() == everything.shape[0] * SEQ * K
        assert loads.all() != (options is IDLE)


@pytest.mark.slow
@pytest.mark.parametrize("rows_per", ROWS_PER)
@distributed(2)
def test_a_rank_without_tokens_takes_part(rows_per):
    rank = dist.get_rank()
    options = {"capacity_factor": 1.0, "shared_intermediate_size": 8}
    whole, layer = make(options), make(options, AllToAll(dist.group.WORLD, EXPERTS, rows_per=rows_per))
    everything = batch().requires_grad_()
    expected, _ = whole(everything)
    backward(expected, None)
    mine = batch()[: 4 if rank == 0 else 0].requires_grad_()
    output, _ = layer(mine)
    backward(output, None)
    held = layer.dispatcher.experts
    same = functools.partial(assert_close, **({"rtol": 0, "atol": 0} if rows_per == "expert" else {}))
    if rank == 0:
        same(output, expected)
        same(mine.grad, everything.grad)
        same(layer.router.weight.grad, whole.router.weight.grad)
    for name, weight in layer.experts.named_parameters():
        same(weight.grad, whole.experts.get_parameter(name).grad[held.start : held.stop])


@pytest.mark.parametrize("rows_per", ROWS_PER)
@distributed(2)
def test_the_parts_driven_by_a_schedule_give_what_forward_gives_bit_for_bit(rows_per):
    rank = dist.get_rank()
    dispatcher = AllToAll(dist.group.WORLD, EXPERTS, rows_per=rows_per)
    options = {**LAYERS["losses"], "shared_intermediate_size": 8}
    mine = batch().chunk(2)[rank]
    plainly, scheduled = make(options, dispatcher), make(options, dispatcher)
    hidden = mine.clone().requires_grad_()
    expected, expected_loss = plainly(hidden)
    backward(expected, expected_loss)

    def border(tensor):
        return tensor.detach().requires_grad_()

    source = mine.clone().requires_grad_()
    sent = scheduled.send(source)
    here = border(dispatcher.dispatch(sent.rows, sent.handle).wait())
    mixed = scheduled.run_experts(here, sent.handle)
    rows, shared = border(dispatcher.combine(mixed, sent.handle).wait()), border(sent.shared)
    weights = None if sent.weights is None else border(sent.weights)  # they travel in the rows
    output = scheduled.receive(rows, weights, shared, sent.handle)
    assert torch.equal(output, expected) and torch.equal(sent.loss, expected_loss)

    backward(output, None)
    there = dispatcher.dispatch(rows.grad, sent.handle)  # the backward of combine
    torch.autograd.backward(mixed, there.wait())
    back = dispatcher.combine(here.grad, sent.handle)
    sources, found = [sent.rows, sent.shared, sent.loss], [back.wait(), shared.grad, None]
    if weights is not None:
        sources, found = [*sources, sent.weights], [*found, weights.grad]
    torch.autograd.backward(sources, found)
    assert torch.equal(source.grad, hidden.grad)
    for name, weight in scheduled.named_parameters():
        assert torch.equal(weight.grad, plainly.get_parameter(name).grad), name


def test_ranks_exchange_counts_while_the_shared_expert_is_computed():
    layer = make({"shared_intermediate_size": 8})
    order = []
    dispatcher = layer.dispatcher
    for owner, name in ((dispatcher, "plan"), (layer.shared_expert, "forward"), (dispatcher, "dispatch")):
        setattr(owner, name, recorded(getattr(owner, name), name, order))
    plan = layer.dispatcher.plan
    layer.dispatcher.plan = lambda counts: watched(plan(counts), order)
    layer(batch())
    assert order == ["plan", "forward", "dispatch"], "the sizes are asked for behind that"
    layer.router.capacity_factor = 0.5
    order.clear()
    layer(batch())
    assert order == ["plan", "forward", "ready", "dispatch"], "how many rows are left must be known to sort them"


def recorded(function, name, order):
    def run(*args):
        order.append(name)
        return function(*args)

    return run


def watched(handle, order):
    handle.ready = recorded(handle.ready, "ready", order)
    return handle


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_load_is_counted_once_per_training_forward_recomputed_or_not(reentrant):
    layer = make({"capacity_factor": 0.5, "aux_loss_coef": 0.1})
    hidden = batch().requires_grad_()
    for _ in range(2):
        if reentrant is None:
            output, loss = layer(hidden)
        else:
            output, loss = checkpoint(layer, hidden, use_reentrant=reentrant)
        output.sum().backward()
    layer.eval()
    layer(hidden)
    added = 2 * loss.detach()
    assert torch.equal(router_losses(layer, reset=False)[""], added)
    assert torch.equal(router_losses(layer)[""], added) and not router_losses(layer)[""]
    chosen = layer.router(hidden).experts.flatten().bincount(minlength=EXPERTS)
    assert torch.equal(load_statistics(layer, reset=False)[""], 2 * chosen)  # dropped ones were chosen too
    model = torch.nn.ModuleDict({"first": layer, "second": torch.nn.Sequential(make({}))})
    loads = load_statistics(model)
    assert list(loads) == ["first", "second.0"]
    assert torch.equal(loads["first"], 2 * chosen) and not loads["second.0"].any()
    assert not load_statistics(model)["first"].any()
    assert load_statistics(torch.nn.Linear(2, 2)) == {}


@pytest.mark.slow
@distributed(4)
def test_load_is_summed_over_every_axis_of_a_mesh():
    layer = make({})
    layer(batch(sequences=dist.get_rank() + 1))
    mesh = init_device_mesh("cpu", (2, 2))
    over_mesh = load_statistics(layer, reset=False, group=mesh)[""]
    assert torch.equal(over_mesh, load_statistics(layer, group=dist.group.WORLD)[""])
    assert over_mesh.sum() == (1 + 2 + 3 + 4) * SEQ * K


def test_counts_are_summed_over_the_ranks_that_are_asked_for_and_those_of_other_positions(world, monkeypatch):
    world(0, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    layer, summed = make({}), []
    layer.other_positions = mesh["tp"]
    monkeypatch.setattr(statistics, "reduce_now", lambda total, how, group, what: summed.append(group))
    for function, group, expected in (
        (load_statistics, None, []),
        (load_statistics, dp, [dp, tp]),
        (load_statistics, mesh["dp"], [dp, tp]),
        (load_statistics, mesh, [dp, tp]),
        (router_losses, mesh["dp"], [dp]),  # a loss covers all positions
    ):
        summed.clear()
        function(layer, group=group)
        assert summed == expected, (function, group)


def test_a_layer_built_on_the_meta_device_starts_like_any_other():
    options = {"expert_bias": True, "shared_intermediate_size": 8, "shared_expert_gate": True}
    options |= dict.fromkeys(("bias", "experts_bias", "router_bias"), True)
    torch.manual_seed(2)
    expected = MoE(HIDDEN, INNER, EXPERTS, K, **options)
    with torch.device("meta"):
        layer = MoE(HIDDEN, INNER, EXPERTS, K, **options)
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(torch.nan)
    torch.manual_seed(2)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert layer.state_dict().keys() == expected.state_dict().keys()
    assert "load" not in layer.state_dict()
    for name, value in expected.state_dict().items():
        assert torch.equal(layer.state_dict()[name], value), name
    assert torch.equal(load_statistics(layer)[""], torch.zeros(EXPERTS, dtype=torch.int64))


def test_bf16_is_close_to_fp32():
    layer = make({"aux_loss_coef": 0.1})
    expected, expected_loss = layer(batch())
    hidden = batch().to(torch.bfloat16).requires_grad_()
    with torch.no_grad():
        layer.router.weight.copy_(layer.router.weight.bfloat16())
    output, loss = layer.to(torch.bfloat16)(hidden)
    assert output.dtype == torch.bfloat16 and loss.dtype == torch.float32
    assert_close(loss, expected_loss)  # the inputs and the router's weights are exact in bf16
    assert_close(output.float(), expected, rtol=3e-2, atol=3e-2 * expected.abs().max().item())  # 8 bits
    output.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "message, options",
    [
        ("shared_intermediate_size=-1: shared_intermediate_size must be", {"shared_intermediate_size": -1}),
        ("shared_expert_gate=True: there is no shared expert to gate", {"shared_expert_gate": True}),
        ("backend='triton'", {"backend": "triton"}),
        ("score='relu'", {"score": "relu"}),
    ],
)
def test_a_wrong_value_is_an_error_that_names_it_and_the_rule(message, options):
    with pytest.raises(ValueError) as error:
        MoE(HIDDEN, INNER, EXPERTS, K, **options)
    assert str(error.value).startswith(message)


def test_tokens_without_a_batch_are_refused():
    layer = MoE(HIDDEN, INNER, EXPERTS, K)
    with pytest.raises(ValueError, match=rf"the shape \(6, {HIDDEN}\): experts take \[batch, seq, hidden\].*unsqueeze"):
        layer(torch.ones(6, HIDDEN))
