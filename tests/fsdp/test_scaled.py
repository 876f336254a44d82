"""Weights that stay quantized: products equal those of one process that quantizes both operands in the same places."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import weft
from tests.fsdp import nets, scaled
from tests.pool import distributed
from weft.dtensor.tensor_parallel import EXPERT
from weft.fsdp import weight_gradient
from weft.fsdp.gradients.direct import local_part
from weft.fsdp.gradients.products import is_scaled
from weft.moe import GroupedExperts
from weft.quantize import blockwise, mx, nvfp4, rowwise, scaled_product, tensorwise

FP32, BF16 = torch.float32, torch.bfloat16
MAKE = [tensorwise, rowwise, lambda **options: blockwise(16, 32, **options), mx, nvfp4]


class Net(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.recompute = recompute
        self.layers = nn.ModuleList([nn.Linear(32, 64), nn.Linear(64, 96, bias=False), nn.Linear(96, 32)])
        self.norm = nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return self.norm(x)


def sharded(recipe, compute=FP32, recompute=False, runtime=None, **options) -> Net:
    net = Net(recompute)
    policy = weft.MixedPrecisionPolicy(compute, FP32, param_quantization=recipe)
    first, second, third = net.layers
    for layers in ([first, second], [third]):
        weft.fully_shard(layers, mp_policy=policy, **options)
    return weft.fully_shard(net, mp_policy=policy, runtime=runtime, **options)


def rows(steps: int, microbatches: int = 2) -> torch.Tensor:
    """`[steps, microbatches, ranks, 5, 32]`."""
    ranks = dist.get_world_size()
    return torch.randn(steps, microbatches, ranks, 5, 32, generator=torch.Generator().manual_seed(1))


def is_chosen(name: str) -> bool:
    return "layers" in name and "bias" not in name


def assert_trains(recipe, compute=FP32, steps=2, **options) -> Net:
    """Steps of two microbatches equal one process, which handles the rows of each rank by themselves."""
    plain, net = Net(), sharded(recipe, compute, **options)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9) for model in (plain, net)]
    ranks, rank = dist.get_world_size(), dist.get_rank()
    tolerance = {} if compute == FP32 else {"rtol": 2**-7, "atol": 2**-7}
    for batch in rows(steps):
        for last, parts in enumerate(batch):
            net.set_is_last_backward(bool(last))
            with scaled.computing(plain, recipe, compute, is_chosen) as model:
                wanted = [model(part.to(compute)).float().square().mean() for part in parts]
                (sum(wanted) / ranks).backward()
            loss = net(parts[rank]).float().square().mean()
            loss.backward()
            torch.testing.assert_close(loss, wanted[rank], **tolerance)
        for one, other in zip(net.parameters(), plain.parameters()):
            torch.testing.assert_close(nets.full(one.grad), other.grad, **tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return net


@pytest.mark.slow
@distributed(2)
def test_a_step_of_scaled_products_equals_one_process():
    assert_trains(tensorwise(compute="scaled"))
    assert_trains(mx(compute="scaled"), BF16)


@pytest.mark.long
@distributed(2)
def test_every_recipe_and_strategy_equals_one_process():
    for number, make in enumerate(MAKE):
        strategy = ["no_shard", "optim", "optim_grads", "optim_grads_params"][number % 4]
        assert_trains(make(compute="scaled"), strategy=strategy)
    assert_trains(rowwise(compute="scaled"), recompute=True)
    assert_trains(rowwise(compute="scaled"), reshard_after_forward=False)
    assert_trains(blockwise(16, 32, compute="scaled"), offload_policy=weft.CPUOffloadPolicy(pin_memory=False))


@pytest.mark.slow
@distributed(4)
def test_meshes_of_two_axes_equal_one_process():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    for outer, recipe in (("no_shard", tensorwise(compute="scaled")), ("optim", mx(compute="scaled"))):
        # After a step weights differ in their last bits, and a few activations round to other codes.
        assert_trains(recipe, steps=1, mesh=mesh, outer_strategy=outer)
    with pytest.raises(ValueError, match=r"reshard_after_forward=2: .*remain quantized"):
        sharded(mx(compute="scaled"), reshard_after_forward=2)


@pytest.mark.slow
@distributed(2)
def test_weights_stay_at_one_byte_and_their_scales():
    net = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))
    policy = weft.MixedPrecisionPolicy(BF16, param_quantization=mx(compute="scaled"))
    for each in net:
        weft.fully_shard(each, mp_policy=policy)
    weft.fully_shard(net, mp_policy=policy)
    for _ in range(3):
        net(torch.ones(2, 256)).float().sum().backward()
    (group,) = net[0]._weft_unit.groups
    assert group.parameters[0].full.dtype == torch.float8_e4m3fn
    assert group.transient.nbytes == 256 * 256 + 256 * 256 // 32
    transient, plan = weft.memory_report(net)["transient"], weft.fsdp.plan_of(net)
    assert plan.peak_bytes == {role: transient[role]["peak"] for role in plan.peak_bytes}


@pytest.mark.slow
@distributed(2)
def test_transposed_codes_are_kept_beside_the_others_and_change_nothing_else():
    for make in (tensorwise, lambda **options: blockwise(16, 32, **options)):
        found, sizes = [], []
        for keep in (False, True):
            net = sharded(make(compute="scaled", keep_transpose=keep))
            read: list[tuple[int, bool]] = []

            def product(x, payload, *args, read=read, dim=-1, **options):
                read.append((dim, payload.is_contiguous()))
                return scaled_product(x, payload, *args, dim=dim, **options)

            with pytest.MonkeyPatch.context() as patches:
                patches.setattr("weft.fsdp.gradients.products.scaled_product", product)
                for batch in rows(3, 1)[:, 0]:
                    net(batch[dist.get_rank()]).square().mean().backward()
            assert set(read) == {(-1, True), (-2, not keep)}
            found.append([each.grad.to_local() for each in net.parameters()])
            group = net.layers[2]._weft_unit.groups[0]
            sizes.append(group.transient.nbytes)
        assert all(map(torch.equal, *found))
        assert sizes[1] == sizes[0] + group.layout.numel


class Writing(torch.autograd.Function):
    """A linear layer that writes its weight gradient itself, as a fused kernel does, or `returns` it."""

    @staticmethod
    def forward(ctx, x, weight, returns):
        ctx.save_for_backward(x)
        ctx.weight, ctx.returns = weight, returns
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, dy):
        (x,), weight = ctx.saved_tensors, ctx.weight
        gradient = dy.flatten(0, -2).t() @ x.flatten(0, -2)
        if ctx.returns:
            return dy @ weight, gradient, None
        if hasattr(weight, "main_grad"):
            weight.main_grad.add_(gradient)
            weight.grad_added_to_main_grad = True
        else:
            buffer, accumulate = weight_gradient(weight)
            (buffer.add_ if accumulate else buffer.copy_)(gradient)
        return dy @ weight, None, None


class Fused(nn.Linear):
    returns = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Writing.apply(x, self.weight, self.returns)


@pytest.mark.slow
@distributed(2)
def test_weight_gradients_that_modules_write_or_return_are_those_of_plain_products():
    found = []
    for way in ("product", "weight_gradient", "main_grad", "returned"):
        net = Net()
        if way != "product":
            net.layers[1].__class__ = Fused
            net.layers[1].returns = way == "returned"
        if way == "main_grad":
            net.layers[1].weight.grad_added_to_main_grad = False
        policy = weft.MixedPrecisionPolicy(BF16, FP32, param_quantization=tensorwise(compute="scaled"))
        for layer in net.layers:
            weft.fully_shard(layer, mp_policy=policy)
        weft.fully_shard(net, mp_policy=policy)
        for last, parts in enumerate(rows(1)[0]):
            net.set_is_last_backward(bool(last))
            net(parts[dist.get_rank()]).float().square().mean().backward()
        found.append([nets.full(parameter.grad) for parameter in net.parameters()])
    for other in found[1:]:
        assert all(torch.equal(one, another) for one, another in zip(found[0], other))


@distributed(2)
def test_other_uses_of_a_quantized_weight_are_refused():
    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.t()

    recipe = rowwise(compute="scaled")
    policy = weft.MixedPrecisionPolicy(BF16, param_quantization=recipe)
    net = weft.fully_shard(Reads(32, 32), mp_policy=policy)
    with pytest.raises(TypeError, match=r"t of 'weight' of .*Reads.*compute=\"scaled\".*quantize"):
        net(torch.ones(2, 32))
    casts = weft.fully_shard(nn.Linear(32, 32), mp_policy=policy)
    casts.register_forward_pre_hook(lambda module, args: args[0].to(module.weight.dtype))
    with pytest.raises(TypeError, match=r"input of 'weight' of .*Linear.* is of torch.float8.*do not cast"):
        casts(torch.ones(2, 32))
    experts = nn.Module()
    experts.weight = nn.Parameter(torch.zeros(2, 32, 32))
    chosen = weft.MixedPrecisionPolicy(param_quantization=recipe, quantize=lambda name, p: True)
    with pytest.raises(ValueError, match=r"rowwise.*'weight'.*tensorwise\(\), blockwise\(\) or mx"):
        weft.fully_shard(experts, mp_policy=chosen)
    tp = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    parallel = parallelize_module(nn.Linear(32, 64), tp["tp"], ColwiseParallel())
    with pytest.raises(ValueError, match=r"'weight'.*tensor-parallel"):
        weft.fully_shard(parallel, mesh=tp["dp"], mp_policy=policy)
    only = weft.fully_shard(nn.Bilinear(32, 32, 32), mp_policy=policy)
    assert [group.recipe.quantization for group in only._weft_unit.groups] == [None], "of no linear layer"


@distributed(2)
def test_attention_of_torch_keeps_its_output_projection_unquantized():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0)
    policy = weft.MixedPrecisionPolicy(BF16, FP32, param_quantization=rowwise(compute="scaled"))
    weft.fully_shard(layer, mp_policy=policy)
    groups = layer._weft_unit.groups
    quantized = [each.name for group in groups if group.recipe.quantization for each in group.parameters]
    assert sorted(quantized) == ["linear1.weight", "linear2.weight"]
    layer(torch.randn(5, 2, 32)).float().square().mean().backward()
    assert all(nets.full(parameter.grad).any() for parameter in layer.parameters())


def test_operators_that_would_lose_scales_or_gradients_of_a_quantized_weight_are_refused(world):
    world(0, 2)
    net = nn.Linear(32, 32, bias=False)
    net.stack = nn.Parameter(torch.zeros(2, 32, 32))
    recipe = tensorwise(compute="scaled")
    policy = weft.MixedPrecisionPolicy(BF16, param_quantization=recipe, quantize=lambda name, parameter: True)
    weft.fully_shard(net, mp_policy=policy).unshard()
    x, ends = torch.ones(2, 32, dtype=BF16), torch.tensor([1, 2], dtype=torch.int32)
    with torch.no_grad():
        assert (x @ net.weight).shape == (2, 32), "the gradient of an input"
        for use, what in (
            (lambda: torch.matmul(net.weight, x.t()), "matmul of 'weight'"),
            (lambda: torch.matmul(x, net.stack), "matmul of 'stack'"),
            (lambda: net.weight.T, "T of 'weight'"),
            (lambda: torch._grouped_mm(x, net.stack, ends, out_dtype=BF16), "_grouped_mm of 'stack'"),
        ):
            with pytest.raises(TypeError, match=f"^{what} of the root .*only linear and grouped products"):
                use()
    with pytest.raises(TypeError, match=r"^matmul of 'weight'"):  # its gradient would be lost
        torch.matmul(x, net.weight)


def test_a_rank_s_part_of_a_stack_of_experts_stays_quantized(world):
    world(0, 2)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    stack = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0))
    experts = nn.Module()
    experts.multiplied_parameters = ("weight",)
    experts.weight = nn.Parameter(DTensor.from_local(stack, mesh["ep"], [Shard(0)], run_check=False))
    policy = weft.MixedPrecisionPolicy(param_quantization=tensorwise(compute="scaled"))
    weft.fully_shard(experts, mesh=mesh["dp"], mp_policy=policy).unshard()
    part, x = local_part(experts.weight), torch.ones(4, 32)
    assert is_scaled(part) and part.dtype == torch.float8_e4m3fn
    ends = torch.tensor([2, 4], dtype=torch.int32)
    torch.testing.assert_close(torch._grouped_mm(x, part, ends), torch._grouped_mm(x, stack, ends), rtol=0.1, atol=1.0)


def test_stacks_that_are_cut_inside_an_expert_are_refused_and_others_are_not(world):
    world(0, 4)
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "ep", "tp"))

    def shard(recipe, *placements):
        experts = nn.Module()
        experts.multiplied_parameters = ("weight",)
        spread = DTensor.from_local(torch.zeros(2, 32, 32), mesh["ep", "tp"], placements, run_check=False)
        experts.weight = nn.Parameter(spread)
        setattr(experts.weight, EXPERT, True)
        policy = weft.MixedPrecisionPolicy(BF16, param_quantization=recipe)
        return weft.fully_shard(experts, mesh=mesh["dp"], mp_policy=policy)

    for recipe in (blockwise(16, 16), tensorwise(compute="scaled")):
        (group,) = shard(recipe, Shard(0), Replicate())._weft_unit.groups
        assert group.recipe.quantization == recipe
    with pytest.raises(ValueError, match=r"'weight' of shape \(2, 32, 32\): products of tensor-parallel weights"):
        shard(tensorwise(compute="scaled"), Shard(0), Shard(1))
    with pytest.raises(ValueError, match=r"each of 2 ranks 32 along dimension 1, .* must be a multiple of 128"):
        shard(blockwise(64, 16), Shard(0), Shard(1))


@pytest.mark.parametrize("compute", ["dequantize", "scaled"])
@distributed(2)
def test_biases_of_experts_are_not_quantized_by_default(compute):
    torch.manual_seed(0)
    experts = GroupedExperts(2, 32, 32, bias=True)
    weft.fully_shard(experts, mp_policy=weft.MixedPrecisionPolicy(BF16, param_quantization=mx(compute=compute)))
    quantized = {
        parameter.name: group.recipe.quantization is not None
        for group in experts._weft_unit.groups
        for parameter in group.parameters
    }
    assert quantized == {name: not name.endswith("_bias") for name in quantized} and len(quantized) == 6
    experts(torch.randn(8, 32), torch.tensor([3, 8], dtype=torch.int32)).float().square().mean().backward()
    assert all(nets.full(parameter.grad).any() for parameter in experts.parameters())


@distributed(2)
def test_experts_on_a_rank_without_rows_and_under_autocast_compute():
    torch.manual_seed(0)
    whole, rank = torch.randn(6, 32), dist.get_rank()
    for recipe in (tensorwise, lambda **options: blockwise(16, 16, **options), mx):
        torch.manual_seed(0)
        experts = GroupedExperts(3, 32, 32)
        policy = weft.MixedPrecisionPolicy(BF16, FP32, param_quantization=recipe(compute="scaled"))
        weft.fully_shard(experts, mp_policy=policy)
        found = []
        for held, autocast in ((6, False), (6, True), (0, False), (0, True)):
            count = held if rank else 6
            x, ends = whole[:count].clone().requires_grad_(), torch.tensor([2, 2, 6], dtype=torch.int32)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = experts(x, ends.clamp(max=count))
            assert output.dtype == BF16 and output.shape == (count, 32)
            output.float().sum().backward()
            assert x.grad.shape == x.shape
            found.append([nets.full(parameter.grad) for parameter in experts.parameters()])
            experts.zero_grad()
        both, cast, one, one_cast = found
        for of_both, of_cast, of_one, of_one_cast in zip(both, cast, one, one_cast):
            assert torch.equal(of_cast, of_both) and torch.equal(of_one_cast, of_one)
            assert torch.equal(of_one, of_both / 2) and of_one[0].any() and not of_one[1].any()
