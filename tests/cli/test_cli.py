import argparse
import json
import re
import resource
import shutil
import subprocess
import sys

import pytest
import torch

from tests.train.command import weft, write_config
from weft.checkpoint import CheckpointManager
from weft.cli import main
from weft.cli.parser import EXIT_CODES, make_parser
from weft.errors import ConfigError
from weft.train.run import launch, worker


def refused(capsys, *arguments):
    """The one line that a wrong call prints, after checking that it is one and the exit code is 2."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as error:
        code = error.code
    output, errors = capsys.readouterr()
    assert code == 2
    assert output == ""
    assert errors.count("\n") == 1
    return errors


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("train.stesp=3", "did you mean train.steps?"),
        ("train.steps=many", "train.steps"),
        ("train.global_batch_size=7", "2 x 2 = 4; nearest valid: 4 or 8"),
        ("model.vocab_size=100", "model.vocab_size = 100"),
        ("model.pattern=[*-", "pattern"),
        ("sharding.strategy=zero3", "optim_grads_params"),
        ("sharding.dp_shard=3", "sharding.dp_shard = 3"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(tmp_path, capsys, setting, said):
    line = refused(capsys, "train", write_config(tmp_path), "--ranks", 2, "--set", setting)
    assert line.startswith("weft train: ")
    assert said in line
    assert not (tmp_path / "runs").exists()


def test_a_missing_configuration_is_one_line(tmp_path, capsys):
    assert "cannot be read" in refused(capsys, "train", tmp_path / "none.toml")
    assert "no configuration is named" in refused(capsys, "train")


def test_wrong_options_are_one_line(tmp_path, capsys):
    assert "--ranks 0: must be at least 1" in refused(capsys, "train", write_config(tmp_path), "--ranks", 0)
    assert refused(capsys, "trian") == "weft: unknown command 'trian'; did you mean train?\n"
    assert "unknown command 'fly'; choose from train, check, " in refused(capsys, "fly")
    assert refused(capsys, "--completion", "bsh") == "weft: unknown --completion 'bsh'; did you mean bash?\n"
    assert "is neither a schedule nor a file; did you mean gpipe?" in refused(capsys, "schedule", "gpip")
    assert refused(capsys, "schedule", "1f1b", "--ranks", "4").endswith("--ranks 4; see weft schedule --help\n")
    line = refused(capsys, "train", write_config(tmp_path), "--set", "train.steps")
    assert line == "weft train: --set train.steps: must be SECTION.NAME=VALUE, such as --set train.steps=20\n"
    line = refused(capsys, "train", "x.toml", "--rnaks")
    assert line == "weft train: unrecognized arguments: --rnaks; did you mean --ranks?\n"
    line = refused(capsys, "train", "x.toml", "--fly")
    assert line == "weft train: unrecognized arguments: --fly; see weft train --help\n"
    line = refused(capsys, "train", "x.toml", "train.steps=3", "optimizer.lr=0.1")
    assert line.endswith("; change settings with --set train.steps=3 --set optimizer.lr=0.1\n")
    for words in (["--train.steps=3", "--optimizer.lr=0.1"], ["--train.steps", "3", "--optimizer.lr", "0.1"]):
        line = refused(capsys, "train", "x.toml", *words)
        assert line.endswith("; change settings with --set train.steps=3 --set optimizer.lr=0.1\n")
    for words in (["--steps", "3"], ["--nproc", "2"], ["--train.overlap"]):  # not --set, --from or --trust
        assert refused(capsys, "train", "x.toml", *words).endswith("; see weft train --help\n")
    line = refused(capsys, "bench", "fsdp2", "--link", "4gbit")
    assert "arguments after --, as in weft bench fsdp2 -- --link 4gbit" in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "3"], "--ranks 3: needs a configuration; name one with --check FILE"),
        (["--ranks", "0", "--check", "any.toml"], "--ranks 0: must be at least 1"),
        (["--markdown", "--check", "any.toml"], "--check: not allowed with argument --markdown"),
    ],
)
def test_options_of_config_that_would_do_nothing_are_refused(capsys, options, said):
    assert said in refused(capsys, "config", *options)


def test_every_command_has_one_line_for_each_option_and_names_the_exit_codes():
    (commands,) = (each for each in make_parser()._actions if isinstance(each, argparse._SubParsersAction))
    for name, command in commands.choices.items():
        assert str(command.epilog).endswith(EXIT_CODES), name
        assert [each.dest for each in command._actions if each.option_strings and not each.help] == [], name


def test_ranks_that_contradict_the_launcher_are_an_error(tmp_path, capsys, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    line = refused(capsys, "train", write_config(tmp_path), "--ranks", 2)
    assert "torchrun has already started 4 ranks" in line


def test_resume_before_the_configuration_means_the_newest_run(tmp_path, capsys):
    line = refused(capsys, "train", "--resume", write_config(tmp_path))
    assert "no run 'tiny' in" in line


def test_resuming_a_run_s_configuration_resumes_that_run(tmp_path, capsys, monkeypatch):
    run = tmp_path / "runs" / "tiny"
    for directory in (run, run.with_name("tiny-2")):
        (directory / "checkpoints" / "step-00000003").mkdir(parents=True)
        shutil.copy(write_config(tmp_path), directory / "config.toml")
    chosen = []
    monkeypatch.setattr(launch, "launch", lambda arguments, ranks, run, command, **_: chosen.append(run.directory) or 0)
    assert main(["train", "--resume", str(run / "config.toml"), "--ranks", "1"]) == 0
    assert chosen == [run]


@pytest.mark.parametrize("words", [["--from", "none"], ["--set", "run.weights=none"]])
@pytest.mark.parametrize("resume", [["--resume"], ["--set", "run.resume=true"]])
def test_weights_for_a_resumed_run_are_refused(tmp_path, capsys, words, resume):
    line = refused(capsys, "train", write_config(tmp_path), *resume, *words)
    assert f"{' '.join(words)}: has no effect on a resumed run" in line


def test_weights_of_a_new_run_are_no_part_of_the_command_that_goes_on(tmp_path, monkeypatch):
    chosen = []
    monkeypatch.setattr(launch, "launch", lambda arguments, ranks, run, command, **_: chosen.append(command) or 0)
    words = ["--from", "first", "--set", "train.steps=3", "--ranks", "1"]
    for more in ([], ["--resume-or-start"]):
        assert main(["train", str(write_config(tmp_path)), *words, *more]) == 0
    runs = tmp_path / "runs"
    go_on = f"weft train {tmp_path / 'tiny.toml'} --set train.steps=3 --ranks 1 --resume"
    assert chosen == [f"{go_on} {runs / 'tiny'}", f"{go_on} {runs / 'tiny-2'}"]


def test_under_torchrun_the_command_that_goes_on_starts_with_torchrun(tmp_path, monkeypatch):
    chosen = []
    monkeypatch.setattr(worker, "work", lambda place, path, overrides, resume, command, **_: chosen.append(command))
    monkeypatch.setattr(launch, "launch", lambda *_, **__: 0)
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host1"}
    for name, value in {**place, "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    config = write_config(tmp_path)
    main(["train", str(config), "--set", "train.steps=3"])
    assert chosen == [f"torchrun --nproc-per-node 2 -m weft train {config} --set train.steps=3"]


def test_an_earlier_run_of_the_name_is_resumed_without_the_settings_of_the_new_one(tmp_path, monkeypatch):
    earlier = tmp_path / "runs" / "tiny"
    (earlier / "checkpoints" / "step-00000007").mkdir(parents=True)
    notes = []
    monkeypatch.setattr(launch, "launch", lambda arguments, ranks, run, command, **_: notes.append(run.note) or 0)
    assert main(["train", str(write_config(tmp_path)), "--set", "train.steps=3", "--ranks", "1"]) == 0
    go_on = f"it resumes from step 7 with: weft train --ranks 1 --resume {earlier}"
    assert notes == [f"a new run in {earlier}-2; {earlier} is unchanged; {go_on}"]


def test_resume_of_what_is_not_there_is_no_word_about_configurations(tmp_path, capsys):
    line = refused(capsys, "train", "--resume", tmp_path / "none")
    assert f"--resume {tmp_path / 'none'}: does not exist; name the directory of a run" in line
    (tmp_path / "none").touch()
    line = refused(capsys, "train", "--resume", tmp_path / "none")
    assert f"--resume {tmp_path / 'none'}: is not a directory; name the directory of a run" in line


@pytest.mark.parametrize("named", [False, True])
def test_resume_of_the_folder_of_runs_names_the_runs(tmp_path, capsys, named):
    for name in ("first", "second"):
        (tmp_path / "runs" / name / "checkpoints" / "step-00000003").mkdir(parents=True)
    config = [write_config(tmp_path)] if named else []
    line = refused(capsys, "train", *config, "--resume", tmp_path / "runs")
    assert f"name one of them: {tmp_path / 'runs' / 'first'}, {tmp_path / 'runs' / 'second'}" in line


@pytest.mark.parametrize("named", [False, True])
def test_resume_of_one_checkpoint_names_the_run(tmp_path, capsys, monkeypatch, named):
    run = tmp_path / "runs" / "first"
    (run / "checkpoints" / "step-00000003").mkdir(parents=True)
    (run / "config.toml").touch()
    config = [write_config(tmp_path)] if named else []
    monkeypatch.chdir(run)
    for inside in (run / "checkpoints", run / "checkpoints" / "step-00000003", "checkpoints"):
        line = refused(capsys, "train", *config, "--resume", inside)
        assert f"--resume {inside}: is not a run, but lies inside one" in line and line.endswith(
            f", so name the run: {run}\n"
        )


def test_what_lies_in_a_run_may_be_a_run_or_a_folder_of_runs(tmp_path, capsys, monkeypatch):
    run = tmp_path / "first"
    for directory in (run, run / "copy", run / "ablations" / "a"):
        (directory / "checkpoints" / "step-00000003").mkdir(parents=True)
    config = shutil.copy(write_config(tmp_path), run / "config.toml")
    line = refused(capsys, "train", config, "--resume", run / "ablations")
    assert line.endswith(f"is not a run, but a folder of runs; name one of them: {run / 'ablations' / 'a'}\n")
    chosen = []
    monkeypatch.setattr(launch, "launch", lambda arguments, ranks, run, command, **_: chosen.append(run.directory) or 0)
    assert main(["train", str(config), "--resume", str(run / "copy"), "--ranks", "1"]) == 0
    assert chosen == [run / "copy"]
    shutil.rmtree(run / "checkpoints")
    (run / "runs").mkdir()  # beside the configuration of a project, which is no run
    assert f"{run / 'runs'} holds no committed checkpoint" in refused(capsys, "train", config, "--resume", run / "runs")


@pytest.mark.long
def test_what_only_the_ranks_can_find_wrong_is_one_line_too(tmp_path):
    done = weft("train", write_config(tmp_path), "--ranks", 2, "--set", "data.sequence_length=100000")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "0 sequences of 100000 for 2 ranks, and each needs one or more" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_inspect_shows_what_a_checkpoint_holds(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    with CheckpointManager(tmp_path / "checkpoints") as manager:
        for step in (10, 20):
            numbers = {"weight": torch.ones(3, 5), "half": torch.ones(2, dtype=torch.bfloat16)}
            manager.save(step, {"model": numbers, "data": {"position": 7}})
    (tmp_path / "checkpoints" / "step-00000030.tmp-0123456789ab").mkdir()
    assert main(["inspect", str(tmp_path), "--verify"]) == 0
    shown = capsys.readouterr().out
    for words in ("step-00000010", "step-00000020", "checksums equal", "not complete: ignored"):
        assert words in shown
    assert "2 tensors: model 64 bytes" in shown
    assert "model.weight" not in shown and " \n" not in shown
    one = tmp_path / "checkpoints" / "step-00000020"
    assert f"weft inspect {one} lists its tensors" in shown
    assert main(["inspect", str(one)]) == 0
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if "model.weight" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "model.weight",
        "float32",
        "3 x 5",
        "whole",
        "60 bytes",
    ]
    assert "plain data: data.position" in shown and " \n" not in shown
    assert main(["inspect", str(one.with_name("step-00000010"))]) == 0
    assert "step 10, written by 1 rank, 2 files" in capsys.readouterr().out


def test_keys_stay_whole_where_a_program_reads_them(tmp_path, capsys):
    key = "decoder.layers." * 20
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": {key: torch.ones(3)}})
    assert main(["inspect", str(tmp_path / "step-00000001")]) == 0
    assert any(f" model.{key} " in line for line in capsys.readouterr().out.splitlines())


def test_inspect_of_something_else_is_refused(tmp_path, capsys):
    assert "contains no checkpoint" in refused(capsys, "inspect", tmp_path)


def test_inspect_of_a_damaged_checkpoint_fails(tmp_path, capsys):
    tmp_path = tmp_path / "exp[/b]"
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": {"weight": torch.ones(3)}})
    (tmp_path / "step-00000001" / ".metadata").unlink()
    assert main(["inspect", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert "damaged: .metadata is missing" in said.err and str(tmp_path) in said.out.replace("\n", ""), (
        "a path is no markup"
    )


def test_inspect_of_a_run_shows_which_checkpoints_are_damaged_and_the_newest_that_is_not(tmp_path, capsys):
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"model": {"weight": torch.ones(3)}})
    (tmp_path / "step-00000001" / ".metadata").unlink()
    metadata = tmp_path / "step-00000003" / ".metadata"
    metadata.write_bytes(bytes(len(metadata.read_bytes())))  # only who reads it knows
    assert main(["inspect", str(tmp_path)]) == 1
    shown, errors = capsys.readouterr()
    rows = [line for line in shown.splitlines() if " step-0" in line]
    assert ["damaged: a resume skips it" in row for row in rows] == [True, False, True]
    assert "step 2, written by 1 rank" in shown
    assert "step-00000001 is damaged: .metadata is missing; " in errors
    assert "step-00000003 is damaged: the checksum of .metadata differs" in errors


def test_help_takes_less_than_half_a_second_of_processor_time():
    def spent():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = spent()
    subprocess.run([sys.executable, "-m", "weft", "--help"], check=True, capture_output=True)
    assert spent() - before < 0.5


@pytest.mark.slow
def test_starting_the_ranks_is_printed_before_torch_is_imported(tmp_path):
    program = (
        "import sys, weft.cli, weft.train.run.launch as launch\n"
        "launch.launch = lambda *_, **__: print('torch' in sys.modules) or 0\n"
        "sys.exit(weft.cli.main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", program, "train", write_config(tmp_path), "--ranks", "2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.parametrize(
    ("code", "kind", "left"),
    [(2, "configuration", 0), (1, "refused", 0), (1, "ended", 0), (3, None, 0), (1, "failure", 1)],
)
def test_a_run_that_ends_in_a_line_before_it_has_trained_leaves_no_directory(tmp_path, monkeypatch, code, kind, left):
    rank = tmp_path / "rank"
    report = json.dumps({"time": 1, "kind": kind, "message": "why", "traceback": "where"})
    said = f"echo '{report}' > $(dirname $WEFT_STORE)/rank-$RANK.error\n" if kind else ""
    rank.write_text(f"#!/bin/sh\n{said}exit {code}\n")
    rank.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(rank))
    monkeypatch.setattr(launch, "on_stop_signals", lambda handler: {})
    assert main(["train", str(write_config(tmp_path)), "--ranks", "2"]) == code
    assert len(list(tmp_path.glob("runs/*"))) == left and (tmp_path / "runs").exists() == bool(left)


def test_the_version_names_what_a_report_of_a_fault_needs(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert re.fullmatch(r"weft \S+, Python \S+, torch \S+\n", capsys.readouterr().out)


def test_an_unknown_benchmark_is_refused_with_the_names_of_those_there_are(tmp_path, capsys, monkeypatch):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "hello.py").write_text("")
    (tmp_path / "benchmarks" / "_shared.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, "bench", "hallo") == "weft bench: 'hallo' is not a benchmark; did you mean hello?\n"
    line = refused(capsys, "bench", "zzz")
    assert "'zzz' is not a benchmark; choose from " in line
    assert "hello" in line
    assert "_shared" not in line


@pytest.mark.long
def test_bench_runs_a_program_on_local_ranks(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "hello.py").write_text(
        "import os, sys\n"
        "line = f\"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} {sys.argv[1:]}\\n\"\n"
        "os.write(1, line.encode())  # one write per line: ranks share the pipe, and print may write the end apart\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "weft", "bench", "hello", "--ranks", "2", "--", "--rounds", "3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert said == ["rank 0 of 2 ['--rounds', '3']", "rank 1 of 2 ['--rounds', '3']"]


@pytest.mark.long
def test_the_command_and_the_module_are_the_same_program():
    command = shutil.which("weft", path=str(sys.executable).rpartition("/")[0])
    assert command is not None
    for words in ([command], [sys.executable, "-m", "weft"]):
        done = subprocess.run([*words, "--help"], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0
        assert done.stdout.startswith("usage: weft ")
        assert "exit code: 0 success" in " ".join(done.stdout.split())


def test_an_option_is_not_shortened(capsys):
    assert main(["train", "config.toml", "--rank", "2"]) == 2
    assert capsys.readouterr().err == "weft train: unrecognized arguments: --rank 2; did you mean --ranks?\n"


@pytest.mark.parametrize(
    ("words", "code"), [(["train", "c"], 4), (["train", "--resume", "r"], 3), (["pattern", "M"], 1)]
)
def test_an_interrupt_before_a_command_can_handle_it_has_the_exit_code_of_its_kind(monkeypatch, capsys, words, code):
    def interrupted(options: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    for place in ("weft.cli.parser.start", "weft.cli.commands.pattern"):
        monkeypatch.setattr(place, interrupted)
    assert main(words) == code
    assert ("nothing was saved" in capsys.readouterr().err) == (code == 4)


@pytest.mark.parametrize(
    "words",
    [
        *(["inspect"], ["report"], ["eval"], ["sample"], ["chat"], ["convert"], ["config", "--from"]),
        *(["train", "--resume"], ["train", "CONFIG", "--resume"]),
    ],
)
def test_a_path_that_does_not_exist_is_named_as_such(tmp_path, capsys, words):
    missing = tmp_path / "nope"
    words = [str(write_config(tmp_path)) if word == "CONFIG" else word for word in words]
    line = refused(capsys, *words, missing, *([tmp_path / "new"] if words == ["convert"] else []))
    assert f"{missing}: does not exist; name " in line


def test_data_that_a_step_refuses_are_one_line(capsys):
    rank = worker._Rank(0, supervised=False)
    rank.trains = True
    assert rank.explain(ConfigError("model.vocab_size = 4: must be above the largest token")) == 2
    assert rank.explain(ValueError("of the model")) == 1
    first, second = capsys.readouterr().err.split("weft train: rank 0: ")[1:]
    assert first == "model.vocab_size = 4: must be above the largest token\n" and "Traceback" not in first
    assert second.startswith("failed:")
