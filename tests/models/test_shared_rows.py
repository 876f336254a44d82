"""What is counted where ranks share rows or layers: bytes, losses of routers."""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import weft
from tests.models.test_context import batch, build
from tests.models.test_documents import config
from tests.pool import distributed
from weft.comm.collectives import reduce_now
from weft.dtensor.uneven import local_of
from weft.errors import KernelError
from weft.models import Documents, context_part
from weft.models.gathering import Gathering
from weft.moe import router_losses


class Made(TorchDispatchMode):
    """The memory of all tensors that are made inside; hooks on saved tensors would change what is kept."""

    def __init__(self):
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if type(each) is torch.Tensor:
                storage = each.untyped_storage()
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    def alive(self, model):
        """Bytes that are in use now, without weights and tables of `model`."""
        lasting = *(local_of(each.detach()) for each in model.parameters()), *model.buffers()
        weights = {each.untyped_storage()._cdata for each in lasting}
        kept = [each for place, each in self.storages.items() if place not in weights]
        return sum(nbytes for storage, nbytes in kept if not storage.expired())


@distributed(2)
def test_losses_of_routers_are_means_over_context_ranks_each_about_its_own_tokens():
    meshes, given = weft.init_meshes("cpu", cp=2), batch(None)
    cfg = config("E", aux_loss_coef=0.5)
    model = build(cfg, meshes)
    loss = model(**context_part(given, meshes)).detach()
    own = sum(router_losses(model).values()).double()
    mean = reduce_now(own.clone(), dist.ReduceOp.SUM, None) / 2
    assert own != mean
    without = build(dataclasses.replace(cfg, aux_loss_coef=0.0))(**given).detach()
    torch.testing.assert_close(loss, without + mean, rtol=1e-6, atol=1e-6)  # router losses are kept in fp32


@pytest.mark.slow
@distributed(2)
def test_kernels_of_other_packages_are_refused_by_name_and_left_alone_by_auto():
    meshes = weft.init_meshes("cpu", cp=2)
    for kind, setting, name in (("M", "mamba_kernel", "mamba_ssm"), ("G", "delta_kernel", "fla")):
        part = context_part(batch(None), meshes)
        with pytest.raises(KernelError, match=f"{name} cannot be used: it does not support context ranks"):
            build(config(kind, **{setting: name}))(**part)
        with mock.patch("weft.models.layers.kernels._chosen", side_effect=AssertionError("asked for a kernel")):
            build(config(kind, **{setting: "auto"}), meshes)(**part)


@pytest.mark.slow
@distributed(2)
@torch.no_grad()
def test_recurrences_send_as_much_for_8k_tokens_as_for_2k():
    meshes = weft.init_meshes("cpu", cp=2)
    for kind in "MG":
        model, sent = build(config(kind), meshes, dtype=torch.float32), []
        for seq in (2048, 8192):
            tokens = torch.arange(seq)[None] % 37
            with mock.patch.object(Gathering, "send", autospec=True, side_effect=Gathering.send) as send:
                model(**context_part({"tokens": tokens, "labels": tokens}, meshes))
            sent.append(sum(part.nbytes for call in send.call_args_list for part in call.args[1]))
        assert sent[0] == sent[1] > 0


def kept_for_backward(model, given):
    """Bytes that are alive between forward and backward, each memory once, without weights and tables."""
    if isinstance(documents := given.get("documents"), Documents):
        given = {**given, "documents": dataclasses.replace(documents)}  # one that has made nothing yet
    with Made() as made:
        loss = model(**given)
    assert loss.requires_grad
    return made.alive(model)


def wide(pattern, **more):
    """Layers whose activations are much larger than what else a step makes."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "mamba_num_heads": 8}
    heads |= {"mamba_head_dim": 16, "mamba_n_groups": 4, "ssm_state_size": 16, "linear_num_key_heads": 4}
    heads |= {"linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    heads |= {"kda_num_heads": 8, "kda_head_dim": 16}
    sizes = {"intermediate_size": 256, "moe_intermediate_size": 64, "chunk_size": 16}
    return dataclasses.replace(config(pattern, **heads, **sizes, **more), hidden_size=64)


@pytest.mark.long
@distributed(4)
def test_activations_are_spread_over_context_and_tensor_parallel_ranks():
    cfg = wide("M[*-]GG[*E]")
    given = batch(None, 256)
    alone = kept_for_backward(build(cfg, dtype=torch.float32), given)
    context, shared = weft.init_meshes("cpu", cp=4), weft.init_meshes("cpu", tp=4)
    both = weft.init_meshes("cpu", tp=2, cp=2)
    part = context_part(given, context)
    assert kept_for_backward(build(cfg, context, dtype=torch.float32), part) <= 0.30 * alone
    assert kept_for_backward(build(cfg, shared, dtype=torch.float32), given) <= 0.35 * alone
    experts, whole = dataclasses.replace(cfg, pattern="[*E][*E]"), weft.init_meshes("cpu", tp=4, etp=1)
    alone = kept_for_backward(build(experts, dtype=torch.float32), given)
    for meshes in (whole, shared):
        assert kept_for_backward(build(experts, meshes, dtype=torch.float32), given) <= 0.35 * alone
    documents = batch(((100, 156), (31, 225)), 256)
    window = {"sliding_window": 32}
    for pattern, options, rows in (
        ("**", {}, given),
        ("**", {}, documents),
        ("**", window, given),
        ("**", window, documents),
        ("**", {**window, "attention_sinks": True}, given),
        ("++", {}, given),
    ):
        attention = dataclasses.replace(cfg, pattern=pattern, **options)
        alone = kept_for_backward(build(attention, dtype=torch.float32), rows)
        exchanged = dataclasses.replace(attention, context_attention="heads")
        cases = [(attention, context, 0.30), (attention, both, 0.30), (attention, shared, 0.35)]
        for each, meshes, most in [*cases, *([(exchanged, context, 0.30)] if pattern == "**" else [])]:
            part = rows if meshes is shared else context_part(rows, meshes)
            assert kept_for_backward(build(each, meshes, dtype=torch.float32), part) <= most * alone, (options, each)


@pytest.mark.long
@distributed(4)
def test_activations_of_each_kind_of_layer_are_spread_over_tensor_parallel_ranks():
    shared, whole = (weft.init_meshes("cpu", tp=4, etp=etp) for etp in (None, 1))
    both, given = weft.init_meshes("cpu", tp=2, cp=2), batch(None, 256)
    for kind in "*+MGKP-E":
        alone = kept_for_backward(build(wide(2 * kind), dtype=torch.float32), given)
        for meshes in (whole, both):
            part = context_part(given, meshes) if meshes is both else given
            assert kept_for_backward(build(wide(2 * kind), meshes, dtype=torch.float32), part) <= 0.30 * alone, kind
    assert 0.35 * alone < kept_for_backward(build(wide("EE"), shared, dtype=torch.float32), given) <= 0.37 * alone
