"""Toy extensions from outside of the package, and how many files of `src` each would touch if it were added there.

An extension is code of its own, here, and entries in the tables of `src` that know such things. The code would be a
file of its own in `src` unless it belongs into the file of the table, as a schedule does.
"""

import inspect
import sys
import types
from collections.abc import Callable, MutableMapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.fsdp import nets
from tests.overlap.small import config, gradients, plain
from tests.pool import distributed
from weft.cli import main
from weft.comm import backends
from weft.comm.transport import Capabilities, Pending, add_scaled
from weft.fsdp import group, payload
from weft.models import HybridConfig, HybridModel, hf, kinds, pattern
from weft.models.hf import families, llama
from weft.models.hf.family import Family
from weft.models.kinds.trunk import Kind
from weft.models.layers import Block
from weft.overlap import forward_backward
from weft.pipeline import Action, Table, schedules


class Tables:
    """Puts extensions into tables of `src` while a test runs, and knows in which files these are."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._undo: list[Callable[[], Any]] = []

    def add(self, module: Any, table: str, key: str, value: Any) -> None:
        known: MutableMapping[str, Any] = getattr(module, table)
        before = known.get(key)
        known[key] = value
        self.files.add(getattr(module, "__file__", ""))
        self._undo.append(lambda: known.pop(key) if before is None else known.__setitem__(key, before))

    def __enter__(self) -> "Tables":
        return self

    def __exit__(self, *_: object) -> None:
        for undo in reversed(self._undo):
            undo()


TOY = Family(
    model_type="toy",
    architecture="ToyForCausalLM",
    layer="toy.blocks.{}.",
    outer={"embedding": "toy.embed", "decoder.final_layernorm": "toy.norm", "output_layer": "toy.head"},
    tensors={"*": llama.ATTENTION, "-": {**llama.MLP, "up_proj": "mlp.widen", "down_proj": "mlp.narrow"}},
    fields={**llama.LLAMA.fields, "width": ("hidden_size", 32), "intermediate_size": ("intermediate_size", 48)},
    read=llama.read,
    write=llama.write,
)


def test_a_family_touches_two_files_its_own_and_the_list_of_families(tmp_path):
    torch.manual_seed(0)
    cfg = HybridConfig(pattern="[*-][*-]", hidden_size=32, intermediate_size=48, vocab_size=61, head_dim=8)
    model = HybridModel(cfg)
    with Tables() as tables:
        tables.add(families, "FAMILIES", "toy", TOY)
        hf.save(model, tmp_path / "toy", "toy")
        names = set(hf.directory.TensorFiles(tmp_path / "toy"))
        assert {"toy.embed.weight", "toy.blocks.1.mlp.narrow.weight", "toy.blocks.0.self_attn.q_proj.weight"} < names
        found = hf.from_pretrained(tmp_path / "toy")
        assert main(["convert", str(tmp_path / "toy"), str(tmp_path / "ours")]) == 0
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(found(tokens), model(tokens), rtol=0, atol=0)
    again = hf.from_pretrained(tmp_path / "ours")
    torch.testing.assert_close(again(tokens), model(tokens), rtol=0, atol=0)
    assert len({__file__} | tables.files) <= 2


def backwards_in_turn(ranks: int, chunks: int, microbatches: int) -> Table:
    """One microbatch at a time: its forward on every stage, and its backward."""
    row = [(Action(kind, m, 0),) for m in range(microbatches) for kind in "FB"]
    return Table("toy", (tuple(row),) * ranks, chunks, microbatches)


@distributed(2)
def test_a_schedule_touches_one_file():
    cfg = config("[*-]*-")
    generator = torch.Generator().manual_seed(0)
    data = [torch.randint(cfg.vocab_size, (2, 2, 6), generator=generator).unbind() for _ in range(3)]
    torch.manual_seed(0)
    whole = HybridModel(cfg)
    expected = plain(whole, data)
    torch.manual_seed(0)
    model = HybridModel(cfg, weft.init_meshes("cpu", pp=2))
    trace: list[Any] = []
    with Tables() as tables:
        tables.add(schedules, "SCHEDULES", "toy", schedules.Schedule(backwards_in_turn, 1, any_chunks=False))
        losses = forward_backward(model, data, schedule="toy", trace=trace)
    torch.testing.assert_close(losses, expected, rtol=0, atol=0)
    theirs = gradients(whole, whole=True)
    for name, gradient in gradients(model, whole=True).items():
        torch.testing.assert_close(gradient, theirs[name], rtol=0, atol=0)
    order = [step.microbatch for step in trace if step.slot not in ("send", "receive")]
    assert order == sorted(order)  # no other schedule ends a microbatch before it begins the next
    assert len(tables.files) <= 1


def test_the_command_line_draws_and_checks_a_schedule_that_was_added(capsys):
    with Tables() as tables:
        tables.add(schedules, "SCHEDULES", "toy", schedules.Schedule(backwards_in_turn, 1, any_chunks=False))
        assert main(["schedule", "toy", "--pp", "2", "--microbatches", "3"]) == 0
        assert "toy" in capsys.readouterr().out
        assert main(["schedule", "toy", "--pp", "2", "--microbatches", "3", "--chunks", "2"]) == 2


class Plain:
    """Every collective by the plainest call of torch, done when it returns."""

    capabilities = Capabilities(tags=False, helpers=False, bundles=False, latency=1e-4, bandwidth=1e9)

    def __init__(self) -> None:
        self.calls: set[str] = set()

    def all_gather(self, full, source, group, tag):
        self.calls.add("all_gather")
        parts = [torch.empty_like(source) for _ in range(group.size())]
        dist.all_gather(parts, source.clone(), group=group)
        full.copy_(torch.cat(parts))
        return Pending()

    def all_gather_uneven(self, parts, rank, group, tag):
        self.calls.add("all_gather_uneven")
        for peer, part in enumerate(parts):
            dist.broadcast(part, group_src=peer, group=group)
        return Pending()

    def reduce_scatter(self, output, partial, group, tag, how):
        self.calls.add("reduce_scatter")
        dist.all_reduce(partial, group=group)
        mine = partial.view(group.size(), -1)[dist.get_rank(group)]
        add_scaled(output, mine, how.scale, how.accumulate)
        return Pending()

    def all_reduce(self, output, partial, group, tag, how):
        self.calls.add("all_reduce")
        dist.all_reduce(partial, group=group)
        add_scaled(output, partial, how.scale, how.accumulate)
        return Pending()

    def all_to_all(self, output, source, output_sizes, source_sizes, group, tag):
        self.calls.add("all_to_all")
        dist.all_to_all_single(output, source, list(output_sizes), list(source_sizes), group=group)
        return Pending()

    def inbox_numel(self, partial_numel, size, *, scatters):
        return 0


def trained(transport: Plain | None) -> list[torch.Tensor]:
    """The weights after two steps on this rank's rows."""
    with Tables() as tables:
        if transport is not None:
            module = types.ModuleType("weft.comm.gloo")  # in place of that of the backend which is here
            module.TRANSPORT = transport
            tables.add(sys, "modules", module.__name__, module)
            backends.TRANSPORTS.clear()
        net = nets.shard(nets.make())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for batch in nets.data(2, 4):
            nets.loss_of(net, batch[dist.get_rank() :: dist.get_world_size()]).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = [each.full_tensor() for each in net.parameters()]
        assert tables.files <= {""}  # no file of `src` lists it: its own is the only one
    backends.TRANSPORTS.clear()
    return found


@pytest.mark.slow
@distributed(2)
def test_a_transport_is_a_module_with_the_name_of_its_backend():
    toy = Plain()
    torch.testing.assert_close(trained(toy), trained(None))
    assert {"all_gather", "reduce_scatter"} <= toy.calls


class Negated(payload.Plain):
    """Weights travel with their signs turned."""

    opened = 0

    def write(self, own, source, pool):
        return lambda: torch.neg(source, out=own)

    def open(self, full, copy):
        Negated.opened += 1
        full.neg_()


@pytest.mark.slow
@distributed(2)
def test_a_payload_touches_two_files_its_own_and_the_one_that_chooses():
    plain = trained(None)
    before, group.payload_of = group.payload_of, Negated
    try:
        negated = trained(None)
    finally:
        group.payload_of = before
    torch.testing.assert_close(negated, plain, rtol=0, atol=0)
    assert Negated.opened > 0
    assert len({__file__, inspect.getsourcefile(before)}) <= 2


class Gain(Block):
    """The smallest layer: a factor for each element of its normalised input."""

    def __init__(self, cfg, source, beside):
        super().__init__(cfg)
        self.weight = torch.nn.Parameter(torch.full((cfg.hidden_size,), 0.5))

    def mix(self, x, state, documents=None):
        return self.weight * x


def gradients_of(model: HybridModel, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    logits = model(rows)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows.flatten()).backward()
    return {name: each.grad for name, each in model.named_parameters()}


@distributed(2)
def test_a_layer_kind_touches_three_files_its_fields_its_layer_and_the_list_of_kinds():
    kind = Kind("%", "gain", "gain", "gain:Gain")
    layer = types.ModuleType("weft.models.layers.gain")
    layer.Gain = Gain
    rows = torch.arange(4 * 8).view(4, 8) % 61
    with Tables() as tables:
        tables.add(kinds, "KINDS", "%", kind)
        counted = len(tables.files)
        tables.add(sys, "modules", layer.__name__, layer)
        tables.add(pattern, "LAYER_NAMES", "%", kind.title)  # made from KINDS when weft is imported
        tables.add(pattern, "LAYER_KEYS", "%", kind.key)
        cfg = HybridConfig(pattern="[%-]%", hidden_size=32, intermediate_size=48, vocab_size=61)
        torch.manual_seed(0)
        plain = HybridModel(cfg)
        torch.manual_seed(0)
        model = HybridModel(cfg)
        weft.models.shard(model, weft.init_meshes("cpu"))
        expected = gradients_of(plain, rows)
        found = gradients_of(model, rows[2 * dist.get_rank() :][:2])
    assert "decoder.layers.0.gain.weight" in found
    for name, gradient in found.items():
        torch.testing.assert_close(gradient.full_tensor(), expected[name])
    assert 2 + counted <= 3  # its fields and its layer are files of their own


def test_a_name_that_no_table_has_is_refused():
    with pytest.raises(ValueError, match="neither a schedule nor a file"):
        weft.pipeline.table("toy", ranks=2, microbatches=2)
    with pytest.raises(ValueError, match="toy"):
        families.family_of({"model_type": "toy"})
