"""torch's optimizers step over small sharded parameters all at once, and nobody notices but the clock."""

import copy
import io
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import sgd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import weft
from tests.dtensor.test_dtensor import SHAPES, Bag
from tests.pool import distributed
from weft.dtensor import steps
from weft.fsdp import UnevenDTensor

OPTIONS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}),
    "AdamW, all options": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2}),
    "SGD, all options": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "SGD, maximize": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "maximize": True}),
    "Adagrad": (
        torch.optim.Adagrad,
        {"lr": 1e-2, "lr_decay": 0.1, "weight_decay": 0.1},
    ),
    "Adagrad, plain": (torch.optim.Adagrad, {"lr": 1e-2, "maximize": True}),
}
FEW = ["AdamW, all options", "SGD", "SGD, maximize", "Adagrad"]
"""All branches of weft's code, and each optimizer with a step of its own."""


class Noted(TorchDispatchMode):
    """Which operators ran on lists, with how many tensors, how many on DTensors, and the elements of the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes, self.on_dtensors, self.widest = [], 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_foreach_" in func._schema.name:
            self.sizes.append(len(args[0]))
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.on_dtensors += any(isinstance(leaf, DTensor) for leaf in leaves)
        if func is not torch.ops.aten.view.default and func is not torch.ops.aten.split.Tensor:
            self.widest = max([self.widest, *(leaf.numel() for leaf in leaves)])
        return func(*args, **(kwargs or {}))


def stepped(model, optimizer, steps=3):
    """The note of the last step."""
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((1,), step + 1.0)).backward()
        with Noted() as noted:
            optimizer.step()
    return noted


def assert_bit_equal(sharded, plain):
    for parameter, original in zip(sharded.parameters(), plain.parameters()):
        assert torch.equal(parameter.full_tensor(), original)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
@distributed(2)
def test_a_default_step_goes_over_lists_and_is_that_of_one_process_bit_for_bit(name):
    kind, options = OPTIONS[name]
    for shapes in (SHAPES["mixed"], SHAPES["tiny"], SHAPES["0-D and empty"]):
        plain, sharded = Bag(shapes), weft.fully_shard(Bag(shapes))
        optimizer = kind(sharded.parameters(), **options)
        stepped(plain, kind(plain.parameters(), **options))
        noted = stepped(sharded, optimizer)
        assert set(noted.sizes) == {len(shapes)}, "no operator ran on a list"
        assert not noted.on_dtensors
        assert optimizer.param_groups[0]["foreach"] is None, "the choice is still the user's"
        assert_bit_equal(sharded, plain)


@pytest.mark.slow
@distributed(2)
def test_what_a_list_could_not_do_alike_is_left_to_torch():
    for kind, options in (
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"fused": False}),
        (torch.optim.AdamW, {"lr": torch.tensor(1e-2)}),
        (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
        (torch.optim.RMSprop, {}),
    ):
        plain, sharded = Bag(SHAPES["tiny"]), weft.fully_shard(Bag(SHAPES["tiny"]))
        stepped(plain, kind(plain.parameters(), **options))
        assert not stepped(sharded, kind(sharded.parameters(), **options)).sizes
        assert_bit_equal(sharded, plain)
        for parameter, original in zip(sharded.parameters(), plain.parameters()):
            assert torch.equal(parameter.grad.full_tensor(), original.grad)


@pytest.mark.slow
@distributed(2)
def test_a_step_goes_over_lists_behind_what_hooks_change_and_they_see_the_choice_of_the_user():
    def slower(optimizer, *_):
        optimizer.param_groups[0]["lr"] = torch.tensor(5e-3)

    for before in ([], [slower]):
        plain, sharded, choices = Bag(SHAPES["tiny"]), weft.fully_shard(Bag(SHAPES["tiny"])), []
        for model in (plain, sharded):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for hook in before:
                optimizer.register_step_pre_hook(hook)
            optimizer.register_step_post_hook(
                lambda stepped, *_, seen=choices: seen.append(stepped.state_dict()["param_groups"][0]["foreach"])
            )
            noted = stepped(model, optimizer)
            assert bool(noted.sizes) == (model is sharded and not before)
        assert choices == [None] * 6
        assert_bit_equal(sharded, plain)


@distributed(2)
def test_momentum_that_begins_with_a_step_is_sharded_and_one_that_begins_later_too():
    plain, sharded = Bag(SHAPES["mixed"]), weft.fully_shard(Bag(SHAPES["mixed"]))
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9) for model in (plain, sharded)]
    for later in (False, True):
        for model, optimizer in zip((plain, sharded), optimizers):
            model(torch.ones(1)).backward()
            if not later:
                model.p1.grad = None
            with Noted() as noted:
                optimizer.step()
            optimizer.zero_grad()
        assert set(noted.sizes) == {len(SHAPES["mixed"]) - (not later)}
        assert_bit_equal(sharded, plain)
    for parameter, original in zip(sharded.parameters(), plain.parameters()):
        (momentum,), (expected,) = (own.state[p].values() for own, p in zip(optimizers[::-1], (parameter, original)))
        assert type(momentum) is UnevenDTensor and momentum._cuts is parameter._cuts
        assert torch.equal(momentum.full_tensor(), expected)


@distributed(2)
def test_large_parameters_and_those_that_are_not_sharded_are_stepped_one_by_one():
    large = weft.fully_shard(nn.Linear(256, 256))
    small, beside = weft.fully_shard(nn.Linear(2, 2)), nn.Linear(2, 2)
    for parameters in (large.parameters(), [*small.parameters(), *beside.parameters()]):
        optimizer = torch.optim.AdamW(parameters)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()  # makes the states
        with Noted() as noted:
            optimizer.step()
        assert not noted.sizes
        assert bool(noted.on_dtensors) == (len(optimizer.param_groups[0]["params"]) == 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FEW, "SGD, Nesterov"])
@distributed(2)
def test_large_parameters_step_over_local_parts_bit_for_bit(name):
    kind, options = {**OPTIONS, "SGD, Nesterov": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True})}[
        name
    ]
    shapes = [(160, 160), (161, 60)]
    for dtype, piece in ((torch.float32, steps.PIECE), (torch.float32, 5000), (torch.bfloat16, 5000)):
        plain, sharded = Bag(shapes).to(dtype), weft.fully_shard(Bag(shapes).to(dtype))
        stepped(plain, kind(plain.parameters(), **options))
        with patch.object(steps, "PIECE", piece):
            noted = stepped(sharded, kind(sharded.parameters(), **options))
        assert not noted.sizes and not noted.on_dtensors
        largest = max(each.to_local().numel() for each in sharded.parameters())
        assert noted.widest == (min(piece, largest) if dtype == torch.float32 else largest)
        assert_bit_equal(sharded, plain)
        for parameter, original in zip(sharded.parameters(), plain.parameters()):
            assert torch.equal(parameter.grad.full_tensor(), original.grad)


@distributed(2)
def test_pieces_are_as_the_whole_where_buffers_begin_or_parts_are_empty_and_for_complex_numbers():
    shapes = [(160, 60), (1, 5), (161, 61)]
    for kind, options, dtype in (
        (torch.optim.SGD, {"momentum": 0.9}, torch.float32),
        (torch.optim.AdamW, {"amsgrad": True}, torch.complex64),
    ):
        plain, sharded = Bag(shapes).to(dtype), weft.fully_shard(Bag(shapes).to(dtype))
        optimizers = [kind(model.parameters(), lr=1e-2, **options) for model in (plain, sharded)]
        with patch.object(steps, "PIECE", 1000):
            for later in (False, True, True):
                for model, optimizer in zip((plain, sharded), optimizers):
                    for number, parameter in enumerate(model.parameters()):
                        parameter.grad = parameter.detach() * 2 if later or number else None
                    optimizer.step()
        assert any(not each.to_local().numel() for each in sharded.parameters()) or dist.get_rank() == 0
        assert_bit_equal(sharded, plain)
        for parameter, original in zip(sharded.parameters(), plain.parameters()):
            own, expected = (each.state[p] for each, p in zip(optimizers[::-1], (parameter, original)))
            for name, value in expected.items():
                found = own[name].full_tensor() if isinstance(own[name], DTensor) else own[name]
                assert torch.equal(found, value), name


@distributed(2)
def test_one_optimizer_steps_over_two_models_beside_what_is_frozen():
    plain, sharded = nn.ModuleList(), nn.ModuleList()
    for seed, shapes in enumerate((SHAPES["tiny"], SHAPES["mixed"])):
        plain.append(Bag(shapes, seed=seed))
        sharded.append(weft.fully_shard(Bag(shapes, seed=seed)))
    for models in (plain, sharded):
        next(models[1].parameters()).requires_grad_(False)
        optimizer = torch.optim.AdamW(models.parameters(), lr=1e-2)
        for step in range(2):
            optimizer.zero_grad()
            for model in models:
                model(torch.full((1,), step + 1.0)).backward()
            with Noted() as noted:
                optimizer.step()
            assert bool(noted.sizes) == (models is sharded)
    assert_bit_equal(sharded, plain)


@distributed(2)
def test_gradients_that_are_cut_in_another_way_are_taken_by_what_lies_here():
    shape, (first, second) = (37, 11), torch.randn(2, 37, 11, generator=torch.Generator().manual_seed(1))
    plain, sharded = Bag([shape, shape]), weft.fully_shard(Bag([shape, shape]))
    elsewhere = weft.fully_shard(Bag([(50,), shape]))
    cut = list(elsewhere.parameters())[1].detach()
    with torch.no_grad():
        cut.copy_(second)
    for model, gradients in ((plain, (first, second)), (sharded, (None, cut))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter.grad = gradient if gradient is not None else weft_slice(parameter, first)
        with Noted() as noted:
            optimizer.step()
        assert bool(noted.sizes) == (model is sharded)
    assert_bit_equal(sharded, plain)


def weft_slice(parameter, full):
    """`full` cut as `parameter` is."""
    assert isinstance(parameter, UnevenDTensor)
    return parameter.detach().like(parameter.slice_of(full))


@distributed(2)
def test_lists_take_full_and_sharded_tensors_but_do_not_write_to_full_ones():
    sharded = weft.fully_shard(Bag(SHAPES["mixed"]))
    parameters = [parameter.detach() for parameter in sharded.parameters()]
    full = [torch.randn(each.shape, generator=torch.Generator().manual_seed(2)) for each in parameters]
    before = [each.full_tensor() for each in parameters]
    torch._foreach_add_(parameters, full, alpha=2)
    for parameter, old, added in zip(parameters, before, full):
        assert torch.equal(parameter.full_tensor(), old.add(added, alpha=2))
    with pytest.raises(TypeError, match="to a plain one"):
        torch._fused_sgd_(
            [full[0]], [parameters[0]], [], weight_decay=0, momentum=0, lr=0.1, dampening=0, nesterov=False,
            maximize=False, is_first_step=False,
        )  # fmt: skip


@distributed(2)
def test_a_step_that_fails_leaves_the_choice_to_the_user():
    sharded = weft.fully_shard(Bag(SHAPES["tiny"]))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)

    def closure():
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        optimizer.step(closure)
    sharded(torch.ones(1)).backward()
    optimizer.step()
    assert optimizer.param_groups[0]["foreach"] is None


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@distributed(2)
def test_what_backward_has_saved_is_not_stepped_on_in_silence(kind):
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    for model in (Bag(SHAPES["mixed"]), weft.fully_shard(Bag(SHAPES["mixed"]))):
        optimizer = kind(model.parameters(), lr=1e-2, **options)
        stepped(model, optimizer, steps=1)
        for saved in (model.p1.detach(), next(each for each in optimizer.state[model.p1].values() if each.dim())):
            weight = torch.ones_like(saved).requires_grad_()
            product = (weight * saved).sum()
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()
        saved = model.p1.detach()
        product = (torch.ones_like(saved).requires_grad_() * saved).sum()
        torch._foreach_add_([each.detach() for each in model.parameters()], 1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@distributed(2)
def test_plain_states_are_not_taken_for_parts():
    for shapes in ([()], [(5,), ()], [(160, 160)]):  # by themselves, in lists, one by one
        plain, sharded = Bag(shapes), weft.fully_shard(Bag(shapes))
        for model in (plain, sharded):
            model(torch.ones(1)).backward()
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, sharded)]
        optimizers[0].step()
        optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        with torch.no_grad():
            for mine, theirs in zip(sharded.parameters(), plain.parameters()):
                mine.copy_(theirs)
        optimizers[0].step()
        try:
            optimizers[1].step()
        except TypeError as error:  # on all ranks
            assert "If the plain one is an optimizer's state, load whole states with" in str(error)
            assert shapes != [()]
        else:
            assert_bit_equal(sharded, plain)


@distributed(2)
def test_all_ranks_step_in_the_same_way_wherever_the_parts_are():
    shapes = [(100, 100), (1,)]  # one rank has all, the other nothing
    plain, even = Bag(shapes), weft.fully_shard(Bag(shapes))
    atomic = weft.fully_shard(Bag(shapes), shard_placement_fn=lambda _: weft.TensorAtomic())
    assert sum(parameter.to_local().numel() for parameter in atomic.parameters()) in (0, 10_001)
    for model, source in ((plain, plain), (atomic, even)):  # gradients that are cut otherwise: they are gathered
        for parameter, other in zip(model.parameters(), source.parameters()):
            parameter.grad = other.detach().clone()
        torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1).step()
    assert_bit_equal(atomic, plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@distributed(2)
def test_steps_of_half_precision_are_those_of_one_process_bit_for_bit(dtype):
    for kind, options in ((torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}), (torch.optim.Adagrad, {})):
        plain, sharded = Bag(SHAPES["mixed"]).to(dtype), weft.fully_shard(Bag(SHAPES["mixed"]).to(dtype))
        optimizers = [kind(model.parameters(), lr=0.1, **options) for model in (plain, sharded)]
        for _ in range(3):
            for mine, theirs in zip(sharded.parameters(), plain.parameters()):
                theirs.grad = theirs.detach().sin()
                mine.grad = mine.detach().sin()
            for optimizer in optimizers:
                optimizer.step()
        assert_bit_equal(sharded, plain)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@distributed(2)
def test_narrower_gradients_step_as_in_one_process(kind):
    plain, sharded = Bag(SHAPES["mixed"]), weft.fully_shard(Bag(SHAPES["mixed"]))
    for model in (plain, sharded):
        for parameter in model.parameters():
            parameter.grad_dtype = None
    optimizers = [kind(model.parameters(), lr=0.1) for model in (plain, sharded)]
    for _ in range(3):
        for mine, theirs in zip(sharded.parameters(), plain.parameters()):
            theirs.grad, mine.grad = theirs.detach().sin().bfloat16(), mine.detach().sin().bfloat16()
        if kind is torch.optim.AdamW:
            with pytest.raises(RuntimeError):
                optimizers[0].step()
            with pytest.raises(TypeError, match="takes tensors of one dtype"):
                optimizers[1].step()
        else:
            for optimizer in optimizers:
                optimizer.step()
        assert_bit_equal(sharded, plain)


@pytest.mark.parametrize("foreach", [None, True])
@distributed(2)
def test_autograd_knows_a_differentiable_step(foreach):
    found = []
    for model in (Bag(SHAPES["tiny"]), weft.fully_shard(Bag(SHAPES["tiny"]))):
        weights = [parameter.detach().clone().requires_grad_() * 1.0 for parameter in model.parameters()]
        gradients = [weight.detach().clone().requires_grad_() for weight in weights]
        sgd.sgd(
            weights, gradients, [None] * len(weights), foreach=foreach, weight_decay=0.0, momentum=0.0, lr=0.1,
            dampening=0.0, nesterov=False, maximize=False,
        )  # fmt: skip
        found.append(torch.autograd.grad(sum(weight.sum() for weight in weights), gradients))
    for mine, theirs in zip(found[1], found[0]):
        assert torch.equal(mine.full_tensor(), theirs)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
@distributed(2)
def test_a_group_may_be_differentiable_by_itself(kind):
    plain, sharded = Bag(SHAPES["mixed"]), weft.fully_shard(Bag(SHAPES["mixed"]))
    for model in (plain, sharded):
        stepped(model, kind([{"params": model.parameters(), "differentiable": True}], lr=1e-2))
    assert_bit_equal(sharded, plain)


@pytest.mark.parametrize("name", FEW)
@distributed(2)
def test_a_step_behind_a_saved_state_has_no_dtensors_either(name):
    kind, options = OPTIONS[name]
    plain, sharded = Bag(SHAPES["mixed"]), weft.fully_shard(Bag(SHAPES["mixed"]))
    expected, before = kind(plain.parameters(), **options), kind(sharded.parameters(), **options)
    stepped(plain, expected)
    stepped(sharded, before)
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    after = kind(sharded.parameters(), **options)
    after.load_state_dict(torch.load(file, weights_only=True))
    stepped(plain, expected)
    noted = stepped(sharded, after, steps=1)
    assert noted.sizes and not noted.on_dtensors
    stepped(sharded, after, steps=2)


@distributed(2)
def test_parameters_of_several_devices_are_left_to_torch():
    here = next(weft.fully_shard(Bag([(5,)])).parameters()).detach()
    there, options = here.like(here.to_local().to("meta")), {"foreach": None, "fused": None}
    with torch.no_grad():
        assert steps._dtype_on_cpu([here, here], ([here, here],), options) == torch.float32
        assert steps._dtype_on_cpu([here, there], ([here, there],), options) is None


def test_a_parameter_is_stepped_whole_if_its_buffer_begins_its_counter_is_shared_or_a_part_is_not_contiguous():
    one, other, counter = torch.zeros(10), torch.zeros(10), torch.zeros(())
    counts = partial(steps._piece_counts, size=4, creates=True)
    assert counts([[one, other], [counter, counter.clone()]]) == [3, 3]
    assert counts([[one, other], [counter, counter]]) == [3, 1]
    assert counts([[one, other], [torch.zeros(10, 2)[:, 0], torch.zeros(10)]]) == [1, 3]
    assert counts([[one, other], [None, torch.zeros(10)]]) == [1, 3]
    assert counts([[one, other], [None, None]], creates=False) == [3, 3]
    first, *later = steps._divided([one, None, counter], [3, 3, 3], 4)[-3:]
    assert first is counter and all(each is not counter for each in later), "a step increments each counter once"
    assert steps._divided([one, None], [3, 3], 4)[3:] == [None] * 3
