"""Quantized weights on unusual paths: ranks that run different units, frozen weights, the meta device, users' reads."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import weft
from tests.fsdp import nets, scaled
from tests.fsdp.seams.truth import assert_gradients
from tests.pool import distributed
from weft.quantize import blockwise, dequantize, mx, nvfp4, quantize, rowwise, tensorwise


def restored(weight: torch.Tensor, recipe) -> torch.Tensor:
    return dequantize(*quantize(weight, recipe), recipe)


def quantized(net: nn.Module, recipe) -> nn.Module:
    """A plain net that computes with what the quantized weights of its blocks hold."""
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if "blocks" in name and weight.ndim == 2:
                weight.copy_(restored(weight, recipe))
    return net


def shard(net: nets.Net, recipe, **options) -> nets.Net:
    return nets.shard(net, mp_policy=weft.MixedPrecisionPolicy(param_quantization=recipe), **options)


class Routed(nets.Net):
    path: tuple[int, ...] = (0, 1, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number in self.path:
            x = self.blocks[number](x)
        return self.head(self.norm(x))


def routed() -> Routed:
    torch.manual_seed(0)
    return Routed()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
@distributed(2)
def test_ranks_may_run_different_units(strategy):
    for recipe in (tensorwise(), rowwise()):
        plain, net = quantized(routed(), recipe), shard(routed(), recipe, strategy=strategy)
        tokens = nets.data(1, 4)[0].chunk(2)
        for _ in range(2):
            plain.zero_grad(), net.zero_grad()
            for rank in range(2):
                plain.path = (0, 1) if rank == 0 else (0, 2)
                (nets.loss_of(plain, tokens[rank]) / 2).backward()
            net.path = (0, 1 + dist.get_rank())
            nets.loss_of(net, tokens[dist.get_rank()]).backward()
            assert_gradients(net, plain)


@pytest.mark.slow
@distributed(2)
def test_recomputation_frozen_weights_and_accumulation_equal_one_process():
    for recompute in (None, "non-reentrant"):
        plain, net = quantized(nets.make(recompute), rowwise()), nets.make(recompute)
        for each in (plain, net):
            each.blocks[1].requires_grad_(False)
        shard(net, rowwise())
        for batch in nets.data(2, 4):
            (nets.loss_of(plain, batch)).backward()
            nets.loss_of(net, batch.chunk(2)[dist.get_rank()]).backward()
        assert_gradients(net, plain)
        assert all(p.grad is None for p in net.blocks[1].parameters())


@distributed(2)
def test_what_a_user_unshards_is_what_the_payload_holds():
    whole = nets.make(width=32, hidden=64)
    net = shard(nets.make(width=32, hidden=64), mx(32))
    block = net.blocks[0]
    for _ in range(2):
        block.unshard()
        assert torch.equal(block.up.weight, restored(whole.blocks[0].up.weight, mx(32)))
        block.reshard()
        with torch.no_grad():
            block.up.weight.mul_(3)
            whole.blocks[0].up.weight.mul_(3)
    assert torch.equal(nets.full(block.up.weight), whole.blocks[0].up.weight)


@distributed(2)
def test_weights_that_begin_on_the_meta_device_are_quantized_once_they_have_values():
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    for each in net:
        weft.fully_shard(each, mp_policy=weft.MixedPrecisionPolicy(param_quantization=tensorwise()))
    weft.fully_shard(net)
    weights = [nets.full(each.weight) for each in net]
    assert all(weight.any() for weight in weights)
    x = torch.randn(2, 32)
    plain = x
    for each, weight in zip(net, weights):
        plain = nn.functional.linear(plain, restored(weight, tensorwise()), nets.full(each.bias))
    torch.testing.assert_close(net(x), plain)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


@pytest.mark.slow
@distributed(2)
def test_slices_of_tensor_parallelism_hold_whole_blocks_and_share_maxima():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def parallel(recipe) -> Pair:
        pair = parallelize_module(Pair(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return weft.fully_shard(pair, mesh=mesh["dp"], mp_policy=weft.MixedPrecisionPolicy(param_quantization=recipe))

    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(2))
    for recipe in (tensorwise(), nvfp4(), mx(32), blockwise(32, 32)):
        plain, pair = Pair(), parallel(recipe)
        with torch.no_grad():
            for weight in plain.parameters():
                weight.copy_(restored(weight, recipe))
        torch.testing.assert_close(pair(x), plain(x))
        pair(x).square().sum().backward(), plain(x).square().sum().backward()
        for one, other in zip(pair.parameters(), plain.parameters()):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)
    for recipe, says in (
        (rowwise(), r"rowwise.*'down.weight'.*each of 2 ranks 32 along dimension 1.*whole on each rank"),
        (blockwise(64, 16), r"blockwise\(64, 16\).*'up.weight'.*32 along dimension 0.*multiple of 128"),
    ):
        with pytest.raises(ValueError, match=says):
            parallel(recipe)


@distributed(2)
def test_tensor_parallel_ranks_that_drew_other_frozen_weights_compute_with_those_of_the_first():
    mesh, rank = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), dist.get_rank()
    net = nn.Sequential(nn.Linear(32, 32, bias=False).requires_grad_(False), Pair())
    with torch.no_grad():
        net[0].weight.fill_(1.0 + rank)
    parallelize_module(net[1], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for each in (net[0], net):
        weft.fully_shard(
            each, mesh=mesh["dp"], mp_policy=weft.MixedPrecisionPolicy(param_quantization=blockwise(16, 16))
        )
    net(torch.ones(3, 32))
    net[0].unshard()
    torch.testing.assert_close(net[0].weight.detach(), torch.ones(32, 32))


class Packed(torch.Tensor):
    """A weight that comes quantized, as torchao's do: a payload, its scales, and `dequantize`."""

    @staticmethod
    def __new__(cls, payload: torch.Tensor, scales: torch.Tensor) -> "Packed":
        made = torch.Tensor._make_wrapper_subclass(cls, payload.shape, dtype=torch.bfloat16)
        made.payload, made.scales = payload, scales
        return made

    def dequantize(self) -> torch.Tensor:
        return dequantize(self.payload, self.scales, blockwise(16, 16), torch.bfloat16)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Packed(args[0].payload, args[0].scales)
        raise NotImplementedError(f"{func} of a packed weight")


class Adapted(nn.Module):
    """A frozen base that may come quantized, and an adapter beside it."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.base, self.down, self.up = (nn.Linear(*sizes, bias=False) for sizes in ((32, 64), (32, 4), (4, 64)))
        payload, scales = quantize(self.base.weight, blockwise(16, 16))
        values = Packed(payload, scales) if packed else dequantize(payload, scales, blockwise(16, 16), torch.bfloat16)
        self.base.weight = nn.Parameter(values, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@distributed(2)
def test_a_frozen_base_that_comes_quantized_trains_its_adapter():
    batch = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    for compute in ("dequantize", "scaled"):
        recipe = rowwise(compute=compute)
        policy = weft.MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, param_quantization=recipe, quantize=lambda name, p: name == "base.weight"
        )
        net, plain = Adapted(packed=True), Adapted(packed=False)
        weft.fully_shard(net, mp_policy=policy)
        mains = {group.recipe.quantization: group.recipe.main for group in net._weft_unit.groups}
        assert mains == {recipe: torch.bfloat16, None: torch.float32}
        before = dequantize(*quantize(plain.base.weight, recipe), recipe, torch.bfloat16)  # the payload alone is kept
        assert torch.equal(nets.full(net.base.weight), before)
        plain.bfloat16()
        if compute == "dequantize":
            with torch.no_grad():
                plain.base.weight.copy_(restored(plain.base.weight, recipe))
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
        net(batch.chunk(2)[dist.get_rank()]).float().square().mean().backward()
        is_scaled = "base.weight" if compute == "scaled" else ""
        with scaled.computing(plain, recipe, torch.bfloat16, is_scaled.__eq__) as model:
            model(batch.bfloat16()).float().square().mean().backward()
        for name in ("up", "down"):
            found, wanted = getattr(net, name).weight.grad, getattr(plain, name).weight.grad
            torch.testing.assert_close(nets.full(found), wanted.float(), rtol=2**-6, atol=2**-6)
        optimizer.step()
        assert torch.equal(nets.full(net.base.weight), before) and net.base.weight.grad is None


@distributed(2)
def test_a_parameter_that_comes_quantized_keeps_the_attributes_that_were_set_on_it():
    net = Adapted(packed=True)
    weft.keep_dtype(net.base.weight)
    net.base.weight.note = "frozen"
    net.base.bias = nn.Parameter(torch.empty(64, device="meta"))  # `reset_parameters` fills it, and sees a plain weight
    weft.fully_shard(net, mp_policy=weft.MixedPrecisionPolicy(param_quantization=rowwise()))
    assert net.base.weight.note == "frozen" and not hasattr(net.base.weight, "payload")
    recipes = {each.name: group.recipe.quantization for group in net._weft_unit.groups for each in group.parameters}
    assert recipes == {"base.weight": None, "base.bias": None, "down.weight": rowwise(), "up.weight": rowwise()}


@distributed(2)
def test_weights_whose_scales_are_unknown_are_refused():
    for policy in (weft.MixedPrecisionPolicy(), weft.MixedPrecisionPolicy(param_quantization=rowwise())):
        net = nn.Linear(32, 32, bias=False)
        net.weight = nn.Parameter(net.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
        with pytest.raises(ValueError, match=r"'weight' is of torch\.float8_e4m3fn.*weft\.quantize\.dequantize"):
            weft.fully_shard(net, mp_policy=policy)
    net.weight = nn.Parameter(Packed(*quantize(torch.randn(32, 32), blockwise(16, 16))))
    with pytest.raises(ValueError, match="a Packed, a tensor subclass with its own operators"):
        weft.fully_shard(net)


class _Travels(torch.autograd.Function):
    """A weight with the values of its payload, and its gradient with those that travel."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor, recipe, travels: torch.dtype) -> torch.Tensor:
        ctx.travels = travels
        return weight.clone() if recipe is None else dequantize(*quantize(weight, recipe), recipe, weight.dtype)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient.to(ctx.travels).to(gradient.dtype), None, None


@pytest.mark.slow
@distributed(2)
def test_adam_in_fp64_equals_one_process():
    """Adam divides by roots of second moments, which makes rounding in fp32 as large as a fault. In fp64 it cannot."""
    sizes = {"width": 32, "hidden": 64}
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "shard"))
    for travels, ties, microbatches, options in (
        (torch.float64, False, 2, {"mesh": mesh, "outer_strategy": "optim"}),
        (torch.float64, True, 1, {}),
        (torch.bfloat16, False, 1, {"strategy": "optim"}),
    ):
        policy = weft.MixedPrecisionPolicy(
            reduce_dtype=travels,
            main_params_dtype=torch.float64,
            param_quantization=mx(32),
            quantize=lambda name, p, ties=ties: p.ndim == 2 and (ties or "embedding" not in name),
        )
        plain, net = nets.make(**sizes).double(), nets.shard(nets.make(**sizes).double(), mp_policy=policy, **options)
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, net)]
        for batch in nets.data(3, 8):
            for last, rows in enumerate(batch.chunk(microbatches)):
                net.set_is_last_backward(last == microbatches - 1)
                nets.loss_of(net, rows.chunk(2)[dist.get_rank()]).backward()
                for part in rows.chunk(2):  # gradients travel by themselves, and are summed in fp64
                    weights = {
                        name: _Travels.apply(p, mx(32) if policy.quantize(name, p) else None, travels)
                        for name, p in plain.named_parameters()
                    }
                    weights["head.weight"] = weights["embedding.weight"]
                    outputs = torch.func.functional_call(plain, weights, (part[:, :-1],))
                    (nn.functional.cross_entropy(outputs.flatten(0, 1), part[:, 1:].flatten()) / 2).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for one, other in zip(net.parameters(), plain.parameters()):
            torch.testing.assert_close(nets.full(one), other.detach(), rtol=1e-13, atol=1e-13)
