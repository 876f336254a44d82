"""Released configurations, key for key."""

import json
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.models.hf.released import FAMILIES, IGNORED, NAMES, READ, REFUSED, config, make, table, tensors
from tests.models.hf.test_families import assert_same_gradients
from weft.errors import ConversionError
from weft.models import HybridModel, hf
from weft.models.hf.family import differences
from weft.models.hf.spelling import text_of

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def read(name, directory):
    ignored = IGNORED.get(name, ())
    model = HybridModel(hf.config_of(directory, ignored=ignored))
    hf.load(model, directory, ignored=ignored)
    return model.eval()


def test_there_are_forty_and_no_reason_is_left_over():
    assert len(NAMES) >= 40 and set(REFUSED) <= set(NAMES) and set(IGNORED) <= set(REFUSED)


def test_the_table_of_the_documentation_is_made_of_the_folder():
    page = (Path(__file__).parents[3] / "docs" / "huggingface.md").read_text()
    assert table() in page


@pytest.mark.parametrize("name", REFUSED)
def test_a_release_that_is_refused_is_refused_by_the_name_of_the_reason(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(config(name)))
    with pytest.raises(ConversionError, match=REFUSED[name]):
        hf.config_of(tmp_path)


OF_FAMILIES = {name for _, name in FAMILIES.values()} | set(IGNORED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in OF_FAMILIES else pytest.param(name, marks=pytest.mark.long) for name in READ]
)
def test_a_release_computes_what_transformers_computes_is_written_as_it_came_and_read_by_transformers(tmp_path, name):
    theirs = make(name, tmp_path / "theirs")
    ours = read(name, tmp_path / "theirs")
    tokens, labels = torch.randint(61, (2, 2, 21), generator=torch.Generator().manual_seed(1))
    expected = theirs(input_ids=tokens, use_cache=False).logits
    assert_close(ours(tokens), expected, **CLOSE)
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    ours(tokens, labels=labels).backward()
    assert_same_gradients(theirs, ours, tmp_path / "theirs")

    hf.save(ours, tmp_path / "again")
    hf.convert(tmp_path / "theirs", tmp_path / "ours", ignored=IGNORED.get(name, ()))
    hf.convert(tmp_path / "ours", tmp_path / "back")
    original = tensors(tmp_path / "theirs")
    for directory in (tmp_path / "again", tmp_path / "back"):
        written = json.loads((directory / "config.json").read_text())
        assert without_dtype(written) == without_dtype(config(name))
        found = tensors(directory)
        assert found.keys() == original.keys()
        assert all(torch.equal(found[each], tensor) for each, tensor in original.items())

    # Without its config.json.
    family, ours.origin = ours.origin.family, None
    hf.save(ours, tmp_path / "anew", family)
    anew, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "anew", dtype=torch.float32, output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and not loading["mismatched_keys"]
    with torch.no_grad():
        assert_close(anew.eval()(input_ids=tokens, use_cache=False).logits, expected, **CLOSE)
    assert differences(ours.cfg, hf.config_of(tmp_path / "anew")) == []


def without_dtype(raw):
    """JSON has no infinity: files of some releases have it nevertheless."""
    plain = {name: value for name, value in json.loads(json.dumps(raw)).items() if name not in ("dtype", "torch_dtype")}
    if text_of(raw) is not raw:
        plain["text_config"] = without_dtype(raw["text_config"])
    return plain
