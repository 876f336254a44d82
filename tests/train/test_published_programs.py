"""What people do with published models on the command line and in short programs."""

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.models.hf.families import KINDS
from tests.models.hf.released import tensors
from weft.cli import main
from weft.errors import ConversionError
from weft.models import hf
from weft.models.hf.directory import TensorWriter
from weft.train.source import Source

WORDS = [f"\u2581{word}" for word in ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "dog"]]
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@pytest.fixture
def blanks(tmp_path):
    """A Llama whose tokens begin with a blank, as those of Llama 2, Mistral and Gemma do."""
    directory = tmp_path / "blanks"
    KINDS["llama"].make().save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    vocabulary = {word: number for number, word in enumerate(["<unk>", "\u2581", *WORDS])}
    vocabulary |= {chr(ord("A") + number): len(vocabulary) + number for number in range(26)}
    tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in vocabulary], 0))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(directory)
    return directory


@pytest.mark.slow
def test_a_text_is_continued_with_the_blank_between_words(blanks):
    theirs, words = AutoModelForCausalLM.from_pretrained(blanks), AutoTokenizer.from_pretrained(blanks)
    among = range(2, 2 + len(WORDS))
    with torch.no_grad():
        weight = theirs.lm_head.weight
        weight[[row for row in range(len(weight)) if row not in among]] = 0
    theirs.save_pretrained(blanks)
    beginning = 0
    for prompt in ("the cat", "a dog saw", "on", "that mat and the cat sat on a dog and the mat"):
        ids = words(prompt, return_tensors="pt")["input_ids"]
        options = {"max_new_tokens": 6, "pad_token_id": 0, "do_sample": False, "eos_token_id": None}
        whole = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[0]
        found = "".join(Source(blanks).continued(prompt, tokens=6, temperature=0))
        assert found == words.decode(whole)
        beginning += found[len(prompt)] == " "
    assert beginning


def test_a_model_that_cannot_chat_is_refused_before_the_first_message(blanks, capsys, monkeypatch):
    (blanks / "chat_template.jinja").write_text(TEMPLATE)
    (blanks / "tokenizer.json").unlink()
    monkeypatch.setattr("builtins.input", lambda *prompt: pytest.fail("a message is asked for"))
    assert main(["chat", str(blanks)]) == 2
    assert "has no tokenizer.json; put the model's tokenizer.json there" in capsys.readouterr().err


def test_two_sets_of_weights_in_one_directory_are_refused(blanks):
    whole, files = (blanks / "model.safetensors").read_bytes(), tensors(blanks)
    (blanks / "model.safetensors").unlink()
    with TensorWriter(blanks, file_bytes=16384) as writer:
        for name, tensor in files.items():
            writer.put(name, tensor)
    expected = hf.from_pretrained(blanks).state_dict()
    (blanks / "model.safetensors").write_bytes(whole)
    with pytest.raises(ConversionError, match=r"both model\.safetensors and model\.safetensors\.index\.json"):
        hf.from_pretrained(blanks)
    index = {"weight_map": dict.fromkeys(files, "model.safetensors")}
    (blanks / "model.safetensors.index.json").write_text(json.dumps(index))
    found = hf.from_pretrained(blanks).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


COMPANY = ("modeling_own.py", "tiktoken.model", "tekken.json", "words.tiktoken", "NOTICE.txt", "vocab.json")


def test_code_and_tokenizers_of_any_kind_come_along(blanks, tmp_path):
    for name in COMPANY:
        (blanks / name).write_text(name)
    hf.save_pretrained(hf.from_pretrained(blanks), tmp_path / "again")
    hf.convert(blanks, tmp_path / "ours")
    hf.convert(tmp_path / "ours", tmp_path / "back")
    for directory in (tmp_path / "again", tmp_path / "back"):
        assert all((directory / name).read_text() == name for name in COMPANY)


def test_transformers_shards_bf16_and_tied_weights_come_back_as_they_were(tmp_path):
    theirs = KINDS["llama"].make("tied").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    hf.save_pretrained(hf.from_pretrained(tmp_path / "theirs", dtype=torch.bfloat16), tmp_path / "again")
    expected, found = tensors(tmp_path / "theirs"), tensors(tmp_path / "again")
    assert expected.keys() == found.keys()
    assert all(found[name].dtype == torch.bfloat16 and torch.equal(found[name], expected[name]) for name in found)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    assert loaded.dtype == torch.bfloat16 and loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_model_that_is_trained_saved_and_loaded_again_computes_the_same(blanks, tmp_path):
    tokens = torch.arange(24).view(2, 12)
    model = hf.from_pretrained(blanks).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(tokens, labels=tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    hf.save_pretrained(model, tmp_path / "again")
    with torch.no_grad():
        expected = model.eval()(tokens)
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "again")(input_ids=tokens).logits
    torch.testing.assert_close(hf.from_pretrained(tmp_path / "again")(tokens), expected, rtol=0, atol=0)
    torch.testing.assert_close(theirs, expected, rtol=1e-4, atol=1e-5)
