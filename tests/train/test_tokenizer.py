import builtins

import numpy as np
import pytest

from weft.train.errors import ConfigError
from weft.train.tokenizer import load_tokenizer


@pytest.fixture
def words(tmp_path):
    """The file of a tokenizer with the words a, b and unknown, and a gap in its numbers."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 9}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="a $A", special_tokens=[("a", 1)])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_bytes_are_their_own_tokens():
    tokenizer = load_tokenizer("bytes")
    every = bytes(range(256))
    assert tokenizer.encode(every).tolist() == list(every)
    assert tokenizer.vocab_size == 256
    assert tokenizer.decode(tokenizer.encode("naïve ☃".encode())) == "naïve ☃"


def test_a_tokenizer_file_gives_all_of_a_text_and_nothing_else(words):
    tokenizer = load_tokenizer(str(words))
    assert tokenizer.encode(b"b a b ? b").tolist() == [9, 1, 9, 0, 9]
    assert tokenizer.encode(b"").size == 0
    assert tokenizer.decode(np.array([9, 1])) == "b a"


def test_a_prompt_has_the_special_tokens_before_a_text_and_none_after_it(words):
    import tokenizers

    file = tokenizers.Tokenizer.from_file(str(words))
    file.add_special_tokens(["<s>", "</s>"])
    begin, end = (file.token_to_id(name) for name in ("<s>", "</s>"))
    special = [("<s>", begin), ("</s>", end)]
    file.post_processor = tokenizers.processors.TemplateProcessing(single="<s> <s> $A </s>", special_tokens=special)
    file.save(str(words))
    tokenizer = load_tokenizer(str(words))
    assert tokenizer.prompt("b a").tolist() == [begin, begin, 9, 1]
    assert tokenizer.prompt("b </s>").tolist() == [begin, begin, 9, end]  # the text itself names a special token
    assert tokenizer.prompt(" ").size == 0


def test_a_token_without_a_text_is_refused(words):
    for tokenizer, token in ((load_tokenizer("bytes"), 256), (load_tokenizer(str(words)), 5)):
        assert token not in tokenizer.ids
        with pytest.raises(ValueError, match=f"token {token}: the tokenizer has no such token"):
            tokenizer.decode(np.array([1, token]))


def test_the_vocabulary_covers_the_largest_token(words):
    assert load_tokenizer(str(words)).vocab_size == 10


def test_text_that_is_no_utf8_is_still_tokenised(words):
    assert load_tokenizer(str(words)).encode(b"a \xff b").tolist() == [1, 0, 9]


def test_another_file_has_another_identity(words):
    before = load_tokenizer(str(words)).identity
    words.write_text(words.read_text().replace('"b":9', '"b":8').replace('"b": 9', '"b": 8'))
    assert load_tokenizer(str(words)).vocab_size == 9
    assert load_tokenizer(str(words)).identity != before


def test_a_missing_or_broken_file_is_one_line_that_names_it(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text('{"version": ')
    for path in (tmp_path / "absent.json", tmp_path, broken):
        with pytest.raises(ConfigError) as caught:
            load_tokenizer(str(path))
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
        assert "data.tokenizer" in str(caught.value)


def test_a_missing_package_is_named_with_what_installs_it(words, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "tokenizers":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"weft\[train\]"):
        load_tokenizer(str(words))
