"""What a checkpoint from elsewhere cannot do: pass as torch's legacy format, or as that of another run."""

import io
import os
import shutil

import pytest
import torch

from weft.checkpoint import CheckpointError, CheckpointManager
from weft.checkpoint.loading import unpack
from weft.checkpoint.manifest import MANIFEST, File, Manifest


class Bomb:
    """Leaves a folder behind where it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def saved(value, **options):
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def test_the_legacy_format_in_front_of_a_harmless_archive_is_refused(tmp_path):
    legacy = saved(bytearray(8), _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="it is not in torch's zip format"):
        unpack(io.BytesIO(legacy + saved(torch.ones(2))))
    for prefix in (b"PK\x03\x04", saved(torch.zeros(3))):
        with pytest.raises(ValueError, match="it has bytes outside of its archive"):
            unpack(io.BytesIO(prefix + saved(torch.ones(2))))
    assert torch.equal(unpack(io.BytesIO(saved(torch.ones(2)))), torch.ones(2))


def run_of(folder, value, steps=(1,)):
    with CheckpointManager(folder) as manager:
        for step in steps:
            manager.save(step, {"model": {"weight": torch.full((2,), float(value))}})
    return folder


def loaded(folder, step=None):
    state = {"model": {"weight": torch.zeros(2)}}
    manager = CheckpointManager(folder)
    return manager.load(state, step), state["model"]["weight"].tolist(), manager.passed_over


def test_a_checkpoint_of_another_run_is_passed_over_and_named(tmp_path):
    own, other = run_of(tmp_path / "own", 1, steps=(1, 2)), run_of(tmp_path / "other", 7, steps=(3,))
    shutil.copytree(other / "step-00000003", own / "step-00000003")
    step, values, passed_over = loaded(own)
    assert (step, values) == (2, [1.0, 1.0])
    assert "belongs to another run (identity" in str(passed_over[3]) and "--from" in str(passed_over[3])
    with pytest.raises(CheckpointError, match="belongs to another run"):
        loaded(own, 3)
    shutil.copytree(own / "step-00000001", tmp_path / "copy" / "step-00000001")  # without its identity file
    assert loaded(tmp_path / "copy")[0] == 1
    run_of(tmp_path / "copy", 5, steps=(4,))  # it continues that run
    assert Manifest.read(tmp_path / "copy/step-00000004").run == Manifest.read(own / "step-00000001").run


def test_a_save_that_could_not_write_the_identity_is_tried_again_with_it(tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    with CheckpointManager(tmp_path) as manager:
        for _ in range(2):
            with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left on device"):
                patch.setattr("weft.checkpoint.directory.os.replace", full_disk)
                manager.save(1, {"model": {"weight": torch.zeros(2)}})
        manager.save(1, {"model": {"weight": torch.zeros(2)}})
    assert Manifest.read(tmp_path / "step-00000001").run == (tmp_path / ".run").read_text().strip() != ""


def test_a_folder_without_an_identity_belongs_to_the_run_of_its_newest_checkpoint(tmp_path):
    own, other = run_of(tmp_path / "own", 1, steps=(1,)), run_of(tmp_path / "other", 7, steps=(3,))
    for folder, name in ((own, "step-00000001"), (other, "step-00000003")):
        shutil.copytree(folder / name, tmp_path / "both" / name)
    run_of(tmp_path / "both", 5, steps=(4,))
    assert Manifest.read(tmp_path / "both/step-00000004").run == Manifest.read(other / "step-00000003").run


def test_a_checkpoint_of_the_format_without_runs_is_still_read(tmp_path):
    folder = run_of(tmp_path / "own", 1)
    path = folder / "step-00000001"
    files = {p.name: File.measure(p) for p in path.iterdir() if p.name != MANIFEST}
    Manifest(1, 1, files, format=2).write(path)
    assert '"run"' not in (path / MANIFEST).read_text()
    assert loaded(folder)[:2] == (1, [1.0, 1.0])


def test_a_checkpoint_of_an_unknown_format_is_refused_with_the_formats_that_are_read(tmp_path):
    (tmp_path / MANIFEST).write_text('{"format": 9}')
    with pytest.raises(CheckpointError, match="has format 9, this version reads 2 and 3"):
        Manifest.read(tmp_path)
