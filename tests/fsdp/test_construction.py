"""Modules built on the meta device get memory and values unit by unit, the same on every rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakIdKeyDictionary

import weft
from tests.fsdp import nets
from tests.pool import distributed


class Scaled(nn.Module):
    """A layer with a buffer that no checkpoint holds, filled with the parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        self.register_buffer("scale", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.scale.copy_(torch.arange(len(self.scale)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight) * self.scale


def built_on_meta(*layers) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*(layer() for layer in layers))


@distributed(2)
def test_ranks_with_different_seeds_get_rank_0s_values_and_real_buffers():
    model = built_on_meta(lambda: Scaled(7), lambda: Scaled(7))
    torch.manual_seed(dist.get_rank())
    for layer in model:
        weft.fully_shard(layer)
    weft.fully_shard(model)
    torch.manual_seed(0)
    reference = nn.Sequential(Scaled(7), Scaled(7))
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].full_tensor(), value, rtol=0, atol=0)
    x = torch.randn(3, 7)
    torch.testing.assert_close(model(x), reference(x))


class Rotary(nn.Module):
    """A table of rotations, which no checkpoint holds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(16, width // 2), persistent=False)
        self.register_buffer("base", torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.base.fill_(10000.0)
        width = self.table.shape[1]
        frequencies = self.base ** (-torch.arange(width, device=self.table.device) / width)
        self.table.copy_(torch.outer(torch.arange(16.0, device=self.table.device), frequencies))


class Attention(nn.Module):
    """Owns a parameter of its own, fills it itself, and fills one child in another way than the child does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.rotary = Rotary(width)
        self.out = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scale)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out((q * self.rotary.table.sum(-1).cos()[0] + k) * v * self.scale)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x + self.attention(x))).relu())


class Decoder(nn.Module):
    """An embedding, layers, and a head that is tied to the embedding and has a bias of its own."""

    def __init__(self, width: int = 64, depth: int = 6, vocabulary: int = 100) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.mixer = nn.MultiheadAttention(width, 4, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.mixer(x, x, x)[0])


def shard(model: Decoder, **options: Any) -> Decoder:
    """In the order in which the model is built, with a unit inside each layer's."""
    weft.fully_shard(model.embedding, **options)
    for layer in model.layers:
        weft.fully_shard(layer.attention, **options)
        weft.fully_shard(layer, **options)
    return weft.fully_shard(model, **options)


class Live(TorchDispatchMode):
    """The most bytes that tensors made under it held at once, each storage counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        before = len(self._made)
        for leaf in tree_flatten(result)[0]:
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta and not isinstance(leaf, DTensor):
                self._made[leaf] = True
        if len(self._made) > before and not func.is_view:
            self.most = max(self.most, self.bytes)
        return result

    @property
    def bytes(self) -> int:
        """Bytes that they hold now."""
        storages = [tensor.untyped_storage() for tensor in list(self._made)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["optim_grads_params", pytest.param("optim", marks=pytest.mark.slow)])
@distributed(2)
def test_construction_needs_one_and_a_half_units_and_gives_the_values_of_a_plain_model(strategy):
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model = Decoder()
    attention, layer, whole = (
        sum(p.nbytes for p in module.parameters()) for module in (model.layers[0].attention, model.layers[0], model)
    )
    unit = layer - attention  # the largest one
    assert whole > 4 * unit
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with Live() as live:
        shard(model, mesh=mesh, strategy=strategy)
    at_rest = weft.memory_report(model)["persistent"]["weights"]
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert live.bytes == at_rest + buffers
    assert live.most < at_rest + buffers + 1.5 * unit

    torch.manual_seed(0)  # rank 0's
    plain = Decoder()
    assert model.head.weight is model.embedding.weight
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(nets.full(model.state_dict()[name]), value, rtol=0, atol=0, msg=name)
    for (name, buffer), expected in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected, rtol=0, atol=0, msg=name)
    tokens = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(tokens), plain(tokens))


class Tied(nn.Module):
    """An embedding whose weight a head, which fills it too, and the module itself, which cannot, have as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 5), nn.Linear(5, 11)
        self.head.weight = self.table = self.embedding.weight


@distributed(2)
def test_a_tied_parameter_is_filled_once_by_the_first_module_that_can():
    for first, layer in (("", nn.Embedding(11, 5)), ("embedding", nn.Embedding(11, 5)), ("head", nn.Linear(5, 11))):
        with torch.device("meta"):
            model = Tied()
        torch.manual_seed(0)
        for name in dict.fromkeys((first, "embedding", "head", "") if first else (first,)):
            weft.fully_shard(model.get_submodule(name))
        assert model.head.weight is model.embedding.weight is model.table
        assert [name for name, _ in model.named_parameters()] == ["table", "head.bias"]
        torch.manual_seed(0)
        layer.reset_parameters()
        torch.testing.assert_close(nets.full(model.table), layer.weight.detach(), rtol=0, atol=0)
        assert nets.full(model.head.bias).abs().max() <= 5**-0.5


@pytest.mark.slow
@distributed(4)
def test_slices_of_tensor_parallelism_get_the_values_of_a_single_process():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(dist.get_rank())
    with torch.device("meta"):
        model = Decoder(depth=1)
    for layer in model.layers:
        plan = {"norm": SequenceParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], {**plan, "attention.rotary": SequenceParallel()})
    assert isinstance(model.layers[0].attention.rotary.table, DTensor) and model.layers[0].up.weight.is_meta
    shard(model, mesh=mesh["dp"])
    torch.manual_seed(0)
    plain = Decoder(depth=1)
    # What is in no plan lies on data-parallel ranks alone: seed the others alike, as without the meta device.
    model, plain = model.layers[0], plain.layers[0]
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(nets.full(model.state_dict()[name]), value, rtol=0, atol=0, msg=name)
    for (name, buffer), expected in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(nets.full(buffer), expected, rtol=0, atol=0, msg=name)
    weight = model.up.weight
    assert weight.device_mesh.ndim == 2 and weight.shape == (256, 64) and weight._cuts.shape == (128, 64)


class Rows(nn.Module):
    """Fills the rows that lie here, each with its number."""

    fills_slices = True

    def __init__(self, tp: DeviceMesh) -> None:
        super().__init__()
        here = torch.empty(3, 4, device="meta")
        self.weight = nn.Parameter(DTensor.from_local(here, tp, [Shard(0)], run_check=False))

    def reset_parameters(self) -> None:
        here = self.weight.detach().to_local()
        first = len(here) * self.weight.device_mesh.get_local_rank()
        here.copy_(torch.arange(first, first + len(here)).unsqueeze(-1).expand_as(here))


@distributed(4)
def test_a_module_may_fill_its_slices_alone():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = weft.fully_shard(Rows(mesh["tp"]), mesh=mesh["dp"])
    torch.testing.assert_close(nets.full(module.weight), torch.arange(6.0).unsqueeze(-1).expand(6, 4))


class Rope(nn.Module):
    """Owns what a checkpoint holds and what it does not; assigns the latter, from the former."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        self.register_buffer("base", torch.empty(()))
        self.register_buffer("table", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.table = torch.arange(4.0, device=self.weight.device) * self.base


class Loud(nn.Module):
    """Fills what its children have too, whatever it is."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Rope(), Rope()
        self.b.weight = self.a.weight
        self.register_buffer("count", torch.empty((), dtype=torch.int64), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.count.fill_(3)
        for parameter in self.parameters():
            nn.init.constant_(parameter, 5.0)


@distributed(2)
def test_loaded_weights_keep_their_values_when_what_no_checkpoint_holds_is_filled():
    with torch.device("meta"):
        model = nn.Sequential(Loud(), nn.Linear(4, 4))
    loaded = {name: torch.full(value.shape, 7.0) for name, value in model.state_dict().items()}
    model.load_state_dict(loaded, assign=True)
    model[0].b.weight = model[0].a.weight
    for layer in model:
        weft.fully_shard(layer)
    weft.fully_shard(model)
    assert model[0].b.weight is model[0].a.weight and model[0].count == 3
    for name, value in model.state_dict().items():
        torch.testing.assert_close(nets.full(value), loaded[name], rtol=0, atol=0, msg=name)
    torch.testing.assert_close(model[0].a.table, 7 * torch.arange(4.0))  # of the loaded base
    assert all((value == 7).all() for value in loaded.values())


@distributed(2)
def test_keeping_loaded_weights_takes_no_more_than_filling_them():
    width, depth = 64, 4
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(Scaled(width), Scaled(width)) for _ in range(depth)))
    model.load_state_dict({name: torch.ones(v.shape) for name, v in model.state_dict().items()}, assign=True)
    unit = 2 * width * width * 4
    with Live() as live:
        for layer in model:
            weft.fully_shard(layer)
    assert live.most < live.bytes + 1.5 * unit


FORGOTTEN = {
    "float": torch.float32,
    "half": torch.bfloat16,
    "complex": torch.complex64,
    "flags": torch.bool,
    "number": torch.int64,
    "bytes": torch.uint8,
}


class Forgetful(nn.Module):
    """Fills the first `filled` rows of what it owns."""

    def __init__(self, dtype: torch.dtype, filled: int, buffer: bool) -> None:
        super().__init__()
        self.filled = filled
        memory = torch.empty(4, 8, dtype=dtype)
        if buffer:
            self.register_buffer("what", memory)
        else:
            self.what = nn.Parameter(memory, requires_grad=False)
        self.linear = nn.Linear(2, 2)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.what[: self.filled] = 0


@pytest.mark.slow
@distributed(2)
def test_what_a_filler_leaves_out_is_named():
    for name, dtype in FORGOTTEN.items():
        for buffer in (False, True):
            for filled in range(0, 5, 2):
                with torch.device("meta"):
                    model = nn.Sequential(Forgetful(dtype, filled, buffer))
                if filled == 4 or (filled and name == "bytes"):  # any byte may be a value
                    weft.fully_shard(model)
                    assert (nets.full(model[0].what)[:filled] == 0).all()
                else:
                    with pytest.raises(ValueError, match=r"'0.what' is not .* Forgetful left .* 'what' .* fill all of"):
                        weft.fully_shard(model)


@distributed(2)
def test_a_filler_may_run_on_rank_0_alone_and_may_choose_any_value():
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(8))
            self.register_buffer("seen", torch.empty(8))

        def reset_parameters(self) -> None:
            if dist.get_rank() == 0:
                nn.init.constant_(self.weight, torch.inf)
                self.seen.fill_(torch.nan)

    with torch.device("meta"):
        model = Chooses()
    weft.fully_shard(model)
    assert nets.full(model.weight).isinf().all() and model.seen.isnan().all()


@distributed(2)
def test_a_filler_that_assigns_another_shape_is_refused():
    class Grows(nn.Linear):
        def reset_parameters(self) -> None:
            self.weight = nn.Parameter(torch.ones(5 - self.weight.is_meta, 4))

    with torch.device("meta"):
        model = Grows(4, 4, bias=False)
    with pytest.raises(ValueError, match=r"replaced 'weight' of shape \(4, 4\) by one of \(5, 4\): .* keep the shapes"):
        weft.fully_shard(model)
