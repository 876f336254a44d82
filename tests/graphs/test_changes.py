"""What may change while graphs are in use: the plan of memory, weights, parameters, and modules of other libraries."""

import copy

import pytest
import torch
from torch import nn

import weft
from tests.fsdp.nets import Block
from tests.graphs.test_hooks import assert_equal, local, poisoned, small, steps, tape
from tests.pool import distributed


class TwoParts(nn.Module):
    """Uses its second part from the time on that `both` is set."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(8, 12), nn.Linear(8, 8)
        self.both = False

    def forward(self, x):
        x = self.first(x)
        return self.second(x) if self.both else x


def two_parts(graphs):
    torch.manual_seed(0)
    net = TwoParts()
    for each in (net.first, net.second):
        weft.fully_shard(each)
    return weft.fully_shard(net, runtime=weft.RuntimeOptions(graphs=graphs))


@distributed(2)
def test_a_chosen_module_that_never_runs_has_zeros_in_the_report():
    net = two_parts(tape("first", "second"))
    net(torch.ones(4, 8)).sum().backward()
    scopes = weft.graph_report(net)["scopes"]
    assert scopes["first"]["eager"] == {"new inputs": 1}
    assert scopes["second"] == {"captures": 0, "replays": 0, "eager": {}, "bytes": 0}


@pytest.mark.slow
@distributed(2)
def test_after_a_new_memory_plan_passes_are_eager_and_then_replayed():
    seen, replays = [], []
    for graphs in (None, tape("first")):
        net = two_parts(graphs)
        with poisoned():
            for start in (0, 6):
                net.both = start > 0
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
                for step in range(start, start + 6):
                    torch.manual_seed(step)
                    y = net(torch.randn(4, 8))
                    y.square().mean().backward()
                    seen += [y.detach(), *(local(each.grad) for each in net.parameters() if each.grad is not None)]
                    optimizer.step()
                    optimizer.zero_grad()
                if graphs is not None:
                    replays.append(weft.graph_report(net)["replays"])
    assert_equal(seen[len(seen) // 2 :], seen[: len(seen) // 2])
    assert replays[0] >= 3 and replays[0] + 3 <= replays[1], replays
    eager = weft.graph_report(net)["eager"]
    assert eager.get("warming up", 0) > 0, eager


@pytest.mark.slow
@distributed(2)
def test_loaded_states_of_model_and_optimizer_are_what_replays_compute_with():
    seen = []
    for graphs in (None, tape("1")):
        net = small(lambda: Block(8, 12), graphs)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        with poisoned():
            for step in range(10):
                if step == 4:
                    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
                if step == 7:
                    net.load_state_dict(saved[0])
                    optimizer.load_state_dict(saved[1])
                torch.manual_seed(step)
                y = net(torch.randn(4, 8))
                y.square().mean().backward()
                seen += [y.detach(), *(local(each.grad) for each in net.parameters())]
                optimizer.step()
                optimizer.zero_grad()
    assert_equal(seen[len(seen) // 2 :], seen[: len(seen) // 2])
    report = weft.graph_report(net)
    assert report["captures"] == 1 and report["replays"] >= 6, report


@pytest.mark.slow
@distributed(2)
def test_a_replaced_parameter_of_a_captured_module_is_refused_as_without_graphs():
    net, plain = small(lambda: Block(8, 12), tape("1")), small(lambda: Block(8, 12), None)
    assert_equal(steps(net, 5), steps(plain, 5))
    own = net[1].up.weight
    net[1].up.weight = nn.Parameter(torch.zeros_like(own))
    with pytest.raises(RuntimeError, match="replaced or removed"):
        net(torch.ones(4, 8))
    assert_equal(steps(net, 3, start=5), steps(plain, 3, start=5))
    assert weft.graph_report(net)["replays"] > 3


@pytest.mark.slow
@distributed(2)
def test_blocks_of_hugging_face_replay():
    from transformers import LlamaConfig, LlamaForCausalLM

    cfg = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    seen = []
    for graphs in (None, tape("model.layers.0", "model.layers.1")):
        torch.manual_seed(0)
        net = LlamaForCausalLM(cfg)
        for layer in net.model.layers:
            weft.fully_shard(layer)
        weft.fully_shard(net, runtime=weft.RuntimeOptions(graphs=graphs))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        with poisoned():
            for step in range(6):
                tokens = torch.randint(0, 31, (2, 7), generator=torch.Generator().manual_seed(step))
                loss = net(input_ids=tokens, labels=tokens).loss
                loss.backward()
                seen += [loss.detach(), *(local(each.grad) for each in net.parameters())]
                optimizer.step()
                optimizer.zero_grad()
    assert_equal(seen[len(seen) // 2 :], seen[: len(seen) // 2])
    report = weft.graph_report(net)
    assert report["captures"] == 2 and report["replays"] >= 6, report
