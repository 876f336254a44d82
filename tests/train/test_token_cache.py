"""Token files on disk are compared with their fingerprints before a run trains on them."""

import pytest

from weft.train.data import load_corpora
from weft.train.sections import DataConfig


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {n} of {n * n % 97}\n" for n in range(500)))
    return DataConfig(paths=(str(path),), cache_dir=str(tmp_path / "cache"), sequence_length=8)


@pytest.mark.parametrize("kind", ["tokens", "documents"])
def test_a_damaged_token_file_of_the_right_length_is_made_anew(text, tmp_path, kind):
    (first,) = load_corpora(text)
    whole = first.train.tobytes()
    (path,) = (tmp_path / "cache").glob(f"*.{kind}")
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    said = []
    (again,) = load_corpora(text, say=said.append)
    assert again.train.tobytes() == whole and path.read_bytes() != bytes(damaged)
    assert len(said) == 1 and said[0].endswith("differs from what was written there; the text is tokenized again")
    said.clear()
    load_corpora(text, say=said.append)
    assert said == []
