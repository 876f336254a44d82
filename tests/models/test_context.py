"""Context parallelism: ranks that share every row compute what one process computes."""

import dataclasses
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import weft
from tests.models.test_documents import LONGROPE, MIXERS, config
from tests.pool import distributed, each_on_one_rank
from weft.comm.collectives import reduce_now
from weft.debug.timeline import Timeline
from weft.models import Documents, HybridModel, context_part, shard
from weft.models.context import Slices
from weft.models.gathering import Gathering
from weft.models.layers.rotary import RotaryEmbedding
from weft.overlap import evaluate, forward_backward

EXACT = {"rtol": 1e-12, "atol": 1e-12}
CLOSE = {"rtol": 1.3e-6, "atol": 1e-5}
SEQ = 32
ROWS = {
    "no documents": None,
    "a border inside a slice": ((11, 21), (3, 29)),
    "borders at the edges of slices": ((8, 16, 8), (24, 8)),
    "a document over three slices": ((5, 26, 1), (2, 25, 5)),
}
"""Slices of 2 ranks have 8 positions, those of 4 have 4."""


def batch(rows, seq=SEQ, number=0):
    generator = torch.Generator().manual_seed(number)
    tokens, labels = torch.randint(37, (2, 2, seq), generator=generator).unbind()
    given = {"tokens": tokens, "labels": labels}
    if rows is not None:
        ids = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)).tolist() for row in rows]
        given["documents"] = Documents.from_ids(torch.tensor(ids))
    return given


def build(cfg, meshes=None, options=None, dtype=torch.float64):
    torch.manual_seed(0)
    model = HybridModel(cfg, meshes).to(dtype)
    return model if options is None else shard(model, meshes, **options)


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def trained(model, batches, steps=2):
    """Losses, first gradients and weights of clipped AdamW steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, first = [], {}
    for step in range(steps):
        loss = model(**batches[step % len(batches)])
        loss.backward()
        if not first:
            first = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, first, {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}


def same(found, expected, **close):
    for one, other in zip(found, expected):
        if isinstance(one, dict):
            one, other = dict(one), {name: other[name] for name in one}
        torch.testing.assert_close(one, other, **(close or EXACT))


def cut(batches, meshes):
    return [context_part(each, meshes) for each in batches]


@pytest.mark.parametrize("rows", ROWS)
def test_slices_turn_as_the_whole_rows_where_the_length_decides(rows):
    rotary, heads = RotaryEmbedding(8, 10000.0, scaling=LONGROPE), torch.randn(2, SEQ, 2, 8)
    documents = batch(ROWS[rows]).get("documents")
    for rank in (0, 1):
        slices = Slices(documents or Documents(2, SEQ, (0, SEQ)), rank, mock.Mock(**{"size.return_value": 2}))
        assert torch.equal(rotary(slices.cut(heads), SEQ // 2, slices), slices.cut(rotary(heads, 0, documents)))


@pytest.mark.long
@pytest.mark.parametrize("kind", MIXERS)
@distributed(2)
@mock.patch("weft.models.layers.delta_net.CHUNK", 4)
def test_every_mixer_equals_one_process(kind):
    """test_many_steps.py has four ranks."""
    meshes = weft.init_meshes("cpu", cp=2)
    assert meshes.dp_size == 1 and meshes.dp_rank == 0
    cfg = config(f"[{kind[0]}-]{kind[0]}", **MIXERS[kind])
    cases = list(ROWS.values())
    expected = each_on_one_rank(cases, lambda rows: trained(build(cfg), [batch(rows)]))
    for rows, alone in zip(cases, expected, strict=True):
        part = cut([batch(rows)], meshes)
        assert part[0]["tokens"].shape == (2, SEQ // 2)
        same(trained(build(cfg, meshes, {}), part), alone)


@pytest.mark.long
@distributed(2)
def test_odd_lengths_depths_and_padding_equal_one_process():
    meshes = weft.init_meshes("cpu", cp=2)
    rows = ((11, 16), (3, 24))
    cfg = config("MG[*-]/[*-]/[*-]")
    for given in (batch(None, 27), batch(rows, 27)):
        same(trained(build(cfg, meshes, {}), cut([given], meshes)), trained(build(cfg), [given]))
    padded = batch(None, 27)
    mask = torch.ones_like(padded["tokens"])
    mask[0, :9], mask[1, 20:] = 0, 0
    padded["documents"] = Documents.from_mask(mask)
    same(trained(build(cfg, meshes, {}), cut([padded], meshes)), trained(build(cfg), [padded]))
    for window in (7, 8, 12):  # slices have 7 positions
        cfg = config("**", sliding_window=window, attention_sinks=window == 12)
        same(trained(build(cfg, meshes, {}), cut([given], meshes)), trained(build(cfg), [given]))


@pytest.mark.slow
@distributed(2)
def test_what_is_gathered_again_serves_a_second_backward_and_ranks_with_nothing_but_padding():
    meshes, given = weft.init_meshes("cpu", cp=2), batch(None)
    ids = torch.full_like(given["tokens"], -1)
    ids[:, 9:23] = 0  # the first and the last slices are the first rank's
    for cfg in (config("*"), config("+"), config("*", recompute=("attend",))):
        for rows in (given, given | {"documents": Documents.from_ids(ids)}):
            expected, model = build(cfg), build(cfg, meshes)
            part = context_part(rows, meshes)
            expected(rows["tokens"], documents=rows.get("documents")).square().sum().backward()
            total = model(part["tokens"], documents=part["documents"]).square().sum()
            for times in (1, 2):
                total.backward(retain_graph=True)
                for name, each in model.named_parameters():
                    gradient = reduce_now(each.grad.clone(), dist.ReduceOp.SUM, None)
                    torch.testing.assert_close(gradient, times * expected.get_parameter(name).grad, **EXACT)


def test_rows_are_padded_so_that_tensor_parallel_ranks_can_cut_slices_again(world):
    world(0, 8)
    part = context_part({"tokens": torch.zeros(2, 9).long()}, weft.init_meshes("cpu", cp=2, tp=4))
    assert part["tokens"].shape == (2, 8)


@distributed(2)
def test_a_rank_without_labels_adds_nothing_to_the_loss():
    meshes, given = weft.init_meshes("cpu", cp=2), batch(None)
    given["labels"][:, 8:] = -100  # the first slice is the first rank's
    expected, model = build(config("-")), build(config("-"), meshes, {})
    same([model(**context_part(given, meshes))], [expected(**given)])


@distributed(2)
def test_outputs_of_a_rank_are_those_of_its_positions():
    meshes, cfg, given = weft.init_meshes("cpu", cp=2), config("[*-]M"), batch(ROWS["a document over three slices"])
    scores = build(cfg)(given["tokens"], documents=given["documents"]).detach()
    part = context_part({**given, "scores": scores}, meshes)
    expected = part.pop("scores")
    _, found = evaluate(build(cfg, meshes).eval(), [part], outputs="all")
    same([found], [expected])


def averaged(cfg, batches):
    """One process on the batches of several data-parallel ranks."""
    model = build(cfg, dtype=torch.float32)
    losses = [model(**each) for each in batches]
    (sum(losses) / len(losses)).backward()
    return [loss.detach() for loss in losses], {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.long
@distributed(4)
def test_with_replicas_experts_under_the_schedule_and_stages():
    """Two data-parallel ranks of two context ranks each, or a pipeline of two stages."""
    cfg, rows = config("[*E][ME]", aux_loss_coef=0.0), ROWS["a document over three slices"]
    batches = [batch(rows, number=number) for number in range(4)]
    expected = averaged(cfg, batches)
    for sizes, options in (
        ({"cp": 2}, {}),
        ({"cp": 2, "dp_replicate": 2}, {"strategy": "optim"}),
        ({"cp": 2, "ep": 2}, {}),
        ({"cp": 2, "ep": 4}, {"strategy": "optim_grads"}),
    ):
        meshes = weft.init_meshes("cpu", **sizes)
        model = build(cfg, meshes, options, torch.float32)
        mine = cut(batches[meshes.dp_rank :: meshes.dp_size], meshes)
        losses = forward_backward(model, mine, overlap="ep" in sizes, loss_scale=0.5)
        same(losses, expected[0][meshes.dp_rank :: meshes.dp_size], **CLOSE)
        same([{name: whole(each.grad) for name, each in model.named_parameters()}], [expected[1]], **CLOSE)
    meshes = weft.init_meshes("cpu", cp=2, pp=2)
    model = build(cfg, meshes, {"strategy": "optim"}, torch.float32)
    mine = cut(batches, meshes)
    same(forward_backward(model, mine, schedule="1f1b", overlap=False, loss_scale=0.25), expected[0], **CLOSE)
    same([{name: whole(each.grad) for name, each in model.named_parameters()}], [expected[1]], **CLOSE)
    same(evaluate(model, mine), expected[0], **CLOSE)


@pytest.mark.slow
@distributed(2)
def test_recurrences_send_as_much_for_long_rows_as_for_short_ones():
    meshes = weft.init_meshes("cpu", cp=2)
    sent = {}
    windows = {window: config("*", sliding_window=window, attention_sinks=True) for window in (5, 8)}  # slices have 8
    kinds = {**{kind: config(kind) for kind in "MG*+"}, **windows}
    for kind, cfg in kinds.items():
        for seq in (32, 128):
            with mock.patch.object(Gathering, "send", autospec=True, side_effect=Gathering.send) as send:
                model = build(cfg, meshes)
                model(**context_part(batch(None, seq), meshes)).backward()
            sent[kind, seq] = sum(part.numel() for call in send.call_args_list for part in call.args[1])
    assert all(sent[kind, 32] == sent[kind, 128] > 0 for kind in ("M", "G", *windows))
    assert sent["*", 128] == 4 * sent["*", 32] and sent["+", 128] == 4 * sent["+", 32]


@distributed(2)
def test_what_the_context_lane_moves_is_under_way_while_the_local_part_computes():
    """In the order of events: queries are computed, forward and backward, between the start of a gather and its end.

    What is gathered again in backward travels beside the last projection's backward.
    """
    meshes = weft.init_meshes("cpu", cp=2)
    events = []

    def noted(name):
        function = getattr(Gathering, name)

        def called(*args):
            events.append(name)
            return function(*args)

        return mock.patch.object(Gathering, name, called)

    for kind in "*+":
        model = build(config(kind), meshes)
        block = model.decoder.layers[0].self_attention
        block.q_proj.register_forward_hook(lambda *_: events.append("queries"))
        block.q_proj.weight.register_hook(lambda _: events.append("gradient of queries"))
        block.o_proj.weight.register_hook(lambda _: events.append("gradient of outputs"))
        with noted("send"), noted("receive"), noted("send_back"), noted("receive_back"), Timeline() as timeline:
            model(**context_part(batch(None), meshes)).backward()
        again = ["send", "gradient of outputs", "receive"]
        gradients = ["send_back", "gradient of queries", "receive_back"]
        assert events == ["send", "queries", "receive", *again, *gradients], kind
        assert any(interval.lane == "context" for interval in timeline.intervals())
        events.clear()


class Products(TorchDispatchMode):
    """Notes each matrix product and each attention in `events`."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(word in str(func) for word in ("mm", "scaled_dot_product")):
            self.events.append("product")
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@distributed(2)
def test_products_run_between_the_start_of_a_gather_and_its_end_in_every_mixer():
    """The last inputs of a convolution are awaited at once: what it computes needs them."""
    meshes = weft.init_meshes("cpu", cp=2)
    for kind in "*+MGKP":
        events = []

        def noted(name, events=events):
            function = getattr(Gathering, name)
            return lambda *args: (events.append(name), function(*args))[1]

        model, part = build(config(kind)), context_part(batch(None), meshes)
        layer = model.decoder.layers[0]
        names = ("send", "receive", "send_back", "receive_back")
        with mock.patch.multiple(Gathering, **{name: noted(name) for name in names}), Products(events):
            x = model.embed(part["tokens"])
            out, _ = layer(x, documents=part["documents"])
            events.append("backward")
            out.sum().backward()
        turn = events.index("backward")
        for passed, begin, end in (
            (events[:turn], "send", "receive"),
            (events[turn:], "send_back", "receive_back"),
        ):
            text = " ".join(passed)
            assert re.search(rf"\b{begin} (product )+{end}\b", text), (kind, text)


@distributed(2)
def test_what_cannot_be_is_refused():
    meshes = weft.init_meshes("cpu", cp=2)
    model, given = build(config("M"), meshes), batch(None)
    with pytest.raises(ValueError, match=r"cp=2: each context rank has a part of every row.*context_part"):
        model(given["tokens"], given["labels"])
    with pytest.raises(ValueError, match="2 x 8 tokens each do not fit a tensor of shape"):
        model(given["tokens"], documents=context_part(given, meshes)["documents"])
    with pytest.raises(ValueError, match="'images' has shape"):
        context_part(given | {"images": torch.zeros(3)}, meshes)
    with pytest.raises(ValueError, match="'names' is a list: a batch with documents can contain only tensors"):
        context_part(given | {"names": ["a", "b"]}, meshes)
    for wrong in (given["tokens"], (given["tokens"], given["labels"]), {"labels": given["labels"]}):
        with pytest.raises(TypeError, match="pass a batch as a dict of tensors"):
            context_part(wrong, meshes)
    with pytest.raises(TypeError, match="documents is a Tensor: create it with"):
        context_part(given | {"documents": given["tokens"]}, meshes)
    with pytest.raises(TypeError, match="already slices: cut each batch once"):
        context_part(context_part(given, meshes), meshes)
    with pytest.raises(ValueError, match="mamba_kernel='mamba_ssm' on cp=2 ranks"):
        build(config("M", mamba_kernel="mamba_ssm"), meshes)
    with pytest.raises(ValueError, match=r"capacity_factor=1\.0 on cp=2 ranks: dropping needs all positions of a row"):
        build(config("E", capacity_factor=1.0), meshes)
    with pytest.raises(ValueError, match="slices of 2 tokens: a convolution needs the 3 tokens before"):
        model(**context_part(batch(None, 8), meshes))
    with pytest.raises(ValueError, match="meshes have no context ranks"):
        context_part(given, dataclasses.replace(meshes, cp=None))
    with pytest.raises(ValueError, match="cp=3"):
        weft.init_meshes("cpu", cp=3)
