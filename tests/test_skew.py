"""Routings and the table of `weft bench experts --skew`."""

import json
import sys
from pathlib import Path

import pytest
import torch

from weft.moe import MoE

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import _routing
import _skew


def test_experts_are_drawn_as_often_as_the_shares_say_and_differ_for_each_token():
    generator = torch.Generator().manual_seed(0)
    for name in ("uniform", "zipf:1.0"):
        shares = _routing.shares_of(name, 8)[0]
        assert shares.sum().item() == pytest.approx(1)
        once = _routing.draw(shares, 1 << 14, 1, generator).flatten().bincount(minlength=8) / (1 << 14)
        torch.testing.assert_close(once, shares, rtol=0, atol=0.02)
        pairs = _routing.draw(shares, 1000, 2, generator)
        assert (pairs[:, 0] != pairs[:, 1]).all()


def test_the_loads_of_a_recorded_run_are_shares_and_what_does_not_fit_is_refused(tmp_path):
    lines = [{"kind": "train", "loss": 1.0}, {"kind": "experts", "load": {"a": [1, 1], "b": [3, 1]}}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [each.tolist() for each in _routing.shares_of(str(tmp_path), 2)] == [[0.5, 0.5], [0.75, 0.25]]
    with pytest.raises(ValueError, match=r"loads of 2 experts, and the benchmark's model has 8.*num_experts = 8"):
        _routing.shares_of(str(tmp_path), 8)
    with pytest.raises(ValueError, match=r"routing 'zipf:much': zipf takes an exponent"):
        _routing.shares_of("zipf:much", 8)
    with pytest.raises(ValueError, match=r"choose uniform, zipf:S, or the folder of a run"):
        _routing.shares_of("nowhere", 8)


def test_layers_get_the_same_rows_in_each_step_and_others_for_each_microbatch():
    layer = MoE(8, 8, 8, 2)
    _routing.assign(layer, _routing.shares_of("zipf:1.0", 8), microbatches=2, seed=0)
    chosen = [layer.router(torch.randn(1, 64, 8)).experts for _ in range(4)]
    assert torch.equal(chosen[0], chosen[2]) and torch.equal(chosen[1], chosen[3])
    assert not torch.equal(chosen[0], chosen[1])


@pytest.mark.slow
def test_the_table_names_slow_ranks_and_what_rows_per_rank_save(capsys, tmp_path):
    ranks = [_skew.OfRank(1.0, 0.8, 100, 79), _skew.OfRank(2.0, 0.7, 100, 77)]
    skew = _skew.Skew("zipf:1.0", "combined", {"combined": 0.6, "unpaired nodes": 1.0}, ranks)
    _skew.table([skew])
    printed = capsys.readouterr().out
    assert "70%" in printed and "22%" in printed and "0.60" in printed
    assert "rank 1 computes for 1.33 x the mean time" in printed and "rank 0" not in printed
    pytest.importorskip("matplotlib")
    _skew.picture([skew, skew._replace(routing="uniform")], str(tmp_path / "skew.png"))
    assert (tmp_path / "skew.png").stat().st_size > 1000
