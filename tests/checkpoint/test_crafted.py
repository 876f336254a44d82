"""Checkpoints from elsewhere: what they name is not run, and what is wrong with them is one line."""

import io
import json
import math
import os
import pickle
import shutil
import zipfile
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType

from weft.checkpoint import CheckpointError, CheckpointManager, CheckpointMismatch, reading
from weft.checkpoint.loading import unpack
from weft.checkpoint.manifest import File, Manifest
from weft.checkpoint.metadata import read_metadata
from weft.cli import main

SHARD = "__0_0.distcp"


class Bomb:
    """Leaves a file behind wherever it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def checkpoint(tmp_path):
    with CheckpointManager(tmp_path / "checkpoints") as manager:
        manager.save(1, {"model": {"weight": torch.ones(3, 5)}, "data": {"position": 7}})
    return tmp_path / "checkpoints" / "step-00000001"


def load(checkpoint):
    state = {"model": {"weight": torch.zeros(3, 5)}, "data": {"position": 0}}
    CheckpointManager(checkpoint.parent).load(state)
    return state


def with_true_checksums(checkpoint):
    """What somebody does who knows the format: the manifest lists the files as they are now."""
    names = [path.name for path in checkpoint.iterdir() if path.name != "weft.json"]
    files = {name: File.measure(checkpoint / name) for name in names}
    Manifest(1, 1, files).write(checkpoint)


def metadata_of(checkpoint):
    return pickle.loads((checkpoint / ".metadata").read_bytes())


def put_metadata(checkpoint, metadata):
    content = metadata if isinstance(metadata, bytes) else pickle.dumps(metadata)
    (checkpoint / ".metadata").write_bytes(content)
    with_true_checksums(checkpoint)


def put_entry(checkpoint, key, content):
    """Replace the stored bytes of `key`."""
    metadata = metadata_of(checkpoint)
    (index,) = [index for index in metadata.storage_data if index.fqn == key]
    path = checkpoint / SHARD
    metadata.storage_data[index] = _StorageInfo(SHARD, path.stat().st_size, len(content))
    with path.open("ab") as stream:
        stream.write(content)
    put_metadata(checkpoint, metadata)


def put_places(metadata, **changes):
    for place in metadata.storage_data.values():
        for name, value in changes.items():
            setattr(place, name, value)


def put_place(checkpoint, **changes):
    metadata = metadata_of(checkpoint)
    put_places(metadata, **changes)
    put_metadata(checkpoint, metadata)


def put_size(checkpoint, size):
    metadata = metadata_of(checkpoint)
    entry = metadata.state_dict_metadata["model.weight"]
    entry.size = torch.Size(size)
    put_metadata(checkpoint, metadata)


def put_chunks(checkpoint, chunks):
    """Of "model.weight", each stored in a place of its own."""
    metadata = metadata_of(checkpoint)
    entry = metadata.state_dict_metadata["model.weight"]
    (index,) = [index for index in metadata.storage_data if index.fqn == "model.weight"]
    place = metadata.storage_data.pop(index)
    entry.chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in chunks]
    for at, _ in chunks:
        metadata.storage_data[MetadataIndex("model.weight", at)] = place
    put_metadata(checkpoint, metadata)


def put_json(checkpoint, change):
    path = checkpoint / "weft.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def with_pickle(pickled):
    """What `torch.save` writes, with another pickle in it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(7))) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            new.writestr(name, pickled if name.endswith("data.pkl") else old.read(name))
    return stream.getvalue()


def memory(name, called=None):
    """A call for a gigabyte of it, small enough for a machine on which it succeeds."""
    return b"\x80\x02" + (called or b"cbuiltins\n" + name + b"\n") + b"J" + (1 << 30).to_bytes(4, "little") + b"\x85R."


def deflated(content):
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return stream.getvalue()


def linked(path, target):
    path.unlink()
    path.symlink_to(target)


def link_to_a_copy(checkpoint, name):
    shutil.copy(checkpoint / name, checkpoint.parent / "elsewhere")
    linked(checkpoint / name, checkpoint.parent / "elsewhere")


def reduce_in_a_key(checkpoint, mark):
    metadata = metadata_of(checkpoint)
    metadata.state_dict_metadata[Bomb(mark)] = TensorStorageMetadata(TensorProperties(), torch.Size([]), [])
    put_metadata(checkpoint, metadata)


def patch_a_class(checkpoint):
    """`BUILD` on a class, not on an instance, would change it for the whole process."""
    build = pickle.dumps(MetadataIndex, 4)[:-1] + b"N}" + b"\x8c\x03fqnK\x01s\x86b."
    put_metadata(checkpoint, build)


CRAFTED = {
    "a call in place of the metadata": lambda c, mark: put_metadata(c, Bomb(mark)),
    "a call inside the metadata": lambda c, mark: put_metadata(c, Metadata({}, planner_data=Bomb(mark))),
    "a call in a key of the metadata": reduce_in_a_key,
    "a call written in the oldest protocol": lambda c, mark: put_metadata(c, f"cos\nmkdir\n(S'{mark}'\ntR.".encode()),
    "a call by an instance": lambda c, mark: put_metadata(c, f"(S'{mark}'\nios\nmkdir\n.".encode()),
    "a class of torch that no metadata needs": lambda c, mark: put_metadata(c, pickle.dumps(torch.nn.Linear)),
    "a function behind an allowed name": lambda c, mark: put_metadata(c, b"\x80\x04\x8c\x05torch\x8c\x07os.open\x93."),
    "a class that is changed": lambda c, mark: patch_a_class(c),
    "a memo of absurd size": lambda c, mark: put_metadata(c, b"\x80\x02Kxr\xff\xff\xff\x7f."),
    "metadata that is something else": lambda c, mark: put_metadata(c, {"state_dict_metadata": {}}),
    "metadata that is no pickle": lambda c, mark: put_metadata(c, b"\xff" * 100),
    "a call in place of plain data": lambda c, mark: put_entry(c, "data.position", saved(Bomb(mark))),
    "a bare pickle in place of plain data": lambda c, mark: put_entry(c, "data.position", pickle.dumps(Bomb(mark))),
    "a call in place of a tensor": lambda c, mark: put_entry(c, "model.weight", saved(Bomb(mark))),
    "a bare pickle in place of a tensor": lambda c, mark: put_entry(
        c, "model.weight", pickle.dumps(Bomb(mark)) + bytes(60)
    ),
    "a module in place of a tensor": lambda c, mark: put_entry(c, "model.weight", saved(torch.nn.Linear(1, 1))),
    "a tensor of another shape": lambda c, mark: put_entry(c, "model.weight", saved(torch.ones(2, 5))),
    "a tensor of another dtype": lambda c, mark: put_entry(c, "model.weight", saved(torch.ones(3, 5).double())),
    "a call that takes memory": lambda c, mark: put_entry(c, "data.position", with_pickle(memory(b"bytearray"))),
    "a call that takes memory, told apart": lambda c, mark: put_entry(
        c, "data.position", with_pickle(memory(b"bytearray", b"\x8c\x08builtins\x8c\x09bytearray\x93"))
    ),
    "a storage that takes memory": lambda c, mark: put_entry(
        c, "data.position", with_pickle(memory(b"", b"ctorch.storage\nUntypedStorage\n"))
    ),
    "parts that lie on each other": lambda c, mark: put_chunks(c, [((0, 0), (2, 5)), ((0, 0), (1, 5))]),
    "parts that overlap in columns": lambda c, mark: put_chunks(c, [((0, 0), (3, 3)), ((0, 1), (3, 2))]),
    "digits without end": lambda c, mark: put_size(c, (10**5000, 1)),
    "a compressed tensor": lambda c, mark: put_entry(c, "model.weight", deflated(saved(torch.ones(3, 5)))),
    "a path out of the checkpoint": lambda c, mark: put_place(c, relative_path="../../secret"),
    "an absolute path": lambda c, mark: put_place(c, relative_path="/etc/passwd"),
    "a place behind the end": lambda c, mark: put_place(c, offset=1 << 60),
    "a place of absurd length": lambda c, mark: put_place(c, length=1 << 60),
    "a negative place": lambda c, mark: put_place(c, offset=-8),
    "a transformation": lambda c, mark: put_place(c, transform_descriptors=["zstd"]),
    "an absurd shape": lambda c, mark: put_size(c, (1 << 40, 1 << 20)),
    "a shape of words": lambda c, mark: put_metadata(
        c, pickle.dumps(metadata_of(c)).replace(b"\x8c\x05sizes", b"\x8c\x05xizes")
    ),
    "json that lists a file elsewhere": lambda c, mark: put_json(
        c, lambda fields: fields["files"].update({"../x": fields["files"][SHARD]})
    ),
    "json with absurd lengths": lambda c, mark: put_json(
        c, lambda fields: fields["files"][SHARD].update(bytes=1 << 80)
    ),
    "json with other types": lambda c, mark: put_json(c, lambda fields: fields.update(files=[1, 2])),
    "json without end": lambda c, mark: (c / "weft.json").write_text("[" * 200_000),
    "a file without checksums": lambda c, mark: Manifest(
        1, 1, {name: File(file.bytes, ()) for name, file in Manifest.read(c).files.items()}
    ).write(c),
    "json of another step": lambda c, mark: Manifest(7, 1, Manifest.read(c).files).write(c),
    "a shard that is a link": lambda c, mark: link_to_a_copy(c, SHARD),
    "metadata that is a link": lambda c, mark: link_to_a_copy(c, ".metadata"),
    "a manifest that is a link": lambda c, mark: link_to_a_copy(c, "weft.json"),
    "a shard that never ends": lambda c, mark: linked(c / SHARD, "/dev/zero"),
    "a shard that is a pipe": lambda c, mark: ((c / SHARD).unlink(), os.mkfifo(c / SHARD)),
}


@pytest.mark.parametrize("craft", CRAFTED.values(), ids=CRAFTED)
def test_a_crafted_checkpoint_runs_no_code_and_is_a_one_line_error(checkpoint, tmp_path, capsys, craft):
    mark = tmp_path / "mark"
    craft(checkpoint, mark)
    with pytest.raises((CheckpointError, CheckpointMismatch)) as error:
        load(checkpoint)
    assert not mark.exists()
    assert "\n" not in str(error.value) and str(error.value).isprintable()
    assert str(checkpoint) in str(error.value)
    for words in (["inspect", str(checkpoint)], ["inspect", str(checkpoint.parent), "--verify"]):
        code = main(words)
        said = capsys.readouterr().err
        assert not mark.exists()
        assert (code, said.count("\n")) in ((0, 0), (1, 1)), said


def test_what_the_metadata_names_is_told(checkpoint, tmp_path):
    put_metadata(checkpoint, Bomb(tmp_path / "mark"))
    with pytest.raises(CheckpointError, match=r"\.metadata names posix\.mkdir, which no checkpoint needs"):
        load(checkpoint)


def test_a_key_cannot_write_to_the_terminal(checkpoint, capsys):
    metadata = metadata_of(checkpoint)
    metadata.state_dict_metadata["model.\x1b[2Jw"] = metadata.state_dict_metadata.pop("model.weight")
    put_metadata(checkpoint, metadata)
    assert main(["inspect", str(checkpoint)]) == 1
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.long
def test_a_resume_from_a_crafted_checkpoint_runs_no_code_and_is_a_one_line_error(pool, tmp_path):
    from tests.train.command import weft, write_config
    from tests.train.test_loop import train_on

    config = write_config(tmp_path, train__steps=1, train__validate_every=0)
    pool.run(1, train_on, config, tmp_path / "runs" / "tiny", stop_at=2)
    checkpoint = tmp_path / "runs" / "tiny" / "checkpoints" / "step-00000001"
    mark = tmp_path / "mark"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Bomb(mark)))
    with_true_checksums(checkpoint)
    done = weft("train", config, "--resume", "--set", "train.steps=2")
    assert not mark.exists()
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"{checkpoint} cannot be trusted: .metadata names posix.mkdir" in done.stderr


def test_enumerations_are_read_as_python_3_11_2_writes_them_and_no_other_attribute_is(checkpoint, monkeypatch):
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda value, _: (getattr, (type(value), value.name)))
    metadata = metadata_of(checkpoint)
    put_metadata(checkpoint, metadata)
    assert b"getattr" in (checkpoint / ".metadata").read_bytes()
    assert load(checkpoint)["model"]["weight"].eq(1).all()
    for asked in ((_MEM_FORMAT_ENCODING, "__class__"), (Metadata, "__init__"), (Metadata, "TORCH_PRESERVE_FORMAT")):
        monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda value, _, asked=asked: (getattr, asked))
        put_metadata(checkpoint, metadata)
        with pytest.raises(CheckpointError, match="asks for an attribute, which no checkpoint needs"):
            load(checkpoint)


def test_torch_reads_a_checkpoint_as_its_own(checkpoint):
    state = {"model.weight": torch.zeros(3, 5)}
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    assert torch.equal(state["model.weight"], load(checkpoint)["model"]["weight"])


def test_a_repeated_element_is_an_error(checkpoint):
    put_chunks(checkpoint, [((0, 0), (3, 3)), ((0, 1), (3, 2))])
    with pytest.raises(CheckpointError, match=r"has some elements of model\.weight twice"):
        load(checkpoint)


def put_parts(metadata, parts):
    """Of "model.weight", each with a place that is as long as it."""
    for at, sizes in parts:
        metadata.storage_data[MetadataIndex("model.weight", at)] = _StorageInfo(SHARD, 0, 4 * math.prod(sizes))
    metadata.state_dict_metadata["model.weight"].chunks = [ChunkStorageMetadata(at, sizes) for at, sizes in parts]


def put_length(metadata, key, length):
    for index, place in metadata.storage_data.items():
        if index.fqn == key:
            place.length = length


def weight(metadata):
    return metadata.state_dict_metadata["model.weight"]


RULES = [
    ("has the key 'a\\\\nb'", lambda m: m.state_dict_metadata.update({"a\nb": weight(m)})),
    ("makes data.position too long", lambda m: put_length(m, "data.position", (1 << 28) + 1)),
    ("holds a int under model.weight", lambda m: m.state_dict_metadata.update({"model.weight": 3})),
    ("gives model.weight no dtype", lambda m: setattr(weight(m).properties, "dtype", None)),
    (r"gives model.weight the shape \(3, -5\)", lambda m: setattr(weight(m), "size", (3, -5))),
    (r"gives model.weight the shape \(3, True\)", lambda m: setattr(weight(m), "size", (3, True))),
    ("has a part of model.weight that lies outside the tensor", lambda m: put_parts(m, [((0, 1), (3, 5))])),
    ("has a part of model.weight that lies outside the tensor", lambda m: put_parts(m, [((0, -1), (3, 5))])),
    ("has a part of model.weight that lies outside the tensor", lambda m: put_parts(m, [((0,), (3,))])),
    ("says that 60 bytes of model.weight are stored in 59", lambda m: put_length(m, "model.weight", 59)),
    (
        "says that 60 bytes of model.weight are stored in 65597",
        lambda m: put_length(m, "model.weight", 60 + (1 << 16) + 1),
    ),
    ("has 10 of the 15 elements of model.weight", lambda m: put_parts(m, [((0, 0), (2, 5))])),
    ("looks for parts in 'there', which is not a file", lambda m: put_places(m, relative_path="there")),
    ("looks for parts outside of", lambda m: put_places(m, offset=-8)),
    ("looks for parts outside of", lambda m: put_places(m, offset=1 << 30)),
    ("wants parts of .* transformed", lambda m: put_places(m, transform_descriptors=["zstd"])),
]


@pytest.mark.parametrize(("said", "broken"), RULES)
def test_each_rule_that_the_metadata_breaks_is_an_error(checkpoint, said, broken):
    """By its own words: another rule, or whoever reads the parts, may refuse it as well, or may not."""
    metadata = metadata_of(checkpoint)
    broken(metadata)
    manifest = Manifest(1, 1, {SHARD: File(1 << 30, ())})
    with pytest.raises(CheckpointError, match=said):
        read_metadata(pickle.dumps(metadata), manifest)


def test_a_part_that_is_no_tensor_is_an_error():
    stream = io.BytesIO()
    torch.save([1], stream)
    stream.seek(0)
    with pytest.raises(ValueError, match="it contains a list, not a tensor"):
        reading._tensor(stream)


@pytest.mark.parametrize(
    "error", [CheckpointError("damaged"), MemoryError(), RuntimeError("[enforce fail] can't allocate memory: 9")]
)
def test_memory_that_runs_out_while_a_part_is_read_is_not_said_to_be_damage(tmp_path, error):
    reader = reading.Reader(tmp_path, mock.Mock(), mock.Mock())
    item = mock.Mock(type=LoadItemType.BYTE_IO)
    with pytest.raises(type(error)) as raised:
        reader._read(item, mock.Mock(readall=mock.Mock(side_effect=error)), mock.Mock(), "file")
    assert raised.value is error


@pytest.mark.parametrize("name", ["bytearray", "frozenset"])
def test_what_plain_data_may_not_name_is_told(name):
    with pytest.raises(ValueError, match=rf"it names builtins\.{name}, which no checkpoint needs"):
        unpack(io.BytesIO(with_pickle(memory(name.encode()))))


def test_what_plain_data_names_in_another_way_is_told():
    apart = with_pickle(memory(b"", b"\x8c\x08builtins\x8c\x09bytearray\x93"))
    capitals = with_pickle(memory(b"bytearray")).replace(b"data.pkl", b"DATA.PKL")
    for content, said in ((apart, "it uses the opcode STACK_GLOBAL"), (capitals, "it names builtins.bytearray")):
        with pytest.raises(ValueError, match=f"{said}, which no checkpoint needs"):
            unpack(io.BytesIO(content))


@pytest.mark.parametrize(("calls", "size"), [(1, 1 << 30), (1 << 12, 1 << 10)])
def test_storages_without_tensors_that_would_take_memory_are_refused(calls, size):
    one = b"ctorch.storage\nUntypedStorage\nJ" + size.to_bytes(4, "little") + b"\x85R0"
    with pytest.raises(ValueError, match=f"loading it could allocate {calls * size} bytes, "):
        unpack(io.BytesIO(with_pickle(b"\x80\x02" + one * calls + b"K\x01.")))


def test_what_is_compressed_is_told():
    with pytest.raises(ValueError, match="it is compressed"):
        unpack(io.BytesIO(deflated(saved([0] * 100))))


def test_plain_data_and_tensors_of_any_dtype_are_read():
    values = [1, 2.5, "a", b"b", None, {"c": (1, {2})}, 3j, torch.float32, torch.Size([2]), 1 << 70]
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.uint16, torch.float8_e4m3fn):
        tensor = torch.zeros(2, dtype=dtype)
        assert unpack(io.BytesIO(saved(tensor))).dtype == dtype
        assert unpack(io.BytesIO(saved(torch.nn.Parameter(tensor, requires_grad=False)))).dtype == dtype
    assert unpack(io.BytesIO(saved(values))) == values
