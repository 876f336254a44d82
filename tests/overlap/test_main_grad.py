"""Modules that add to `main_grad` themselves, by Megatron's convention, find it in a schedule's backward too."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from tests.overlap.small import gradients
from tests.overlap.test_schedule import CFG, data
from tests.overlap.test_stages import OwnModel
from tests.pool import distributed
from weft.models import HybridModel
from weft.overlap import forward_backward
from weft.pipeline import Cut


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, dy):
        (x,), weight = ctx.saved_tensors, ctx.weight
        weight.main_grad.addmm_(dy.flatten(0, -2).t(), x.flatten(0, -2))
        weight.grad_added_to_main_grad = True
        return dy @ weight, torch.full_like(weight, torch.nan)  # a dummy: nobody may read it


class Fused(nn.Linear):
    def forward(self, x):
        return _Fused.apply(x, self.weight)


def build(meshes, strategy, fused):
    """With the convention in attention, in a dense MLP and in the head, which belongs to no layer."""
    torch.manual_seed(0)
    model = HybridModel(dataclasses.replace(CFG, pattern="[*E][*-]*"), meshes=meshes)
    if fused:
        first, second, third = model.decoder.layers
        declared = [first.self_attention.q_proj, second.mlp.down_proj, third.self_attention.o_proj, model.output_layer]
        for linear in declared:
            linear.__class__ = Fused
            linear.weight.grad_added_to_main_grad = False
    return weft.models.shard(model, meshes, strategy=strategy)


@pytest.mark.long
@distributed(2)
def test_modules_that_add_to_main_grad_find_it_in_every_step_that_needs_it():
    meshes = weft.init_meshes("cpu", ep=2)
    for strategy in ("optim_grads_params", "optim"):
        plain, fused = (build(meshes, strategy, fused) for fused in (False, True))
        for switches in ({"overlap": False}, {}, {"delay_wgrad": True}):
            for model in (plain, fused):
                model.zero_grad()
                forward_backward(model, data(3), **switches)
            for (name, expected), found in zip(plain.named_parameters(), fused.parameters()):
                torch.testing.assert_close(found.grad.to_local(), expected.grad.to_local(), msg=name)


class Projecting(OwnModel):
    """A projection follows the embedding, outside of the layers."""

    def __init__(self, cut=None):
        super().__init__(cut)
        self.project = nn.Linear(8, 8, bias=False) if self.embedding is not None else None

    def embed(self, tokens):
        return self.project(super().embed(tokens))


@distributed(2)
def test_modules_before_the_layers_find_main_grad_on_a_rank_without_the_head():
    microbatches = [torch.randint(11, (2, 2, 6), generator=torch.Generator().manual_seed(n)).unbind() for n in range(3)]
    whole, meshes = Projecting(), weft.init_meshes("cpu", pp=2)
    forward_backward(whole, microbatches, overlap=False)
    expected = gradients(whole)
    stage = Projecting(Cut((range(2), range(2, 5)), 2, meshes.pp.get_local_rank(), group=meshes.pp.get_group()))
    if stage.project is not None:
        stage.project.__class__ = Fused
        stage.project.weight.grad_added_to_main_grad = False
    weft.fully_shard(stage, mesh=meshes.dense)
    forward_backward(stage, microbatches, schedule="1f1b")
    for name, gradient in gradients(stage).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)
