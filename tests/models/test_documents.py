"""Documents in one row do not see each other."""

import dataclasses
from unittest import mock

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from weft.models import Documents, HybridConfig, HybridModel
from weft.models.layers.delta_net import delta_chunked, delta_stepwise
from weft.models.layers.mamba2 import ssd_chunked, ssd_stepwise
from weft.models.layers.rotary import RotaryEmbedding
from weft.overlap import evaluate

SEQ = 23
ROWS = ((7, 1, 9, 6), (2, 11, 10))
"""The documents of each row: some end at a chunk's border, some cross several."""
EXACT = {"rtol": 1e-12, "atol": 1e-12}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 8,
}
MIXERS = {
    "*": {"qk_norm": "head"},
    "* in windows with sinks": {"sliding_window": 3, "attention_sinks": True, "attention_output_gate": True},
    "+": {"q_lora_rank": 12},
    "M": {"chunk_size": 4},
    "G": {},
    "K": {"kda_head_dim": 8, "kda_num_heads": 2},
    "P": {"chunk_size": 4, "ssm_out_multiplier": 0.5},
}


def config(pattern, **more):
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24, "mamba_num_heads": 4}
    sizes |= {"mamba_head_dim": 8, "mamba_n_groups": 2, "ssm_state_size": 8, "linear_key_head_dim": 8}
    sizes |= {"linear_value_head_dim": 8, "linear_num_key_heads": 2, "kv_lora_rank": 8, "num_experts": 4}
    return HybridConfig(pattern=pattern, vocab_size=37, hidden_size=16, **{**sizes, **more})


def build(cfg, dtype=torch.float64):
    torch.manual_seed(0)
    model = HybridModel(cfg).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("A_log", "dt_bias")):
                parameter.sub_(2.0)  # states that last over a border
    return model


def borders(rows=ROWS):
    return Documents.from_position_ids(torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows]))


def batch(rows=ROWS):
    tokens = torch.randint(37, (len(rows), sum(rows[0])), generator=torch.Generator().manual_seed(1))
    return tokens, tokens.roll(-1, 1)


def pieces(rows=ROWS):
    """Where each document is: row and slice."""
    for row, lengths in enumerate(rows):
        start = 0
        for length in lengths:
            yield row, slice(start, start + length)
            start += length


def labels_in(labels):
    return int((labels != -100).sum())


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    monkeypatch.setattr("weft.models.layers.delta_net.CHUNK", 4)
    monkeypatch.setattr("weft.models.layers.delta_net.CHUNK_OF_CHANNELS", 4)


@pytest.mark.parametrize("kind", [*MIXERS, "* turned by the length"])
def test_a_packed_row_equals_its_documents_alone(kind):
    model = build(config(f"[{kind[0]}-]{kind[0]}/[{kind[0]}-]", **MIXERS.get(kind, {"rope_scaling": LONGROPE})))
    tokens, labels = batch()
    documents = borders()
    packed = model(tokens, documents=documents)
    loss = model(tokens, labels, documents=documents)
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    mine = documents.labels(labels)
    count, after = labels_in(mine), labels_in(documents.following(mine, 1, -100))
    for row, piece in pieces():
        alone = tokens[row : row + 1, piece]
        assert_close(model(alone), packed[row : row + 1, piece], **EXACT)
        wanted = mine[row : row + 1, piece]
        if wanted.shape[1] == 1:
            continue
        share = labels_in(wanted) / count
        model.mtp.coef = 0.3 * labels_in(wanted[:, 1:]) / after / share  # of a mean of means makes that of all labels
        (model(alone, wanted) * share).backward()
    assert_close({name: parameter.grad for name, parameter in model.named_parameters()}, gradients, **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MIXERS)
def test_a_changed_token_changes_no_bit_of_another_document(kind):
    model = build(config(f"[{kind[0]}-]{kind[0]}/[{kind[0]}-]", **MIXERS[kind]), torch.float32)
    tokens, labels = batch()
    documents = borders()

    def of(piece, tokens):
        """Logits of one document, and the gradients of its loss."""
        row, where = piece
        mine = torch.full_like(labels, -100)
        mine[row, where] = labels[row, where]
        model.zero_grad()
        model(tokens, mine, documents=documents).backward()
        logits = model(tokens, documents=documents)[row, where]
        return [logits, *(parameter.grad.clone() for parameter in model.parameters())]

    every = list(pieces())
    for piece, changed in ((every[2], every[0]), (every[2], every[1]), (every[0], every[2]), (every[5], every[4])):
        other = tokens.clone()
        other[changed[0], changed[1].stop - 1] = (other[changed[0], changed[1].stop - 1] + 1) % 37
        assert not torch.equal(model(tokens), model(other))
        for one, two in zip(of(piece, tokens), of(piece, other)):
            assert torch.equal(one, two)


def test_without_documents_the_second_document_sees_the_first():
    """What this is for."""
    for kind in MIXERS:
        model = build(config(kind[0], **MIXERS[kind]))
        tokens, _ = batch()
        other = tokens.clone()
        other[0, 6] = (other[0, 6] + 1) % 37
        assert not torch.equal(model(tokens)[0, 7:], model(other)[0, 7:])


@pytest.mark.parametrize("length", [4, 64])
def test_the_chunked_forms_are_the_recurrences_with_borders(length, monkeypatch):
    monkeypatch.setattr("weft.models.layers.delta_net.CHUNK", length)
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    numbers = borders().numbers()
    x, B, C = draw(2, SEQ, 4, 3), draw(2, SEQ, 2, 5), draw(2, SEQ, 2, 5)
    given = x, draw(2, SEQ, 4).exp() * 0.1, -draw(4).exp(), B, C, None, length, numbers
    for one, two in zip(ssd_chunked(*given), ssd_stepwise(*given)):
        assert_close(one, two, **EXACT)
    q, k, v = draw(2, SEQ, 2, 5), draw(2, SEQ, 2, 5), draw(2, SEQ, 4, 3)
    given = q, k, v, -draw(2, SEQ, 4).exp() * 0.1, draw(2, SEQ, 4).sigmoid(), None, numbers
    for one, two in zip(delta_chunked(*given), delta_stepwise(*given)):
        assert_close(one, two, **EXACT)


@pytest.mark.parametrize("kind", "MG")
def test_a_document_that_fades_fast_leaves_gradients_of_the_next_finite(kind):
    model = build(config(kind), torch.float32)
    with torch.no_grad():
        model.decoder.layers[0].mixer.A_log.fill_(5.0)
        model.decoder.layers[0].mixer.dt_bias.fill_(5.0)
    model(*batch(), documents=borders()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("kind", MIXERS)
def test_padding_on_either_side_is_as_if_it_were_not_there(kind):
    model = build(config(f"[{kind[0]}-]", **MIXERS[kind]))
    tokens, labels = batch()
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    mask[1, 17:] = 0
    documents = Documents.from_mask(mask)
    found = model(tokens, documents=documents)
    assert_close(found[:1, 5:], model(tokens[:1, 5:]), **EXACT)
    assert_close(found[1:, :17], model(tokens[1:, :17]), **EXACT)
    assert documents.labels(labels).ne(-100).sum() == 17 + 16


def test_short_documents_cost_less_than_one_long_one(monkeypatch):
    model = build(config("**"), torch.float32)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    products, compute = [], functional.scaled_dot_product_attention

    def counted(q, k, v, **options):
        products.append(q.shape[0] * q.shape[2] * k.shape[2])
        return compute(q, k, v, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", counted)

    def calls_and_products(documents):
        products.clear()
        model(tokens, documents=documents)
        return len(products), sum(products)

    assert calls_and_products(None) == (2, 2 * 2 * 64 * 64)
    assert calls_and_products(Documents.from_cu_seqlens(torch.arange(0, 129, 16), 2, 64)) == (2, 2 * 8 * 16 * 16)
    mixed = Documents.from_ids(torch.tensor([[0] * 40 + [1] * 24, [0] * 24 + [-1] * 40]))
    assert calls_and_products(mixed) == (4, 2 * (40 * 40 + 2 * 24 * 24))  # padding costs nothing


def test_documents_are_what_they_were_made_from():
    one = Documents.from_ids(torch.tensor([[4, 4, 7, -1], [0, 0, 0, 0]]))
    assert one.lengths == (2, 1, 1, 4) and one.padding == (2,) and not one.is_plain
    assert one.position_ids().tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
    assert one.cu_seqlens().tolist() == [0, 2, 3, 4, 8]
    two = Documents.from_position_ids(torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]]))
    assert two == Documents.from_cu_seqlens(torch.tensor([0, 2, 4, 8]), 2, 4) != one
    assert two == Documents.from_ids(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])) and hash(two) == hash(
        Documents(2, 4, (0, 2, 4))
    )
    assert Documents(2, 4, (0, 4)).is_plain
    labels = torch.arange(8).view(2, 4)
    assert two.labels(labels).tolist() == [[0, -100, 2, -100], [4, 5, 6, -100]]
    assert dataclasses.replace(two, continues=True).labels(labels).tolist() == [[0, -100, 2, 3], [4, 5, 6, 7]]
    padded = dataclasses.replace(one, continues=True, padding=(2, 3))  # padding does not continue
    assert padded.labels(labels).tolist() == [[0, -100, -100, -100], [-100] * 4]
    assert two.following(labels, 1, -1).tolist() == [[1, -1, 3, -1], [5, 6, 7, -1]]


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: Documents.from_position_ids(torch.tensor([[0, 1, 3]])), r"position_ids\[0, 2\] is 3 after 1"),
        (lambda: Documents.from_position_ids(torch.tensor([[1, 2, 0]])), r"position_ids\[0, 0\] is 1 at the beginning"),
        (lambda: Documents.from_ids(torch.tensor([[0, 1, 0]])), r"ids\[0, 2\] is 0, which appears before another"),
        (lambda: Documents.from_ids(torch.tensor([[0, -2]])), "ids has -2"),
        (lambda: Documents.from_cu_seqlens(torch.tensor([0, 2, 5]), 1, 6), "ends with 5.* = 6"),
        (lambda: Documents.from_cu_seqlens(torch.tensor([0, 4, 6]), 2, 3), "row 1 begins inside a document"),
        (lambda: Documents.from_cu_seqlens(torch.tensor([0, 2, 2, 6]), 1, 6), "must begin with 0 and ascend"),
        (lambda: Documents.from_cu_seqlens(torch.tensor([1, 6]), 1, 6), "must begin with 0 and ascend"),
        (lambda: Documents.from_mask(torch.tensor([[1, 0, 1]])), "padding between tokens of row 0: each row"),
        (lambda: Documents.from_mask(torch.tensor([[2, 0, 1]])), "values other than 0 and 1"),
        (lambda: Documents.from_ids(torch.zeros(3, dtype=torch.int64)), r"shape \[3\]"),
        (lambda: Documents(1, 4, (0, 2), padding=(2,)), "indices of starts"),
        (lambda: Documents.from_ids([[0, 0, 1]]), r"ids is a list: pass a tensor of integers \[batch, seq\]"),
        (lambda: Documents.from_cu_seqlens([0, 3], 1, 3), r"cu_seqlens is a list: pass a tensor of integers"),
        (lambda: Documents.from_cu_seqlens(torch.tensor([0.0, 3.0]), 1, 3), r"cu_seqlens has shape \[2\] and dtype"),
        (lambda: Documents.from_mask([[1, 0]]), r"attention_mask is a list"),
        (lambda: Documents.from_mask(torch.full((1, 2), 0.5)), r"attention_mask .* dtype torch.float32: pass integers"),
    ],
)
def test_what_describes_no_documents_is_refused(make, said):
    with pytest.raises((ValueError, TypeError), match=said):
        make()


def test_documents_of_another_batch_and_together_with_a_cache_are_refused():
    model = build(config("*"))
    tokens, _ = batch()
    with pytest.raises(ValueError, match="2 rows of 23 tokens do not fit a tensor of shape"):
        model(tokens[:, 1:], documents=borders())
    with pytest.raises(ValueError, match="documents with a cache"):
        model(tokens, cache={}, documents=borders())
    ids = borders().numbers()
    with pytest.raises(TypeError, match="documents is a Tensor: create it with"):
        model(tokens, documents=ids)
    for wrong, raised in ((ids, TypeError), (Documents.from_ids(ids.view(1, -1)), ValueError)):
        with pytest.raises(raised, match=r"documents (is a Tensor|of 1 row of 46 tokens)"):
            evaluate(model.eval(), [{"tokens": tokens, "documents": wrong}], outputs="all")


def test_all_layers_share_one_table_of_rotations_of_a_batch():
    model, documents = build(config("**[*-]"), torch.bfloat16), borders()
    with mock.patch.object(RotaryEmbedding, "_turns", autospec=True, side_effect=RotaryEmbedding._turns) as turns:
        for _ in range(2):
            model(batch()[0], documents=documents)
        assert turns.call_count == 1
    found = model.float()(batch()[0], documents=documents)
    assert torch.equal(found, model(batch()[0], documents=borders()))
