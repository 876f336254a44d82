"""Context ranks that exchange heads in place of gathering keys and values."""

import dataclasses
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import weft
from tests.models.test_context import CLOSE, ROWS, averaged, batch, build, cut, same, trained, whole
from tests.models.test_documents import config
from tests.pool import distributed, each_on_one_rank
from weft.models import Documents, HybridModel, context_part
from weft.models.context import Slices
from weft.models.gathering import Exchanging, Gathering
from weft.models.shared import check_context
from weft.overlap import forward_backward

KINDS = {
    "* with a key head for each query head": {"num_key_value_heads": 4, "qk_norm": "head"},
    "* with fewer key heads than ranks": {"num_key_value_heads": 1, "attention_output_gate": True},
    "* in windows with sinks": {"sliding_window": 3, "attention_sinks": True, "num_key_value_heads": 2},
    "P": {"chunk_size": 4, "num_key_value_heads": 2},
}


def exchanging(pattern, **options):
    return config(pattern, context_attention="heads", **{"num_attention_heads": 4, **options})


@pytest.mark.slow
@distributed(2)
def test_exchanged_heads_equal_one_process():
    meshes = weft.init_meshes("cpu", cp=2)
    cfg = exchanging("*[*-]", attention_sinks=True)
    for rows in (None, ROWS["a document over three slices"]):
        given = [batch(rows, 27 if rows is None else 32)]
        same(trained(build(cfg, meshes, {}), cut(given, meshes)), trained(build(cfg), given))


@pytest.mark.long
@distributed(2, 4)
def test_exchanged_heads_of_every_kind_equal_one_process():
    meshes = weft.init_meshes("cpu", cp=dist.get_world_size())
    padded = batch(None, 27)
    mask = torch.ones_like(padded["tokens"])
    mask[0, :9], mask[1, 2:] = 0, 0
    padded["documents"] = Documents.from_mask(mask)
    models = [exchanging(f"{kind[0]}/[{kind[0]}-]", **options) for kind, options in KINDS.items()]
    cases = list(itertools.product(models, (batch(None), batch(ROWS["a document over three slices"]))))
    cases.append((models[-1], padded))
    cases = cases if dist.get_world_size() == 2 else cases[1::2]  # with documents
    expected = each_on_one_rank(cases, lambda case: trained(build(case[0]), [case[1]]))
    for (cfg, given), alone in zip(cases, expected, strict=True):
        same(trained(build(cfg, meshes, {}), cut([given], meshes)), alone)


@pytest.mark.slow
@distributed(4)
def test_key_heads_that_ranks_do_not_divide_are_sent_to_several():
    """Twelve query heads with three key heads on four ranks: each key head is repeated four times."""
    meshes = weft.init_meshes("cpu", cp=4)
    cfg = exchanging("*", num_attention_heads=12, num_key_value_heads=3, head_dim=4)
    with mock.patch.object(Exchanging, "send", autospec=True, side_effect=Exchanging.send) as send:
        found = trained(build(cfg, meshes, {}), cut([batch(None)], meshes), 1)
    same(found, trained(build(cfg), [batch(None)], 1))
    assert [part.shape[-2] for part in send.call_args_list[0].args[1]] == [3, 3]


@pytest.mark.long
@distributed(4)
def test_with_replicas_experts_under_the_schedule_stages_and_tensor_parallel_ranks():
    cfg, rows = exchanging("[*E][*E]", aux_loss_coef=0.0), ROWS["a document over three slices"]
    batches = [batch(rows, number=number) for number in range(4)]
    expected = averaged(dataclasses.replace(cfg, context_attention="gather"), batches)
    for sizes, options, how in (
        ({"cp": 2}, {}, {}),
        ({"cp": 2, "dp_replicate": 2}, {"strategy": "optim"}, {}),
        ({"cp": 2, "ep": 2}, {}, {"overlap": True}),
        ({"cp": 2, "ep": 4}, {"strategy": "optim_grads"}, {"overlap": True, "delay_wgrad": True}),
        ({"cp": 2, "tp": 2}, {}, {}),
        ({"cp": 2, "pp": 2}, {"strategy": "optim"}, {"schedule": "1f1b"}),
    ):
        meshes = weft.init_meshes("cpu", **sizes)
        model = build(cfg, meshes, options, torch.float32)
        mine = cut(batches[meshes.dp_rank :: meshes.dp_size], meshes)
        losses = forward_backward(model, mine, **{"overlap": False, **how}, loss_scale=1 / len(mine))
        same(losses, expected[0][meshes.dp_rank :: meshes.dp_size], **CLOSE)
        same([{name: whole(each.grad) for name, each in model.named_parameters()}], [expected[1]], **CLOSE)


def sent(cfg, part, meshes):
    """How many numbers this rank sends and gets in a step, without what it has already."""
    with (
        mock.patch.object(Exchanging, "send", autospec=True, side_effect=Exchanging.send) as exchange,
        mock.patch.object(Gathering, "send", autospec=True, side_effect=Gathering.send) as gather,
        mock.patch.object(Gathering, "send_back", autospec=True, side_effect=Gathering.send_back) as scatter,
    ):
        build(cfg, meshes)(**part).backward()
    others = dist.get_world_size() - 1
    numel = lambda calls: sum(part.numel() for call in calls for part in call.args[1])  # noqa: E731
    exchanged = numel(exchange.call_args_list) * others // (others + 1)
    return exchanged, numel(gather.call_args_list) * others + numel(scatter.call_args_list) * others // (others + 1)


@pytest.mark.slow
@distributed(4)
def test_what_is_exchanged_shrinks_with_the_ranks_and_what_is_gathered_does_not():
    """Numbers per rank and step, of S / cp positions: 2 x (2 H + 2 K) x (cp - 1) / cp, and 3 x 2 K x (cp - 1)."""
    meshes, cp, seq = weft.init_meshes("cpu", cp=4), 4, 32
    part, width = context_part(batch(None, seq), meshes), 4
    positions = 2 * seq // cp
    for heads, keys in ((4, 4), (4, 2), (4, 1)):
        cfg = exchanging("*", num_key_value_heads=keys)
        copies = max(keys, cp)
        exchanged = 2 * (2 * heads + 2 * copies) * width * positions * (cp - 1) // cp
        gathered = 3 * 2 * keys * width * positions * (cp - 1)
        assert sent(cfg, part, meshes) == (exchanged, 0)
        assert sent(dataclasses.replace(cfg, context_attention="gather"), part, meshes) == (0, gathered)


@distributed(2)
def test_keys_and_values_travel_while_queries_are_computed():
    """In the order of events, forward and backward."""
    meshes, events = weft.init_meshes("cpu", cp=2), []

    def noted(name):
        function = getattr(Exchanging, name)

        def called(work, *args):
            events.append(f"{name} {len(work._shapes)}")
            return function(work, *args)

        return mock.patch.object(Exchanging, name, called)

    model = build(exchanging("*"), meshes)
    block = model.decoder.layers[0].self_attention
    block.q_proj.register_forward_hook(lambda *_: events.append("queries"))
    block.q_proj.weight.register_hook(lambda _: events.append("gradient of queries"))
    with noted("send"), noted("receive"), noted("send_back"), noted("receive_back"):
        loss = model(**context_part(batch(None), meshes))
        forward, _ = list(events), events.clear()
        loss.backward()
    back = ["send 1", "receive 1"]
    assert forward == ["send 2", "queries", "send 1", "receive 2", "receive 1", *back]
    sends = [event for event in events if event.startswith(("send_back", "receive_back", "gradient"))]
    assert sends[2:] == ["send_back 1", "send_back 2", "receive_back 1", "gradient of queries", "receive_back 2"]


def test_heads_are_counted_on_the_ranks_that_share_them():
    check_context(exchanging("*", num_attention_heads=8), 4, 2)
    with pytest.raises(ValueError, match=r"num_attention_heads=4 on tp=2 ranks: each has 2, not divisible by cp=4"):
        check_context(exchanging("*"), 4, 2)
    with pytest.raises(ValueError, match=r"num_attention_heads=2 .* cp=4"):
        check_context(exchanging("P", num_attention_heads=2, num_key_value_heads=2), 4, 1)


@distributed(2)
def test_heads_that_ranks_do_not_divide_are_refused():
    meshes = weft.init_meshes("cpu", cp=2)
    for options in ({"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4},):
        with pytest.raises(ValueError, match=r"num_attention_heads=3 .*cp=2: make it a multiple of tp \* cp = 2"):
            HybridModel(exchanging("*", **options), meshes)
        model = HybridModel(exchanging("*", **options)).double()
        with pytest.raises(ValueError, match="3 heads on 2 context ranks"):
            model(**context_part(batch(None), meshes))
    assert isinstance(context_part(batch(None), meshes)["documents"], Slices)
    with pytest.raises(ValueError, match="context_attention='all'"):
        config("*", context_attention="all")
