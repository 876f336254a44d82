import pytest

from weft.cli import main
from weft.models import HybridConfig, HybridModel
from weft.models.table import rows_of


def test_each_symbol_has_a_row_with_its_numbers_and_parameters():
    cfg = HybridConfig(pattern="M[*-]|[*E]/[*E]")
    (*rows, predicting, last), total = rows_of(cfg)
    assert (predicting.segment, predicting.unit, last.logical, last.symbol) == ("depth 1", "mtp.layers.0", 0, "E")
    assert "".join(row.symbol for row in rows) == "M*-*E"
    assert [row.physical for row in rows] == [1, 2, 3, 4, 5]
    assert [row.logical for row in rows] == [0, 1, 1, 2, 2]
    assert [row.segment for row in rows] == ["0", "0", "0", "1", "1"]
    assert [row.unit for row in rows][2:] == ["decoder.layers.1", "decoder.layers.2", "decoder.layers.2"]
    model = HybridModel(cfg)
    assert sum(row.parameters for row in rows) == sum(weight.numel() for weight in model.decoder.layers.parameters())
    assert total == sum(weight.numel() for weight in model.parameters())


def test_the_command_prints_the_table(capsys):
    assert main(["pattern", "M|[*-]"]) == 0
    shown = capsys.readouterr().out
    assert all(part in shown for part in ("Mamba-2", "self-attention", "decoder.layers.1", "parameters"))
    layers, others, model = (
        int(line.split()[-2].replace(",", ""))
        for name in ("all layers", "embedding, others", "whole model")
        for line in shown.splitlines()
        if name in line
    )
    assert layers + others == model and others > 0


def test_the_command_takes_sizes_from_a_configuration(tmp_path, capsys):
    (tmp_path / "wide.toml").write_text("[model]\nhidden_size = 8\nintermediate_size = 4\n")
    assert main(["pattern", "-", "--config", str(tmp_path / "wide.toml")]) == 0
    assert str(3 * 8 * 4 + 8) in capsys.readouterr().out


@pytest.mark.parametrize("pattern, caret", [("M[*-]x", 5), ("[M", 0), ("*-[**]", 4)])
def test_the_command_shows_where_a_pattern_is_wrong(pattern, caret, capsys):
    assert main(["pattern", pattern]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"weft pattern: {pattern}"
    assert second.index("^") == first.index(pattern) + caret
