"""A run of the trainer with `sharding.graphs`."""

import json

import pytest
import torch

from tests.train.command import write_config
from tests.train.test_loop import train_on


@pytest.mark.long
def test_a_run_with_graphs_is_the_run_without_and_its_report_counts_replays(pool, tmp_path):
    changes = {"model__pattern": "[*E][*-]", "model__num_experts": 4, "model__moe_intermediate_size": 16}
    changes |= {
        "sharding__ep": 2,
        "train__overlap": True,
        "train__delay_wgrad": True,
        "train__log_every": 1,
        "train__steps": 7,
    }
    path = write_config(tmp_path, **changes, checkpoint__every=0)
    found = []
    for name, graphs in (
        ("eager", []),
        ("graphs", ['sharding.graphs=["attn", "mlp"]', "sharding.graphs_backend=tape"]),
    ):
        directory = tmp_path / name
        lines, _, model, moments, _ = pool.run(2, train_on, path, directory, graphs, stop_at=99)[0]
        found.append(([(line["loss"], line["gradient_norm"]) for line in lines], {**model, **moments}))
    (eager, expected), (replayed, values) = found
    assert replayed == eager
    assert all(torch.equal(values[key], value) for key, value in expected.items())
    counted = json.loads((tmp_path / "graphs" / "facts.json").read_text())["graphs"]
    assert counted["captures"] and counted["replays"], counted
