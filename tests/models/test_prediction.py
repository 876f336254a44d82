"""Prediction depths, against those of transformers."""

import dataclasses

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.testing import assert_close
from transformers.modeling_layers import MtpModel

from tests.models.hf.families import KINDS
from tests.pool import distributed
from weft.mesh import init_meshes
from weft.models import Documents, HybridConfig, HybridModel, context_part, hf, shard
from weft.models.prediction import prediction_losses, shifted
from weft.moe import load_statistics
from weft.overlap import forward_backward

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
OURS = {
    "embedding_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "project.weight": "eh_proj.weight",
    "final_layernorm.weight": "post_norm.weight",
}


def small(pattern, **options):
    return HybridConfig(pattern=pattern, vocab_size=37, hidden_size=32, num_experts=4, intermediate_size=24, **options)


def batch(shape=(2, 9)):
    return torch.randint(37, (2, *shape), generator=torch.Generator().manual_seed(1)).unbind()


def both(tmp_path, depths):
    """A Llama of transformers with prediction depths, and ours with their weights."""
    main = KINDS["llama"].make()
    main.save_pretrained(tmp_path)
    main.config.num_mtp_layers = depths
    theirs = MtpModel(main, depths).eval()
    with torch.no_grad():
        for weight in theirs.layers.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2)
    cfg = hf.config_of(tmp_path)
    trunk, ours = (
        HybridModel(cfg),
        HybridModel(HybridConfig(**{**vars(cfg), "pattern": cfg.pattern + "/[*-]" * depths})),
    )
    hf.load(trunk, tmp_path)
    places = {ours: place.names[0] for ours, place in hf.FAMILIES["llama"].places(cfg).items()}
    weights = trunk.state_dict()
    for number, layer in enumerate(theirs.layers):
        state = layer.state_dict()
        inside = {name: places[f"decoder.{name}"].replace("model.layers.0", "mtp_block") for name in LAYER}
        for name, source in {**OURS, **inside}.items():
            weights[f"mtp.layers.{number}.{name}"] = state[source]
    ours.load_state_dict(weights)
    return main, theirs, ours


LAYER = [
    *(f"layers.0.self_attention.{name}.weight" for name in ("norm", "q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"layers.0.mlp.{name}.weight" for name in ("norm", "gate_proj", "up_proj", "down_proj")),
]


@pytest.mark.parametrize("depths", [1, 2])
def test_loss_and_gradients_are_those_of_transformers(tmp_path, depths):
    main, theirs, ours = both(tmp_path, depths)
    tokens, labels = batch()
    hidden = main.model(input_ids=tokens).last_hidden_state
    expected = cross_entropy(main.lm_head(hidden).flatten(0, 1), labels.flatten())
    positions = torch.arange(9)[None].expand(2, -1)
    for number in range(depths):
        following = torch.cat([tokens[:, number + 1 :], tokens.new_zeros(2, number + 1)], dim=1)
        hidden = theirs.forward_layer(number, hidden, positions, None, input_ids=following)
        wanted = torch.cat([labels[:, number + 1 :], labels.new_full((2, number + 1), -100)], dim=1)
        loss = cross_entropy(main.lm_head(hidden).flatten(0, 1), wanted.flatten())
        expected = expected + ours.cfg.mtp_loss_coef / depths * loss
    found = ours(tokens, labels=labels)
    assert_close(found, expected, **CLOSE)
    expected.backward()
    found.backward()
    places = {name: place.names[0] for name, place in hf.FAMILIES["llama"].places(trunk_of(ours.cfg)).items()}
    compared = {name: main.get_parameter(source).grad for name, source in places.items()}
    for number, layer in enumerate(theirs.layers):
        inside = {name: places[f"decoder.{name}"].replace("model.layers.0", "mtp_block") for name in LAYER}
        for name, source in {**OURS, **inside}.items():
            compared[f"mtp.layers.{number}.{name}"] = layer.get_parameter(source).grad
    assert compared.keys() == dict(ours.named_parameters()).keys()
    for name, gradient in compared.items():
        grad = ours.get_parameter(name).grad
        assert_close(grad, gradient, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


def trunk_of(cfg):
    """The configuration without prediction depths."""
    return dataclasses.replace(cfg, pattern=cfg.pattern.partition("/")[0])


def test_depths_count_in_training_only_and_are_logged_separately():
    torch.manual_seed(0)
    model = HybridModel(small("[*-]/[*E]/[*E]", mtp_loss_coef=0.5))
    tokens, labels = batch()
    total = model(tokens, labels=labels)
    depths = prediction_losses(model)
    alone = model.eval()(tokens, labels=labels)
    assert_close(total, alone + 0.5 * depths.mean())
    assert prediction_losses(model).tolist() == [0, 0]


def test_scores_of_depths_are_those_that_their_losses_are_of():
    torch.manual_seed(0)
    model = HybridModel(small("[*-]/[*E]/[*E]"))
    tokens, labels = batch()
    documents = Documents.from_position_ids(torch.tensor([[*range(5), *range(4)], [*range(9)]]))
    model(tokens, labels=labels, documents=documents)
    scores = model.prediction_logits(tokens, documents=documents)
    mine = documents.labels(labels)
    targets = [documents.following(mine, places, -100) for places in (1, 2)]
    losses = [cross_entropy(each.flatten(0, 1), target.flatten()) for each, target in zip(scores, targets)]
    assert_close(prediction_losses(model), torch.stack(losses))
    assert HybridModel(small("[*-]")).prediction_logits(tokens) == []
    with pytest.raises(ValueError, match="depths=True with labels or a cache"):
        model(tokens, labels, depths=True)


@pytest.mark.slow
@distributed(2)
def test_scores_of_depths_are_those_of_one_process_on_ranks_that_share_layers_or_rows():
    tokens, _ = batch((2, 12))
    torch.manual_seed(0)
    cfg = small("[*-]/[*-]/[*-]")
    expected = HybridModel(cfg).prediction_logits(tokens)
    for axis in ("tp", "cp"):
        meshes = init_meshes("cpu", **{axis: 2})
        torch.manual_seed(0)
        model = shard(HybridModel(cfg, meshes), meshes)
        given = {"tokens": tokens, "first": expected[0], "second": expected[1]}
        part = given if axis == "tp" else context_part(given, meshes)
        found = model.prediction_logits(part["tokens"], documents=part.get("documents"))
        assert_close(found, [part["first"], part["second"]])


def test_a_sequence_without_a_label_for_a_depth_adds_nothing_and_no_nan():
    torch.manual_seed(0)
    model = HybridModel(small("-/-/-"))
    tokens, labels = batch((2, 2))
    model(tokens, labels=labels).backward()
    assert prediction_losses(model)[1] == 0
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


def test_shifted_tokens_end_in_the_filling():
    tokens = torch.tensor([[1, 2, 3]])
    assert [shifted(tokens, places, 0).tolist() for places in (1, 2, 5)] == [[[2, 3, 0]], [[3, 0, 0]], [[0, 0, 0]]]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [(), ("attend", "experts")])
def test_the_trunk_is_walked_once_whoever_reads_it(recompute):
    """The head and the depths read one output; its gradients add before they go on."""
    torch.manual_seed(0)
    model = HybridModel(small("[*-][M*E]/[*E]/[*E]", recompute=recompute))
    pairs = [batch(), batch()]
    calls = []
    trunk = model.decoder.layers[1].self_attention.o_proj
    trunk.register_full_backward_hook(lambda *_: calls.append(1))
    for tokens, labels in pairs:
        model(tokens, labels=labels).backward()
    assert len(calls) == len(pairs)
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    forward_backward(model, pairs, overlap=False)
    assert len(calls) == 2 * len(pairs)
    assert_close({name: weight.grad for name, weight in model.named_parameters()}, expected)


@pytest.mark.long
@distributed(2)
def test_the_trunk_is_walked_once_where_it_is_sharded_and_overlapped():
    meshes = init_meshes("cpu", ep=2)
    torch.manual_seed(0)
    model = shard(HybridModel(small("[*-][M*E]/[*E]/[*E]", recompute=("attend",)), meshes), meshes)
    calls = []
    for layer in model.decoder.layers:
        layer.self_attention.o_proj.register_full_backward_hook(lambda *_: calls.append(1))
    forward_backward(model, [batch()] * 4, delay_wgrad=True)
    assert len(calls) == 2 * 4


def test_stages_are_cut_so_that_the_last_has_time_for_its_depths():
    sizes = []
    for depths in range(4):
        cut = HybridModel(small("[*-]" * 6 + "/[*-]" * depths), chunks=2).cut
        sizes.append([len(segment) for segment in cut.segments])
    assert sizes == [[3, 3], [4, 2], [5, 1], [5, 1]]


def test_keys_of_depths_are_numbered_from_0():
    keys = HybridModel(small("[*-]/-/-")).state_dict().keys()
    assert {key.split(".")[2] for key in keys if key.startswith("mtp.")} == {"0", "1"}
    assert "mtp.layers.1.layers.0.mlp.up_proj.weight" in keys


def test_routers_of_depths_have_names_of_their_own():
    model = HybridModel(small("[*E]/[*E]/[*E]"))
    names = ["decoder.layers.0.mlp", "mtp.layers.0.layers.0.mlp", "mtp.layers.1.layers.0.mlp"]
    assert list(load_statistics(model)) == names
    tokens, labels = batch()
    model(tokens, labels=labels)
    assert [int(load.sum()) for load in load_statistics(model).values()] == [2 * tokens.numel()] * 3


def test_the_trunk_starts_the_same_with_and_without_depths():
    models = []
    for pattern in ("[*-]", "[*-]/[*-]"):
        torch.manual_seed(0)
        models.append(HybridModel(small(pattern)))
    for name, weight in models[0].named_parameters():
        assert torch.equal(weight, models[1].get_parameter(name))
