"""dtypes: what computes, what travels, what accumulates, what the optimizer sees, each compared with one process."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import weft
from tests.fsdp import nets
from tests.fsdp.seams.truth import assert_gradients, assert_weights
from tests.pairs import pairwise
from tests.pool import distributed
from weft.comm import collectives
from weft.comm.lanes import Lane

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
MOSTLY_SLOW = [*(pytest.param(strategy, marks=pytest.mark.slow) for strategy in STRATEGIES[:3]), STRATEGIES[3]]

# What two processes compute may differ from one by a rounding to the neighbouring value in bf16.
NEIGHBOURS = {"rtol": 2**-7, "atol": 2**-7}

RECIPES = [
    # model, param,  reduce, main,  main grads: what is given; None keeps what was there
    (FP32, BF16, None, None, None),
    (FP32, BF16, FP32, None, None),
    (FP32, BF16, FP32, BF16, FP32),
    (FP32, BF16, None, None, BF16),
    (FP32, None, BF16, None, None),
    (FP32, None, FP16, None, None),
    (FP32, FP16, FP32, None, None),
    (FP32, FP32, None, FP64, None),
    (FP32, FP32, None, BF16, None),
    (BF16, None, None, None, None),
    (BF16, None, None, None, FP32),
    (BF16, None, FP32, FP32, None),
]


def mine(batch: torch.Tensor) -> torch.Tensor:
    """This rank's rows."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def shard(net: nets.Net, policy: weft.MixedPrecisionPolicy, **options) -> nets.Net:
    """One unit per block, the root last and with fp32 outputs."""
    for block in net.blocks:
        weft.fully_shard(block, mp_policy=policy, **options)
    outputs = weft.MixedPrecisionPolicy(**{**vars(policy), "output_dtype": FP32})
    return weft.fully_shard(net, mp_policy=outputs, **options)


def travelled(monkeypatch) -> set[torch.dtype]:
    """The dtypes of gradients that are reduced from now on."""
    seen = set()
    run = Lane.run

    def spy(lane, collective, *args, **options):
        if collective in (collectives.reduce_scatter, collectives.all_reduce):
            _, partial, _ = args
            seen.add(partial.dtype)
        return run(lane, collective, *args, **options)

    monkeypatch.setattr(Lane, "run", spy)
    return seen


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy", [*(pytest.param(s, marks=pytest.mark.long) for s in STRATEGIES[:3]), STRATEGIES[3]]
)
@distributed(2)
def test_every_recipe_equals_one_process_that_casts_at_the_same_places(strategy):
    ranks, batches = dist.get_world_size(), nets.data(2, 8)
    outer = "no_shard" if strategy == "no_shard" else "optim"
    axes = [{}, {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "shard")), "outer_strategy": outer}]
    # The others take half of the recipes each: they reduce as this one does, or after the last microbatch.
    some = slice(None) if strategy == "optim_grads_params" else slice(STRATEGIES.index(strategy) % 2, None, 2)
    for number, (own, *recipe) in [*enumerate(RECIPES)][some]:
        policy = weft.MixedPrecisionPolicy(recipe[0], recipe[1], None, True, recipe[2], recipe[3])
        main, compute = policy.main_params_dtype or own, policy.param_dtype or own
        travels, main_grad = policy.reduce_dtype or compute, policy.main_grads_dtype or main
        plain = nets.make().to(own).to(main)
        for parameter in plain.parameters():
            parameter.grad_dtype = main_grad
        net = shard(nets.make().to(own), policy, strategy=strategy, **axes[number // 2 % 2])
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, net)]
        with pytest.MonkeyPatch.context() as patches:
            seen = travelled(patches)
            for batch in batches:
                for last, rows in enumerate(batch.chunk(2)):
                    net.set_is_last_backward(bool(last))
                    nets.loss_as_cast(plain, rows, ranks=ranks, compute=compute, travels=travels).backward()
                    nets.loss_of(net, mine(rows)).backward()
                assert {(p.dtype, p.grad.dtype) for p in net.parameters()} == {(main, main_grad)}
                assert_gradients(net, plain, **NEIGHBOURS)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        assert seen == {travels}
        assert_weights(net, plain, **NEIGHBOURS)
        net.unshard()
        assert net.norm.weight.dtype == compute


@pytest.mark.slow
@distributed(2)
def test_optimizers_that_need_gradients_in_the_weights_dtype_say_so():
    policy = weft.MixedPrecisionPolicy(BF16, main_params_dtype=BF16, main_grads_dtype=FP32)
    net = shard(nets.make(), policy)
    nets.loss_of(net, nets.data(1, 4)[0]).backward()
    for options in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        with pytest.raises(TypeError, match=r"torch.bfloat16 and torch.float32.*leave out main_grads_dtype"):
            torch.optim.AdamW(net.parameters(), **options).step()
        with pytest.raises(
            ValueError, match=r"AdamW .* torch.float32 for weights in torch.bfloat16.*main_params_dtype"
        ):
            weft.optim.flat(torch.optim.AdamW, net, **options)
    copied = copy.deepcopy(net.norm.weight)
    assert copied.grad.dtype == FP32
    weft.optim.flat(torch.optim.SGD, net, lr=0.1, momentum=0.9).step()
    stepped = nets.full(net.norm.weight)
    torch.optim.SGD([copied], lr=0.1, momentum=0.9).step()
    torch.testing.assert_close(nets.full(copied), stepped, rtol=0, atol=0)


@pytest.mark.slow
@distributed(2)
def test_flat_optimizers_take_gradients_of_a_narrower_dtype_than_the_weights():
    policy = weft.MixedPrecisionPolicy(FP32, BF16, main_grads_dtype=BF16)
    for options in ({"foreach": False}, {"fused": True}):
        net, plain = shard(nets.make(), policy), nets.make()
        flat = weft.optim.flat(torch.optim.AdamW, net, lr=1e-2, **options)
        ordinary = torch.optim.AdamW(plain.parameters(), lr=1e-2, **options)
        for batch in nets.data(3, 4):
            nets.loss_of(net, mine(batch)).backward()
            assert {(p.dtype, p.grad.dtype) for p in net.parameters()} == {(FP32, BF16)}
            for one, other in zip(net.parameters(), plain.parameters()):
                other.grad = nets.full(one.grad).float()
            flat.step(), ordinary.step(), flat.zero_grad()
        assert_weights(net, plain)
        (room,) = flat._rooms.values()
        most = max(group.main_weight.local.numel() for unit in net.modules() for group in groups_of(unit))
        assert room.numel() <= most, "the gradients of one unit at a time are widened"


def groups_of(module: nn.Module) -> list:
    return module._weft_unit.groups if isinstance(module, weft.FSDPModule) else []


# --- units that mix dtypes ------------------------------------------------------------------------------------------


class Decay(nn.Module):
    """A layer in bf16 whose decay, step bias and norm are fp32, as state-space models have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, width, dtype=BF16)
        self.A_log = nn.Parameter(torch.rand(width))
        self.dt_bias = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = F.softplus(self.project(self.norm(x.float()).to(BF16)).float() + self.dt_bias)
        return x + torch.tanh(-self.A_log.exp() * step).to(x.dtype)


class Decays(nn.Module):
    def __init__(self, recompute: str | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 13, dtype=BF16)
        self.blocks = nn.ModuleList(Decay(13) for _ in range(2))
        self.head = nn.Linear(13, 11)
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x)
        return self.head(x.float())


@pytest.mark.long
@distributed(2)
def test_units_that_mix_dtypes_equal_one_process():
    ranks = dist.get_world_size()
    policies = [weft.MixedPrecisionPolicy(), weft.MixedPrecisionPolicy(None, FP32, main_params_dtype=FP32)]
    recomputed = [None, "reentrant", "non-reentrant"]
    for strategy, recompute, policy in pairwise(strategy=STRATEGIES, recompute=recomputed, policy=policies):
        torch.manual_seed(0)
        plain = Decays(recompute)
        torch.manual_seed(0)
        net = Decays(recompute)
        own = {name: p.dtype for name, p in net.named_parameters()}
        for block in net.blocks:
            weft.fully_shard(block, strategy=strategy, mp_policy=policy)
        weft.fully_shard(net, strategy=strategy, mp_policy=policy)
        main = policy.main_params_dtype
        assert {name: main or dtype for name, dtype in own.items()} == {
            name: p.dtype for name, p in net.named_parameters()
        }
        for tokens in nets.data(2, 4):
            for rows in tokens.chunk(ranks):
                (nets.loss_of(plain, rows) / ranks).backward()
            nets.loss_of(net, mine(tokens)).backward()
            actual = nets.whole({name: p.grad for name, p in net.named_parameters()})
            for name, expected in plain.named_parameters():
                assert actual[name].dtype == (main or expected.dtype)
                torch.testing.assert_close(actual[name].to(expected.dtype), expected.grad, **NEIGHBOURS)


# --- sums in low precision ------------------------------------------------------------------------------------------


class Steep(nn.Module):
    """The gradient of its weights is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(300))
        self.inner = nn.Linear(3, 3)

    def forward(self, slopes: torch.Tensor) -> torch.Tensor:
        return (self.weight * slopes).sum() + 0 * self.inner(torch.ones(3)).sum()


@pytest.mark.slow
@distributed(4)
def test_gradients_are_scaled_before_their_sums_leave_fp16():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "shard"))
    axes = [{"mesh": mesh, "outer_strategy": outer} for outer in ("no_shard", "optim")]
    cases = [{"strategy": strategy} for strategy in STRATEGIES]
    cases += [{"strategy": "optim", **each} for each in axes] + [
        {"strategy": "optim_grads_params", **each} for each in axes
    ]
    largest = torch.finfo(FP16).max
    slopes = torch.linspace(largest / 2, largest * 0.9, 300)
    for number, options in enumerate(cases):
        for compute in (FP16, FP32) if options == {"strategy": "optim_grads_params"} else [(FP16, FP32)[number % 2]]:
            policy = weft.MixedPrecisionPolicy(compute, FP16)
            net = Steep()
            weft.fully_shard(net.inner, mp_policy=policy, **options)
            weft.fully_shard(net, mp_policy=policy, **options)
            # The sum over ranks is four times too large for fp16, their average is not.
            net(slopes).backward()
            torch.testing.assert_close(nets.full(net.weight.grad), slopes, rtol=2**-9, atol=0)
            net.zero_grad()
            # Sums of tokens' losses, in several microbatches, divided by the number of tokens.
            net.set_gradient_divide_factor(4 * 300.0)
            terms = 100 * slopes if compute == FP32 else slopes  # beyond fp16 even before they are added up
            for number in range(3):
                net.set_is_last_backward(number == 2)
                net(terms).backward()
            torch.testing.assert_close(nets.full(net.weight.grad), terms / 100, rtol=2**-8, atol=0)


def uneven(tokens: torch.Tensor) -> torch.Tensor:
    """Labels of which every row has another number."""
    labels = tokens[:, 1:].clone()
    for row, line in enumerate(labels):
        line[row % 5 + 1 :] = -100
    return labels


def summed_loss(net: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [*(pytest.param(s, marks=pytest.mark.long) for s in STRATEGIES[:3]), STRATEGIES[3]]
)
@distributed(2)
def test_a_loss_per_token_with_uneven_counts_equals_one_process(strategy):
    plain, net = nets.make(), nets.shard(nets.make(), strategy=strategy)
    for step, tokens in enumerate(nets.data(3, 12)):
        labels = uneven(tokens.roll(step, 0))
        microbatches = list(zip(tokens.chunk(2), labels.chunk(2)))
        count = (labels != -100).sum()
        assert (mine(labels[:6]) != -100).sum() * 4 != count
        for model in (plain, net):
            model.zero_grad()
        (sum(summed_loss(plain, *each) for each in microbatches) / count).backward()
        for unit in (*net.blocks, net):
            unit.set_gradient_divide_factor(float(count))
        for last, (rows, targets) in enumerate(microbatches):
            net.set_is_last_backward(bool(last))
            summed_loss(net, mine(rows), mine(targets)).backward()
        for p, expected in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(nets.full(p.grad), expected.grad)


@pytest.mark.slow
@distributed(2)
def test_a_gradient_scaler_in_fp16_equals_one_process():
    """The scale grows until the gradients of one rank leave fp16: both skip that step and go on."""
    ranks = dist.get_world_size()
    for strategy in ("optim", "optim_grads_params"):
        plain, net = nets.make(), shard(nets.make(), weft.MixedPrecisionPolicy(FP16, FP32), strategy=strategy)
        optimizers = {model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, net)}
        scalers = {
            model: torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_factor=4.0, growth_interval=1)
            for model in (plain, net)
        }
        scales = []
        for batch in nets.data(6, 4):
            for model, optimizer in optimizers.items():
                optimizer.zero_grad()
                if model is plain:  # gradients reach the average after they could overflow, as sharded ones do
                    loss = ranks * nets.loss_as_cast(plain, batch, ranks=ranks, compute=FP16)
                else:
                    loss = nets.loss_of(net, mine(batch))
                scalers[model].scale(loss).backward()
                for p in plain.parameters() if model is plain else ():
                    p.grad.div_(ranks)
                scalers[model].unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scalers[model].step(optimizer)
                scalers[model].update()
            scales.append([scaler.get_scale() for scaler in scalers.values()])
            for p, expected in zip(net.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(nets.full(p), expected.detach(), **NEIGHBOURS)
        assert all(one == other for one, other in scales)
        assert sorted({one for one, _ in scales}) != [one for one, _ in scales]  # it shrank


# --- what the policy accepts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["param_dtype", "reduce_dtype", "output_dtype", "main_params_dtype", "main_grads_dtype"]
)
def test_dtypes_in_which_torch_does_not_compute_are_refused(name):
    for dtype in (torch.int8, torch.float8_e4m3fn, torch.complex64, "bf16"):
        with pytest.raises(ValueError, match=rf"{name}=.*choose one of torch.float64, .*torch.float16, or None"):
            weft.MixedPrecisionPolicy(**{name: dtype})


class Dtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list = []

    def forward(self, x, *, extra):
        self.seen = [x.dtype, extra["scale"].dtype, extra["index"].dtype, self.linear.weight.dtype]
        return {"y": self.linear(x.to(self.linear.weight.dtype)), "index": extra["index"]}


@distributed(2)
def test_inputs_and_outputs_are_cast_as_the_policy_says():
    x, extra = torch.randn(2, 4), {"scale": torch.ones(2), "index": torch.arange(2)}
    for casts in (True, False):
        policy = weft.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64, cast_forward_inputs=casts)
        module = weft.fully_shard(Dtypes(), mp_policy=policy)
        output = module(x, extra=extra)
        floating = torch.bfloat16 if casts else torch.float32
        assert module.seen == [floating, floating, torch.int64, torch.bfloat16]
        assert output["y"].dtype == torch.float64 and output["index"].dtype == torch.int64


@distributed(2)
def test_torch_s_own_policies_are_accepted():
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = nets.shard(nets.make(), mp_policy=policy, offload_policy=OffloadPolicy())
    assert net(nets.data(1, 2)[0]).dtype == torch.bfloat16
