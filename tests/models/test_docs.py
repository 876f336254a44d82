"""docs/models.md says what the code does."""

import dataclasses
import re
from itertools import chain
from pathlib import Path

import pytest
import torch

from tests.pool import distributed, run_blocks
from weft.models import HybridConfig, HybridModel
from weft.models.pattern import LAYER_KEYS, PatternError

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def blocks(language):
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return [text for written, text in fenced if written == language]


@distributed(2)
def test_the_examples_run_one_after_another():
    names = {}
    run_blocks(blocks("python"), names)
    assert names["logits"].shape == (*names["tokens"].shape, names["cfg"].vocab_size)
    assert all(map(torch.equal, names["later"].parameters(), names["model"].parameters()))
    loss = names["sharded"](names["tokens"], labels=names["tokens"])
    loss.backward()
    names["optimizer"].step()
    assert names["sharded"](names["tokens"], labels=names["tokens"]) < loss


def test_the_configuration_table_lists_every_field_with_its_default():
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", PAGE, re.MULTILINE)
    fields = [(field.name, repr(field.default).replace("'", '"')) for field in dataclasses.fields(HybridConfig)]
    assert rows == fields


def test_the_pattern_table_lists_every_symbol_with_its_key_and_its_file():
    rows = re.findall(r"^\| `(.)` \| .* \| `(\w+)` \| `(\w+).py` \|", PAGE, re.MULTILINE)
    assert {symbol: key for symbol, key, _ in rows} == LAYER_KEYS
    model = HybridModel(HybridConfig(pattern="MGKP*-E"))
    files = {layer.symbols: type(next(layer.children())).__module__ for layer in model.decoder.layers}
    files |= {"+": type(HybridModel(HybridConfig(pattern="+")).decoder.layers[0].self_attention).__module__}
    assert {symbol: file for symbol, _, file in rows} == {
        symbol: module.rpartition(".")[2] for symbol, module in files.items()
    }


def test_the_listed_keys_are_those_of_the_model():
    (listing,) = (block for block in blocks("") if "embedding.weight" in block)
    (pattern,) = re.findall(r"`(\S+)` has these keys:\n", PAGE)

    def spelled_out(line):
        braces = re.search(r"{(.*)}", line)
        if braces is None:
            return [line]
        return [line.replace(braces.group(), choice) for choice in braces.group(1).split(",")]

    listed = set(chain.from_iterable(spelled_out(line) for line in listing.split()))
    assert listed == set(HybridModel(HybridConfig(pattern=pattern)).state_dict())


def test_the_shown_error_is_the_one_that_is_raised():
    (shown,) = (block.strip() for block in blocks("") if block.startswith("pattern"))
    with pytest.raises(PatternError) as error:
        HybridConfig(pattern=shown.split("'")[1])
    assert str(error.value) == shown
