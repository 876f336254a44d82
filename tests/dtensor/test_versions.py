"""The version counter of a unit's flat buffer tells of every write to its weights, and of nothing else."""

import copy

import pytest
import torch
from torch import nn

import weft
from tests.dtensor.test_dtensor import SHAPES, Bag
from tests.pool import distributed


def made(**options):
    torch.manual_seed(0)
    return weft.fully_shard(Bag(SHAPES["mixed"]), **options)


def version(model) -> int:
    """Of the memory that the unit's weights lie in."""
    return model._weft_unit.groups[0].main_weight.local._version


def stepping(optimizer, **options):
    def step(model):
        optimizer(model.parameters(), lr=1e-2, **options).step()

    return step


def flat_step(model, **options):
    weft.optim.flat(torch.optim.AdamW, model, **options).step()


def scaled_step(model):
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler.scale(model(torch.ones(1))).backward()
    scaler.step(optimizer)


def no_grad(write):
    def written(model):
        with torch.no_grad():
            for parameter in model.parameters():
                write(parameter)

    return written


WRITES = {
    "AdamW foreach": stepping(torch.optim.AdamW, foreach=True),
    "AdamW for-loop": stepping(torch.optim.AdamW, foreach=False),
    "AdamW fused": stepping(torch.optim.AdamW, fused=True),
    "SGD foreach": stepping(torch.optim.SGD, foreach=True),
    "SGD for-loop": stepping(torch.optim.SGD, foreach=False),
    "SGD fused": stepping(torch.optim.SGD, fused=True),
    "flat AdamW foreach": lambda model: flat_step(model, foreach=True),
    "flat AdamW for-loop": lambda model: flat_step(model, foreach=False),
    "flat AdamW fused": lambda model: flat_step(model, fused=True),
    "fused after scaling": scaled_step,
    "load_state_dict": lambda model: model.load_state_dict(Bag(SHAPES["mixed"], seed=1).state_dict()),
    "load sharded": lambda model: model.load_state_dict(made().state_dict()),
    "copy_": no_grad(lambda p: p.copy_(torch.ones(p.shape))),
    "foreach copy": no_grad(lambda p: torch._foreach_copy_([p], [p.clone()])),
    "mul_ of data": lambda model: [p.data.mul_(2) for p in model.parameters()],
    "setitem of data": lambda model: [p.data.__setitem__(..., 2.0) for p in model.parameters()],
    "add_ detached": lambda model: [p.detach().add_(1) for p in model.parameters()],
    "local part": no_grad(lambda p: p.to_local().add_(1)),
    "local part of data": no_grad(lambda p: p.data.to_local().add_(1)),
    "uniform_": lambda model: [nn.init.uniform_(p) for p in model.parameters()],
    "zeros_": lambda model: [nn.init.zeros_(p) for p in model.parameters()],
    "through a view": no_grad(lambda p: p.view(-1).mul_(2)),
    "tril_": no_grad(lambda p: p.tril_() if p.dim() > 1 else p.zero_()),
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@distributed(2)
def test_every_write_is_counted(strategy):
    for name, write in WRITES.items():
        model = made(strategy=strategy)
        model(torch.ones(1)).backward()
        before = version(model)
        write(model)
        assert version(model) > before, name


@distributed(2)
def test_a_write_on_the_owner_of_a_tensor_is_counted_there():
    model = weft.fully_shard(Bag([(8, 8)]), shard_placement_fn=lambda p: weft.TensorAtomic())
    owner = bool(model.p0.to_local().numel())
    for write in (lambda p: p.tril_(), lambda p: p.mT.mul_(2), lambda p: p[0].zero_()):
        before = version(model)
        with torch.no_grad():
            write(model.p0)
        assert (version(model) > before) == owner


READS = {
    "full_tensor": lambda model: [p.full_tensor() for p in model.parameters()],
    "to_local": lambda model: [p.to_local() for p in model.parameters()],
    "state_dict": lambda model: model.state_dict(),
    "norms": lambda model: weft.parameter_norms(model),
    "gradient norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "gradient clipping": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.1),
    "norm": lambda model: [p.norm() for p in model.parameters()],
    "foreach norm": lambda model: torch._foreach_norm(list(model.parameters())),
    "foreach sum": lambda model: torch._foreach_add(list(model.parameters()), 1),
    "view": lambda model: [p.detach().view(-1).full_tensor() for p in model.parameters()],
    "element-wise": lambda model: [p.detach() * 2 for p in model.parameters()],
    "deepcopy": lambda model: copy.deepcopy(list(model.parameters())),
    "parameters_to_vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
    "zero_grad": lambda model: model.zero_grad(),
    "find_nonfinite": lambda model: weft.find_nonfinite(model),
}


@pytest.mark.slow
@distributed(2)
def test_reading_is_not_counted():
    model = made()
    for name, read in READS.items():
        model(torch.ones(1)).backward()
        before = version(model)
        read(model)
        assert version(model) == before, name


@distributed(2)
def test_clipping_counts_as_a_write_to_gradients():
    for clip in (
        lambda p: nn.utils.clip_grad_value_(p, 1e-3),
        lambda p: nn.utils.clip_grad_value_(p, 1e-3, foreach=False),
        lambda p: nn.utils.clip_grad_norm_(p, 1e-3),
        lambda p: nn.utils.clip_grad_norm_(p, 1e-3, foreach=False),
    ):
        model = made()
        model(torch.ones(1)).backward()
        parts = [p.grad.to_local() for p in model.parameters()]
        before = [part._version for part in parts]
        clip(list(model.parameters()))
        assert all(part._version > version for part, version in zip(parts, before))


@distributed(2)
def test_unscaling_counts_as_a_write_to_gradients():
    model = made()
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(1))).backward()
    parts = [p.grad.to_local() for p in model.parameters()]
    before = [part._version for part in parts]
    scaler.unscale_(optimizer)
    assert all(part._version > version for part, version in zip(parts, before))
