import dataclasses
import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pool import distributed
from weft.train.config import DataConfig
from weft.train.data import Batches, Validation, load_corpus
from weft.train.data import cache as cache_module
from weft.train.data import documents as documents_module
from weft.train.data.corpus import _key
from weft.train.data.order import shuffled
from weft.train.errors import ConfigError
from weft.train.run.turns import first_rank_first

LENGTH = 4
TOKENS = np.arange(1001, dtype=np.uint16)
"""250 sequences, each of which tells its number by its first token."""


def batches(rank=0, ranks=1, seed=0, microbatch=2, batch=24, tokens=TOKENS):
    return Batches(
        tokens,
        sequence_length=LENGTH,
        microbatch_size=microbatch,
        global_batch_size=batch,
        dp_rank=rank,
        dp_size=ranks,
        seed=seed,
    )


def numbers(step):
    """Which sequences the microbatches of a step hold."""
    return [int(row[0]) // LENGTH for tokens, _ in step for row in tokens]


def joined(*ranks):
    """Which sequences all ranks' next step holds."""
    return [number for rank in ranks for number in numbers(rank.next_step())]


@given(st.integers(1, 300), st.integers(0, 2**63 - 1), st.integers(0, 5))
@settings(max_examples=40)
def test_each_epoch_of_the_order_is_a_permutation(count, seed, epoch):
    positions = np.arange(count) + epoch * count
    assert sorted(shuffled(positions, count, seed).tolist()) == list(range(count))


def test_seeds_and_epochs_have_orders_of_their_own_that_look_random():
    count = 5000
    first, second = (shuffled(np.arange(count) + epoch * count, count, 7) for epoch in (0, 1))
    other = shuffled(np.arange(count), count, 8)
    for a, b in ((first, second), (first, other), (first, np.arange(count)), (first[1:], first[:-1])):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.06
        assert (a == b).mean() < 0.01


def test_labels_are_the_next_tokens():
    tokens, labels = next(batches())
    assert tokens.shape == labels.shape == (2, LENGTH)
    assert tokens.dtype == labels.dtype == torch.int64
    assert torch.equal(labels, tokens + 1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, microbatch", [(1, 24), (3, 4), (4, 2)])
def test_a_global_batch_is_the_same_for_any_number_of_ranks(ranks, microbatch):
    reference = batches()
    shares = [batches(rank, ranks, microbatch=microbatch) for rank in range(ranks)]
    for _ in range(25):
        assert sorted(joined(*shares)) == sorted(joined(reference))


@pytest.mark.slow
def test_every_sequence_comes_once_per_epoch():
    source = batches(batch=2)
    for _ in range(3):
        seen = [number for _ in range(125) for number in numbers(source.next_step())]
        assert sorted(seen) == list(range(250))


@pytest.mark.long
@given(st.integers(0, 40), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3, 6]))
@settings(max_examples=25)
def test_a_restored_position_continues_exactly_on_any_number_of_ranks(steps, before, after):
    source = batches(0, before)
    for _ in range(steps):
        source.next_step()
    state = json.loads(json.dumps(source.state_dict()))
    others = [batches(rank, before) for rank in range(1, before)]
    for other in others:
        other.load_state_dict(state)
    expected = [joined(source, *others) for _ in range(3)]
    resumed = [batches(rank, after) for rank in range(after)]
    for one in resumed:
        one.load_state_dict(state)
    for want in expected:
        got = joined(*resumed)
        assert sorted(got) == sorted(want)
        assert got == want or before != after


def test_a_position_within_a_step_is_restored_too():
    source = batches()
    next(source)
    resumed = batches()
    resumed.load_state_dict(source.state_dict())
    assert torch.equal(next(resumed)[0], next(source)[0])


@pytest.mark.parametrize(
    "other, setting",
    [(batches(seed=1), "data.seed"), (batches(tokens=TOKENS[:900]), "data.paths")],
)
def test_the_position_of_other_data_is_refused(other, setting):
    with pytest.raises(ConfigError, match=setting):
        batches().load_state_dict(other.state_dict())


def test_a_batch_that_ranks_cannot_share_is_refused():
    with pytest.raises(ConfigError, match="3 x 2 = 6"):
        batches(ranks=3, batch=8)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_validation_is_the_same_set_on_any_number_of_ranks(ranks):
    def make(rank, of, microbatch):
        return Validation(
            TOKENS,
            sequence_length=LENGTH,
            microbatch_size=microbatch,
            global_batch_size=8,
            batches=3,
            dp_rank=rank,
            dp_size=of,
        )

    shares = [make(rank, ranks, 2) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    rows = [tuple(row.tolist()) for share in shares for tokens, _ in share for row in tokens]
    inputs, labels = make(0, 1, 8).pairs()
    assert sorted(rows) == sorted(map(tuple, inputs.tolist()))
    assert len(set(rows)) == 24
    assert np.array_equal(labels, inputs + 1)
    starts = np.sort(inputs[:, 0])
    assert np.diff(starts).max() <= 2 * np.diff(starts).min()
    assert starts.max() - starts.min() > 0.9 * np.ptp(TOKENS), "it is spread over the text, not its beginning"


def test_a_validation_set_takes_what_is_there_and_needs_one_global_batch():
    arguments = {"sequence_length": LENGTH, "microbatch_size": 2, "batches": 100}
    assert len(Validation(TOKENS, global_batch_size=100, **arguments)) == 100
    with pytest.raises(ConfigError, match=r"250 sequences.*251|250 sequences.*252"):
        Validation(TOKENS, global_batch_size=252, **arguments)


@pytest.fixture
def text(tmp_path):
    """A folder of text, one line per number, in files of very different sizes."""
    folder = tmp_path / "text"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    line = 0
    for name, count in (("b.txt", 400), ("a.py", 3), ("deep/c.txt", 60), ("deep/er/d.py", 40), ("e.txt", 1)):
        (folder / name).write_text("".join(f"line {line + i}\n" for i in range(count)))
        line += count
    (folder / "picture.bin").write_bytes(b"\x89\0\0")
    (folder / ".hidden" / "x.txt").write_text("secret\n")
    (folder / "empty.txt").write_text("")
    return folder


def config(text, tmp_path, **settings):
    return DataConfig(paths=(str(text),), sequence_length=8, cache_dir=str(tmp_path / "cache"), **settings)


def lines(tokens):
    return tokens.astype(np.uint8).tobytes().decode().splitlines()


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.5, 0.9])
def test_training_and_validation_share_no_line_and_lose_none(text, tmp_path, fraction):
    corpus = load_corpus(config(text, tmp_path, validation_fraction=fraction))
    train, validation = lines(corpus.train), lines(corpus.validation)
    assert sorted(train + validation) == sorted(f"line {i}" for i in range(504))
    assert 0.4 * fraction < len(corpus.validation) / (len(corpus.train) + len(corpus.validation))
    assert len(validation) <= 504 * fraction * 1.3


@pytest.mark.parametrize("files", [1, 40])
def test_validation_text_is_spread_over_the_whole_text(tmp_path, files):
    folder = tmp_path / "text"
    folder.mkdir()
    for file in range(files):
        numbers = range(2000 * file // files, 2000 * (file + 1) // files)
        (folder / f"{file:02}.txt").write_text("".join(f"{number}\n" for number in numbers))
    found = np.array(lines(load_corpus(config(folder, tmp_path, validation_fraction=0.2)).validation), dtype=int)
    assert 0.3 < found.mean() / 2000 < 0.7
    assert np.ptp(found) > 0.4 * 2000


def test_patterns_choose_files_in_folders(text, tmp_path):
    corpus = load_corpus(config(text, tmp_path, include=("*.py",), validation_fraction=0.3))
    found = lines(corpus.train) + lines(corpus.validation)
    assert len(found) == 43 and "line 400" in found and "line 463" in found


def test_the_same_text_gives_the_same_tokens_wherever_it_is_and_whatever_the_seed(text, tmp_path):
    first = load_corpus(config(text, tmp_path))
    moved = text.rename(tmp_path / "moved")
    second = load_corpus(config(moved, tmp_path / "other", seed=5))
    assert np.array_equal(first.train, second.train)
    assert np.array_equal(first.validation, second.validation)


@pytest.mark.parametrize("fraction", [0.1, 0.3])
def test_a_document_is_text_of_one_file_without_a_gap(tmp_path, fraction):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {number}\n" for number in range(300)))
    corpus = load_corpus(config(tmp_path, tmp_path, include=("*.txt",), validation_fraction=fraction))
    whole = [path.read_text() for path in sorted(tmp_path.glob("*.txt"))]
    for part in (corpus.training, corpus.held):
        borders = [*part.starts.tolist(), len(part.tokens)]
        texts = [bytes(part.tokens[begin:end]).decode() for begin, end in itertools.pairwise(borders)]
        assert borders[0] == 0 and all(any(text in file for file in whole) for text in texts)
        assert all(text not in file for text in map("".join, itertools.pairwise(texts)) for file in whole)


def test_a_folder_that_cannot_be_read_is_named(text, tmp_path, monkeypatch):
    real = os.scandir

    def scandir(path):
        if str(path).endswith("deep/er"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(ConfigError, match=r"data\.paths: '.*deep/er' cannot be read \(Permission denied\)"):
        load_corpus(config(text, tmp_path))


def test_files_that_are_validation_and_training_text_are_told(text, tmp_path):
    said = []
    held = (str(text / "b.txt"), str(tmp_path / "held.txt"))
    (tmp_path / "held.txt").write_text("held\n" * 20)
    corpus = load_corpus(config(text, tmp_path, validation_paths=held), say=said.append)
    assert corpus.description.startswith(f"{text}: "), "the path, not a list in TOML"
    (line,) = said
    assert line.startswith("data.validation_paths = ") and ": shares 1 file (of 2) with data.paths = " in line


def test_output_of_runs_is_not_training_text(text, tmp_path):
    before = load_corpus(config(text, tmp_path))
    for folder in ("runs/exp", "cache"):
        (text / folder).mkdir(parents=True)
        (text / folder / "metrics.jsonl").write_text("numbers\n" * 50)
    inside = dataclasses.replace(config(text, tmp_path), cache_dir=str(text / "cache"))
    after = load_corpus(inside, runs=str(text / "runs"))
    assert np.array_equal(before.train, after.train) and np.array_equal(before.validation, after.validation)
    assert len(load_corpus(config(text / "runs" / "exp", tmp_path), runs=str(text / "runs")).train), "named on purpose"
    with pytest.raises(ConfigError, match=r"data\.paths: .* is run\.directory or data\.cache_dir itself"):
        load_corpus(config(text, tmp_path), runs=str(text))


def test_directories_of_runs_are_not_training_text_wherever_they_are(text, tmp_path):
    """A run may be resumed or evaluated in another working directory than the one from which `run.directory` counts."""
    before = load_corpus(config(text, tmp_path))
    (text / "old" / "exp" / "checkpoints").mkdir(parents=True)
    (text / "old" / "exp" / "metrics.jsonl").write_text("numbers\n" * 50)
    (text / "old" / "exp" / "checkpoints" / ".run").write_text("0" * 32)
    after = load_corpus(config(text, tmp_path), runs="runs")
    assert np.array_equal(before.train, after.train) and np.array_equal(before.validation, after.validation)


def test_text_is_tokenised_once_and_again_when_it_changed(text, tmp_path, monkeypatch):
    first = load_corpus(config(text, tmp_path))
    built = []
    real = cache_module.build
    monkeypatch.setattr(cache_module, "build", lambda *a: built.append(a) or real(*a))
    again = load_corpus(config(text, tmp_path))
    assert not built and np.array_equal(first.train, again.train)
    assert isinstance(again.train, np.memmap)
    (text / "a.py").write_text("something else\n" * 3)
    changed = load_corpus(config(text, tmp_path))
    assert len(built) == 1
    assert "something else" in lines(changed.train) + lines(changed.validation)


def test_tokens_of_another_origin_are_in_other_files(text, tmp_path):
    file, byte = ("a.txt", 3, 5), SimpleNamespace(identity="bytes")
    lines = {"kind": "jsonl", "field": "a"}
    keys = [
        _key(config(text, tmp_path, **settings), files, tokenizer, fraction)
        for settings, files, tokenizer, fraction in (
            ({}, [file], byte, 0.1),
            ({}, [file], byte, 0.2),
            ({}, [file], SimpleNamespace(identity="tokenizer.json"), 0.1),
            ({}, [("a.txt", 3, 6)], byte, 0.1),
            ({}, [file, file], byte, 0.1),
            ({"separator": "|"}, [file], byte, 0.1),
            (lines, [file], byte, 0.1),
            ({**lines, "field": "b"}, [file], byte, 0.1),
        )
    ]
    assert len(set(keys)) == len(keys)


@distributed(2)
def test_what_only_the_first_rank_finds_wrong_ends_all():
    def make():
        if dist.get_rank() == 0:
            raise ConfigError("no room here")

    with pytest.raises(ConfigError, match="no room here"):
        first_rank_first(make)


def test_a_cut_off_cache_file_is_made_again(text, tmp_path):
    want = load_corpus(config(text, tmp_path)).train.copy()
    (tokens,) = (tmp_path / "cache").glob("*.tokens")
    os.truncate(tokens, tokens.stat().st_size // 2)
    assert np.array_equal(load_corpus(config(text, tmp_path)).train, want)


def test_a_failed_build_leaves_nothing_behind(text, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(documents_module, "_read_lines", fail)
    with pytest.raises(ConfigError, match=r"data\.cache_dir.*No space left"):
        load_corpus(config(text, tmp_path))
    assert list((tmp_path / "cache").iterdir()) == []


def load_together(settings):
    dist.barrier()
    corpus = load_corpus(settings)
    return corpus.train.tobytes(), corpus.validation.tobytes()


@pytest.mark.long
def test_processes_that_build_the_cache_at_once_all_get_whole_tokens(pool, text, tmp_path):
    (text / "long.txt").write_text("".join(f"long {i}\n" for i in range(60_000)))
    settings = config(text, tmp_path)
    want = load_corpus(dataclasses.replace(settings, cache_dir=str(tmp_path / "alone")))
    for found in pool.run(4, load_together, settings):
        assert found == (want.train.tobytes(), want.validation.tobytes())
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_a_line_longer_than_a_piece_is_cut_between_characters(tmp_path):
    (tmp_path / "one.txt").write_text("☃" * 100_000, encoding="utf-8")
    corpus = load_corpus(config(tmp_path / "one.txt", tmp_path))
    for part in (corpus.train, corpus.validation):
        part.tobytes().decode("utf-8")
    assert len(corpus.train) + len(corpus.validation) == 300_000


def test_bytes_per_token_counts_the_validation_text(text, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"line": 0, "?": 300}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    named = config(text, tmp_path, tokenizer=str(tmp_path / "tokenizer.json"), validation_fraction=0.2)
    corpus = load_corpus(named)
    plain = load_corpus(config(text, tmp_path, validation_fraction=0.2))
    assert corpus.vocab_size == 301 and corpus.train.dtype == np.uint16
    assert len(corpus.validation) == 2 * len(lines(plain.validation))
    assert corpus.bytes_per_token == len(plain.validation) / len(corpus.validation)
    assert plain.bytes_per_token == 1


@pytest.mark.parametrize("content", ["", "too short"])
def test_a_text_with_less_than_a_sequence_per_rank_is_named(tmp_path, content):
    folder = tmp_path / "little"
    folder.mkdir()
    (folder / "a.txt").write_text(content)
    with pytest.raises(ConfigError, match=r"data\.paths = .*little"):
        load_corpus(config(folder, tmp_path), dp_size=2)


def test_a_text_is_enough_for_some_ranks_and_not_for_more(text, tmp_path):
    held = (len(load_corpus(config(text, tmp_path)).validation) - 1) // 8
    load_corpus(config(text, tmp_path), dp_size=held)
    with pytest.raises(ConfigError, match=f"{held} sequences of 8 for {held + 1} ranks"):
        load_corpus(config(text, tmp_path), dp_size=held + 1)


@pytest.mark.parametrize("name, says", [("absent", "not a file or folder"), ("picture.bin", "not text")])
def test_a_path_that_is_no_text_is_named(text, tmp_path, name, says):
    with pytest.raises(ConfigError, match=f"{name}.*{says}"):
        load_corpus(config(text / name, tmp_path))


@pytest.mark.slow
def test_the_default_text_is_the_standard_librarys_source(tmp_path):
    corpus = load_corpus(DataConfig(cache_dir=str(tmp_path)))
    assert 4e6 < len(corpus.train) + len(corpus.validation) < 4e7
    assert len(corpus.validation) == pytest.approx(0.05 * len(corpus.train), rel=0.2)
    source = Path(dataclasses.__file__).read_bytes()
    assert source in corpus.train.tobytes() or source in corpus.validation.tobytes()
