"""Sharded parameters tell the truth, however unevenly they are cut."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import weft
from tests.fsdp import nets
from tests.pool import distributed
from weft.comm import collectives
from weft.dtensor import local, norms
from weft.fsdp import UnevenDTensor

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]

SHAPES = {
    "fewer rows than ranks": [(1, 70), (3, 5), (2, 2, 31)],
    "0-D and empty": [(), (7,), (0, 4), (3, 0), (1,)],
    "one tensor": [(37, 11)],
    "tiny": [(1,), (2,), (), (3, 1)],
    "mixed": [(13, 29), (29,), (4, 3, 5, 2), (), (64, 64), (1, 1, 1, 9)],
}


class Bag(nn.Module):
    """Parameters of any shapes; the loss weighs every element differently."""

    def __init__(self, shapes: list[tuple[int, ...]], seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for number, shape in enumerate(shapes):
            self.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        total = scale.sum() * 0
        for parameter in self.parameters():
            weights = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)
            total = total + (parameter * weights).sin().sum() * scale.mean()
        return total


def random_shapes(seed: int) -> list[tuple[int, ...]]:
    """Up to six shapes with up to three small dimensions, some of size zero."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(0, high, (), generator=generator))

    return [tuple(draw(20) for _ in range(draw(4))) for _ in range(1 + draw(6))]


def bags(**options):
    """`(shapes, plain, sharded)` for every list of shapes, the two holding the same values."""
    for shapes in [*SHAPES.values(), *(random_shapes(seed) for seed in range(3))]:
        yield shapes, Bag(shapes), weft.fully_shard(Bag(shapes), **options)


def assert_same(actual: torch.Tensor, expected: torch.Tensor, **tolerance) -> None:
    torch.testing.assert_close(nets.full(actual), nets.full(expected), **tolerance)


def exactly(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert_same(actual, expected, rtol=0, atol=0)


def parts_of(tensor: DTensor) -> list[torch.Tensor]:
    """Every rank's local part, flattened."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, tensor.to_local().detach().reshape(-1))
    return parts


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "strategy"), [(2, "optim"), (4, "optim_grads_params")])
@distributed()
def test_full_tensor_and_the_parts_are_the_original(strategy):
    empty = 0
    for _, plain, sharded in bags(strategy=strategy):
        for original, parameter in zip(plain.parameters(), sharded.parameters()):
            exactly(parameter.full_tensor(), original)
            parts = parts_of(parameter)
            exactly(torch.cat(parts).view(original.shape), original)
            empty += sum(not part.numel() for part in parts if original.numel())
    assert empty, "no case had a rank without a part"


@distributed(2, 4)
def test_no_shard_keeps_whole_tensors():
    for _, plain, sharded in bags(strategy="no_shard"):
        for original, parameter in zip(plain.parameters(), sharded.parameters()):
            exactly(parameter.full_tensor(), original)
            exactly(parameter.to_local(), original)


@pytest.mark.slow
@distributed(2, 4, long=4)
def test_clipping_equals_the_reference_for_every_norm():
    for shapes, plain, sharded in bags():
        if any(0 in shape for shape in shapes):
            continue  # torch refuses the infinity norm of nothing
        for model in (plain, sharded):
            model(torch.ones(1)).backward()
        gradients = [p.grad.clone() for p in plain.parameters()]
        own = [p.grad.clone() for p in sharded.parameters()]
        for order in (1, 2, math.inf):
            for foreach in (False, True):
                for p, gradient in zip(plain.parameters(), gradients):
                    p.grad = gradient.clone()
                for p, gradient in zip(sharded.parameters(), own):
                    p.grad.copy_(gradient)
                options = {"norm_type": order, "foreach": foreach}
                expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.3, **options)
                norm = nn.utils.clip_grad_norm_(sharded.parameters(), 0.3, **options)
                assert_same(norm, expected)
                for p, q in zip(sharded.parameters(), plain.parameters()):
                    assert_same(p.grad, q.grad)


class DTensorsSeen(TorchDispatchMode):
    """Counts the operators that are called with DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("foreach", [None, True, False])
@distributed(2)
def test_clipping_asks_the_other_ranks_for_one_number_and_computes_with_plain_tensors(foreach):
    plain, sharded = Bag(SHAPES["mixed"]), weft.fully_shard(Bag(SHAPES["mixed"]))
    for model in (plain, sharded):
        model(torch.ones(1)).backward()
    sizes, reduce_now = [], collectives.reduce_now

    def noted(tensor, *rest):
        sizes.append(tensor.numel())
        return reduce_now(tensor, *rest)

    with pytest.MonkeyPatch.context() as patch, DTensorsSeen() as seen:
        patch.setattr(collectives, "reduce_now", noted)
        norm = nn.utils.clip_grad_norm_(sharded.parameters(), 0.3, foreach=foreach)
    assert sizes == [1] and not seen.count
    assert_same(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.3))
    for parameter, original in zip(sharded.parameters(), plain.parameters()):
        assert_same(parameter.grad, original.grad)


@distributed(2)
def test_what_cannot_be_clipped_with_plain_tensors_goes_torchs_way():
    plain, sharded = Bag(SHAPES["mixed"]), weft.fully_shard(Bag(SHAPES["mixed"]))
    for model in (plain, sharded):
        model(torch.ones(1)).backward()
        model.p0.grad, model.p0.grad_dtype = None, None
        model.p0.grad = model.p0.detach().double()  # each kernel is of one dtype
    norm = nn.utils.get_total_norm([p.grad for p in sharded.parameters()])
    expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    assert_same(norm, expected)
    nn.utils.clip_grads_with_norm_(iter(sharded.parameters()), 0.3, norm)
    nn.utils.clip_grads_with_norm_(plain.parameters(), 0.3, expected)
    nn.utils.clip_grads_with_norm_(sharded.p1, 0.01, expected)  # one parameter, a plain norm
    nn.utils.clip_grads_with_norm_(plain.p1, 0.01, expected)
    for parameter, original in zip(sharded.parameters(), plain.parameters()):
        assert_same(parameter.grad, original.grad)
    with pytest.raises(TypeError, match="clamp"):
        nn.utils.clip_grads_with_norm_(sharded.p1, 0.01, 0.3)


@distributed(2)
def test_a_norm_that_is_in_parts_is_added_up_before_it_clips():
    plain, sharded = Bag(SHAPES["mixed"]), weft.fully_shard(Bag(SHAPES["mixed"]))
    for model in (plain, sharded):
        model(torch.ones(1)).backward()
    part = torch.tensor(1.0 + dist.get_rank())
    total = DTensor.from_local(part, sharded.p0.device_mesh, [Partial()])
    nn.utils.clip_grads_with_norm_(sharded.parameters(), 0.5, total)
    nn.utils.clip_grads_with_norm_(plain.parameters(), 0.5, torch.tensor(3.0))
    for parameter, original in zip(sharded.parameters(), plain.parameters()):
        assert_same(parameter.grad, original.grad)


@distributed(2)
def test_gradients_that_backward_has_saved_are_not_clipped_in_silence():
    for model in (Bag(SHAPES["mixed"]), weft.fully_shard(Bag(SHAPES["mixed"]))):
        model(torch.ones(1)).backward()
        product = (torch.ones_like(model.p1.grad).requires_grad_() * model.p1.grad).sum()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@distributed(2)
def test_reductions_have_the_dtypes_of_one_process():
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        plain = (Bag(SHAPES["one tensor"]).p0.detach() * 1e6).to(dtype)
        sharded = (weft.fully_shard(Bag(SHAPES["one tensor"])).p0.detach() * 1e6).to(dtype)
        for of in (torch.any, torch.all, torch.max, torch.min, torch.sum):
            found, expected = of(sharded), of(plain)
            assert found.dtype == expected.dtype, of
            assert_same(found, expected)


@pytest.mark.slow
@distributed(2)
def test_the_norm_of_all_is_the_one_that_torch_takes_of_their_norms():
    tensors = [parameter.detach() for parameter in weft.fully_shard(Bag(SHAPES["mixed"])).parameters()]
    torchs = nn.utils.get_total_norm.__wrapped__  # type: ignore[attr-defined]
    assert torchs is not nn.utils.get_total_norm and torchs.__module__ == nn.utils.clip_grad.__name__
    atomic = weft.fully_shard(Bag(SHAPES["mixed"], seed=1), strategy="no_shard")  # cut over other axes
    mixed = [each for pair in zip(tensors, (p.detach() for p in atomic.parameters())) for each in pair]
    for order in (0, 1, 2, 3.5, -1, math.inf, -math.inf):
        for some in (tensors, mixed, tensors[:1], [*tensors, tensors[0].double()]):
            found = nn.utils.get_total_norm(some, order)
            assert isinstance(found, DTensor)
            assert_same(found, torchs(some, order))
        assert torch.equal(nn.utils.get_total_norm(iter(tensors), order), nn.utils.get_total_norm(tensors, order))
    assert nn.utils.get_total_norm(tensors, "0") == torchs(tensors, 0)  # type: ignore[arg-type]
    assert nn.utils.get_total_norm([]) == 0
    elsewhere = tensors[0].like(torch.empty_like(tensors[0].to_local(), device="meta"))  # each kernel is of one device
    assert norms._of_sharded([tensors[0], elsewhere], 2.0) is None is not norms._of_sharded(tensors[:1], 2.0)
    tensors[0].fill_(math.nan)
    assert nn.utils.get_total_norm(tensors).isnan()
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        nn.utils.get_total_norm(tensors, error_if_nonfinite=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
@distributed(2)
def test_sums_and_norms_of_half_precision_are_those_of_one_process(dtype, scale):
    whole = torch.full((300, 401), scale, dtype=dtype)
    whole[::7] *= -0.5
    model = nn.Module()
    model.weight = nn.Parameter(whole.clone())
    parameter = weft.fully_shard(model).weight.detach()
    for of in (
        torch.Tensor.mean,
        torch.Tensor.sum,
        torch.linalg.vector_norm,
        lambda tensor: torch.linalg.vector_norm(tensor, 3),
        lambda tensor: torch._foreach_norm([tensor])[0],
        lambda tensor: nn.utils.get_total_norm([tensor]),
        lambda tensor: nn.utils.get_total_norm([tensor, tensor], 1.0),
        lambda tensor: tensor.sum(dtype=torch.float32),
    ):
        found, expected = of(parameter), of(whole)
        assert found.dtype == expected.dtype
        assert_same(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("order", [0.0, 1.0, 2.0])
@distributed(2)
def test_norms_of_half_precision_are_rounded_once(dtype, order):
    wholes = [torch.full((331, 3), each, dtype=dtype) for each in (1.0, 2.0, 3.0)]  # in fp32 their sums are exact
    parameters = [each.detach() for each in weft.fully_shard(Bag([(331, 3)] * 3).to(dtype)).parameters()]
    assert any(each.owner is None for each in parameters)
    for parameter, whole in zip(parameters, wholes):
        parameter.copy_(whole)
        expected = torch.linalg.vector_norm(whole.float(), order).to(dtype)
        for found in (torch.linalg.vector_norm(parameter, order), torch._foreach_norm([parameter], order)[0]):
            assert torch.equal(nets.full(found), expected)
    if order:  # torch's own norm of all counts tensors for 0
        expected = torch.linalg.vector_norm(torch.stack(wholes).float(), order).to(dtype)
        assert torch.equal(nets.full(nn.utils.get_total_norm(parameters, order)), expected)


@distributed(2, 4)
def test_norms_of_many_dtypes_are_those_of_one_process():
    dtypes = (torch.float16, torch.float32, torch.complex64, torch.float16, torch.float64)
    plain = nn.ParameterList(torch.full((37, 3), 3e4, dtype=dtype) for dtype in dtypes)
    whole = [parameter.detach().clone() for parameter in plain]
    parameters = [parameter.detach() for parameter in weft.fully_shard(plain).parameters()]
    for options in ({}, {"ord": 1}):
        for found, expected in zip(torch._foreach_norm(parameters, **options), torch._foreach_norm(whole, **options)):
            assert found.dtype == expected.dtype
            assert_same(found, expected)
    for found, expected in zip(parameters[:2], whole):  # the second is cut on any number of ranks
        assert_same(*(torch.linalg.vector_norm(each, dtype=torch.float64) for each in (found, expected)))
    for narrower in (
        lambda: torch.linalg.vector_norm(parameters[1], dtype=torch.float16),
        lambda: torch._foreach_norm(parameters[1:2], dtype=torch.float16),
    ):
        with pytest.raises(RuntimeError, match="without narrowing"):
            narrower()


@pytest.mark.parametrize("at", [0, -1])
@distributed(2, 4)
def test_a_nan_is_the_largest_and_the_smallest_whichever_rank_has_it(at):
    model = weft.fully_shard(Bag([(37, 11)]))
    model(torch.ones(1)).backward()
    with torch.no_grad():
        model.p0.grad.copy_(model.p0.grad.full_tensor().index_fill(0, torch.tensor([at % 37]), math.nan))
    grad = model.p0.grad
    for found in (
        grad.max(),
        grad.min(),
        *(torch.linalg.vector_norm(grad, order) for order in (math.inf, -math.inf)),
        *torch._foreach_norm([grad], math.inf),
        nn.utils.get_total_norm([grad], math.inf),
        weft.optim.grad_norm(model, math.inf),
    ):
        assert found.isnan()
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, math.inf, error_if_nonfinite=True)


@distributed(2)
def test_a_norm_of_tensors_on_several_meshes_is_of_meshes_of_the_same_ranks():
    meshes = [init_device_mesh("cpu", shape, mesh_dim_names=("ep", "dp")) for shape in ((2, 1), (1, 2))]
    one, other, alone = (weft.fully_shard(Bag([(7, 3)]), mesh=mesh).p0.detach() for mesh in (*meshes, meshes[0]["dp"]))
    assert_same(nn.utils.get_total_norm([one, other]), Bag([(7, 3)]).p0.detach().norm() * math.sqrt(2))
    with pytest.raises(RuntimeError, match="must have the same mesh"):  # each rank has another `alone`
        nn.utils.get_total_norm([other, alone])


@distributed(2)
def test_norms_are_of_the_one_spec_that_torch_keeps_for_them():
    parameters = [parameter.detach() for parameter in weft.fully_shard(Bag(SHAPES["mixed"])).parameters()]
    found = [*torch._foreach_norm(parameters), *torch._foreach_norm(parameters)]
    assert len({id(norm._spec) for norm in found}) == 1


OPTIMIZERS = {
    "AdamW": lambda p, **kw: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, **kw),
    "Adam, amsgrad": lambda p, **kw: torch.optim.Adam(p, lr=1e-2, amsgrad=True, **kw),
    "SGD, momentum": lambda p, **kw: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, **kw),
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks, name", [(2, "Adam, amsgrad"), (2, "SGD, momentum"), (2, "AdamW")])
@distributed()
def test_optimizers_equal_the_reference_in_all_implementations(name):
    for implementation in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        for shapes in (SHAPES["mixed"], SHAPES["0-D and empty"], random_shapes(3)):
            plain, sharded = Bag(shapes), weft.fully_shard(Bag(shapes))
            for model in (plain, sharded):
                optimizer = OPTIMIZERS[name](model.parameters(), **implementation)
                for step in range(3):
                    optimizer.zero_grad()
                    model(torch.full((1,), step + 1.0)).backward()
                    optimizer.step()
            for parameter, original in zip(sharded.parameters(), plain.parameters()):
                assert_same(parameter, original)


@distributed(2, 4)
def test_optimizer_state_is_cut_as_its_parameter_is():
    sharded = weft.fully_shard(Bag(SHAPES["mixed"]))
    optimizer = torch.optim.AdamW(sharded.parameters())
    sharded(torch.ones(1)).backward()
    optimizer.step()
    for parameter in sharded.parameters():
        for value in (optimizer.state[parameter]["exp_avg"], parameter.grad):
            assert isinstance(value, UnevenDTensor)
            assert value.to_local().shape == parameter.to_local().shape


def noting(run, sizes):
    """`run`, which notes how many elements the tensors of its lists have."""

    def noted(*args, **kwargs):
        lists = [value for value in args if isinstance(value, list)]
        sizes.extend([each.numel() for each in value if isinstance(each, torch.Tensor)] for value in lists)
        return run(*args, **kwargs)

    return noted


@distributed(2, 4)
def test_empty_parts_are_on_every_rank_and_stay_out_of_kernels_for_many_tensors():
    plain, sharded = Bag(SHAPES["mixed"]), weft.fully_shard(Bag(SHAPES["mixed"]))
    sizes, facts = [], local._facts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "_facts", lambda func: (noting((known := facts(func))[0], sizes), *known[1:]))
        for model in (plain, sharded):
            model(torch.ones(1)).backward()
            for optimizer in (
                torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True, amsgrad=True),
                torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
                torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=True),
            ):
                optimizer.step()
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(model(torch.ones(1))).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        empty = [number for number, p in enumerate(sharded.parameters()) if not p.to_local().numel()]
        with torch.no_grad():
            roots = torch._foreach_mul(list(sharded.parameters()), [float(n) for n in range(len(SHAPES["mixed"]))])
            scalars = torch.arange(len(roots), dtype=torch.float32)
            torch._foreach_addcmul_(roots, roots, roots, scalars)
    for number, (parameter, original, root) in enumerate(zip(sharded.parameters(), plain.parameters(), roots)):
        assert isinstance(parameter.grad, UnevenDTensor)
        assert parameter.grad.to_local().shape == parameter.to_local().shape
        assert_same(parameter, original)
        assert_same(parameter.grad, original.grad)
        scaled = original.detach() * number
        assert_same(root, scaled + number * scaled * scaled)
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, (len(empty), len(sizes)))
    assert any(number for number, _ in counts), "no rank has an empty part"
    assert any(number for _, number in counts), "no list was seen"
    mixed = [each for each in sizes if 0 in each and any(each)]
    assert not mixed, "empty parts beside others"


@distributed(2)
def test_copies_come_from_full_tensors_and_from_other_cuts():
    shapes = SHAPES["mixed"]
    values = Bag(shapes, seed=1)
    other_cuts = weft.fully_shard(Bag([(50,), *shapes], seed=2))
    target = weft.fully_shard(Bag(shapes))
    sources = [parameter.detach() for parameter in other_cuts.parameters()][1:]
    with torch.no_grad():
        for parameter, full, source in zip(target.parameters(), values.parameters(), sources):
            parameter.copy_(full)
            exactly(parameter, full)
            source.copy_(parameter)
            exactly(source, full)
            parameter.zero_().copy_(source)
            exactly(parameter, full)
            plain = torch.zeros(parameter.shape)
            plain.copy_(parameter)
            exactly(plain, full)
        row, plain = torch.arange(29.0), torch.zeros(29)
        torch._foreach_copy_([target.p0], [row])
        exactly(target.p0, row.expand(13, 29))
        torch._foreach_copy_([target.p0, plain], [values.p0, target.p1])
        exactly(target.p0, values.p0)
        exactly(plain, values.p1)
        with pytest.raises(ValueError, match=r"copy_ of a tensor of shape \(3,\) into a parameter of shape \(13, 29\)"):
            target.p0.copy_(torch.zeros(3))


REDUCTIONS = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.max,
    "min": torch.min,
    "norm": torch.norm,
    "vector norm 1": lambda t: torch.linalg.vector_norm(t, 1),
    "vector norm 3": lambda t: torch.linalg.vector_norm(t, 3),
    "vector norm 0": lambda t: torch.linalg.vector_norm(t, 0),
    "vector norm inf": lambda t: torch.linalg.vector_norm(t, math.inf),
    "vector norm -inf": lambda t: torch.linalg.vector_norm(t, -math.inf),
    "sum of a dimension": lambda t: t.sum(-1),
    "norm of a dimension": lambda t: torch.linalg.vector_norm(t, dim=-1),
    "max of integers": lambda t: (t * 100).long().max(),
    "min of integers": lambda t: (t * 100).long().min(),
    "all": lambda t: (t < 0.5).all(),
    "any": lambda t: (t > 1.5).any(),
    "mean in double": lambda t: t.mean(dtype=torch.float64),
    "isfinite": lambda t: t.isfinite().all(),
}


@pytest.mark.slow
@distributed(2, 4, long=4)
def test_reductions_equal_the_reference():
    for shapes in (SHAPES["mixed"], SHAPES["tiny"]):
        plain, sharded = Bag(shapes), weft.fully_shard(Bag(shapes))
        for name, reduction in REDUCTIONS.items():
            for parameter, original in zip(sharded.parameters(), plain.parameters()):
                if "dimension" in name and not original.dim():
                    continue
                result = reduction(parameter.detach())
                try:
                    assert_same(result, reduction(original.detach()))
                except AssertionError as error:
                    raise AssertionError(f"{name} of {tuple(original.shape)}: {error}") from error


@distributed(2, 4)
def test_equality_is_of_the_whole_tensor_and_the_same_on_every_rank():
    one, same, other = (weft.fully_shard(Bag(SHAPES["mixed"], seed)) for seed in (0, 0, 0))
    with torch.no_grad():
        if dist.get_rank() == 0:  # only one rank holds the first element
            other.p0.to_local().view(-1)[0] += 1
    assert torch.equal(one.p0, same.p0)
    assert not torch.equal(one.p0, other.p0)
    for parameter, whole in zip(one.parameters(), Bag(SHAPES["mixed"]).parameters()):
        assert torch.equal(parameter, whole) and torch.equal(whole, parameter)


@distributed(2)
def test_tensors_are_moved_and_cast_in_inference_mode_too():
    plain, sharded = Bag([(6, 10)]).p0.detach(), weft.fully_shard(Bag([(6, 10)])).p0.detach()
    like = torch.ones(1, dtype=torch.float64)
    with torch.inference_mode():
        for x, a in ((sharded, plain), (sharded[1:], plain[1:])):
            assert_same(x.cpu(), a)
            assert_same(x.to("cpu", torch.float64, copy=True), a.double())
            assert_same(x.to(like), a.double())
            assert_same(x.type_as(like), a.double())
            assert_same(x.reshape(-1), a.reshape(-1))
        assert isinstance(sharded.cpu(), UnevenDTensor)


@distributed(2, 4)
def test_operators_without_a_rule_run_on_the_whole_tensor():
    plain, sharded = Bag([(6, 10), (10, 3)]), weft.fully_shard(Bag([(6, 10), (10, 3)]))
    a, b, x, y = *(p.detach() for p in plain.parameters()), *(p.detach() for p in sharded.parameters())
    assert_same(x @ y, a @ b)
    assert_same(x.t(), a.t())
    assert_same(x.softmax(-1), a.softmax(-1))
    assert_same(x.view(3, 20), a.view(3, 20))
    assert_same(x + x[0], a + a[0])
    atomic = weft.fully_shard(Bag([(6, 10), (10, 3)]), shard_placement_fn=lambda _: weft.TensorAtomic())
    for mine, theirs in ((x, a), (x[1:], a[1:]), (atomic.p0.detach(), a)):
        assert_same(mine.unique(), theirs.unique())
        assert_same(mine.nonzero(), theirs.nonzero())
        assert_same(mine.cummax(1).values, theirs.cummax(1).values)
        assert torch.allclose(mine, mine) and not torch.allclose(x, x + 1)
        assert_same(mine.index_select(0, torch.tensor(1)), theirs.index_select(0, torch.tensor(1)))
    x += x.cos().t().sin().t()  # in place with the result of such an operator: its slice is added
    assert_same(x, a + a.cos().sin())


@distributed(2)
def test_operands_of_other_cuts_and_views_are_cut_like_the_first_and_torch_s_dtensors_are_added_up():
    plain, sharded = Bag([(6, 10)]).p0.detach(), weft.fully_shard(Bag([(6, 10)])).p0.detach()
    other = weft.fully_shard(Bag([(6, 10), (50,)])).p0.detach()
    assert other._cuts != sharded._cuts
    for operand in (other, sharded.mT.mT):
        product = sharded * operand
        assert isinstance(product, UnevenDTensor) and product._cuts == sharded._cuts
        assert_same(product, plain * plain)
    for part in (torch.tensor(1.0 + dist.get_rank()), torch.ones(10, 6) + dist.get_rank()):
        partial = DTensor.from_local(part, sharded.device_mesh, [Partial()])
        operator = torch.matmul if part.dim() else torch.mul
        assert_same(operator(sharded, partial), operator(plain, torch.full(part.shape, 3.0)))
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "dp"))["dp"]
    expert = weft.fully_shard(Bag([(10, 6)]), mesh=alone).p0.detach()
    with pytest.raises(RuntimeError, match="different meshes"):
        sharded @ expert  # each rank has another one


@distributed(2)
def test_operators_on_lists_run_on_torch_s_dtensors_by_torch_s_rules():
    plain, sharded = Bag([(6, 10)]).p0.detach(), weft.fully_shard(Bag([(6, 10)])).p0.detach()
    mesh = sharded.device_mesh
    whole = DTensor.from_local(torch.ones(4, 4), mesh, [Replicate()])
    rows = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])
    parts = DTensor.from_local(torch.full((4, 4), 1.0 + dist.get_rank()), mesh, [Partial()])
    torch._foreach_add_([sharded, whole, whole], [sharded, parts, rows])
    assert_same(sharded, 2 * plain)
    assert_same(whole, torch.full((4, 4), 5.0))
    halves = torch._foreach_mul((rows, sharded, parts), (2.0, 3.0, 4.0))
    for half, expected in zip(halves, (torch.full((4, 4), 2.0), 6 * plain, torch.full((4, 4), 12.0))):
        assert_same(half, expected)
    with pytest.raises(TypeError, match=r"to a plain one of shape \(6, 10\)"):
        torch._foreach_add_([sharded, torch.ones(6, 10)], [sharded, sharded])
    with pytest.raises(TypeError, match=r"takes a plain tensor of shape \(6, 10\) with a sharded one"):
        torch._foreach_add([sharded, torch.ones(6, 10)], [sharded, sharded])


@distributed(2)
def test_errors_of_operators_on_parts_are_raised():
    numbers = (weft.fully_shard(Bag([(6, 10)])).p0.detach() * 100).long()
    for operator in (lambda: numbers.mul_(torch.tensor(0.5)), lambda: torch._foreach_sqrt_([numbers])):
        with pytest.raises(RuntimeError, match="can't be cast to the desired output type Long"):
            operator()


@distributed(2)
def test_collectives_of_sharded_tensors_are_refused():
    weight = weft.fully_shard(Bag([(6, 10)])).p0.detach()
    before = weight.full_tensor().clone()
    for tensor in (weight, weight[1:]):
        for call in (
            lambda t: dist.all_reduce(t),
            lambda t: dist.broadcast(t, 0),
            lambda t: dist.all_gather([torch.empty(6, 10)] * 2, t),
            lambda t: all_reduce(t, "sum", [0, 1]),
        ):
            with pytest.raises(TypeError, match=r"sharded tensor of shape .*backward has averaged.*to_local\(\)"):
                call(tensor)
    assert torch.equal(weight.full_tensor(), before)


@distributed(2)
def test_a_child_called_outside_its_unit_says_what_to_call():
    net = nets.shard(nets.make())
    with pytest.raises(RuntimeError, match="call the module that was passed to fully_shard"):
        net.norm(torch.randn(2, 13))
    with pytest.raises(RuntimeError, match="register_fsdp_forward_method"):
        net.blocks[0].up(torch.randn(2, 13))


@distributed(2, 4)
def test_full_tensor_and_to_local_are_differentiable():
    plain, sharded = Bag([(5, 7)]), weft.fully_shard(Bag([(5, 7)]))
    (plain.p0**2).sum().backward()
    (sharded.p0.full_tensor() ** 2).sum().backward()
    assert_same(sharded.p0.grad, plain.p0.grad)
    sharded.p0.grad = None
    (sharded.p0.to_local() ** 2).sum().backward()
    assert_same(sharded.p0.grad, plain.p0.grad)
    assert_same(sharded.p0.redistribute(), plain.p0)  # with the placements that it has
    half = sharded.p0.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16


@distributed(2)
def test_gradients_of_full_tensors_and_parts_are_summed_where_their_placements_say_so():
    replicas = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "shard"))
    weight = 1.0 + dist.get_rank()
    for mesh, placements, whole in ((None, [Partial()], True), (replicas, [Partial(), Shard(0)], False)):
        parameter = weft.fully_shard(Bag([(5, 7)]), mesh=mesh).p0
        read = parameter.full_tensor if whole else parameter.to_local
        (read(grad_placements=placements) * weight).sum().backward()
        assert_same(parameter.grad, torch.full((5, 7), 3.0))
        parameter.grad = None
        (read(grad_placements=None) * 2).sum().backward()
        assert_same(parameter.grad, torch.full((5, 7), 2.0))
        for wrong in ([Shard(1)], [*placements, Replicate()]):
            with pytest.raises(ValueError, match=r"grad_placements=.*choose .* with Partial\(\) in place of Replicate"):
                read(grad_placements=wrong)


@pytest.mark.slow
@distributed(2, 4, long=4)
def test_derived_tensors_keep_the_cuts():
    for _, plain, sharded in bags():
        for original, parameter in zip(plain.parameters(), sharded.parameters()):
            copied = copy.deepcopy(parameter)
            assert isinstance(copied, nn.Parameter) and copied.requires_grad
            same = (parameter.detach(), parameter.clone(), copied, nn.Parameter(parameter.detach()))
            for derived in same:
                exactly(derived, original)
            exactly(torch.zeros_like(parameter), torch.zeros_like(original))
            exactly(parameter.detach() * 2 + 1, original.detach() * 2 + 1)
            exactly(parameter.double(), original.double())
            for derived in (*same, torch.zeros_like(parameter), parameter.to(torch.bfloat16)):
                assert isinstance(derived, UnevenDTensor)
                assert derived._cuts == parameter._cuts
                assert derived.shape == original.shape
                assert derived.to_local().shape == parameter.to_local().shape
            with torch.no_grad():
                copied.add_(1)
            exactly(parameter, original)


@distributed(2)
def test_a_copy_has_the_class_the_gradient_and_the_attributes():
    model = weft.fully_shard(Bag([(6, 10)]))
    model(torch.ones(1)).backward()
    model.p0.tags = ["a", model.p0]
    copied = copy.deepcopy(model.p0)
    assert type(copied) is UnevenDTensor and isinstance(copied, nn.Parameter) and copied.requires_grad
    assert copied.tags[0] == "a" and copied.tags[1] is copied and copied.tags is not model.p0.tags
    exactly(copied.grad, model.p0.grad)
    assert not isinstance(copied.grad, nn.Parameter) and copied.grad.to_local() is not model.p0.grad.to_local()
    with pytest.raises(RuntimeError, match=r"that autograd computed: detach\(\) it first"):
        copy.deepcopy(model.p0 * 2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@distributed(2)
def test_state_dicts_load_from_sharded_and_from_plain_tensors(strategy):
    plain = nets.make(seed=3)
    sharded = nets.shard(nets.make(seed=3), strategy=strategy)
    assert list(sharded.state_dict()) == list(plain.state_dict())

    for source in (plain.state_dict(), sharded.state_dict()):
        target = nets.shard(nets.make(seed=4), strategy=strategy)
        before = [id(parameter) for parameter in target.parameters()]
        tokens = nets.data(1, 4)[0]
        nets.loss_of(target, tokens)  # weights that a forward left must not survive the load
        target.load_state_dict(source)
        assert [id(parameter) for parameter in target.parameters()] == before
        for name, value in target.state_dict().items():
            exactly(value, plain.state_dict()[name])
        torch.testing.assert_close(nets.loss_of(target, tokens), nets.loss_of(plain, tokens))


def trained(strategy, seed=0):
    """A net and its optimizer after a step, with state."""
    net = nets.shard(nets.make(seed=seed), strategy=strategy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    nets.loss_of(net, nets.data(1, 4, seed=seed + 1)[0]).backward()
    optimizer.step()
    return net, optimizer


def state_of(net, optimizer) -> dict:
    """Weights and optimizer state by name."""
    state = {f"model.{name}": value for name, value in net.state_dict().items()}
    for name, parameter in net.named_parameters():
        for key, value in optimizer.state[parameter].items():
            state[f"optimizer.{name}.{key}"] = value
    return state


def save(strategy, folder):
    net, optimizer = trained(strategy)
    state = state_of(net, optimizer)
    dcp.save(state, checkpoint_id=folder)
    return nets.whole(state)


def load(strategy, folder):
    net, optimizer = trained(strategy, seed=5)
    state = state_of(net, optimizer)
    dcp.load(state, checkpoint_id=folder)
    return nets.whole(state)


def save_bags(folder):
    for number, (_, _, sharded) in enumerate(bags()):
        dcp.save(dict(sharded.named_parameters()), checkpoint_id=f"{folder}/{number}")


def load_bags(folder):
    for number, (_, plain, sharded) in enumerate(bags()):
        with torch.no_grad():
            for parameter in sharded.parameters():
                parameter.fill_(math.nan)
        dcp.load(dict(sharded.named_parameters()), checkpoint_id=f"{folder}/{number}")
        for parameter, original in zip(sharded.parameters(), plain.parameters()):
            exactly(parameter, original)


@pytest.mark.long
def test_checkpoints_of_four_ranks_load_on_other_numbers_and_under_every_strategy(pool, tmp_path):
    saved = pool.run(4, save, "optim_grads_params", str(tmp_path))
    for ranks, strategy in ((1, STRATEGIES[-1]), (4, STRATEGIES[-1]), *((2, each) for each in STRATEGIES)):
        for loaded in pool.run(ranks, load, strategy, str(tmp_path)):
            torch.testing.assert_close(loaded, saved[0], rtol=0, atol=0)


@pytest.mark.slow
def test_checkpoints_of_any_shapes_load_on_other_numbers_of_ranks(pool, tmp_path):
    pool.run(4, save_bags, str(tmp_path))
    for ranks in (2, 1):
        pool.run(ranks, load_bags, str(tmp_path))


@distributed(2)
def test_a_fused_step_does_not_write_to_a_state_that_is_cut_differently():
    one = weft.fully_shard(Bag([(8, 8)]))
    other = weft.fully_shard(Bag([(8, 8)]), shard_placement_fn=lambda p: weft.TensorAtomic())
    optimizer = torch.optim.AdamW(one.parameters(), fused=True)
    for _ in range(2):
        one(torch.ones(1)).backward()
        optimizer.step()
        optimizer.state[one.p0]["exp_avg"] = torch.zeros_like(other.p0)
        with pytest.raises(TypeError, match="cut differently"):
            optimizer.step()
        optimizer.state.clear()


@distributed(2)
def test_an_infinity_in_what_only_one_rank_has_is_found_on_all_though_all_have_the_rest_whole():
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "dp"))["dp"]
    dense = weft.fully_shard(Bag([(8, 8)]), strategy="no_shard")
    experts = weft.fully_shard(Bag([(8, 8)]), mesh=alone)
    parameters = [dense.p0, experts.p0]
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(parameters, lr=0.1)
    scaler.scale(dense(torch.ones(1)) + experts(torch.ones(1))).backward()
    if dist.get_rank() == 0:
        experts.p0.grad.to_local().fill_(torch.inf)
    before = [each.full_tensor().clone() for each in parameters]
    scaler.step(optimizer)
    assert all(map(torch.equal, [each.full_tensor() for each in parameters], before))


@distributed(2)
def test_an_infinity_in_one_of_torch_s_dtensors_is_found_on_all_ranks_beside_sharded_parameters():
    dense = weft.fully_shard(Bag([(8, 8)]), strategy="no_shard")
    rows = nn.Parameter(DTensor.from_local(torch.ones(2, 4), dense.p0.device_mesh, [Shard(0)]))
    optimizer, scaler = torch.optim.SGD([dense.p0, rows], lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(dense(torch.ones(1))).backward()
    rows.grad = DTensor.from_local(
        torch.full((2, 4), math.inf if dist.get_rank() else 1.0), rows.device_mesh, [Shard(0)]
    )
    before = dense.p0.full_tensor().clone()
    scaler.step(optimizer)
    assert torch.equal(dense.p0.full_tensor(), before) and rows.to_local().eq(1).all()


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}])
@distributed(2)
def test_an_optimizer_over_lists_adds_up_gradients_of_torch_s_dtensors_beside_sharded_parameters(options):
    sharded, plain = weft.fully_shard(Bag([(6, 10)])), Bag([(6, 10), (4, 4)])
    whole = nn.Parameter(DTensor.from_local(plain.p1.detach().clone(), sharded.p0.device_mesh, [Replicate()]))
    for model in (sharded, plain):
        model(torch.ones(1)).backward()
    part = plain.p1.grad / 2 + 1 - 2 * dist.get_rank()
    whole.grad = DTensor.from_local(part, whole.device_mesh, [Partial()])
    for parameters in ([sharded.p0, whole], list(plain.parameters())):
        nn.utils.clip_grad_norm_(parameters, 0.1)
        torch.optim.AdamW(parameters, lr=0.1, **options).step()
    for mine, theirs in zip((sharded.p0, whole), plain.parameters()):
        assert_same(mine, theirs)
