"""The trainer on a card: the losses of a CPU, a resume, graphs, text from what it trained."""

import json
import shutil

import pytest
import torch

from tests.gpu.cards import takes_time
from tests.train.command import weft, write_config

pytestmark = [pytest.mark.gpu, takes_time]


def losses(folder, *arguments, name="tiny", **environment) -> dict[int, float]:
    done = weft("train", *arguments, timeout=240, real=True, **environment)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


@pytest.mark.parametrize("changes", [{}, {"train__precision": "bf16"}, {"sharding__graphs": ["attn", "mlp"]}])
def test_a_run_on_a_card_has_the_losses_of_one_on_a_cpu_and_resumes(tmp_path, changes):
    begun, host, card = (tmp_path / name for name in ("begun", "host", "card"))
    for folder in (begun, host, card):
        folder.mkdir()
    losses(begun, write_config(begun, train__steps=1), CUDA_VISIBLE_DEVICES="")
    weights = ("--from", begun / "runs" / "tiny")  # a card draws other random numbers than a CPU
    plain = {name: value for name, value in changes.items() if name != "sharding__graphs"}
    expected = losses(host, write_config(host, **plain), *weights, CUDA_VISIBLE_DEVICES="")
    found = losses(card, write_config(card, **changes), *weights)
    assert len(found) == 20
    # Steps of AdamW magnify what sums in another order round differently; bf16 rounds at each operation.
    tolerance = 2e-2 if "train__precision" in changes else 1e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    run = card / "runs" / "tiny"
    if "sharding__graphs" in changes:
        assert json.loads((run / "facts.json").read_text())["graphs"]["replays"]
    shutil.rmtree(next((run / "checkpoints").glob("*20")))
    resumed = losses(card, "--resume", run)
    torch.testing.assert_close(resumed, found, rtol=1e-3, atol=1e-3)  # attention's gradients are sums in any order
    assert json.loads((run / "facts.json").read_text())["resumed"]
    said = weft("sample", run, "--prompt", "line", "--tokens", "20", timeout=120, real=True)
    assert said.returncode == 0, said.stderr
