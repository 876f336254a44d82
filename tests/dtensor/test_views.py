"""Writes to sharded tensors arrive, whatever way they take, or are refused: none is lost."""

import pytest
import torch
from torch import nn

import weft
from tests.dtensor.test_dtensor import Bag, exactly
from tests.pool import distributed
from weft.dtensor.views import ShardedView

SHAPES = [(6, 10), (5, 4, 3), (8, 8), (37, 11), (3, 4)]
"""Cut inside rows, between rows, and of which one rank has all."""


def pair(shape=(6, 10), **options):
    return Bag([shape]), weft.fully_shard(Bag([shape]), **options)


def each(shapes=SHAPES, **options):
    """A plain and a sharded parameter of each shape."""
    return [(plain.p0, sharded.p0) for plain, sharded in (pair(shape, **options) for shape in shapes)]


def swap_rows(w):
    w[0], w[-1] = w[-1].clone(), w[0].clone()


WRITES = {
    "slice": lambda w: w[:, :2].zero_(),
    "flattened": lambda w: w.view(-1).mul_(2),
    "transposed": lambda w: w.transpose(0, 1).fill_(1),
    "matrix transposed": lambda w: w.mT.add_(1),
    "permuted": lambda w: w.permute(*reversed(range(w.dim()))).sub_(1),
    "row": lambda w: w[-1].zero_(),
    "row of a row": lambda w: w[0][1].fill_(3),
    "one element": lambda w: w[(0,) * w.dim()].fill_(7),
    "new dimensions": lambda w: w.unsqueeze(0).squeeze(0).flatten().neg_(),
    "unflattened": lambda w: w.view(-1).unflatten(0, w.shape).mul_(3),
    "diagonal": lambda w: w.diagonal().zero_(),
    "as_strided": lambda w: w.as_strided((2,), (3,)).zero_(),
    "each of a split": lambda w: [part.mul_(at) for at, part in enumerate(w.split(2))],
    "each of unbind": lambda w: [part.mul_(at) for at, part in enumerate(w.unbind())],
    "chunk": lambda w: w.chunk(2, -1)[0].zero_(),
    "narrow": lambda w: w.narrow(-1, 1, 2).zero_(),
    "reshape that is a view": lambda w: w.reshape(-1)[::2].zero_(),
    "reshape that is a copy": lambda w: w.mT.reshape(-1).zero_(),
    "a view of the transpose": lambda w: w.mT[1:].mul_(5),
    "setitem of a slice": lambda w: w.__setitem__((slice(None), 1), 4.0),
    "setitem of all": lambda w: w.__setitem__(..., torch.arange(w.numel()).view(w.shape)),
    "setitem by mask": lambda w: w.__setitem__(torch.arange(w.numel()).view(w.shape) % 3 == 0, 0),
    "setitem by index": lambda w: w.__setitem__(torch.tensor([0, -1]), 2.0),
    "setitem of values": lambda w: w.__setitem__(0, torch.arange(w[0].numel()).view(w.shape[1:])),
    "rows swapped": swap_rows,
    "a row from another": lambda w: w[0].copy_(w[-1]),
    "view with a view": lambda w: w.view(-1).mul_(w.view(-1)),
    "row added to all": lambda w: w.add_(w[0].clone()),
    "plain values added": lambda w: w.add_(torch.arange(w.numel()).view(w.shape)),
    "plain row multiplied": lambda w: w.mul_(torch.arange(w.shape[-1])),
    "detached": lambda w: w.detach()[0].zero_(),
    "detached view": lambda w: w[0].detach().zero_(),
    "data": lambda w: w.data.mul_(2),
    "item of data": lambda w: w.data.__setitem__(0, 5.0),
    "all of data": lambda w: w.data.__setitem__(..., 5.0),
    "data of a view": lambda w: w[0].data.fill_(2),
    "masked_fill": lambda w: w.masked_fill_(torch.arange(w.numel()).view(w.shape) % 2 == 0, -1),
    "masked_fill of a view": lambda w: w[0].masked_fill_(w[0] > 0, -1),
    "index_fill": lambda w: w.index_fill_(0, torch.tensor([0]), 9),
    "index_add": lambda w: w.index_add_(0, torch.tensor([0]), torch.ones(1, *w.shape[1:])),
    "index_copy": lambda w: w.index_copy_(0, torch.tensor([0]), torch.ones(1, *w.shape[1:])),
    "scatter": lambda w: w.scatter_(0, torch.zeros(w.shape, dtype=torch.long), 8),
    "tril": lambda w: w.tril_(),
    "renorm": lambda w: w.renorm_(2, 0, 0.5),
    "fill_diagonal": lambda w: w.view(w.shape[0], -1).fill_diagonal_(1),
    "random view": lambda w: w[:, 1:].normal_(),
    "bernoulli": lambda w: w.bernoulli_(0.5),
    "out of an element-wise operator": lambda w: torch.add(torch.ones(w.shape), 1, out=w),
    "out of cos": lambda w: torch.cos(w, out=w),
    "out of a view": lambda w: torch.add(torch.ones(w.shape[1:]), 1, out=w[0]),
    "out of a matrix product": lambda w: (torch.mm if w.dim() == 2 else torch.bmm)(w.clone(), w.mT @ w, out=w),
    "broadcast copy": lambda w: w.copy_(torch.arange(w.shape[-1])),
    "out of random values": lambda w: torch.randn(w.shape, out=w.detach()),
    "several views of one": lambda w: torch._foreach_mul_([w[0], w[-1]], 3),
    "swapped through a clone": lambda w: (lambda kept: (w.zero_(), w.copy_(kept)))(w.detach().clone()),
}


@pytest.mark.long
@pytest.mark.parametrize("strategy, shapes", [("optim_grads_params", SHAPES), ("no_shard", SHAPES[1:2])])
@distributed(2)
def test_every_write_equals_that_of_one_process(strategy, shapes):
    """Where a rank has all of a tensor, where it would be cut is all the same."""
    for name, write in WRITES.items():
        for plain, sharded in each(shapes, strategy=strategy):
            for tensor in (plain, sharded):
                torch.manual_seed(3)
                with torch.no_grad():
                    write(tensor)
            try:
                exactly(sharded, plain)
            except AssertionError as error:
                raise AssertionError(f"{name} of {tuple(plain.shape)}: {error}") from error


INITS = {
    "uniform": nn.init.uniform_,
    "normal": nn.init.normal_,
    "trunc_normal": nn.init.trunc_normal_,
    "constant": lambda w: nn.init.constant_(w, 3),
    "ones": nn.init.ones_,
    "zeros": nn.init.zeros_,
    "eye": lambda w: nn.init.eye_(w) if w.dim() == 2 else w,
    "dirac": lambda w: nn.init.dirac_(w) if w.dim() == 3 else w,
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "kaiming_normal": nn.init.kaiming_normal_,
    "orthogonal": nn.init.orthogonal_,
    "orthogonal slices": lambda w: [nn.init.orthogonal_(part) for part in w.detach().unsqueeze(0).unbind()],
    "sparse": lambda w: nn.init.sparse_(w, 0.5) if w.dim() == 2 else w,
}


@pytest.mark.slow
@distributed(2)
def test_every_initialisation_equals_that_of_one_process():
    for name, initialise in INITS.items():
        for plain, sharded in each():
            for tensor in (plain, sharded):
                torch.manual_seed(3)
                initialise(tensor)
            try:
                exactly(sharded, plain)
            except AssertionError as error:
                raise AssertionError(f"{name} of {tuple(plain.shape)}: {error}") from error


@distributed(2)
def test_a_view_shows_what_its_tensor_holds_now():
    plain, sharded = pair()
    rows = [weights.detach()[1:].mT for weights in (plain.p0, sharded.p0)]
    assert isinstance(rows[1], ShardedView)
    assert (rows[1].shape, rows[1].stride()) == (rows[0].shape, rows[0].stride())
    exactly(rows[1], rows[0])
    with torch.no_grad():
        for weights in (plain.p0, sharded.p0):
            weights.mul_(2)
        exactly(rows[1], rows[0])
        sharded.p0.to_local().zero_()
        assert not rows[1].full_tensor().any()
    made = rows[1].new_empty(rows[1].shape, device="cpu")
    assert type(made) is torch.Tensor and made.shape == rows[1].shape


@pytest.mark.slow
@distributed(2)
def test_gradients_flow_through_views():
    plain, sharded = pair()
    for model in (plain, sharded):
        w = model.p0
        (w[1:].sin().sum() + (w.view(-1) * 2).exp().sum() + (w.mT @ w)[0].sum()).backward()
    exactly(sharded.p0.grad, plain.p0.grad)


@distributed(2)
def test_gradients_flow_through_writes_to_views():
    plain, sharded = pair()
    for model in (plain, sharded):
        changed = model.p0 * 2
        changed[1:].mul_(3)
        changed.mT[0].sin_()
        changed.cos().sum().backward()
    exactly(sharded.p0.grad, plain.p0.grad)


REFUSED = {
    "data assigned": (lambda w: setattr(w, "data", w.detach().clone()), RuntimeError, r"copy_\(\).*clone"),
    "data of a view assigned": (lambda w: setattr(w[0], "data", torch.zeros(10)), RuntimeError, r"copy_\(\)"),
    "vector_to_parameters": (
        lambda w: nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([w]), [w]),
        RuntimeError,
        r"copy_\(\)",
    ),
    "swap_tensors": (lambda w: torch.utils.swap_tensors(w, nn.Parameter(w.detach().clone())), RuntimeError, "swap"),
    "set_": (lambda w: w.detach().set_(torch.zeros(6, 10)), TypeError, "flat buffer"),
    "resize_": (lambda w: w.detach().resize_(3, 10), TypeError, "flat buffer"),
    "t_": (lambda w: w.detach().t_(), TypeError, "without the underscore"),
    "squeeze_ of a view": (lambda w: w[:1].squeeze_(), TypeError, "without the underscore"),
    "views of two tensors": (
        lambda w: torch._foreach_zero_([w[0], w.detach()[1]]),
        TypeError,
        "write to one at a time",
    ),
    "a plain tensor": (lambda w: torch.zeros(6, 10).addcmul_(w, w), TypeError, r"full_tensor\(\)"),
    "a plain tensor from views": (lambda w: torch.zeros(10).addcmul_(w[0], w[1]), RuntimeError, "mixed torch.Tensor"),
    "out of another size": (lambda w: torch.eye(4, out=w), ValueError, r"\(4, 4\).*\(6, 10\)"),
    "to_local of a view": (lambda w: w[0].to_local(), RuntimeError, r"full_tensor\(\)"),
}


@pytest.mark.parametrize("name", REFUSED)
@distributed(2)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_what_cannot_be_written_is_refused_with_the_way_out(name):
    write, error, match = REFUSED[name]
    plain, sharded = pair()
    with torch.no_grad(), pytest.raises(error, match=match):
        write(sharded.p0)
    exactly(sharded.p0, plain.p0)


@distributed(2)
def test_a_matrix_that_one_rank_holds_has_views_there():
    """Matrix optimizers step on such tensors without communication."""
    for original, weights in each(shard_placement_fn=lambda p: weft.TensorAtomic()):
        before = weights.to_local()._version
        with torch.no_grad():
            view = weights.mT
            assert not isinstance(view, ShardedView)
            view.mul_(2)
            original.mT.mul_(2)
        exactly(weights, original)
        assert (weights.to_local()._version > before) == bool(weights.to_local().numel())
