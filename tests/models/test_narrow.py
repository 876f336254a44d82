"""Hybrid models whose weights travel quantized: which weights, and the numbers of one process."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

import weft
import weft.overlap
from tests.fsdp.nets import full
from tests.fsdp.test_narrow import assert_same, travelling
from tests.pool import distributed
from weft.fsdp.module import units_of
from weft.mesh import init_meshes
from weft.models import HybridConfig, HybridModel, shard
from weft.models.narrow import choose_weights
from weft.moe.experts import GroupedExperts
from weft.quantize import blockwise, dequantize, except_ends, mx, nvfp4, quantize, rowwise, tensorwise

CFG = HybridConfig(
    pattern="M[*E][*-]G/[*-]",
    vocab_size=37,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_experts=4,
    moe_intermediate_size=32,
    mtp_loss_coef=0.0,
)


def chosen(model: HybridModel, quantize=None) -> list[str]:
    policy = choose_weights(model, weft.MixedPrecisionPolicy(param_quantization=mx(32), quantize=quantize))
    return [name for name, parameter in model.named_parameters() if policy.quantize(name, parameter)]


def test_projections_and_experts_are_quantized_and_the_ends_are_left_out():
    names = chosen(HybridModel(CFG))
    of_attention = ["q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"]
    mlp = ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
    attention = [f"self_attention.{each}" for each in of_attention]
    layers = {
        0: ["mixer.in_proj.weight", "mixer.out_proj.weight"],
        1: [*attention, *(f"mlp.experts.{each.removesuffix('.weight')}" for each in mlp)],
        2: [*attention, *(f"mlp.{each}" for each in mlp)],
        3: ["mixer.in_proj.weight", "mixer.out_proj.weight"],
    }
    main = [f"decoder.layers.{number}.{name}" for number, names in layers.items() for name in names]
    assert [name for name in names if "mtp" not in name] == main
    assert len(names) == len(main) + len(layers[2]), "of the prediction depth"
    inner = chosen(HybridModel(CFG), except_ends(2, 3))  # M * | E * - | G * -
    assert inner == [name for name in main if "layers.1.mlp" in name or "layers.2" in name]
    own = chosen(HybridModel(CFG), lambda name, parameter: name.endswith("in_proj.weight"))
    assert own == ["decoder.layers.0.mixer.in_proj.weight", "decoder.layers.3.mixer.in_proj.weight"]
    gated = dataclasses.replace(CFG, pattern="E", shared_expert_intermediate_size=32, shared_expert_gate=True)
    shared = [name for name in chosen(HybridModel(gated)) if "shared" in name]
    assert shared == [f"decoder.layers.0.mlp.shared_expert.{each}" for each in mlp], "the gate is left out"


def test_a_second_choice_forgets_the_first():
    model = HybridModel(CFG)
    everything = chosen(model)
    assert len(chosen(model, except_ends(2, 3))) < len(everything) == len(chosen(model))


def test_ends_that_are_the_whole_model_are_refused():
    with pytest.raises(ValueError, match=r"except_ends\(4, 4\) of a model with 8 layers"):
        chosen(HybridModel(CFG), except_ends(4, 4))
    with pytest.raises(ValueError, match=r"weft\.models\.shard"):
        except_ends()("weight", None)
    with pytest.raises(ValueError, match="first=-1"):
        except_ends(-1)


def test_parametrized_experts_are_not_quantized_in_silence():
    model = HybridModel(CFG)
    experts = next(module for module in model.modules() if isinstance(module, GroupedExperts))
    torch.nn.utils.parametrize.register_parametrization(experts, "up_proj", torch.nn.Identity())
    with pytest.raises(ValueError, match=r"parametrized experts, .*: leave it out, or choose the weights"):
        chosen(model)


def build(pattern: str, recipe, **sizes: int) -> tuple[HybridModel, HybridModel]:
    """One process that computes with what the quantized weights hold, and the sharded model."""
    meshes, models = init_meshes("cpu", **sizes), []
    for given in (None, meshes):
        torch.manual_seed(7)
        models.append(HybridModel(dataclasses.replace(CFG, pattern=pattern), meshes=given))
    whole, parts = models
    with torch.no_grad():
        for name in chosen(whole):
            weight = whole.get_parameter(name)
            weight.copy_(dequantize(*quantize(weight, recipe), recipe))
    shard(parts, meshes, mp_policy=weft.MixedPrecisionPolicy(param_quantization=recipe))
    return whole, parts


def assert_bytes(parts: HybridModel) -> None:
    """What travels of each quantized group are the bytes of whole weights, or of this rank's experts."""
    torch.manual_seed(7)
    whole, compared = HybridModel(parts.cfg), 0
    for unit in units_of(parts):
        for group in unit.groups:
            recipe, extents = group.recipe.quantization, group.layout.extents
            if recipe is None:
                continue
            weights = [whole.get_parameter(f"{unit.name}.{each.name}").detach() for each in group.parameters]
            mine = [
                weight if weight.shape == extent.shape else weight.chunk(dist.get_world_size())[dist.get_rank()]
                for weight, extent in zip(weights, extents)
            ]
            assert_same(travelling(group), extents, mine, recipe, torch.float32)
            compared += 1
    assert compared


def assert_gradients(parts: HybridModel, whole: HybridModel) -> None:
    for name, one in parts.named_parameters():
        assert_close(full(one.grad), whole.get_parameter(name).grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
@distributed(2)
def test_stages_and_schedules_with_delayed_weight_gradients_equal_one_process():
    rows = torch.randint(CFG.vocab_size, (2, 4, 8), generator=torch.Generator().manual_seed(1))
    for recipe in (tensorwise(), mx(32)):
        whole, parts = build("[*-]|[*-]", recipe, pp=2)
        microbatches = list(zip(*(each.chunk(2) for each in rows)))
        expected = [whole(tokens, labels=labels) for tokens, labels in microbatches]
        torch.stack(expected).sum().backward()
        losses = weft.overlap.forward_backward(parts, microbatches)
        assert_close(torch.stack([*losses]), torch.stack(expected).detach())
        assert_gradients(parts, whole)
        assert_bytes(parts)
    whole, parts = build("[*E][*-]", nvfp4(), ep=2)
    tokens, labels = rows
    (2 * whole(tokens, labels=labels)).backward()  # of two microbatches the losses are added
    mine = [part[2 * dist.get_rank() :][:2].chunk(2) for part in rows]
    weft.overlap.forward_backward(parts, list(zip(*mine)), delay_wgrad=True)
    assert_gradients(parts, whole)


@pytest.mark.long
@distributed(2)
def test_experts_of_other_ranks_equal_one_process():
    tokens, labels = torch.randint(CFG.vocab_size, (2, 4, 8), generator=torch.Generator().manual_seed(1))
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    for recipe in (tensorwise(), rowwise(), blockwise(16, 32), mx(32), nvfp4()):
        whole, parts = build("[*E][*-]", recipe, ep=2)
        expected, loss = whole(tokens, labels=labels), parts(tokens[mine], labels=labels[mine])
        expected.backward(), loss.backward()
        dist.all_reduce(mean := loss.detach().clone())
        assert_close(mean / 2, expected.detach())
        assert_gradients(parts, whole)
        assert_bytes(parts)
