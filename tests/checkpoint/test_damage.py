"""Disks lie: damage is never loaded, the newest intact checkpoint is, and what is intact stays."""

import os
import random
import re
import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.pool import distributed
from weft.checkpoint import CheckpointError, CheckpointManager, ModelState, inspect, manifest
from weft.checkpoint.manifest import File, Manifest

FILES = [".metadata", "__0_0.distcp", "weft.json"]


def value_of(step):
    return torch.arange(64).view(8, 8) + 1000.0 * step


def save(directory, *steps, keep=9):
    with CheckpointManager(directory, keep=keep) as manager:
        for step in steps:
            manager.save(step, {"model": {"weight": value_of(step)}, "data": {"position": step}})


def load(manager):
    """Which step was loaded, after checking that its values were."""
    state = {"model": {"weight": torch.zeros(8, 8)}, "data": {"position": 0}}
    step = manager.load(state)
    assert torch.equal(state["model"]["weight"], value_of(step))
    assert state["data"]["position"] == step
    return step


def names(directory):
    return sorted(path.name for path in directory.iterdir() if path.name not in (".lock", ".run"))


def flip(path, places, seed=0):
    content = bytearray(path.read_bytes())
    for place in random.Random(seed).sample(range(len(content)), min(places, len(content))):
        content[place] ^= 0xFF
    path.write_bytes(content)


DAMAGE = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "deleted": lambda path: path.unlink(),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_the_newest_intact_checkpoint_is_loaded_and_the_damage_is_named(tmp_path, name, damage):
    save(tmp_path, 1, 2)
    damaged = tmp_path / "step-00000002"
    damage(damaged / name)
    manager = CheckpointManager(tmp_path)
    assert load(manager) == 1
    assert list(manager.passed_over) == [2]
    said = str(manager.passed_over[2])
    assert str(damaged) in said and name in said and "damaged" in said and "\n" not in said
    with pytest.raises(CheckpointError, match=r"damaged: .*" + name.replace(".", r"\.")):
        manager.load({"model": {"weight": torch.zeros(8, 8)}, "data": {"position": 0}}, step=2)


def test_a_manifest_with_fields_that_no_save_writes_is_refused_even_if_its_checksum_is_right(tmp_path, monkeypatch):
    save(tmp_path, 1)
    checkpoint = tmp_path / "step-00000001"
    intact = Manifest.read(checkpoint)
    data = intact.files["__0_0.distcp"]
    broken = {
        "step -1 of 1 ranks": {"step": -1},
        "step 1 of 0 ranks": {"ranks": 0},
        "it does not list .metadata": {"files": {"__0_0.distcp": data}},
        "'x' is not the identity of a run": {"run": "x"},
        "a checksum is not a SHA-256": {"files": {**intact.files, "__0_0.distcp": File(data.bytes, ("x",))}},
    }
    for said, fields in broken.items():
        replace(intact, **fields).write(checkpoint)
        with pytest.raises(CheckpointError, match=re.escape(said)):
            Manifest.read(checkpoint)
    monkeypatch.setattr(manifest, "_LARGEST", 10)
    with pytest.raises(CheckpointError, match=r"it has \d+ bytes"):
        Manifest.read(checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_flipped_bytes_are_never_loaded(tmp_path, name):
    save(tmp_path, 1, 2)
    manager = CheckpointManager(tmp_path)
    path = tmp_path / "step-00000002" / name
    whole = path.read_bytes()
    for seed in range(50):
        flip(path, 1 if seed % 2 else 20, seed)
        assert load(manager) == 1
        path.write_bytes(whole)
    assert load(manager) == 2


def test_a_damaged_checkpoint_without_an_intact_older_one_is_a_one_line_error_and_stays(tmp_path):
    save(tmp_path, 1, 2)
    for step in (1, 2):
        flip(tmp_path / f"step-0000000{step}" / "__0_0.distcp", 20)
    with pytest.raises(CheckpointError) as error:
        load(CheckpointManager(tmp_path))
    for words in (
        "no checkpoint is intact",
        "replace one with an undamaged copy",
        "step-00000002 is damaged",
        "step-00000001 is damaged",
    ):
        assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_run_that_found_damage_deletes_no_existing_checkpoint(tmp_path):
    save(tmp_path, 1, 2, 3)
    flip(tmp_path / "step-00000003" / "__0_0.distcp", 20)
    with CheckpointManager(tmp_path, keep=1) as manager:
        assert load(manager) == 2
        for step in (3, 4):
            manager.save(step, {"model": {"weight": value_of(step)}, "data": {"position": step}})
            with pytest.raises(CheckpointError, match=f"step-0000000{step} already exists"):  # the new one is intact
                manager.save(step, {"model": {"weight": value_of(step)}, "data": {"position": step}})
    kept = names(tmp_path)
    assert kept[:2] == ["step-00000001", "step-00000002"]
    assert kept[2].startswith("step-00000003.damaged-")
    assert kept[3:] == ["step-00000004"]
    assert load(CheckpointManager(tmp_path)) == 4


NO_FOLDERS = {
    "a link to a disk that is not mounted": lambda path: path.symlink_to("/nowhere/at/all"),
    "a file": lambda path: path.write_text("not mounted"),
}


@pytest.mark.parametrize("make", NO_FOLDERS.values(), ids=NO_FOLDERS)
def test_a_newest_checkpoint_that_is_not_a_folder_is_damaged_and_an_older_intact_one_is_loaded(tmp_path, make):
    save(tmp_path, 1)
    place = tmp_path / "step-00000002"
    make(place)
    said = []
    with CheckpointManager(tmp_path, keep=1, progress=said.append) as manager:
        assert load(manager) == 1
        assert len(said) == 1 and said[0].startswith(f"{place} is damaged: weft.json cannot be used: ")
        with pytest.raises(CheckpointError, match=r"step-00000002 is damaged"):
            inspect.show(tmp_path)
        manager.save(2, {"model": {"weight": value_of(2)}, "data": {"position": 2}})
    kept = names(tmp_path)
    assert kept[:2] == ["step-00000001", "step-00000002"] and kept[2].startswith("step-00000002.damaged-")
    assert load(CheckpointManager(tmp_path)) == 2


class Loader:
    """A receiver that cannot take what was saved, on the last rank."""

    def state_dict(self):
        return {"position": 0}

    def load_state_dict(self, state):
        if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
            raise OSError(5, "the disk of the data is gone")


def test_an_error_of_a_stateful_object_is_not_damage_and_no_older_checkpoint_is_loaded(tmp_path):
    save(tmp_path, 1, 2)
    manager = CheckpointManager(tmp_path)
    with pytest.raises(OSError, match="the disk of the data is gone"):
        manager.load({"data": Loader()})
    assert manager.passed_over == {}


@pytest.mark.long
@distributed(2)
def test_an_error_of_a_stateful_object_on_one_rank_ends_the_load_on_all_ranks(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"data": {"position": step}}, asynchronous=False)
        wanted = OSError if dist.get_rank() else RuntimeError
        with pytest.raises(wanted, match="" if dist.get_rank() else "rank 1: OSError: .*the disk of the data is gone"):
            manager.load({"data": Loader()})
        assert manager.passed_over == {}


def replaced_while_read(monkeypatch, directory, *steps):
    """Another run saves the next of `steps`, and keeps that one only, whenever a checkpoint is about to be read."""
    coming = iter(steps)
    read = Manifest.read

    def read_late(checkpoint):
        if (step := next(coming, None)) is not None:
            save(directory, step, keep=1)
        return read(checkpoint)

    monkeypatch.setattr(Manifest, "read", read_late)


def test_where_another_run_replaces_the_newest_checkpoint_while_it_is_read_the_newer_one_is_taken(
    tmp_path, monkeypatch
):
    save(tmp_path, 1)
    replaced_while_read(monkeypatch, tmp_path, 2, 3)
    said = []
    manager = CheckpointManager(tmp_path, progress=said.append)
    assert load(manager) == 3
    assert manager.passed_over == {} and said == []


def test_a_checkpoint_that_was_named_and_is_replaced_while_it_is_read_is_not_said_to_be_damaged(tmp_path, monkeypatch):
    save(tmp_path, 1)
    replaced_while_read(monkeypatch, tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"step-00000001 does not exist: a run that trains") as error:
        CheckpointManager(tmp_path).load({"model": {"weight": torch.zeros(8, 8)}, "data": {"position": 0}}, step=1)
    assert "damaged" not in str(error.value)


def test_checkpoints_that_are_replaced_faster_than_they_are_read_end_the_reading(tmp_path, monkeypatch):
    save(tmp_path, 1)
    replaced_while_read(monkeypatch, tmp_path, *range(2, 100))
    with pytest.raises(CheckpointError, match="does not exist"):
        load(CheckpointManager(tmp_path))


def test_a_run_that_trains_is_inspected_without_what_it_replaces_meanwhile(tmp_path, monkeypatch, capsys):
    save(tmp_path, 1)
    replaced_while_read(monkeypatch, tmp_path, 2, 3)
    inspect.show(tmp_path, verify_content=True)
    assert "step-00000003: step 3, written by 1 rank" in capsys.readouterr().out


@pytest.mark.slow
def test_every_block_that_is_read_is_checked_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "BLOCK", 256)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": {"weight": torch.ones(999)}, "other": {"weight": torch.ones(999)}})
    path = tmp_path / "step-00000001" / "__0_0.distcp"
    content = path.read_bytes()
    broken, first = 0, {"model": {"weight": torch.zeros(999)}}
    CheckpointManager(tmp_path).load(first)
    assert first["model"]["weight"].sum() == 999
    with manifest.CheckedFile(path.parent, path.name, manifest.Manifest.read(path.parent).files[path.name]) as stream:
        stream.readall()
        assert len(stream._blocks) <= 4 < len(content) / 256, "a large file does not fit into memory"
    for place in range(0, len(content), 512):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            CheckpointManager(tmp_path).load(first, step=1)
        except CheckpointError:
            broken += 1
    assert len(content) // 512 * 0.4 < broken < len(content) // 512 * 0.7, "about half of it belongs to the other state"


@pytest.mark.slow
@distributed(2)
def test_damage_that_one_rank_reads_lets_all_ranks_fall_back(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    weft.fully_shard(model)
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(step)
            manager.save(step, {"model": ModelState(model), "own": {f"rank{dist.get_rank()}": torch.ones(3)}})
        manager.wait()
        if dist.get_rank() == 0:
            flip(tmp_path / "step-00000002" / "__1_0.distcp", 20)
        dist.barrier()
        assert manager.load({"model": ModelState(model)}) == 1
        assert "__1_0.distcp" in str(manager.passed_over[2])
        assert all((parameter.full_tensor() == 1).all() for parameter in model.parameters())
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(tmp_path / "step-00000002")
        dist.barrier()
        assert manager.load({"model": ModelState(model)}) == 1
        assert manager.passed_over == {}
