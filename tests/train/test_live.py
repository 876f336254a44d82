"""What a person sees of a run while it trains: a report that is written again and again, and texts of the model."""

import errno
import json
import os

import pytest
import torch

from tests.train.command import metrics, wait_until, write_config
from tests.train.test_conversations import CHATML, tokenizer_in
from weft.models import HybridConfig, HybridModel, hf
from weft.train.config import from_tables, load_config
from weft.train.errors import ConfigError
from weft.train.loop import Trainer
from weft.train.record.metrics import Metrics, read_metrics
from weft.train.record.progress import Progress
from weft.train.record.samples import in_one_line
from weft.train.report import write_report
from weft.train.report.facts import command
from weft.train.report.live import LiveReport
from weft.train.run.runs import CONFIG, Run
from weft.train.source import Source

PROMPT = "line 7 <b>"


@pytest.fixture
def folder(tmp_path):
    with Metrics(tmp_path, loggers=[]) as recording:
        recording.log(3, "train", loss=2.0, step_seconds=0.25)
        recording.log_sample(3, "line 1 <b> & more")
    (tmp_path / CONFIG).write_text("[train]\nsteps = 1000\n")
    return tmp_path


def test_the_page_of_a_run_that_trains_loads_itself_again_and_the_last_one_does_not(folder, monkeypatch):
    monkeypatch.setattr("weft.train.report.page.can_draw", lambda: False)
    page = write_report(folder, live_s=30).read_text()
    assert '<meta http-equiv="refresh" content="30">' in page and "at step 3 of 1,000" in page
    assert "250 ms" in page and "per step" in page
    assert "<p>step 3</p><pre>line 1 &lt;b&gt; &amp; more</pre>" in page
    page = write_report(folder).read_text()
    assert 'http-equiv="refresh"' not in page and "A training run of weft, 3 steps" in page


def no_process(*arguments, **options):
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


@pytest.mark.long
def test_a_report_is_written_during_the_run_and_a_failure_is_one_line(folder, monkeypatch):
    said = []
    live = LiveReport(folder, 0.01, said.append)
    wait_until(lambda: live.after_step() or (folder / "report.html").exists())
    live.close()
    assert 'content="0.01"' in (folder / "report.html").read_text() and not said
    (folder / "metrics.jsonl").unlink()
    wait_until(lambda: live.after_step() or said)
    live.close()
    assert said == ["the report could not be written while the run trains (exit code 2); training continues"]
    del said[:]
    live = LiveReport(folder, 1e-9, said.append)
    monkeypatch.setattr("subprocess.Popen", no_process)
    for _ in range(2):
        live.after_step()
    live.close()
    why = "its process cannot be started: Resource temporarily unavailable"
    assert said == [f"the report could not be written while the run trains ({why}); training continues"]
    for disabled in (LiveReport(folder, 0, said.append), LiveReport(folder, 0.01, said.append, enabled=False)):
        disabled.after_step()
        assert disabled._writer is None


def trained(path, run, overrides=(), *, resume_from=None):
    said = []
    trainer = Trainer(load_config(path, overrides), Run(run, resume_from), say=said.append)
    trainer.progress._line = said.append
    trainer.run()
    return said


@pytest.mark.long
def test_the_text_of_a_run_is_that_of_its_checkpoint_and_changes_nothing_else(pool, tmp_path):
    path = write_config(tmp_path, train__steps=4, train__validate_every=2)
    pool.run(2, trained, path, tmp_path / "plain")
    said = pool.run(2, trained, path, tmp_path / "run", [f'train.sample="{PROMPT}"', "train.sample_tokens=9"])[0]
    for kind in ("train", "validation"):
        assert metrics(tmp_path / "run", kind) == metrics(tmp_path / "plain", kind)
    first, last = (each for each in read_metrics(tmp_path / "run") if each["kind"] == "sample")
    assert (first["step"], last["step"]) == (2, 4) and first["text"].startswith(PROMPT)
    assert in_one_line(4, last["text"]) in said
    expected = "".join(Source(str(tmp_path / "run"), print).continued(PROMPT, tokens=9, temperature=0.0))
    assert last["text"] == expected and len(last["text"]) > len(PROMPT)


@pytest.mark.long
def test_the_text_of_a_loaded_model_is_that_of_weft_sample_with_its_special_and_end_tokens_and_penalty(pool, tmp_path):
    torch.manual_seed(0)
    published, run = tmp_path / "published", tmp_path / "run"
    words, tokenizer = tokenizer_in(published, CHATML)  # begins a text with a special token
    cfg = HybridConfig(pattern="[*-]", vocab_size=len(words), hidden_size=16)
    model = HybridModel(cfg)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight))
    hf.save(model, published)
    fields = {"repetition_penalty": 9.0, "eos_token_id": list(range(0, len(words), 9))}
    (published / "generation_config.json").write_text(json.dumps(fields))
    sizes = ("vocab_size", "head_dim", "num_key_value_heads", "intermediate_size", "num_attention_heads")
    changes = {f"model__{name}": getattr(hf.config_of(published), name) for name in sizes}
    path = write_config(tmp_path, train__steps=2, data__tokenizer=tokenizer, run__weights=str(published), **changes)
    sample = ["train.sample=hello", "train.sample_tokens=40", "train.validate_every=2"]
    for steps, before in ((2, None), (4, 2)):  # a new run, and a resumed run
        pool.run(2, trained, path, run, [*sample, f"train.steps={steps}"], resume_from=before)
        *_, found = (each["text"] for each in read_metrics(run) if each["kind"] == "sample")
        source = Source(run)
        assert found == "".join(source.continued("hello", tokens=40, temperature=0))
        assert found > "hello" and len(source.tokenizer.encode(found.encode())) < 40  # an end token came


def test_a_model_that_writes_no_text_is_refused(tmp_path):
    path = write_config(tmp_path, model__pattern="[*-][*-]")
    for axis in ("sharding.pp", "sharding.cp", "sharding.tp"):
        config = load_config(path, ["train.sample=x", f"{axis}=2"])
        with pytest.raises(ConfigError, match=rf'^train\.sample = "x": each rank needs the whole model .*{axis} = 2'):
            config.validate(2)
    with pytest.raises(ConfigError, match=r"a model described by .* and a tokenizer"):
        load_config(path, ["train.sample=x", "data.kind=tokens"]).validate(1)


def test_settings_of_texts_and_reports_are_checked():
    with pytest.raises(ConfigError, match=r"train\.sample_tokens = 9: has no effect without train\.sample"):
        from_tables({"train": {"sample_tokens": 9}})
    with pytest.raises(ConfigError, match=r"run\.report_every = -1\.0: must not be negative"):
        from_tables({"run": {"report_every": -1.0}})


def test_the_command_in_a_report_can_be_pasted(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/x/weft/__main__.py", "train", "my run.toml", "--set", 'run.name="a b"'])
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert command() == """weft train 'my run.toml' --set 'run.name="a b"'"""
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "1"])
    assert command() == "python train.py --lr 1"
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert command() == "torchrun --nproc-per-node 2 train.py --lr 1"
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_ADDR", "host1")
    meeting = "--rdzv-backend c10d --rdzv-endpoint host1:29500"
    assert command() == f"torchrun --nnodes 3 --nproc-per-node 2 {meeting} train.py --lr 1"


def test_a_line_in_the_terminal_has_the_time_of_a_step(capsys):
    progress = Progress(4, log_every=1)
    with progress:
        progress.update(1, loss=2.0, step_seconds=0.0123)
    assert "step 12 ms" in capsys.readouterr().out
