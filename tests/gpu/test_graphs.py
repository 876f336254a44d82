"""CUDA graphs on a card: the numbers of eager runs, with replays. A rehearsal takes the tape, which checked streams
switch off."""

import pytest
import torch
import torch.distributed as dist

import weft
from tests.fsdp import nets
from tests.gpu.cards import DEVICE, REHEARSES, on_one_card, takes_time
from tests.overlap.small import config
from weft.models import HybridModel

BACKEND = "tape" if DEVICE == "cpu" else "cuda"
STEPS = 3 if REHEARSES else 8
"""Of which a rehearsal replays none."""


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """Sums of gradients by atomic additions, such as those of repeated rows, differ from run to run."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def run(model, step, steps):
    """Losses of all steps and the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    seen = []
    for number in range(steps):
        seen += [each.detach().clone() for each in step(model, number)]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [nets.full(each) for each in model.parameters()]


def compare(build, step, steps=STEPS):
    """Both are bit-equal, and the second has replayed."""
    torch.use_deterministic_algorithms(DEVICE == "cuda", warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    plain, graphed = build(None), build(BACKEND)
    expected = run(plain, step, steps)
    found = run(graphed, step, steps)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not torch.equal(one, other):
            again = run(build(None), step, steps)[number]
            differs = f"number {number} of {len(found)} differs by {float((one - other).abs().max())}"
            raise AssertionError(f"{differs}; so does another eager run: {not torch.equal(again, other)}")
    report = weft.graph_report(graphed)
    if REHEARSES:
        assert report["replays"] == 0 and report["eager"]
    else:
        assert report["captures"] and report["replays"], report


def blocks():
    batches = nets.data(8, 4 * dist.get_world_size()).to(DEVICE)

    def build(backend):
        net = nets.make().to(DEVICE)
        for block in net.blocks:
            weft.fully_shard(block)
        chosen = [f"blocks.{number}" for number in range(3)]
        graphs = backend and weft.Graphs(modules=chosen, warmup=1, backend=backend)
        return weft.fully_shard(net, runtime=weft.RuntimeOptions(graphs=graphs))

    def step(net, number):
        loss = nets.loss_of(net, batches[number].chunk(dist.get_world_size())[dist.get_rank()])
        loss.backward()
        return [loss]

    compare(build, step)


def scopes():
    run_scopes(config("[*-][*E]", moe_rows_per="expert"), overlap=False)


def recomputed_scopes_and_delayed_gradients():
    padded = {"capacity_factor": 1.0, "pad_to_capacity": True, "recompute": ("attend", "experts")}
    run_scopes(config("[*-][*E]", moe_rows_per="expert", **padded), overlap=False, delay_wgrad=True)


def run_scopes(cfg, **schedule):
    meshes = weft.init_meshes(DEVICE)

    def build(backend):
        torch.manual_seed(0)
        graphs = backend and weft.Graphs(warmup=1, backend=backend)
        model = HybridModel(cfg, meshes=meshes).to(DEVICE)
        return weft.models.shard(model, meshes, runtime=weft.RuntimeOptions(graphs=graphs))

    def step(model, number):
        torch.manual_seed(number)
        microbatches = [tuple(torch.randint(0, 37, (2, 2, 6)).to(DEVICE)) for _ in range(2)]
        return weft.overlap.forward_backward(model, microbatches, **schedule)

    compare(build, step)


@pytest.mark.gpu
@pytest.mark.parametrize("body", [blocks, scopes, recomputed_scopes_and_delayed_gradients])
def test_graphs_on_a_card_have_the_numbers_of_eager_runs(tmp_path, body):
    on_one_card(body, 1, "nccl", tmp_path)


@pytest.mark.gpu
def test_two_ranks_on_one_card_replay(tmp_path):
    on_one_card(blocks, 2, "gloo", tmp_path)


class Elsewhere(torch.nn.Module):
    """Computes on the stream that CUDA synchronizes with all others, so that no capture of it is possible."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x):
        with torch.cuda.stream(torch.cuda.default_stream()):
            return self.linear(x)


def capture_fails():
    net = torch.nn.Sequential(Elsewhere(), torch.nn.Linear(16, 16)).to(DEVICE)
    graphs = weft.Graphs(modules=["0", "1"], warmup=1)
    for layer in net:
        weft.fully_shard(layer)
    weft.fully_shard(net, runtime=weft.RuntimeOptions(graphs=graphs))
    for _ in range(8):
        net(torch.randn(4, 16, device=DEVICE)).sum().backward()
    report = weft.graph_report(net)
    assert not report["scopes"]["0"]["captures"] and report["scopes"]["1"]["replays"], report
    (because,) = (each for each in report["scopes"]["0"]["eager"] if "CUDA" in each)
    assert "\n" not in because
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    side = torch.cuda.Stream()
    for _ in range(20):  # the allocator reuses memory that another stream has used
        memory = torch.empty(2**24, device=DEVICE)
        memory.record_stream(side)
        del memory
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() - before <= 2**27


@pytest.mark.gpu
@takes_time
def test_a_capture_that_cuda_refuses_leaves_nothing_behind(tmp_path):
    on_one_card(capture_fails, 1, "nccl", tmp_path)
