"""Sharded modules among torch's other functions: `replicate`, DDP, torch's own FSDP2, pipelining, `drop_in`."""

import copy
import sys
import types
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.pipelining.stage as stage
from torch import nn
from torch.distributed._composable.replicate import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize, prune

import weft
from tests.fsdp import nets
from tests.pool import distributed


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))


def rows() -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(1))


def mine(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def backward(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
    model(batch).square().mean().backward()
    return [nets.full(parameter.grad) for parameter in model.parameters()]


@pytest.mark.parametrize("around", [replicate, replicate_by_ddp])
@distributed(2)
def test_what_replicates_the_rest_leaves_a_sharded_child_alone(around):
    model = make()
    weft.fully_shard(model[0])
    around(model)
    torch.testing.assert_close(backward(model, mine(rows())), backward(make(), rows()))


@distributed(2)
def test_wrappers_that_take_all_parameters_for_replicas_are_refused():
    model = make()
    weft.fully_shard(model[0])
    for gathered in (False, True):
        if gathered:
            model[0].unshard()
        for wrapper in (DistributedDataParallel, nn.DataParallel):
            with pytest.raises(
                TypeError, match=rf"{wrapper.__name__} around '0.weight' of .*, which is sharded.*no_shard"
            ):
                wrapper(model)
    DistributedDataParallel(make())


@distributed(2)
def test_a_wrapper_that_ignores_sharded_parameters_replicates_the_rest():
    model = make()
    weft.fully_shard(model[0])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    with pytest.raises(TypeError, match=r"around '0\.bias' of"):
        DistributedDataParallel(model)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "0.bias"])
    wrapped = DistributedDataParallel(model)
    torch.testing.assert_close(backward(wrapped, mine(rows())), backward(make(), rows()))
    with pytest.raises(TypeError, match=r"DataParallel around '0\.weight' of"):
        nn.DataParallel(model)
    tied = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False), nn.Linear(5, 3))
    tied[1].weight = tied[0].weight
    weft.fully_shard([tied[0], tied[1]])
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(tied, ["0.weight"])
    with pytest.raises(TypeError, match=r"around '1\.weight' of"):
        DistributedDataParallel(tied)


@distributed(2)
def test_a_model_is_sharded_by_one_of_the_two_libraries():
    for theirs in (torch_fsdp.fully_shard, replicate):
        model = make()
        theirs(model[0], mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(ValueError, match=r"0 \(.*Linear\) is managed by torch's .*no_shard.*weft.drop_in"):
            weft.fully_shard(model)
    model = make()
    weft.fully_shard(model[0])
    with pytest.raises(ValueError, match=r"torch's fully_shard around parameter 'weight' of .*Linear.*weft.drop_in"):
        torch_fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


@distributed(2)
def test_a_parametrization_comes_before_sharding():
    class Twice(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    model = make()
    weft.fully_shard(model[0])
    weft.fully_shard(model)
    for gathered in (False, True):
        if gathered:
            model[0].unshard()
        with pytest.raises(ValueError, match=r"a parametrization of parameter 'weight' of .*before fully_shard"):
            parametrize.register_parametrization(model[0], "weight", Twice())
    model[0].reshard()
    torch.testing.assert_close(backward(model, mine(rows())), backward(make(), rows()))
    plain, sharded = make(), make()
    for each in (plain, sharded):
        parametrize.register_parametrization(each[0], "weight", Twice())
    weft.fully_shard(sharded[0])
    weft.fully_shard(sharded)
    torch.testing.assert_close(backward(sharded, mine(rows())), backward(plain, rows()))


REWRITES = {
    "spectral_norm": nn.utils.spectral_norm,
    "weight_norm": nn.utils.weight_norm,
    "pruning": lambda module: prune.l1_unstructured(module, "weight", amount=0.5),
    "parametrized spectral_norm": nn.utils.parametrizations.spectral_norm,
    "parametrized weight_norm": nn.utils.parametrizations.weight_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("name", REWRITES)
@distributed(2)
def test_what_makes_a_weight_of_others_comes_before_sharding_or_is_refused(name):
    def stepped(model, rows):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model(rows).detach()

    def made(sharded, early):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        if early:
            REWRITES[name](model[0])
        if sharded:
            weft.fully_shard(model[0])
            weft.fully_shard(model)
        return model

    rows = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(stepped(made(True, early=True), rows), stepped(made(False, early=True), rows))
    late = made(True, early=False)
    stepped(late, rows)
    with pytest.raises((RuntimeError, ValueError), match=r"weight|sharded parameter"):
        REWRITES[name](late[0])
        stepped(late, rows)


@distributed(2)
def test_the_state_reduces_what_backwards_without_sync_have_left_as_pipelining_asks_it_to():
    model = make()
    assert weft.fully_shard.state(model) is None
    weft.fully_shard(model[0])
    weft.fully_shard(model)
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    for batch in mine(rows()).chunk(2):
        (model(batch).square().mean() / 2).backward()
    assert all(each.sharded.grad is None for each in model[0]._weft_unit.groups[0].parameters)
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    state = weft.fully_shard.state(model)
    assert not state._state_ctx.all_states, "nothing is left for torch to reduce"
    state._root_post_backward_final_callback()
    assert weft.memory_report(model)["transient"]["gathered weights"]["live"] == 0
    actual = [nets.full(parameter.grad) for parameter in model.parameters()]  # the sharded ones are registered
    torch.testing.assert_close(actual, backward(make(), rows()))


@pytest.mark.slow
@distributed(4)
def test_a_placement_function_may_give_parameters_a_mesh_of_their_own():
    """As experts have: they are reduced over the ranks of their mesh alone."""
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    parts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
    model = make()

    def place(parameter: nn.Parameter) -> ShardPlacementResult:
        mesh = parts["edp"] if parameter.dim() == 1 else whole
        return ShardPlacementResult(Shard(0), FSDPMeshInfo(mesh, shard_mesh_dim=0))

    weft.fully_shard(model, mesh=whole, shard_placement_fn=place)
    actual = dict(zip(dict(model.named_parameters()), backward(model, mine(rows()))))
    everyone, few = make(), make()
    backward(everyone, rows())
    backward(few, rows().chunk(2)[dist.get_rank() // 2])
    for name, parameter in model.named_parameters():
        assert parameter.device_mesh.size() == (2 if parameter.dim() == 1 else 4)
        expected = (few if parameter.dim() == 1 else everyone).get_parameter(name).grad
        torch.testing.assert_close(actual[name], expected)
    with pytest.raises(ValueError, match=r"reshard_after_forward=2 where shard_placement_fn gives"):
        weft.fully_shard(make(), mesh=whole, shard_placement_fn=place, reshard_after_forward=2)


@distributed(2)
def test_a_hook_s_stream_changes_nothing_on_cpu_and_must_be_one():
    seen = []
    model = weft.fully_shard(make())
    model.set_all_reduce_hook(lambda reduced: seen.append(reduced.numel()), stream=torch.cpu.current_stream())
    torch.testing.assert_close(backward(model, mine(rows())), backward(make(), rows()))
    assert len(seen) == 1
    for context in (nullcontext(), weft.debug.check_streams()):
        with context, pytest.raises(TypeError, match="pass a stream, or leave it out"):
            model.set_all_reduce_hook(lambda reduced: None, stream=object())


@distributed(2)
def test_averages_of_weights_are_copies_of_parameters_since_modules_are_not_copied():
    model = weft.fully_shard(make())
    with pytest.raises(TypeError, match="to average its weights, copy the sharded parameters"):
        torch.optim.swa_utils.AveragedModel(model)
    averages = {name: copy.deepcopy(parameter) for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            before = nets.full(parameter)
            parameter.add_(1)
            averages[name].lerp_(parameter, 0.5)
            torch.testing.assert_close(nets.full(averages[name]), before + 0.5)


@pytest.mark.slow
@distributed(2)
def test_function_transforms_of_sharded_modules_are_refused_at_once():
    model = weft.fully_shard(make())
    x = torch.ones(3, 5)
    for transformed in (
        lambda: torch.func.grad(lambda each: model(each).sum())(x),
        lambda: torch.func.jvp(model, (x,), (x,)),
        lambda: torch.func.vmap(model)(x),
    ):
        with pytest.raises(RuntimeError, match=r"torch.func or forward-mode differentiation.*a plain copy"):
            transformed()
    with pytest.raises(RuntimeError, match=r"called under torch.jit.trace: .*a plain copy"):
        torch.jit.trace(model, x)
    torch.testing.assert_close(backward(model, mine(rows())), backward(make(), rows()))


def test_drop_in_replaces_torch_s_names_wherever_they_were_imported_and_says_where():
    library = types.ModuleType("a_library")
    library.shard_it = torch_fsdp.fully_shard
    sys.modules[library.__name__] = library
    theirs = torch_fsdp.fully_shard
    try:
        with weft.drop_in() as replaced:
            from torch.distributed._composable.fsdp import fully_shard

            assert fully_shard is library.shard_it is torch_fsdp.fully_shard is weft.fully_shard
            assert stage.FSDPModule is torch_fsdp.FSDPModule is weft.FSDPModule
            assert torch_fsdp.MixedPrecisionPolicy is not weft.MixedPrecisionPolicy
            assert {"a_library.shard_it", "torch.distributed.fsdp.fully_shard"} <= set(replaced.replaced)
            assert "torch.distributed.pipelining.stage: FSDPModule, fully_shard" in str(replaced)
            assert weft.drop_in().replaced == ()
        assert torch_fsdp.fully_shard is library.shard_it is theirs is not weft.fully_shard
        assert stage.FSDPModule is not weft.FSDPModule
    finally:
        del sys.modules[library.__name__]


@pytest.mark.slow
@distributed(2)
def test_a_script_for_torch_s_names_runs_with_weft_under_drop_in():
    model = make()
    with weft.drop_in():
        torch_fsdp.fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))
        torch_fsdp.fully_shard(model, mp_policy=torch_fsdp.MixedPrecisionPolicy(), mesh=init_device_mesh("cpu", (2,)))
        assert isinstance(model, torch_fsdp.FSDPModule) and isinstance(model, weft.FSDPModule)
    torch.testing.assert_close(backward(model, mine(rows())), backward(make(), rows()))
