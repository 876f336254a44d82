"""torchao's float8 and int8 training and its optimizers: numbers are those of their run with torch's FSDP2."""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

import weft
from tests.fsdp import nets
from tests.pool import distributed
from weft.fsdp import UnevenDTensor

pytestmark = pytest.mark.slow

pytest.importorskip("torchao", reason="needs torchao: pip install 'weft[ecosystem]'")

STEPS = 4


def network() -> nn.Module:
    """The same on every rank. Each half of a weight has 4,096 elements; for less, torchao's optimizers use fp32."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 32)) for _ in range(2)))


def sharded(model: nn.Module) -> nn.Module:
    """In a unit for each layer."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        torch_fsdp.fully_shard(layer, mesh=mesh)
    return torch_fsdp.fully_shard(model, mesh=mesh)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def trained(model: nn.Module, make_optimizer: Callable = adamw) -> tuple[list[torch.Tensor], Any]:
    """Losses over all ranks and norms, and the optimizer."""
    optimizer = make_optimizer(model.parameters())
    numbers = []
    for rows in torch.randn(STEPS, 8, 32, generator=torch.Generator().manual_seed(1)):
        mine = rows.chunk(dist.get_world_size())[dist.get_rank()]
        loss = (model(mine) - mine).square().mean()
        loss.backward()
        norm = nets.full(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        numbers += [mean / dist.get_world_size(), norm]
    return numbers, optimizer


def in_both(run: Callable) -> list[Any]:
    """What `run()` returns with torch's names, and with weft's in their place."""
    results = []
    for context in (nullcontext, weft.drop_in):
        with context():
            results.append(run())
    return results


def float8(recipe: str, model: nn.Module, **options: Any) -> nn.Module:
    """With products in float8, emulated where there is no such hardware."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True, **options)
    return convert_to_float8_training(model, config=config)


def int8(model: nn.Module, **options: Any) -> nn.Module:
    """With products in int8."""
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
    from torchao.quantization import quantize_

    quantize_(model, Int8MixedPrecisionTrainingConfig(**options))
    return model


NARROW = {
    "float8, a scale per tensor": lambda model: float8("tensorwise", model),
    "float8, a scale per row": lambda model: float8("rowwise", model),
    "float8, weight gradients in high precision": lambda model: float8("rowwise_with_gw_hp", model),
    "int8": lambda model: int8(model, module_swap=True),
}


@pytest.mark.parametrize("kind", NARROW)
@distributed(2)
def test_narrow_products_of_plain_weights_train_alike(kind):
    (expected, _), (actual, _) = in_both(lambda: trained(sharded(NARROW[kind](network()))))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    plain, _ = trained(sharded(network()))
    assert all(abs(here - there) > 1e-5 for here, there in zip(actual, plain))


@distributed(2)
def test_float8_of_what_is_gathered_is_float8_that_is_gathered():
    """The scale is that of the whole weight, whoever finds it."""
    gathered, _ = trained(sharded(float8("tensorwise", network(), enable_fsdp_float8_all_gather=True)))
    with weft.drop_in():
        plain, _ = trained(sharded(float8("tensorwise", network())))
    torch.testing.assert_close(plain, gathered, rtol=1e-5, atol=1e-5)


def int8_weights(model: nn.Module) -> nn.Module:
    """With weights that are int8 at rest."""
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training
    from torchao.quantization import quantize_

    quantize_(model, int8_weight_only_quantized_training())
    return model


WRAPPED = {
    "WeightWithDynamicFloat8CastTensor": lambda model: float8("tensorwise", model, enable_fsdp_float8_all_gather=True),
    "Int8MixedPrecisionTrainingLinearWeight": lambda model: int8(model, module_swap=False),
    "Int8QuantizedTrainingLinearWeight": int8_weights,
}


@pytest.mark.parametrize("kind", WRAPPED)
@distributed(2)
def test_weights_with_operators_of_their_own_are_refused_by_name(kind):
    model = WRAPPED[kind](network())
    with weft.drop_in(), pytest.raises(ValueError, match=f"is a {kind}, a tensor subclass with its own operators"):
        sharded(model)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@distributed(2)
def test_optimizers_of_few_bits_train_alike(name):
    """Their compiled step runs as it is written: compilation takes longer than the test."""
    import torchao.optim

    def run() -> tuple[list[torch.Tensor], torch.Tensor]:
        model = sharded(network())
        numbers, optimizer = trained(model, lambda parameters: getattr(torchao.optim, name)(parameters, lr=1e-2))
        states = [optimizer.state[parameter]["exp_avg"].to_local() for parameter in model.parameters()]
        narrow = sum(state.numel() for state in states if type(state).__name__.startswith("OptimState"))
        total = torch.tensor(narrow)
        dist.all_reduce(total)
        return numbers, total

    with torch.compiler.set_stance("force_eager"):
        (expected, _), (actual, narrow) = in_both(run)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert narrow == sum(parameter.numel() for parameter in network().parameters() if parameter.ndim == 2)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
@distributed(2)
def test_states_of_few_bits_are_saved_and_resumed_by_distributed_checkpoint(name, tmp_path):
    import torchao.optim

    def make(parameters: Any) -> torch.optim.Optimizer:
        return getattr(torchao.optim, name)(parameters, lr=1e-2)

    def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))

    with torch.compiler.set_stance("force_eager"), weft.drop_in():
        model = sharded(network())
        _, optimizer = trained(model, make)
        saved = contents(model, optimizer)
        parts = [each.to_local() for each in tree_leaves(saved) if isinstance(each, UnevenDTensor)]
        assert any(type(each).__name__.startswith("OptimState") for each in parts)
        dcp.save(saved, checkpoint_id=tmp_path)
        expected, _ = trained(model, lambda _: optimizer)
        resumed = sharded(network())
        fresh = make(resumed.parameters())
        state = contents(resumed, fresh)
        dcp.load(state, checkpoint_id=tmp_path)
        set_state_dict(resumed, fresh, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        actual, _ = trained(resumed, lambda _: fresh)
    assert all(map(torch.equal, actual, expected))
