"""Damaged and crafted directories: each is one line that names the file, and nothing is written."""

import json
import math

import pytest

from tests.models.hf.families import KINDS
from tests.models.hf.released import tensors
from weft.cli import main
from weft.models.hf.directory import TensorWriter

VALUES = ["many", None, [1], {"a": 1}, -1, 0, 2.5, True, 1 << 70]
SIZES = ["hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "num_hidden_layers", "head_dim"]
OTHERS = {
    "rope_parameters": ["many", [1], 3, {"rope_type": 5}, {"rope_type": "yarn", "factor": [2]}, {"rope_theta": "big"}],
    "rms_norm_eps": ["small", None, -1.0, math.nan, [1e-6], True],
    "attention_bias": ["yes", 1, [True]],
    "tie_word_embeddings": ["yes", 1, None],
    "hidden_act": [None, 3, ["silu"], "gelu"],
    "model_type": [None, 3, ["llama"], {"a": 1}],
    "pad_token_id": ["x", 99, -1, 1.5],
    "quantization_config": [{"quant_method": "fp8"}, {}, "fp8"],
    "num_key_value_heads": [3, "2", [2]],
}
MAY_BE_NULL = {("head_dim", None), ("num_key_value_heads", None)}
CRAFTED = [(name, value) for name in SIZES for value in VALUES] + [
    (name, value) for name, values in OTHERS.items() for value in values
]
LEGAL = {"num_hidden_layers": (None,), "head_dim": (None,), "vocab_size": (), "intermediate_size": ()}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A directory with several files and an index."""
    directory = tmp_path_factory.mktemp("sound")
    KINDS["llama"].make().save_pretrained(directory)
    files = tensors(directory)
    (directory / "model.safetensors").unlink()
    with TensorWriter(directory, file_bytes=16384) as writer:
        for name, tensor in files.items():
            writer.put(name, tensor)
    assert len(list(directory.glob("*.safetensors"))) > 2
    return directory


def copied(sound, target):
    target.mkdir(parents=True)
    for path in sound.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def refused(directory, capsys, what):
    """The line, which names a file of the directory or the directory itself."""
    target = directory.parent / "target"
    code = main(["convert", str(directory), str(target)])
    output, errors = capsys.readouterr()
    assert (code, output, errors.count("\n")) == (2, "", 1), (what, errors)
    assert str(directory) in errors, (what, errors)
    assert not target.exists()
    return errors


FILES = ("config.json", "model.safetensors.index.json", "model-00001-of-", "model-00002-of-", "other.safetensors")


@pytest.mark.slow
def test_crafted_values_are_one_line_that_names_the_file_and_the_field(sound, tmp_path, capsys):
    raw = json.loads((sound / "config.json").read_text())
    directory = copied(sound, tmp_path / "theirs")
    for name, value in CRAFTED:
        if value in LEGAL.get(name, ()) and value is None:
            continue
        (directory / "config.json").write_text(json.dumps({**raw, name: value}))
        assert (
            f"{directory / 'config.json'}: " in (line := refused(directory, capsys, (name, value)))
            or "does not fit" in line
            or ("has the shape" in line)
        ), (name, value, line)
    assert len(CRAFTED) > 60


def shards(directory):
    return sorted(directory.glob("*.safetensors"))


def cut(name, keep):
    def damage(directory):
        path = shards(directory)[0] if name == "weights" else directory / name
        content = path.read_bytes()
        path.write_bytes(content[: keep if isinstance(keep, int) else int(len(content) * keep)])

    return damage


def overwritten(name, place, content):
    def damage(directory):
        path = shards(directory)[0] if name == "weights" else directory / name
        old = bytearray(path.read_bytes())
        old[place : place + len(content)] = content
        path.write_bytes(bytes(old))

    return damage


def header(change):
    def damage(directory):
        path = shards(directory)[0]
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        changed = change(json.loads(content[8 : 8 + length]))
        written = json.dumps(changed).encode()
        path.write_bytes(len(written).to_bytes(8, "little") + written + content[8 + length :])

    return damage


def first(table):
    return next(name for name in table if name != "__metadata__")


def another(places):
    """A shard that does not hold the first tensor."""
    return next(place for place in places.values() if place != places[first(places)])


def index(change):
    def damage(directory):
        path = directory / "model.safetensors.index.json"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))

    return damage


def without(table, name):
    return {key: value for key, value in table.items() if key != name}


def mapped(change):
    return index(lambda table: {**table, "weight_map": change(table["weight_map"])})


def appended(name, content):
    def damage(directory):
        with (directory / name).open("ab") as file:
            file.write(content)

    return damage


def whole(name, content):
    def damage(directory):
        (shards(directory)[0] if name == "weights" else directory / name).write_bytes(content)

    return damage


INDEX = "model.safetensors.index.json"
OTHER = [
    ("a page of an error", b"<!DOCTYPE html><html><body>404: not found</body></html>"),
    ("a pointer of git-lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"),
    ("an archive", b"PK\x03\x04" + bytes(60)),
    ("zeros", bytes(200)),
    ("text in two bytes a sign", "{'a': 1}".encode("utf-16")),
]
DAMAGES = {
    **{f"config cut at {keep}": cut("config.json", keep) for keep in (0, 1, 5, 40, 0.3, 0.6, 0.9)},
    **{f"index cut at {keep}": cut(INDEX, keep) for keep in (0, 1, 5, 40, 0.3, 0.6, 0.9)},
    **{f"weights cut at {keep}": cut("weights", keep) for keep in (0, 4, 8, 9, 20, 100, 0.3, 0.6, 0.9)},
    "weights short by one byte": lambda directory: cut("weights", shards(directory)[0].stat().st_size - 1)(directory),
    "weights long by one byte": lambda directory: shards(directory)[0].write_bytes(
        shards(directory)[0].read_bytes() + b"x"
    ),
    "no such text": overwritten("config.json", 3, b"\xff\xfe\xfd"),
    "a list": lambda directory: (directory / "config.json").write_text("[]"),
    "a number": lambda directory: (directory / "config.json").write_text("3"),
    "nothing": lambda directory: (directory / "config.json").write_text("null"),
    "deep": lambda directory: (directory / "config.json").write_text("[" * 100000),
    "no config": lambda directory: (directory / "config.json").unlink(),
    "a folder": lambda directory: ((directory / "config.json").unlink(), (directory / "config.json").mkdir()),
    "no shard": lambda directory: shards(directory)[1].unlink(),
    "a shard that is a folder": lambda directory: (
        shards(directory)[1].unlink(),
        (directory / shards(directory)[0].name.replace("00001", "00002")).mkdir(),
    ),
    "no index": lambda directory: (directory / INDEX).unlink(),
    "an index that is a list": index(lambda table: []),
    "an index without a map": index(lambda table: {}),
    "an index that maps to numbers": mapped(lambda table: dict.fromkeys(table, 3)),
    "an index that leaves the folder": mapped(lambda table: dict.fromkeys(table, "../model.safetensors")),
    "an index without a tensor": mapped(lambda table: without(table, first(table))),
    "an index with one tensor more": mapped(lambda table: {**table, "model.extra": next(iter(table.values()))}),
    "an index that names another shard": mapped(lambda table: {**table, first(table): another(table)}),
    "a long header": overwritten("weights", 0, (1 << 40).to_bytes(8, "little")),
    "a header of no length": overwritten("weights", 0, (0).to_bytes(8, "little")),
    "a header that is not JSON": overwritten("weights", 8, b"not JSON"),
    "an unknown dtype": header(lambda table: {**table, first(table): {**table[first(table)], "dtype": "F7"}}),
    "another dtype": header(lambda table: {**table, first(table): {**table[first(table)], "dtype": "I32"}}),
    "another shape": header(lambda table: {**table, first(table): {**table[first(table)], "shape": [1]}}),
    "no shape": header(lambda table: {**table, first(table): {**table[first(table)], "shape": []}}),
    "offsets backwards": header(lambda table: {**table, first(table): {**table[first(table)], "data_offsets": [9, 2]}}),
    "offsets beyond": header(
        lambda table: {**table, first(table): {**table[first(table)], "data_offsets": [0, 1 << 40]}}
    ),
    **{
        f"{name} is {what}": whole(name, content)
        for name in ("weights", "config.json", INDEX)
        for what, content in OTHER
    },
    "a number behind the fields": appended("config.json", b" 3"),
    "a byte order mark": overwritten("config.json", 0, b"\xef\xbb\xbf"),
    "zeros inside of the fields": overwritten("config.json", 20, bytes(6)),
    "a quote that is lost": lambda directory: (directory / "config.json").write_text(
        (directory / "config.json").read_text().replace('"', "", 1)
    ),
    "a link to itself": lambda directory: (
        (directory / "config.json").unlink(),
        (directory / "config.json").symlink_to(directory / "config.json"),
    ),
    "an index that maps to a shard that was never there": mapped(
        lambda table: {**table, first(table): "other.safetensors"}
    ),
    "an index that maps to nothing": mapped(lambda table: {**table, first(table): None}),
    "a header as long as can be": overwritten("weights", 0, b"\xff" * 8),
    "a header cut by its length": lambda directory: overwritten(
        "weights", 0, (int.from_bytes(shards(directory)[0].read_bytes()[:8], "little") - 9).to_bytes(8, "little")
    )(directory),
    "a header of zeros": overwritten("weights", 8, bytes(40)),
    "a header that is a list": header(lambda table: [table]),
    "no dtype": header(lambda table: {**table, first(table): without(table[first(table)], "dtype")}),
    "no offsets": header(lambda table: {**table, first(table): without(table[first(table)], "data_offsets")}),
    "a dtype that is a number": header(lambda table: {**table, first(table): {**table[first(table)], "dtype": 3}}),
    "a negative size": header(lambda table: {**table, first(table): {**table[first(table)], "shape": [-1, 32]}}),
    "a size that is no whole number": header(
        lambda table: {**table, first(table): {**table[first(table)], "shape": [1.5, 2]}}
    ),
    "three offsets": header(lambda table: {**table, first(table): {**table[first(table)], "data_offsets": [0, 4, 8]}}),
    "two tensors at one place": header(lambda table: {**table, "again": table[first(table)]}),
    "facts that are no text": header(lambda table: {**table, "__metadata__": {"format": 3}}),
    "a tensor without a name": header(lambda table: {"": table[first(table)], **without(table, first(table))}),
}


@pytest.mark.long
def test_fifty_kinds_of_damage_are_each_one_line_that_names_the_file(sound, tmp_path, capsys):
    assert len(DAMAGES) >= 80
    unnamed = {}
    for number, (name, damage) in enumerate(DAMAGES.items()):
        directory = copied(sound, tmp_path / str(number) / "theirs")
        damage(directory)
        line = refused(directory, capsys, name)
        lacking = "does not fit its configuration: " in line  # it names a tensor that no file has, or one too many
        if not (lacking or any(file in line for file in FILES)):
            unnamed[name] = line
    assert not unnamed


def test_what_is_not_damaged_is_converted(sound, tmp_path):
    assert main(["convert", str(sound), str(tmp_path / "ours")]) == 0
