"""Kinds of data: each gives the documents that went in, once, and goes on where it was."""

import contextlib
import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.train.command import metrics, rewind, write_config
from tests.train.test_loop import train_on
from weft.train.config import load_config, parse_config
from weft.train.data import Batches, Validation, load_corpora, load_corpus
from weft.train.data import cache as cache_module
from weft.train.data.cache import Part
from weft.train.data.sequences import NO_LABEL, Mixture, sequences
from weft.train.errors import ConfigError
from weft.train.sections import DataConfig
from weft.train.task.text import TextTask

DOCUMENTS = [f"document {number}: " + "x" * (number % 23) for number in range(300)]
ENDS = "\0"


def write_jsonl(folder, name="data.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps({"id": n, "body": text}) + "\n" for n, text in enumerate(DOCUMENTS)))
    return path


def write_parquet(folder):
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(arrow.table({"id": range(300), "body": DOCUMENTS}), folder / "data.parquet", row_group_size=70)
    return folder / "data.parquet"


def write_datasets(folder):
    """What `datasets.Dataset.save_to_disk` writes, in two files."""
    arrow = pytest.importorskip("pyarrow")
    saved = folder / "saved"
    saved.mkdir()
    names = [f"data-0000{number}-of-00002.arrow" for number in range(2)]
    for name, texts in zip(names, (DOCUMENTS[:120], DOCUMENTS[120:])):
        table = arrow.table({"body": texts})
        with arrow.OSFile(str(saved / name), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=50)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return saved


WRITERS = {"jsonl": write_jsonl, "parquet": write_parquet, "datasets": write_datasets}


def config(path, folder, **settings):
    settings = {"paths": (str(path),), "field": "body", "separator": ENDS, "validation_fraction": 0.2, **settings}
    return DataConfig(sequence_length=16, cache_dir=str(folder / "cache"), **settings)


def texts(part):
    """The documents of a part, by its borders, which must be where the separators say."""
    borders = [*part.starts.tolist(), len(part.tokens)]
    found = [bytes(part.tokens[a:b]).decode() for a, b in itertools.pairwise(borders)]
    assert all(text.endswith(ENDS) and text.count(ENDS) == 1 for text in found)
    return [text.removesuffix(ENDS) for text in found]


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITERS)
def test_every_document_is_there_once_in_order_and_validation_has_its_part(tmp_path, kind):
    corpus = load_corpus(config(WRITERS[kind](tmp_path), tmp_path, kind=kind))
    train, held = texts(corpus.training), texts(corpus.held)
    assert sorted(train + held) == sorted(DOCUMENTS)
    assert train == [text for text in DOCUMENTS if text in set(train)]
    assert 30 < len(held) < 90
    assert corpus.bytes_per_token == pytest.approx(1, rel=0.1)


def test_texts_end_with_the_separator_too(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"{name} line\n" * 40)
    corpus = load_corpus(config(tmp_path, tmp_path, field="text", include=("*.txt",)))
    whole = bytes(corpus.train).decode() + bytes(corpus.validation).decode()
    assert whole.count(ENDS) == 2 and whole.count("a.txt") == whole.count("b.txt") == 40


def test_a_validation_set_of_its_own_takes_nothing_from_training(tmp_path):
    write_jsonl(tmp_path)
    (tmp_path / "held.jsonl").write_text("".join(json.dumps({"body": f"held {n}"}) + "\n" for n in range(50)))
    held = (str(tmp_path / "held.jsonl"),)
    settings = {"kind": "jsonl", "validation_paths": held, "validation_fraction": 0.05}
    corpus = load_corpus(config(tmp_path / "data.jsonl", tmp_path, **settings))
    assert texts(corpus.training) == DOCUMENTS
    assert texts(corpus.held) == [f"held {n}" for n in range(50)]


@pytest.mark.parametrize("name", ["tokens.npy", "tokens.bin"])
def test_token_files_are_mapped_and_their_end_validates(tmp_path, name):
    tokens = np.arange(1000, dtype=np.uint16)
    np.save(tmp_path / name, tokens) if name.endswith("npy") else tokens.tofile(tmp_path / name)
    settings = {"kind": "tokens", "field": "text", "separator": "", "validation_fraction": 0.1}
    corpus = load_corpus(config(tmp_path / name, tmp_path, **settings))
    assert isinstance(corpus.train, np.memmap)
    assert np.array_equal(np.concatenate([corpus.train, corpus.validation]), tokens) and len(corpus.train) == 900
    assert not list((tmp_path / "cache").glob("*.tokens"))


def test_tokenising_says_how_far_it_is_and_happens_once(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "_EVERY_S", -1.0)
    said = []
    settings = config(write_jsonl(tmp_path), tmp_path, kind="jsonl")
    load_corpus(settings, say=said.append)
    shares = [int(line.rpartition(" ")[2].rstrip("%")) for line in said]
    assert shares == sorted(shares) and shares[-1] == 100 and len(shares) == 300
    load_corpus(settings, say=said.append)
    made = said[0].partition(" ")[0]
    assert not any(line.startswith(made) for line in said[300:]), "the tokens are compared, not computed again"


def test_whole_documents_are_never_cut_as_long_as_they_fit():
    lengths = [5, 9, 3, 3, 40, 7, 2, 16, 1, 17]
    starts = np.cumsum([0, *lengths[:-1]])
    part = Part(np.arange(1, sum(lengths) + 1, dtype=np.uint16), starts)
    packed = sequences(part, 16, "whole", 1, cross_documents=True)
    seen = []
    for number in range(len(packed)):
        tokens, labels = Mixture([packed]).batch(np.zeros(1, dtype=int), np.asarray([number]))
        count = int((labels != NO_LABEL).sum())
        assert count == packed.labels(np.asarray([number]))
        assert tokens.shape == labels.shape == (1, 16)
        assert torch.equal(labels[0, :count], tokens[0, :count] + 1), "the next token"
        assert (labels[0, count:] == NO_LABEL).all() and (tokens >= 0).all()
        seen.append((int(tokens[0, 0]) - 1, count + 1))
    begins = {begin for begin, _ in seen}
    fitting = [(start, length) for start, length in zip(starts.tolist(), lengths) if 1 < length <= 17]
    for start, length in fitting:
        assert any(begin <= start and start + length <= begin + count for begin, count in seen), (start, seen)
    covered = {token for begin, count in seen for token in range(begin, begin + count)}
    assert covered == set(range(sum(lengths))), "nothing is lost"
    assert begins >= {0}


def test_sequences_without_a_label_are_left_out_where_documents_are_separate():
    """A step of documents of one token would have no mean loss."""
    lengths = [1] * 9 + [3] + [1] * 9
    part = Part(np.arange(sum(lengths), dtype=np.uint16), np.cumsum([0, *lengths[:-1]]))
    packed = sequences(part, 4, "whole", 1)
    assert len(packed) == 1 and packed.labels(np.zeros(1, dtype=int)) == 2
    assert len(sequences(part, 4, "whole", 1, cross_documents=True)) == 5
    ones = Part(np.zeros(20, dtype=np.uint16), np.arange(20))
    with pytest.raises(ConfigError, match="20 tokens: 0 sequences with a label for 1 rank"):
        sequences(ones, 4, "whole", 1)


def parts(*sizes):
    """Texts whose tokens tell which text they are of."""
    return [
        Part(np.full(size * 4 + 1, text, dtype=np.uint8), np.zeros(1, dtype=int)) for text, size in enumerate(sizes)
    ]


def mixed(rank=0, ranks=1, weights=(0.7, 0.2, 0.1)):
    sizes = {"sequence_length": 4, "microbatch_size": 5, "global_batch_size": 10, "dp_rank": rank, "dp_size": ranks}
    return Batches(parts(50, 30, 70), weights=weights, **sizes)


@pytest.mark.slow
def test_a_mixture_has_its_weights_from_the_beginning_on_and_every_sequence_in_turn():
    source = mixed()
    counts = np.zeros(3)
    for step in range(1, 101):
        for tokens, _ in source.next_step():
            counts += np.bincount(tokens[:, 0].numpy(), minlength=3)
        assert abs(counts - np.asarray([0.7, 0.2, 0.1]) * 10 * step).max() <= 2
    mixture = source._mixture
    texts, numbers = mixture.place(np.arange(4000))
    for text in range(3):
        assert np.array_equal(numbers[texts == text], np.arange((texts == text).sum()))


def test_a_mixture_resumes_exactly_and_is_the_same_on_any_number_of_ranks():
    whole = mixed()
    steps = [torch.cat([tokens for tokens, _ in whole.next_step()]) for _ in range(6)]
    for ranks in (1, 2):
        shares = [mixed(rank, ranks) for rank in range(ranks)]
        for _ in range(3):
            [share.next_step() for share in shares]
        resumed = [mixed(rank, ranks) for rank in range(ranks)]
        for one, other in zip(resumed, shares):
            one.load_state_dict(json.loads(json.dumps(other.state_dict())))
        for expected in steps[3:]:
            rows = torch.cat([tokens for one in resumed for tokens, _ in one.next_step()])
            assert torch.equal(rows.sort(0)[0], expected.sort(0)[0])


def test_validation_of_a_mixture_has_its_weights():
    sizes = {"sequence_length": 4, "microbatch_size": 5, "global_batch_size": 10, "batches": 10}
    held = Validation(parts(70, 20, 30), weights=(0.7, 0.2, 0.1), **sizes)
    found = np.bincount(torch.cat([tokens[:, 0] for tokens, _ in held]).numpy())
    assert np.abs(found - [70, 20, 10]).max() <= 1


def test_each_path_of_a_mixture_has_tokens_of_its_own(tmp_path):
    paths = []
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name}\n" * 2000)
        paths.append(str(tmp_path / f"{name}.txt"))
    settings = {"field": "text", "separator": "", "paths": tuple(paths), "weights": (3.0, 1.0)}
    first, second = load_corpora(config(tmp_path, tmp_path, **settings))
    assert set(bytes(first.train)) == set(b"a\n") and set(bytes(second.train)) == set(b"b\n")


def write_text(folder, name, text):
    (folder / name).write_text(text * 500)
    return str(folder / name)


def write_tokens(folder, name, text):
    np.save(folder / f"{name}.npy", np.frombuffer(text.encode() * 500, dtype=np.uint8).astype(np.uint16))
    return str(folder / f"{name}.npy")


KEPT = {"text": (write_text, {}), "tokens": (write_tokens, {"kind": "tokens"})}


@pytest.fixture(params=KEPT)
def kept(request, tmp_path):
    """Writes texts of a kind, and makes the batches of a mixture of `a` and `b` that validates on `held`."""
    write, settings = KEPT[request.param]

    def batches_of(folder, *names, **texts):
        texts = {"a": "abc\n", "b": "xyz\n", "held": "123\n", **texts}
        paths = {name: write(folder, name, text) for name, text in texts.items()}
        data = DataConfig(
            paths=tuple(paths[name] for name in names or "ab"),
            weights=(1.0, 1.0),
            validation_paths=(paths["held"],),
            cache_dir=str(tmp_path / "cache"),
            sequence_length=16,
            **settings,
        )
        corpora = load_corpora(data)
        sizes = {"sequence_length": 16, "microbatch_size": 2, "global_batch_size": 2}
        return Batches([each.training for each in corpora], held=[corpora[0].held], weights=data.weights, **sizes)

    return batches_of


def test_data_resumes_with_the_same_texts_at_any_path(kept, tmp_path):
    state = json.loads(json.dumps(kept(tmp_path).state_dict()))
    kept(tmp_path).load_state_dict(state)
    (tmp_path / "moved").mkdir()
    kept(tmp_path / "moved").load_state_dict(state)


@pytest.mark.parametrize(
    ("names", "texts", "said"),
    [
        (
            "ab",
            {"b": "xyy\n"},
            r'data\.paths = \[".*/b.*"\]: differs from the text .* has the same length but other tokens',
        ),
        (
            "ab",
            {"a": "abcdef\n"},
            r'data\.paths = \[".*/a.*"\]: differs from the text .* had \d+ sequences and now has \d+',
        ),
        ("ba", {}, r'data\.paths = \[".*/b.*"\]: differs from the text'),
        ("ab", {"held": "124\n"}, r'data\.validation_paths = \[".*/held.*"\]: differs from the text'),
    ],
)
def test_data_that_changed_in_place_or_in_order_is_refused(kept, tmp_path, names, texts, said):
    state = kept(tmp_path).state_dict()
    with pytest.raises(ConfigError, match=said) as error:
        kept(tmp_path, *names, **texts).load_state_dict(state)
    assert "\n" not in str(error.value)


def refused_where_hosts_differ(path, folder, texts):
    """What each rank says where its working directory, and with it its text, is its own."""
    own = folder / str(dist.get_rank())
    own.mkdir()
    for name, text in texts[dist.get_rank()].items():
        write_text(own, name, text)
    settings = ['data.paths=["a", "b"]', "data.weights=[1, 1]", 'data.validation_paths=["held"]']
    with contextlib.chdir(own), pytest.raises(ConfigError) as error:
        TextTask(load_config(path, settings), torch.device("cpu"), lambda line: None)
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"b": "xyy\n"}, 'data.paths = ["b"]: differs between rank 1 and rank 0 (it has the same length but other tok'),
        ({"held": "12\n"}, 'data.validation_paths = ["held"]: differs between rank 1 and rank 0 (it is 1500 lo'),
    ],
)
def test_texts_that_differ_from_host_to_host_are_refused_on_every_rank_by_name(pool, tmp_path, differs, said):
    texts = {"a": "abc\n", "b": "xyz\n", "held": "123\n"}
    path = write_config(tmp_path, data__validation_fraction=0.05)
    lines = pool.run(2, refused_where_hosts_differ, path, tmp_path, [texts, {**texts, **differs}])
    assert lines[0] == lines[1] and lines[0].startswith(said)


def test_token_files_are_read_for_their_fingerprint_once(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "_EVERY_S", -1.0)
    path = write_tokens(tmp_path, "a", "abc\n")
    settings = config(path, tmp_path, kind="tokens", field="text", separator="", validation_fraction=0.1)
    said = []
    first = load_corpus(settings, say=said.append)
    assert said[-1].endswith("for its fingerprint: 100%")
    heard = len(said)
    again = load_corpus(settings, say=said.append)
    assert len(said) == heard and again.training.fingerprint == first.training.fingerprint != ""
    less = load_corpus(dataclasses.replace(settings, validation_fraction=0.2))
    assert less.training.fingerprint != first.training.fingerprint
    nowhere = dataclasses.replace(settings, cache_dir=f"{path}/cache")
    assert load_corpus(nowhere).training.fingerprint == first.training.fingerprint, "it only takes longer"


WRONG = {
    "field": ("jsonl", {"field": "nothing"}, "data.field = 'nothing': "),
    "column": ("parquet", {"field": "nothing"}, "has no such column; choose from id, body"),
    "number": ("parquet", {"field": "id"}, "row 1: must be text, but is a int"),
    "directory": ("datasets", {"paths": ("/",)}, "is not the directory of a `datasets` dataset"),
}


@pytest.mark.parametrize("name", WRONG)
def test_data_that_is_not_what_it_is_said_to_be_is_one_line(tmp_path, name):
    kind, settings, words = WRONG[name]
    with pytest.raises(ConfigError) as error:
        load_corpus(config(WRITERS[kind](tmp_path), tmp_path, kind=kind, **settings))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_broken_line_is_named_by_its_number(tmp_path):
    path = write_jsonl(tmp_path)
    path.write_text(path.read_text() + "{broken\n")
    with pytest.raises(ConfigError, match="line 301: is not JSON"):
        load_corpus(config(path, tmp_path, kind="jsonl"))


def write_half_a_character(folder):
    (folder / "half.jsonl").write_text('{"body": "whole"}\n{"body": "\\ud83d"}\n')
    return folder / "half.jsonl"


def write_nested(folder):
    (folder / "deep.jsonl").write_text("[" * 100_000)
    return folder / "deep.jsonl"


def write_nothing_there(folder):
    (folder / "null.jsonl").write_text('{"body": null}\n')
    return folder / "null.jsonl"


def write_no_text(folder):
    parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    borders = pa.py_buffer(np.arange(0, 12, 4, dtype=np.int32).tobytes())
    texts = pa.StringArray.from_buffers(2, borders, pa.py_buffer(b"text\xff\xfe.."))
    parquet.write_table(pa.table({"body": texts}), folder / "bytes.parquet")
    return folder / "bytes.parquet"


def write_damage(folder):
    path = WRITERS["parquet"](folder)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + bytes(range(256)) * 4 + whole[4 + 4 * 256 :])
    return path


UNREADABLE = {
    "a half of a character": (write_half_a_character, "half.jsonl': document 2 cannot be read"),
    "too deep for the parser": (write_nested, "deep.jsonl': document 1 cannot be read (line 1: is not JSON"),
    "null": (write_nothing_there, "line 1: must be an object with text in this field, but has null"),
    "other bytes than text": (write_no_text, "bytes.parquet': document 2 cannot be read"),
    "a damaged page": (write_damage, ".parquet': document 1 cannot be read"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_named_with_its_place(tmp_path, name):
    write, words = UNREADABLE[name]
    path = write(tmp_path)
    with pytest.raises(ConfigError) as error:
        load_corpus(config(path, tmp_path, kind=path.suffix.removeprefix(".")))
    assert words in str(error.value) and "\n" not in str(error.value)


HELD = {
    "a typo": ("text", "held.txt", None, "is not a file or folder"),
    "no text": ("text", "held.txt", b"\0", "is not text"),
    "an empty file": ("text", "held.txt", b"", "no text found"),
    "too little": ("text", "held.txt", b"too short", "9 validation tokens: 0 sequences"),
    "a broken line": ("jsonl", "held.jsonl", b"{broken", "document 1 cannot be read (line 1: is not JSON"),
    "no tokens": ("tokens", "held.npy", b"x", "cannot be mapped as tokens"),
    "no data set": ("datasets", "held", None, "is not the directory of a `datasets` dataset"),
}


@pytest.mark.parametrize("name", HELD)
def test_what_is_wrong_with_a_validation_set_of_its_own_is_said_of_its_own_setting(tmp_path, name):
    kind, file, content, words = HELD[name]
    training = WRITERS[kind](tmp_path) if kind in WRITERS else KEPT[kind][0](tmp_path, "a", "abc\n")
    if content is not None:
        (tmp_path / file).write_bytes(content)
    settings = {} if kind in WRITERS else {"field": "text", "separator": ""}
    settings |= {"validation_paths": (str(tmp_path / file),), "validation_fraction": 0.05, "kind": kind}
    with pytest.raises(ConfigError) as error:
        load_corpus(config(training, tmp_path, **settings))
    said = str(error.value)
    assert said.startswith("data.validation_paths") and words in said and "data.paths" not in said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"validation_fraction": 0.1}, r'data\.validation_fraction = 0\.1 of data\.paths = \[".*a"\]: holds \d+ seq'),
        (
            {"validation_paths": ("held",), "validation_fraction": 0.05},
            r'data\.validation_paths = \["held"\]: holds 1',
        ),
    ],
)
def test_a_validation_set_of_less_than_a_global_batch_names_its_own_setting(tmp_path, monkeypatch, settings, said):
    monkeypatch.chdir(tmp_path)
    paths = [write_text(tmp_path, name, "abc\n") for name in ("a", "held")]
    corpus = load_corpus(config(paths[0], tmp_path, field="text", separator="", **settings))
    sizes = {"sequence_length": 16, "microbatch_size": 2, "global_batch_size": 5000, "batches": 1}
    with pytest.raises(ConfigError, match=said):
        Validation([corpus.held], **sizes)


def test_tokens_below_zero_are_named():
    """What `transformers` puts at places without a label is no token."""
    with pytest.raises(ConfigError, match="the token file contains -100"):
        next(Batches(np.array([5, -100] * 20), sequence_length=4, microbatch_size=2, global_batch_size=2))


def test_tokens_beyond_the_vocabulary_are_named():
    sizes = {"sequence_length": 4, "microbatch_size": 5, "global_batch_size": 5}
    with pytest.raises(
        ConfigError, match=r"model\.vocab_size = 2: .*which is 2 in the files; set model.vocab_size = 3"
    ):
        for _ in range(20):
            Batches(parts(50, 30, 70), weights=(1, 1, 1), vocabulary=2, **sizes).next_step()


def settings_for(folder, kind):
    path = WRITERS[kind](folder) if kind in WRITERS else folder / "tokens.npy"
    if kind == "tokens":
        np.save(path, np.frombuffer("".join(DOCUMENTS * 2).encode(), dtype=np.uint8))
        return [f'data.paths=["{path}"]', "data.kind=tokens"]
    changes = [f'data.paths=["{path}"]', f"data.kind={kind}", "data.field=body", "data.separator=|"]
    return [*changes, "data.packing=whole"] if kind == "jsonl" else changes


@pytest.mark.long
@pytest.mark.parametrize("kind", ["jsonl", "tokens", pytest.param("parquet", marks=pytest.mark.long)])
def test_a_run_on_any_kind_of_data_resumes_bit_for_bit(pool, tmp_path, kind):
    path = write_config(tmp_path, train__validate_every=2, data__validation_fraction=0.1, checkpoint__every=2)
    changes = settings_for(tmp_path, kind)
    whole = pool.run(2, train_on, path, tmp_path / "run", changes, stop_at=4)[0]
    rewind(tmp_path / "run", 2)
    parts = pool.run(2, train_on, path, tmp_path / "run", changes, stop_at=4, resume_from=2)[0]
    assert parts[:2] == whole[:2]
    assert all(torch.equal(parts[2][name], value) for name, value in whole[2].items())
    assert ("nats_per_byte" in metrics(tmp_path / "run", "validation")[0]) == (kind != "tokens")


@pytest.mark.long
def test_every_label_of_a_step_counts_alike_however_sequences_meet_in_microbatches(pool, tmp_path):
    """Packed whole, sequences have different numbers of labels."""
    path = write_config(tmp_path, train__validate_every=1, data__validation_fraction=0.2, train__global_batch_size=8)
    changes, found = settings_for(tmp_path, "jsonl"), {}
    for ranks, size, more in ((1, 8, []), (1, 1, []), (2, 2, []), (2, 1, ["sharding.pp=2"])):
        run = tmp_path / f"{ranks}-{size}"
        changed = [*changes, f"train.microbatch_size={size}", *more]
        steps, validations, model, *_ = pool.run(ranks, train_on, path, run, changed, stop_at=2)[0]
        numbers = [line[name] for line in steps for name in ("loss", "gradient_norm")]
        found[ranks, size] = numbers, [line["loss"] for line in validations], model
    whole = found.pop((1, 8))
    assert len(set(whole[0])) == 4 and len(whole[1]) == 2
    for numbers, validations, model in found.values():
        torch.testing.assert_close(numbers, whole[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(validations, whole[1], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(model, {name: whole[2][name] for name in model})  # of the first stage


def test_a_configuration_names_kinds_and_weights(tmp_path):
    path = write_config(tmp_path, data__weights=[1.0], data__packing="whole", data__separator="<|end|>")
    data = load_config(path).data
    assert (data.weights, data.packing, data.separator) == ((1.0,), "whole", "<|end|>")
    with pytest.raises(ConfigError, match=r'data.field = "body": has no effect with data.kind = "text"'):
        parse_config("", ["data.field=body"])
