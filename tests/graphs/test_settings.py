"""What `weft.Graphs` refuses, in words."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import weft
from tests.pool import distributed
from weft.fsdp.gradients.direct import whole
from weft.graphs import captured
from weft.graphs.captured import Captured, distinct
from weft.graphs.places import Places
from weft.graphs.statics import Sample
from weft.graphs.tape import TapeBackend


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"scopes": ("full_iteration",)}, ValueError, "gathers and reductions"),
        ({"scopes": ("moe",)}, ValueError, "exchange of rows"),
        ({"scopes": ("attention",)}, ValueError, "choose among 'attn'"),
        ({"scopes": "attn"}, TypeError, "sequence of names"),
        ({"scopes": ("moe_preprocess",)}, ValueError, "without 'moe_router'"),
        ({"scopes": ()}, ValueError, "nothing would be captured"),
        ({"modules": "block"}, TypeError, "predicate"),
        ({"warmup": 0}, ValueError, "at least 1"),
        ({"backend": "hip"}, ValueError, "'cuda'"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        weft.Graphs(**options)


def test_memory_without_fixed_places_is_refused():
    with pytest.raises(ValueError, match="addresses of weights"):
        weft.RuntimeOptions(graphs=weft.Graphs(), allocator="caching")
    with pytest.raises(TypeError, match=r"weft\.Graphs"):
        weft.RuntimeOptions(graphs=True)


def of(function, x, modules=(), like=None, owned=False):
    """`function` of one tensor, captured."""
    ((leaves, spec),) = [torch.utils._pytree.tree_flatten(((x,), {}))]
    places = Places(modules, lambda parameter: owned)
    gradients = {0: Sample.of(x if like is None else like)}
    return Captured(TapeBackend(), function, leaves, spec, places, gradients, [].append)


def mask(x):
    return x[x > 0].sum() + x


def offloaded(x):
    x.detach().to("meta")  # another device than that of the module, as the CPU is for a card
    return x * 2


def attention(x):
    return torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)


ELSEWHERE = torch.ones(3)

REFUSED = {
    "item": (lambda x: x * x.sum().item(), "host reads"),
    "a mask": (mask, "host reads"),
    "tolist": (lambda x: x * x.detach().tolist()[0][0], "host reads"),
    "numpy": (lambda x: x * float(x.detach().numpy()[0, 0]), "host reads"),
    "nonzero": (lambda x: x[x.detach().nonzero()[:, 0]].sum() + x, "host reads"),
    "a branch": (lambda x: x * 2 if x.detach().sum() > 0 else x, "host reads"),
    "random numbers": (lambda x: x + torch.rand(3), "random"),
    "dropout": (lambda x: torch.nn.functional.dropout(x, 0.1), "random"),
    "dropout in attention": (attention, "random"),
    "dropout that is recomputed": (lambda x: checkpoint(torch.dropout, x, 0.1, True, use_reentrant=False), "random"),
    "numbers of the host": (lambda x: x * torch.tensor([1.0, 2.0, 3.0]), "numbers on the host"),
    "a copy to another device": (offloaded, "copies between devices"),
    "a tensor from elsewhere": (lambda x: x + ELSEWHERE, "not an argument, parameter or buffer"),
    "a collective": (lambda x: x + torch.ops._c10d_functional.wait_tensor(x.detach()), "contains a collective"),
    "another class of tensors": (lambda x: x + TwoTensor(torch.ones(3, 3), torch.ones(3, 3)).sum(), "a TwoTensor"),
    "a write": (lambda x: x.detach().add_(1) + x, "writes to memory"),
    "a generator": (lambda x: (i for i in (x,)), "returns a generator"),
    "no gradients": (lambda x: x.detach() * 2, "nothing in it needs a gradient"),
    "a checkpoint with a graph of its own": (lambda x: checkpoint(torch.sin, x, use_reentrant=True), "use_reentrant"),
}


@pytest.mark.parametrize(("function", "words"), REFUSED.values(), ids=REFUSED)
def test_what_a_graph_cannot_hold_is_found_at_capture(function, words):
    with pytest.raises(RuntimeError, match=words):
        of(function, torch.ones(3, 3, requires_grad=True))


def test_a_tensor_that_overlaps_itself_is_refused():
    x = torch.ones(4).as_strided((3, 2), (1, 1)).requires_grad_()
    with pytest.raises(RuntimeError, match=r"shape \(3, 2\) and strides \(1, 1\) overlaps itself; pass .contiguous"):
        of(lambda x: x * 2, x)


def test_a_replay_reads_nothing_of_the_one_before(monkeypatch):
    monkeypatch.setattr(captured, "POISON", True)
    module = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6))
    graph = of(module, torch.randn(5, 4, requires_grad=True), [*module.modules()], torch.ones(5, 6))
    for factor in (1.0, 0.5):
        with torch.no_grad():
            module[0].weight.mul_(factor)
        x = torch.randn(5, 4, requires_grad=True)
        expected = module(x)
        expected.square().sum().backward()
        gradients = [each.grad.clone() for each in (x, *module.parameters())]
        module.zero_grad()
        x.grad = None
        found = graph.run([x], copies=True)
        found.square().sum().backward()
        assert torch.equal(found, expected)
        assert all(torch.equal(each.grad, to) for each, to in zip((x, *module.parameters()), gradients))
        module.zero_grad()


def test_an_output_that_the_next_replay_overwrites_is_refused_by_autograd():
    graph = of(lambda x: x * 2, torch.ones(3, requires_grad=True))
    first = graph.run([torch.ones(3, requires_grad=True)], copies=False)
    later = first * first
    graph.run([torch.ones(3, requires_grad=True)], copies=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        later.sum().backward()


def test_an_output_that_its_backward_reads_must_not_be_written_to():
    for function, read in ((torch.sigmoid, True), (torch.sin, False)):
        graph = of(function, torch.ones(3, requires_grad=True))
        x = torch.ones(3, requires_grad=True)
        output = graph.run([x], copies=False)
        output.mul_(2)
        if read:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                output.sum().backward()
        else:
            output.sum().backward()
            assert torch.equal(x.grad, 2 * torch.ones(3).cos())


def test_what_is_read_after_a_backward_is_poison(monkeypatch):
    """The negative control: a caller that keeps what a later replay may overwrite fails the comparison."""
    monkeypatch.setattr(captured, "POISON", True)
    graph = of(lambda x: x.sin() * 2, torch.ones(3, requires_grad=True))
    x = torch.ones(3, requires_grad=True)
    for copies in (True, False):
        output = graph.run([x], copies=copies)
        kept, inputs = output.detach(), graph._inputs[0].tensor
        assert torch.equal(inputs, x)
        output.sum().backward()
        assert torch.equal(kept, x.detach().sin() * 2) == copies
        assert inputs.isnan().all() and kept.isnan().all() != copies


def test_weights_that_moved_are_no_address_of_a_replay():
    module = nn.Linear(3, 3)
    graph = of(module, torch.ones(3, requires_grad=True), [module])
    found = graph.run([torch.ones(3, requires_grad=True)], copies=False)
    module.weight.data = module.weight.data.clone()
    with pytest.raises(RuntimeError, match="have moved"):
        found.sum().backward()


class Summed(nn.Module):
    """Reads weights whose gradients are summed over ranks, one of them twice."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        self.weight, self.frozen = (
            nn.Parameter(DTensor.from_local(torch.full((3,), value), mesh, [Replicate()])) for value in (2.0, 5.0)
        )
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return x * whole(self.weight, self.mesh) * whole(self.frozen, self.mesh) + whole(self.weight, self.mesh)


@distributed(1)
def test_gradients_that_are_summed_over_ranks_outside_of_a_replay_come_to_their_weights():
    module = Summed(init_device_mesh("cpu", (1,)))
    graph = of(module, torch.ones(3, requires_grad=True), [module], owned=True)
    for number in range(2):
        x = torch.full((3,), 3.0 + number, requires_grad=True)
        graph.run([x], copies=True).sum().backward()
        assert x.grad.tolist() == [10.0] * 3
        assert module.weight.grad.to_local().tolist() == [5 * (3.0 + number) + 1] * 3
        assert module.frozen.grad is None
        module.zero_grad()


def test_a_graph_of_a_replay_cannot_be_differentiated_again():
    graph = of(lambda x: x * x, torch.ones(3, requires_grad=True))
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(graph.run([x], copies=False).sum(), x, create_graph=True)


def test_one_tensor_in_two_places_is_one_static_input():
    x = torch.ones(2)
    assert distinct([x, 3, x, torch.ones(2)]) == [0, 3]
