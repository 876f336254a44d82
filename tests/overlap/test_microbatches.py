"""A microbatch is a dict of tensors: what stands beside tokens and labels reaches the parts that name it."""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.overlap.small import config, gradients
from tests.pool import distributed
from tests.test_snippets import blocks
from weft.comm.watch.rules import CollectiveMismatch
from weft.models import Documents, HybridModel
from weft.overlap import Crossing, arguments, evaluate, forward_backward, run_stages

LENGTHS = ((3, 4), (5, 2), (1, 6))
SIZES = {"mamba_num_heads": 2, "mamba_head_dim": 8, "ssm_state_size": 8, "chunk_size": 4}


def data(count=3, seq=7):
    """Microbatches of two rows, each with other documents."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for number in range(count):
        tokens, labels = torch.randint(37, (2, 2, seq), generator=generator).unbind()
        ids = [[0] * lengths[0] + [1] * lengths[1] for lengths in (LENGTHS[number % 3], LENGTHS[(number + 1) % 3])]
        found.append({"tokens": tokens, "labels": labels, "documents": Documents.from_ids(torch.tensor(ids))})
    return found


def build(pattern, meshes=None, **how):
    torch.manual_seed(0)
    return HybridModel(config(pattern, **SIZES), meshes, **how)


def plain(model, microbatches):
    losses = []
    for each in microbatches:
        loss = model(**each)
        loss.backward()
        losses.append(loss.detach())
    return losses, gradients(model)


def same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.slow
def test_documents_reach_layers_depths_and_loss_of_a_schedule():
    expected = plain(build("M*[*E]/[*-]"), data())
    model = build("M*[*E]/[*-]")
    losses, found = forward_backward(model, data(), overlap=False, delay_wgrad=True), gradients(model)
    # Layers and depths read the embedding. One backward adds their two shares first, a schedule adds each to the sum.
    one, other = ({"embedding.weight": each.pop("embedding.weight")} for each in (found, expected[1]))
    torch.testing.assert_close(one, other)
    same((losses, found), expected)
    other = [each | {"documents": None} for each in data()]
    assert forward_backward(build("M*[*E]/[*-]"), other, overlap=False) != expected[0]


@pytest.mark.slow
@distributed(2)
def test_documents_in_stages_and_under_the_exchange_of_experts():
    """Each rank of a pipeline has the documents; nothing is sent for them."""
    expected = plain(build("M*[*-]/[*-]"), data(4))
    model = build("M*[*-]/[*-]", weft.init_meshes("cpu", pp=2))
    losses = forward_backward(model, data(4), schedule="1f1b")
    same(losses, expected[0])
    mine = gradients(model)
    torch.testing.assert_close(mine, {name: expected[1][name] for name in mine})
    meshes = weft.init_meshes("cpu", ep=2)
    one, two = build("[*E][ME]", meshes), build("[*E][ME]", meshes)
    same((forward_backward(one, data()), gradients(one)), plain(two, data()))


@distributed(2)
def test_ranks_of_a_pipeline_with_different_documents_raise():
    model = build("M*", weft.init_meshes("cpu", pp=2))
    mine = data()
    if dist.get_rank():
        mine[1]["documents"] = mine[0]["documents"]
    with pytest.raises(CollectiveMismatch, match="Documents"):
        forward_backward(model, mine, schedule="1f1b")


class Noted(HybridModel):
    """Its methods have the arguments of `StagedModel`."""

    def embed(self, tokens):
        return 2 * super().embed(tokens)

    def loss(self, hidden, tokens, labels, losses):
        return super().loss(hidden, tokens, labels, losses) + hidden.square().mean()


def test_methods_that_a_subclass_overrides_without_further_entries_run_with_and_without_a_schedule():
    torch.manual_seed(0)
    model = Noted(config("[*-]"))
    pairs = [{name: each[name] for name in ("tokens", "labels")} for each in data(2)]
    same((forward_backward(model, pairs, overlap=False), gradients(model)), plain(model, pairs))


class Seeing(HybridModel):
    def embed(self, tokens, *, images=None):
        return super().embed(tokens)


class Codec:
    def __repr__(self):
        return f"<Codec object at 0x7f{dist.get_rank()}>"  # as object's own, which has another address on each rank


def images(number):
    pictures = [torch.full((2, 700), 0.5), torch.tensor([number])]
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    return {"pictures": pictures, "codec": Codec(), "ragged": ragged, "where": torch.eye(3).to_sparse()}


@distributed(2)
def test_entries_of_any_kind_are_compared_by_their_values_over_the_ranks_of_a_pipeline():
    torch.manual_seed(0)
    model = Seeing(config("**"), weft.init_meshes("cpu", pp=2))
    pairs = [{name: each[name] for name in ("tokens", "labels")} for each in data(2)]
    entries = [each | {"images": images(3)} for each in pairs]
    forward_backward(model, entries, schedule="1f1b")
    if dist.get_rank():  # one stage computes with an entry, which then remembers its longest row
        torch.nested.to_padded_tensor(entries[0]["images"]["ragged"], 0.0)
    forward_backward(model, entries, schedule="1f1b")
    said = r"'pictures': \[\[2, 700\], \[1\]\], 'codec': '<Codec object>', .*checksum (\w+).*checksum (?!\1)\w+"
    with pytest.raises(CollectiveMismatch, match=said):
        forward_backward(model, [each | {"images": images(dist.get_rank())} for each in pairs], schedule="1f1b")


def outputs_of(model, microbatches, documents=True):
    with torch.no_grad():
        return torch.cat([model(each["tokens"], documents=each["documents"]) for each in microbatches])


@pytest.mark.slow
@distributed(2)
def test_evaluate_returns_outputs_on_the_last_stage_or_on_all():
    reference = build("M*[*-]/[*-]").eval()
    expected = outputs_of(reference, data())
    for model in (build("M*[*-]/[*-]").eval(), build("M*[*-]/[*-]", weft.init_meshes("cpu", pp=2)).eval()):
        losses = evaluate(model, data())
        with torch.no_grad():
            same(losses, [reference(**each) for each in data()])
        found = evaluate(model, data(), outputs="all")
        same(found[0], losses)
        same(found[1], expected)
        unlabeled = [{name: each[name] for name in ("tokens", "documents")} for each in data()]
        none, last = evaluate(model, unlabeled, outputs="last")
        assert none == []
        if model.cut is None or model.cut.is_last:
            same(last, expected)
        else:
            assert last is None


class Pictured(HybridModel):
    """Adds a picture to the embeddings."""

    def embed(self, tokens, pictures=None):
        return super().embed(tokens) if pictures is None else super().embed(tokens) + pictures


class TakesAll(Pictured):
    """Takes what its base takes, by any name."""

    def embed(self, tokens, **entries):
        return super().embed(tokens, **entries)


class Doubling(nn.Module):
    """A layer of its own kind, which takes a mask by name."""

    stages, dispatcher = ("attend",), None

    def attend(self, hidden, mask=None):
        return Crossing(hidden if mask is None else hidden * mask)

    def expert_modules(self):
        return []

    def forward(self, hidden, mask=None):
        return run_stages(self, hidden, mask=mask)[0]

    def experts(self, rows, handle):
        raise AssertionError("the layer is all in `attend`")

    finish = experts


def test_each_part_gets_the_entries_that_it_names_and_unused_entries_are_refused():
    torch.manual_seed(0)
    model = Pictured(config("*-"))
    tokens, labels = data()[0]["tokens"], data()[0]["labels"]
    pictures = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(0))
    given = {"tokens": tokens, "labels": labels, "pictures": pictures}
    with_pictures = forward_backward(model, [given], overlap=False)
    with mock.patch.object(arguments, "taken_by", side_effect=AssertionError):  # the names are known now
        forward_backward(model, [given], overlap=False)
    x_BSD, losses = model.decoder(model.embed(tokens, pictures))
    same(with_pictures, [model.loss(x_BSD, tokens, labels, losses).detach()])
    assert with_pictures != forward_backward(model, [(tokens, labels)], overlap=False)
    with pytest.raises(
        ValueError, match="microbatches have 'attention_mask', 'sounds', which nothing in Pictured accepts"
    ):
        forward_backward(model, [given | {"sounds": tokens, "attention_mask": tokens}], overlap=False)
    with pytest.raises(ValueError, match="microbatches have 'sounds', which nothing in Pictured accepts"):
        evaluate(model, [given | {"sounds": tokens}])
    torch.manual_seed(0)
    same(forward_backward(TakesAll(config("*-")), [given], overlap=False), with_pictures)
    model.decoder.layers[1] = Doubling()
    masked = forward_backward(model, [given | {"mask": torch.zeros(2, 7, 1)}], overlap=False)
    torch.testing.assert_close(masked[0], torch.tensor(37.0).log())


@pytest.mark.parametrize(
    "given, error, said",
    [
        ({"tokens": 3, "labels": 3}, TypeError, "microbatch 0: 'tokens' is a int; pass a tensor"),
        ({"tokens": torch.zeros(1, 2).long()}, TypeError, "microbatch 0: 'labels' is missing"),
        (
            {"tokens": torch.zeros(1, 2).long(), "labels": torch.zeros(1, 2).long(), "cache": {}},
            ValueError,
            "'cache' cannot be the name of an entry",
        ),
        (
            {"tokens": torch.zeros(1, 2).long(), "labels": torch.zeros(1, 2).long(), 3: torch.zeros(1)},
            ValueError,
            "3 cannot be the name of an entry",
        ),
    ],
)
def test_wrong_microbatches_are_refused(given, error, said):
    with pytest.raises(error, match=said):
        forward_backward(build("*"), [given], overlap=False)


def test_outputs_that_cannot_be_had_are_refused(monkeypatch):
    model = build("*/*")
    with pytest.raises(ValueError, match=r"call model.eval\(\) first"):
        evaluate(model, data(), outputs="all")
    model.eval()
    with pytest.raises(ValueError, match="outputs='first': choose"):
        evaluate(model, data(), outputs="first")
    short = {"tokens": data()[0]["tokens"][:, :3], "labels": data()[0]["labels"][:, :3]}
    with pytest.raises(ValueError, match=r"lengths \[\(3,\), \(7,\)\] cannot be merged"):
        evaluate(model, [short, data()[0]], outputs="all")
    with pytest.raises(TypeError, match="one dict as microbatches"):
        evaluate(model, data()[0])
    unlabeled = {"tokens": data()[0]["tokens"]}
    with pytest.raises(ValueError, match="some microbatches have labels and some have none"):
        evaluate(model, [data()[0], unlabeled], outputs="all")
    monkeypatch.delattr(HybridModel, "logits")
    with pytest.raises(TypeError, match=r"HybridModel has no method logits\(hidden\)"):
        evaluate(model, data(), outputs="all")
    assert dataclasses.is_dataclass(Documents)


def test_the_page_about_documents_runs_as_it_is_printed():
    names = {}
    for block in blocks("documents", "python"):
        exec(block, names)
    assert names["losses"][0] > 0 and names["logits"].shape == (2, 8, 256)
    assert names["documents"] == Documents.from_cu_seqlens(torch.tensor([0, 3, 8, 14, 16]), 2, 8)
