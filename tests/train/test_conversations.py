"""Conversations: what is learnt of them, and a model that answers."""

import io
import json
import math
import random
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast

from tests.train.command import train_here
from weft.cli import main
from weft.models import HybridConfig, HybridModel, hf
from weft.models.loss import cross_entropy
from weft.train.chat import template_of
from weft.train.data import Batches, load_corpus
from weft.train.data.cache import Part
from weft.train.data.conversations import ConversationTokenizer
from weft.train.errors import ConfigError
from weft.train.passes import _weighted
from weft.train.sections import DataConfig

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADERS = (
    "{{ bos_token }}{%- for message in messages %}\n"
    "    {%- if message.role == 'assistant' %}\n"
    "        {{- '[A]' }}{% generation %}{{- message.content | trim }}{{- eos_token }}{% endgeneration %}\n"
    "    {%- else %}\n"
    "        {{- '[' + message.role[:1] | upper + ']' + message.content | trim }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '[A]' }}{%- endif %}"
)
CHECKED = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{{ messages[0].content }}\n"
    "{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no ' ~ m.role) }}{% endif %}"
    "{% if m.role == 'user' %}### {{ m.content }}\n{% else %}{% generation %}{{ m.content }}{{ eos_token }}\n"
    "{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}{% endif %}"
)
AS_JSON = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m | tojson }}{% endgeneration %}"
    "{% else %}{{ m | tojson }}{% endif %}\n{% endfor %}"
)
PARTS = (
    "{%- for m in messages -%}{%- if loop.index0 > 40 -%}{%- break -%}{%- endif -%}"
    "{%- if m.role == 'assistant' -%}<{% generation %}{{ m.content }}.{% endgeneration %}>"
    "{%- else -%}({{ m.content }}){%- endif -%}{%- endfor -%}"
)
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "checked": CHECKED, "json": AS_JSON, "parts": PARTS}
UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def tokenizer_in(folder, template):
    """A tokenizer of bytes with merges, in the files of a release; transformers' and its path."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {sign: number for number, sign in enumerate([*alphabet, "he", "ll", "hell", "re", "Ġa"])}
    bpe = Tokenizer(models.BPE(words, [("h", "e"), ("l", "l"), ("he", "ll"), ("r", "e"), ("Ġ", "a")]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<s>", "<|im_end|>", "<|im_start|>"])
    begin = ("<s>", bpe.token_to_id("<s>"))
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[begin])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return fast, str(folder / "tokenizer.json")


def conversations(count):
    """Of several turns, some with a system message, other alphabets and empty answers."""
    chance = random.Random(0)
    words = [
        "hello",
        "there",
        "are",
        "all",
        "of",
        "these",
        "words,",
        "здравствуй",
        "你好",
        "😀",
        "a\nb",
        "",
        "c",
        "\ue000",
        "\ue001",
    ]

    def text(most):
        return " ".join(chance.choices(words, k=chance.randint(0, most)))

    for _ in range(count):
        messages = [{"role": "system", "content": text(6)}] if chance.random() < 0.4 else []
        for _ in range(chance.randint(1, 4)):
            messages += [{"role": "user", "content": text(12)}, {"role": "assistant", "content": text(20)}]
        yield messages


def test_a_microbatch_without_labels_adds_nothing_to_the_loss():
    losses = [torch.tensor(math.nan), torch.tensor(3.0)]  # the mean over no labels, and another one
    assert _weighted(losses, [0.0, 2.0]).tolist() == [0.0, 6.0]


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_masks_of_forty_conversations_are_those_of_transformers(tmp_path, name):
    fast, path = tokenizer_in(tmp_path, TEMPLATES[name])
    ours = ConversationTokenizer(path)
    for messages in conversations(40):
        expected = fast.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
        )
        tokens, written = ours.labeled(messages)
        assert tokens.tolist() == expected["input_ids"]
        assert written.astype(int).tolist() == expected["assistant_masks"]
        assert ours.template.render(messages, prompt=True) == fast.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )


def test_a_template_without_marks_says_it_by_its_prompts_or_is_refused(tmp_path):
    for folder, template in (("marked", CHATML), ("unmarked", UNMARKED)):
        (tmp_path / folder).mkdir()
        tokenizer_in(tmp_path / folder, template)
    marked, unmarked = (
        ConversationTokenizer(str(tmp_path / each / "tokenizer.json")) for each in ("marked", "unmarked")
    )
    messages = next(conversations(1))
    tokens, written = unmarked.labeled(messages)
    expected, ends = marked.labeled(messages)
    assert tokens.tolist() == expected.tolist() and written.sum() > ends.sum()  # and the line's end behind each answer
    assert (written | ~ends).all()
    last = "{{ messages[-1].content }}"
    with pytest.raises(ConfigError, match=r"no \{% generation %\} .*message 2 differently"):
        template_of({"chat_template.jinja": last.encode()}, "x").spans([*messages, *messages])
    thinks = last + "{% if add_generation_prompt %}<think>{% endif %}"
    with pytest.raises(ConfigError, match=r"no \{% generation %\} .*message 2 without the generation prompt"):
        template_of({"chat_template.jinja": thinks.encode()}, "x").spans(messages)
    with pytest.raises(ConfigError, match=r"x: tokenizer_config\.json is damaged"):
        template_of({"chat_template.jinja": b"", "tokenizer_config.json": b"[]"}, "x")


def write_lines(path, messages):
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages))


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["stream", "whole"])
def test_the_labels_of_batches_are_what_an_assistant_writes(tmp_path, packing):
    fast, path = tokenizer_in(tmp_path, CHATML)
    write_lines(tmp_path / "talk.jsonl", list(conversations(120)))
    data = DataConfig(
        kind="messages",
        paths=(str(tmp_path / "talk.jsonl"),),
        tokenizer=path,
        packing=packing,
        sequence_length=96,
        validation_fraction=0.2,
        cache_dir=str(tmp_path / "cache"),
    )
    corpus = load_corpus(data)
    options = {"sequence_length": 96, "packing": packing, "microbatch_size": 1, "global_batch_size": 1}
    batches = Batches([corpus.training], **options)
    learnt = total = 0
    for _ in range(len(batches._mixture.texts[0])):
        (batch,) = batches.next_step()
        tokens, labels = batch if packing == "stream" else (batch["tokens"], batch["labels"])
        assert tokens.min() >= 0 and tokens.max() < len(fast) and (labels >= 0).any()
        follow = labels[:, :-1] >= 0
        assert torch.equal(labels[:, :-1][follow], tokens[:, 1:][follow])
        learnt, total = learnt + int((labels >= 0).sum()), total + labels.numel()
    assert 0.2 * total < learnt < 0.9 * total


def test_the_loss_of_a_conversation_is_that_of_transformers_masks(tmp_path):
    fast, path = tokenizer_in(tmp_path, HEADERS)
    ours = ConversationTokenizer(path)
    torch.manual_seed(0)
    model = HybridModel(HybridConfig(pattern="[*-]", vocab_size=len(fast), hidden_size=16))
    for messages in conversations(6):
        expected = fast.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = (torch.tensor(expected[name])[None] for name in ("input_ids", "assistant_masks"))
        scores = model(ids[:, :-1])
        each = torch.nn.functional.cross_entropy(scores[0], ids[0, 1:], reduction="none")
        tokens, written = ours.labeled(messages)
        labels = torch.tensor(np.where(written, tokens.astype(int), -100))[None, 1:]
        assert_close(cross_entropy(scores, labels), each[mask[0, 1:] == 1].mean())


def test_conversations_in_one_sequence_have_the_loss_of_each_by_itself(tmp_path):
    _, path = tokenizer_in(tmp_path, HEADERS)
    ours = ConversationTokenizer(path)
    torch.manual_seed(0)
    model = HybridModel(HybridConfig(pattern="[*-]", vocab_size=ours.tokens, hidden_size=16))
    encoded = [ours.encode(json.dumps(messages).encode()) for messages in conversations(5)]
    starts = np.cumsum([0, *map(len, encoded)])
    part = Part(np.concatenate(encoded), starts[:-1], conversations=ours.tokens)
    options = {"packing": "whole", "microbatch_size": 1, "global_batch_size": 1}
    (batch,) = Batches([part], sequence_length=int(starts[-1]), **options).next_step()
    together = model(batch["tokens"], documents=batch["documents"])
    alone = torch.zeros(())
    for messages in conversations(5):
        tokens, written = ours.labeled(messages)
        labels = torch.tensor(np.where(written, tokens.astype(int), -100))[1:]
        scores = model(torch.tensor(tokens.astype(int))[None, :-1])[0]
        alone = alone + torch.nn.functional.cross_entropy(scores, labels, reduction="sum")
    assert_close(torch.nn.functional.cross_entropy(together[0], batch["labels"][0], reduction="sum"), alone)


WRONG = [
    ('{"messages": "hello"}', "must be an object with a list of messages"),
    ('{"messages": []}', "must be an object with a list of messages"),
    ('{"messages": [{"content": "a"}]}', "must be an object with a list of messages"),
    ('{"messages": [{"role": "tool", "content": "a"}]}', r"data\.paths: '.*talk\.jsonl', document 2: .*no tool"),
    ("{", "is not JSON"),
]


@pytest.mark.parametrize("line, message", WRONG)
def test_lines_that_are_no_conversations_are_refused_by_number(tmp_path, line, message):
    _, path = tokenizer_in(tmp_path, CHECKED)
    fine = '{"messages": [{"role": "user", "content": "a"}]}'
    (tmp_path / "talk.jsonl").write_text(f"{fine}\n\n{line}\n")
    data = DataConfig(kind="messages", paths=(str(tmp_path / "talk.jsonl"),), tokenizer=path, cache_dir=str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        load_corpus(data)


def test_a_tokenizer_without_a_template_is_refused(tmp_path):
    _, path = tokenizer_in(tmp_path, None)
    with pytest.raises(ConfigError, match="has no chat template in its folder"):
        ConversationTokenizer(path)
    with pytest.raises(ConfigError, match="chat template in the same folder"):
        DataConfig(kind="messages", paths=("x",))


def test_chat_answers_each_line_with_the_conversation_before_it(tmp_path, monkeypatch, capsys):
    fast, _ = tokenizer_in(tmp_path / "model", CHATML)
    torch.manual_seed(0)
    hf.save(HybridModel(HybridConfig(pattern="[*-]", vocab_size=len(fast), hidden_size=16)), tmp_path / "model")
    lines = iter(["hello", "", "there"])

    def typed(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    assert main(["chat", str(tmp_path / "model"), "--tokens", "5", "--temperature", "0", "--system", "be brief"]) == 0
    said = [{"role": "system", "content": "be brief"}]
    model, expected = hf.from_pretrained(tmp_path / "model"), ""
    for line in ("hello", "there"):
        said.append({"role": "user", "content": line})
        ids = torch.tensor([fast.apply_chat_template(said, add_generation_prompt=True)["input_ids"]])
        best, answer = [], ""
        for _ in range(5):
            best.append(int(model(torch.cat((ids, torch.tensor([best], dtype=torch.int64)), 1))[0, -1].argmax()))
            text = fast.decode(best)
            answer = answer if text.endswith("\ufffd") else text  # the rest of a character is still to come
        said.append({"role": "assistant", "content": answer})
        expected += answer + "\n"
    assert capsys.readouterr().out == expected


def test_a_model_without_a_template_does_not_chat(tmp_path, capsys):
    tokenizer_in(tmp_path / "model", None)
    hf.save(HybridModel(HybridConfig(pattern="[*-]", vocab_size=300, hidden_size=16)), tmp_path / "model")
    assert main(["chat", str(tmp_path / "model")]) == 2
    assert "has no chat template; use weft sample" in capsys.readouterr().err


def test_a_conversation_that_the_model_has_no_tokens_for_is_refused(tmp_path, monkeypatch, capsys):
    tokenizer_in(tmp_path / "model", CHATML)
    hf.save(HybridModel(HybridConfig(pattern="[*-]", vocab_size=9, hidden_size=16)), tmp_path / "model")
    monkeypatch.setattr("builtins.input", lambda prompt: "hello")
    assert main(["chat", str(tmp_path / "model")]) == 2
    assert "its tokenizer maps the prompt to token" in capsys.readouterr().err


@pytest.mark.long
def test_the_small_model_that_is_made_answers_after_its_fine_tuning(pool, tmp_path, monkeypatch, capsys):
    """With the capitals of two countries, which it knows sooner than all."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "chat_model.py"))
    known = [name for name in example["CAPITALS"] if name not in ("France", "Japan")]
    for name in known:
        del example["CAPITALS"][name]
    for _ in range(2):  # as in two runs of `make chat`
        example["main"](tmp_path, steps=100)
    assert capsys.readouterr().out.endswith("exists: its model and conversations are used again\n")
    pool.run(1, train_here, tmp_path / "chat.toml")
    (run,) = (tmp_path / "runs").iterdir()
    asked = "What is the capital of France?\nTell me the capital of Japan.\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(asked))
    assert main(["chat", str(run)]) == 0
    assert capsys.readouterr().out == "The capital of France is Paris.\nThe capital of Japan is Tokyo.\n"
