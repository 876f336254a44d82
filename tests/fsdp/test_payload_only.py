"""Frozen weights of which the payload alone is kept: what they take, and what a user may do with them."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import weft
from tests.fsdp import nets
from tests.fsdp.test_behaviour import mine
from tests.fsdp.test_narrow import BF16, FP32, RECIPES, STRATEGIES, policy
from tests.pool import distributed
from weft.dtensor.deferred import DeferredDTensor
from weft.errors import CollectiveMismatch
from weft.quantize import dequantize, mx, nvfp4, quantize, rowwise, tensorwise

WIDTH = 64


class Adapted(nn.Module):
    """A frozen matrix and a low-rank correction of it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).to(dtype).requires_grad_(False)
        self.low, self.high = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x)) + self.high(self.low(x))


def adapted(dtype: torch.dtype = FP32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted(dtype) for _ in range(3)))


def chosen(name: str, parameter: nn.Parameter) -> bool:
    return "base" in name


def shard(net: nn.Sequential, recipe, compute=FP32, **options) -> nn.Sequential:
    mixed = policy(recipe, param_dtype=compute, quantize=chosen if recipe is not None else None)
    for each in net:
        weft.fully_shard(each, mp_policy=mixed, **options)
    return weft.fully_shard(net, mp_policy=mixed, **options)


def narrowed(net: nn.Sequential, recipe) -> nn.Sequential:
    """`net`, a plain one whose frozen weights have the values of their payload."""
    with torch.no_grad():
        for each in net:
            each.base.weight.copy_(dequantize(*quantize(each.base.weight, recipe), recipe, each.base.weight.dtype))
    return net


def frozen_groups(net: nn.Sequential) -> list:
    return [group for each in net for group in each._weft_unit.groups if group.recipe.quantization is not None]


def gone(net: nn.Sequential) -> bool:
    """Whether no frozen weight takes memory beside its payload."""
    return all(type(each.base.weight) is DeferredDTensor for each in net) and all(
        group.main_weight.storage.nbytes() == 0 for group in frozen_groups(net)
    )


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in net.parameters() if p.requires_grad), lr=0.5, momentum=0.9)


def step(net: nn.Module, optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()


def assert_trains(recipe, **options) -> nn.Sequential:
    """Adapters on a frozen base train as those of one process that quantizes and dequantizes the base."""
    plain, net = narrowed(adapted(), recipe), shard(adapted(), recipe, **options)
    optimizers = {each: sgd(each) for each in (plain, net)}
    for x in torch.randn(3, 8, WIDTH, generator=torch.Generator().manual_seed(1)):
        step(plain, optimizers[plain], x), step(net, optimizers[net], mine(x))
        assert gone(net)
        trained = {name: p for name, p in plain.named_parameters() if p.requires_grad}
        nets.assert_same({name: p for name, p in net.named_parameters() if name in trained}, trained)
    return net


@pytest.mark.slow
@distributed(2)
def test_adapters_train_on_a_base_whose_payload_alone_is_kept():
    net = assert_trains(mx(32))
    assert type(net[0].base.weight) is DeferredDTensor, "nothing has asked for it"
    numel = 3 * WIDTH * WIDTH
    persistent = weft.memory_report(net)["persistent"]
    assert persistent["quantized weights"] == 33 / 32 * numel / 2
    assert persistent["weights"] == 4 * 3 * 8 * WIDTH / 2, "those of the adapters"
    assert "payload" in weft.describe(net)
    for each, whole in zip(net, narrowed(adapted(), mx(32))):
        assert torch.equal(nets.full(each.base.weight), whole.base.weight)
        assert not hasattr(each.base.weight, "_bring"), "a copy would copy the payload too"
    assert weft.memory_report(net)["persistent"]["weights"] == 4 * (3 * 8 * WIDTH + numel) / 2, "they were asked for"
    with torch.inference_mode():
        net(torch.ones(2, WIDTH))
    assert gone(net)


@pytest.mark.slow
@distributed(2)
def test_what_needs_no_values_leaves_the_payload_alone():
    net, x = shard(adapted(), mx(32)), torch.ones(2, WIDTH)
    optimizers = torch.optim.AdamW(net.parameters(), weight_decay=0.5), weft.optim.flat(torch.optim.AdamW, net)
    for _ in range(2):
        net(x).square().mean().backward()
        weft.optim.clip_grad_norm_(net, 0.1), nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.state_dict()
        net.zero_grad(set_to_none=False)
        assert gone(net)
    before = nets.full(net[0].base.weight)
    sizes = []
    hook = net[0].low.register_forward_pre_hook(
        lambda *_: sizes.extend(group.main_weight.storage.nbytes() for group in frozen_groups(net))
    )
    assert not gone(net)
    net(x)
    hook.remove()
    assert sizes == [0, 0, 0], "what was read goes before the pass takes memory, not after it"
    assert torch.equal(nets.full(net[0].base.weight), before)


@pytest.mark.slow
@distributed(2)
def test_main_weights_stay_while_other_code_has_their_memory():
    net, x, scale = shard(adapted(), mx(32)), torch.ones(2, WIDTH), torch.ones((), requires_grad=True)
    wanted = nets.full(net[1].base.weight)
    ways = {
        "part": lambda p: p.to_local(),
        "view": lambda p: p.to_local()[1:],
        "data": lambda p: p.data,
        "state dict": lambda p: net.state_dict(),
        "array": lambda p: p.to_local().numpy(),
        "storage": lambda p: p.to_local().untyped_storage(),
        "another library's": lambda p: torch.from_dlpack(p.to_local()),
        "graph": lambda p: (p.to_local() * scale).sum(),
    }
    for name, hold in ways.items():
        held = hold(net[1].base.weight)
        net(x)
        assert frozen_groups(net)[1].main_weight.storage.nbytes() > 0, name
        if name == "graph":
            held.backward()
            torch.testing.assert_close(scale.grad, net[1].base.weight.to_local().sum())
        del held
        net(x)
        assert gone(net), name
        assert torch.equal(nets.full(net[1].base.weight), wanted), name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_every_strategy_and_recipe_keeps_the_payload_alone(strategy):
    some = slice(None) if strategy == "optim_grads_params" else slice(STRATEGIES.index(strategy) % 2, None, 2)
    for recipe in RECIPES[some]:
        assert_trains(recipe, strategy=strategy)


@pytest.mark.long
@distributed(4)
def test_meshes_of_two_axes_keep_the_payload_alone():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    for outer in ("no_shard", "optim"):
        for recipe in (tensorwise(), mx(32), nvfp4()):
            assert_trains(recipe, mesh=mesh, outer_strategy=outer)
    assert_trains(rowwise(), reshard_after_forward=2)


@pytest.mark.slow
@distributed(2)
def test_reads_and_first_writes_are_those_of_a_parameter():
    x = torch.ones(2, WIDTH)
    edits = [
        lambda p: p.mul_(1.5),
        lambda p: p[3:5].zero_(),
        lambda p: p.copy_(torch.arange(float(WIDTH**2)).view(WIDTH, WIDTH)),
        lambda p: torch._foreach_mul_([p], 0.01),
        lambda p: p.data.add_(0.25),
    ]
    for number, edit in enumerate(edits):
        recipe, strategy = ((tensorwise(), "optim_grads"), (mx(32), "optim_grads_params"))[number % 2]
        plain, net = adapted(), shard(adapted(), recipe, strategy=strategy)
        if strategy == "optim_grads_params":
            narrowed(plain, recipe)  # fully_shard has quantized it
        for each in (plain, net):
            with torch.no_grad():
                edit(each[1].base.weight)
        assert torch.equal(nets.full(net[1].base.weight), plain[1].base.weight)
        narrowed(plain, recipe)
        torch.testing.assert_close(net(x), plain(x))
        assert gone(net)
        assert torch.equal(nets.full(net[1].base.weight), plain[1].base.weight)
    norm = torch._foreach_norm([net[0].base.weight])[0]
    torch.testing.assert_close(nets.full(norm), plain[0].base.weight.norm())
    local = net[0].base.weight.to_local()
    net(x)
    assert not gone(net), "a tensor in their memory is held"
    del local
    net(x)
    assert gone(net)


@pytest.mark.slow
@distributed(2)
def test_small_writes_add_up_as_those_to_main_weights():
    for recipe, strategy in ((tensorwise(), "optim_grads"), (mx(32), "optim_grads_params")):
        main, net = narrowed(adapted(), recipe), shard(adapted(), recipe, strategy=strategy)
        x, target = torch.ones(2, WIDTH), torch.full((WIDTH, WIDTH), 0.5)
        net(x)
        for _ in range(3):
            with torch.no_grad():
                for each in (main, net):
                    each[1].base.weight.lerp_(target, 1e-3)
            torch.testing.assert_close(net(x), narrowed(copy.deepcopy(main), recipe)(x))
        assert torch.equal(nets.full(net[1].base.weight), main[1].base.weight)
        assert [group.payload_only is None for group in frozen_groups(net)] == [False, True, False]


@pytest.mark.slow
@distributed(2)
def test_a_write_on_one_rank_alone_is_one_on_all():
    for strategy in ("optim", "optim_grads_params"):
        net, plain = shard(adapted(), tensorwise(), strategy=strategy), narrowed(adapted(), tensorwise())
        x = torch.ones(2, WIDTH)
        net(x)
        if dist.get_rank() == 0:
            net[1].base.weight.to_local().mul_(2)
        with torch.no_grad():
            plain[1].base.weight[: WIDTH // 2].mul_(2)
        narrowed(plain, tensorwise())
        torch.testing.assert_close(net(x), plain(x))
        assert [group.payload_only is None for group in frozen_groups(net)] == [False, True, False]


@distributed(2)
def test_after_a_first_pass_that_fails_the_payload_alone_is_kept_too():
    net, plain = shard(adapted(), tensorwise(), strategy="optim_grads"), narrowed(adapted(), tensorwise())
    with pytest.raises(RuntimeError, match="shapes"):
        net(torch.ones(2, WIDTH + 1))
    torch.testing.assert_close(net(torch.ones(2, WIDTH)), plain(torch.ones(2, WIDTH)))
    assert gone(net)


@distributed(2)
def test_weights_that_are_unfrozen_after_a_first_pass_that_fails_keep_exact_values():
    net, exact = shard(adapted(), tensorwise(), strategy="optim_grads"), adapted()
    with pytest.raises(RuntimeError, match="shapes"):
        net(torch.ones(2, WIDTH + 1))
    net[1].base.requires_grad_(True)
    net(torch.ones(2, WIDTH))
    kept = [torch.equal(nets.full(one.base.weight), other.base.weight) for one, other in zip(net, exact)]
    assert kept == [False, True, False]


@pytest.mark.slow
@distributed(2)
def test_two_copies_and_main_weights_in_cpu_memory_keep_exact_values():
    for recipe, options in ((mx(32, compute="scaled"), {}), (mx(32), {"offload_policy": weft.CPUOffloadPolicy()})):
        net, x = shard(adapted(), recipe, **options), torch.ones(2, WIDTH)
        for _ in range(2):
            net(x)
        for each, exact in zip(net, adapted()):
            assert torch.equal(nets.full(each.base.weight), exact.base.weight)


@pytest.mark.slow
@distributed(2)
def test_weights_that_are_unfrozen_have_main_weights_from_then_on():
    for recipe, strategy in ((tensorwise(), "optim_grads"), (mx(32), "optim_grads_params")):
        net, wanted = shard(adapted(), recipe, strategy=strategy), narrowed(adapted(), recipe)
        optimizers = {each: sgd(each) for each in (wanted, net)}
        batches = torch.randn(3, 8, WIDTH, generator=torch.Generator().manual_seed(1))
        step(wanted, optimizers[wanted], batches[0]), step(net, optimizers[net], mine(batches[0]))
        for each in (wanted, net):
            each[1].base.requires_grad_(True)
            optimizers[each].add_param_group({"params": [each[1].base.weight]})
        net(batches[1])
        assert [type(each.base.weight) is DeferredDTensor for each in net] == [True, False, True]
        step(wanted, optimizers[wanted], batches[1]), step(net, optimizers[net], mine(batches[1]))
        nets.assert_same(dict(net.named_parameters()), dict(wanted.named_parameters()))
        net[1].base.requires_grad_(False)
        net(batches[2])
        nets.assert_same(dict(net.named_parameters()), dict(wanted.named_parameters()))
        assert weft.quantization_shares(net).keys() == {"1"}


@pytest.mark.slow
@distributed(2)
def test_weights_that_only_one_rank_unfreezes_have_main_weights_on_all():
    net, plain = shard(adapted(), tensorwise()), narrowed(adapted(), tensorwise())
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    net(mine(x)).sum().backward()
    net.zero_grad()
    net[1].base.requires_grad_(dist.get_rank() == 1)
    net(mine(x)).square().mean().backward()
    plain[1].base.requires_grad_(True)
    (plain(x.chunk(2)[1]).square().mean() / 2).backward()
    torch.testing.assert_close(nets.full(net[1].base.weight.grad), plain[1].base.weight.grad)
    assert type(net[1].base.weight) is not DeferredDTensor


@distributed(2)
def test_ranks_that_freeze_different_quantized_weights_first_are_refused():
    net = adapted()
    net[1].base.requires_grad_(dist.get_rank() == 1)
    shard(net, mx(32))
    with pytest.raises(CollectiveMismatch, match="frozen and quantized"):
        net(torch.ones(2, WIDTH))


@pytest.mark.slow
@distributed(2)
def test_flat_optimizers_leave_out_what_has_no_main_weights():
    net = shard(adapted(), mx(32))
    optimizer = weft.optim.flat(torch.optim.SGD, net, lr=0.5)
    step(net, optimizer, torch.ones(2, WIDTH))
    assert gone(net)
    net[1].base.requires_grad_(True)
    with pytest.raises(ValueError, match=r"1\.base\.weight.*build the optimizer again"):
        step(net, optimizer, torch.ones(2, WIDTH))
    before = nets.full(net[1].base.weight)
    step(net, weft.optim.flat(torch.optim.SGD, net, lr=0.5), torch.ones(2, WIDTH))
    assert not torch.equal(nets.full(net[1].base.weight), before)


@pytest.mark.slow
@distributed(2)
def test_checkpoints_hold_values_and_give_the_same_payload(tmp_path):
    for number, recipe in enumerate(RECIPES):
        net, again = shard(adapted(BF16), recipe, BF16), shard(adapted(BF16), recipe, BF16)
        with torch.no_grad():
            for each in again:
                each.base.weight.zero_()
        folder = tmp_path / str(number)
        dist.barrier()
        dcp.save({"model": net.state_dict()}, checkpoint_id=folder)
        dcp.load({"model": (found := again.state_dict())}, checkpoint_id=folder)
        again.load_state_dict(found, strict=True)
        x = torch.randn(2, WIDTH, dtype=BF16)
        del found
        assert torch.equal(net(x), again(x)) and gone(net) and gone(again)
        for one, other in zip(frozen_groups(net), frozen_groups(again)):
            assert torch.equal(one.model_weight.local, other.model_weight.local)
        other = shard(adapted(BF16), None, BF16) if recipe.kind == "mx" else None
        if other is not None:
            dcp.load({"model": other.state_dict()}, checkpoint_id=folder)
            assert torch.equal(other(x), net(x)), "without a recipe: the same values in bf16"
