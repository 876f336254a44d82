"""The examples do what they say, and the README shows the one that a newcomer copies as it is."""

import functools
import importlib.util
import os
import re
import runpy
import signal
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn

import weft
from tests.pool import distributed, run_blocks
from tests.programs import Imported
from tests.train.command import WITHOUT_PICTURES, assert_same_contents, contents, free_port, metrics
from weft.train import Trainer

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


IMPORTS = "import transformers, weft.fsdp, weft.models.hf, weft.optim, weft.overlap, weft.train.loop"


@pytest.fixture(scope="module")
def run():
    """`run_of` with a process that has imported what the examples do."""
    with Imported(IMPORTS) as ready:
        yield functools.partial(run_of, ready)


def run_of(imported, example, *arguments):
    """What the first of two ranks of `examples/EXAMPLE ARGUMENTS` prints on the CPU."""
    program = (
        f"import os, runpy, sys; os.chdir({os.getcwd()!r}); sys.argv = {[example, *map(str, arguments)]}\n"
        f"runpy.run_path({str(EXAMPLES / example)!r}, run_name='__main__')"
    )
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    places = [{**place, "RANK": str(rank), "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""} for rank in range(2)]
    first, second = imported.run([program] * 2, places, timeout=180, together=True)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    return first.stdout


def launched(example):
    """What `torchrun --nproc-per-node 2 examples/EXAMPLE` prints on the CPU."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [*torchrun, str(EXAMPLES / example)],
        env={**os.environ, "PYTHONPATH": WITHOUT_PICTURES, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses_in(output):
    return [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", output, re.MULTILINE)]


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def test_the_readme_shows_the_example_as_it_is():
    assert (EXAMPLES / "any_module.py").read_text() in python_blocks("README.md")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        *("sharding", "composition", "gradients", "precision", "narrow", "memory", "debugging", "experts", "overlap"),
        *("from-fsdp2", "from-megatron-fsdp", "optimizers", "schedules", "pipelines", "context", "tensor"),
    ],
)
@distributed(2)
def test_the_code_of_a_page_runs_from_top_to_bottom(page):
    run_blocks(python_blocks(f"docs/{page}.md"), {})


@pytest.mark.parametrize("page", ["graphs", "reference/weft"])
@distributed(1)
def test_the_code_of_a_page_that_shows_no_model_runs_with_one(page):
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    names = {"weft": weft, "model": nn.Sequential(OrderedDict(encoder=layers))}
    run_blocks(python_blocks(f"docs/{page}.md"), names)
    assert isinstance(names["model"], weft.FSDPModule)


STEPS = 40
"""Of the trainer's examples in tests: beyond the step at which they are stopped, and enough to learn something."""
TRAINED = ("vision", "hf_finetune", "hf_lora")


def test_the_trainer_s_examples_are_short():
    for name in TRAINED:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 60


def in_process(example, folder, *arguments, interrupt_at=0):
    """What `torchrun examples/EXAMPLE ARGUMENTS` does in `folder`, on ranks that are there; what the file then holds.

    interrupt_at: the step after which somebody presses Ctrl-C; the next one is the last.
    """

    def moment(self, name, numbers):
        if name == "step" and self.position.step == interrupt_at:
            signal.raise_signal(signal.SIGINT)
        own(self, name, numbers)

    def shortened(self, *args, config, **options):
        train = {
            **config["train"],
            "steps": STEPS,
            "validate_every": min(STEPS, config["train"].get("validate_every", 0)),
        }
        make(self, *args, config={**config, "train": train}, **options)

    own, make = Trainer.moment, Trainer.__init__
    (folder / "here").mkdir(exist_ok=True, parents=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Trainer, "moment", moment)
        patched.setattr(Trainer, "__init__", shortened)
        patched.setattr("weft.train.report.page.can_draw", lambda: False)  # pictures take seconds
        patched.setattr(sys, "argv", [example, *arguments])
        patched.chdir(folder / "here")
        return runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")


def stopped_and_resumed(example, folder):
    """Returns what the file holds after the resumed run, and the folders of that and of a run that nobody stopped."""
    torch.manual_seed(0)
    whole = in_process(example, folder / "whole")["trainer"]
    torch.manual_seed(0)
    stopped = in_process(example, folder / "parts", interrupt_at=11)["trainer"]
    assert stopped.position.step == 12
    names = in_process(example, folder / "parts", "--resume")
    runs = [each.run_place.directory for each in (names["trainer"], whole)]
    return names, *(folder / place / "here" / run for place, run in zip(("parts", "whole"), runs))


def loss_of_first_batch(names, model):
    """Of the data of rank 0, on every rank."""
    torch.manual_seed(0)
    data = names.get("sentences") or names["images"]
    with torch.no_grad():
        value = names["trainer"].task._loss(model.eval(), data(0, 2)[0])
    return value[0] if isinstance(value, tuple) else value


def goes_on_and_loads(example, folder):
    names, parts, whole = stopped_and_resumed(example, folder)
    step = names["trainer"].position.step
    assert metrics(parts) == metrics(whole) and len(metrics(whole)) == step
    checkpoints = [run / "checkpoints" / f"step-{step:08d}" for run in (parts, whole)]
    if dist.get_rank() == 0:
        assert_same_contents(*map(contents, checkpoints))
    expected = loss_of_first_batch(names, names["trainer"].model)
    plain = {"vision": plain_classifier, "hf_finetune": plain_llama, "hf_lora": plain_adapter}[example]
    torch.testing.assert_close(loss_of_first_batch(names, plain(names, parts, checkpoints[0])), expected)
    first, last = metrics(whole)[0]["loss"], metrics(whole)[-1]["loss"]
    assert expected < first and last < first


def filled(model, checkpoint):
    """A plain model with the weights of a checkpoint, read by torch alone."""
    state = {"model": {name: torch.full_like(value, torch.nan) for name, value in model.state_dict().items()}}
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    model.load_state_dict(state["model"])
    return model


def plain_classifier(names, run, checkpoint):
    return filled(names["Classifier"](), checkpoint)


def plain_llama(names, run, checkpoint):
    return filled(transformers.LlamaForCausalLM(names["CONFIG"]), checkpoint)


def plain_adapter(names, run, checkpoint):
    import peft

    adapted = filled(names["adapted"](), checkpoint)
    base = adapted.unload()  # as it was: adapters alone are trained
    return peft.PeftModel.from_pretrained(base, run / "adapter")


@pytest.mark.long
@pytest.mark.parametrize("example", TRAINED)
@distributed(2)
def test_own_models_and_data_train_resume_bit_for_bit_and_load_into_plain_torch(example, tmp_path):
    goes_on_and_loads(example, tmp_path)


@pytest.mark.long
def test_an_example_runs_under_its_launcher(run, tmp_path, monkeypatch):
    """The one with the fewest imports: what each does without a launcher, tests above see."""
    monkeypatch.chdir(tmp_path)
    assert "step 120/120" in launched("vision.py")
    assert "nothing to do: the run is at step 120 of 120" in run("vision.py", "--resume")


@pytest.mark.long
def test_any_module_learns_on_two_ranks_and_shows_its_units(run):
    output = run("any_module.py", "--steps", 40)
    losses = losses_in(output)
    assert len(losses) == 40
    assert sum(losses[-5:]) < sum(losses[:5]) / 4
    units = [line.split() for line in output.splitlines() if "TransformerEncoderLayer" in line]
    shards = output[output.index("unit ") :].split().index("shards")
    assert [unit[shards] for unit in units] == ["2"] * 4


@pytest.fixture(scope="module")
def hf_llama():
    spec = importlib.util.spec_from_file_location("hf_llama", EXAMPLES / "hf_llama.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_the_sharded_llama_has_the_losses_of_one_process_and_comes_back_from_its_checkpoint(run, hf_llama, tmp_path):
    output = run("hf_llama.py", "--steps", 8, "--checkpoint", tmp_path / "llama")

    cpu = torch.device("cpu")
    model = hf_llama.make_model(0, cpu)
    optimizer = hf_llama.make_optimizer(model)
    tokens = hf_llama.make_batch(8, cpu)
    plain = [hf_llama.train_step(model, optimizer, tokens).item() for _ in range(10)]

    losses = losses_in(output)
    torch.testing.assert_close(losses, plain[:8], rtol=1e-5, atol=1e-5)
    assert losses[-1] < losses[0] - 1

    continued = dict(re.findall(r"^(uninterrupted|loaded) losses (.*)$", output, re.MULTILINE))
    assert continued["loaded"] == continued["uninterrupted"]
    torch.testing.assert_close([float(loss) for loss in continued["loaded"].split()], plain[8:], rtol=1e-5, atol=1e-5)
    assert (tmp_path / "llama" / ".metadata").exists()


def test_the_readme_shows_lines_of_the_example_of_published_models_in_their_order():
    root = Path(__file__).parents[1]
    shown = (
        (root / "README.md").read_text().partition("[examples/hf_hybrid.py](examples/hf_hybrid.py)")[2].split("```")[1]
    )
    text = (root / "examples" / "hf_hybrid.py").read_text()
    places = [text.find(part.strip("\n") + "\n") for part in shown.removeprefix("python\n").split("...\n")]
    assert len(places) == 3 and -1 not in places and places == sorted(places)


@pytest.mark.long
def test_a_hugging_face_directory_is_trained_with_experts_overlapped_and_written_back(run, tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_experts": 4, "moe_intermediate_size": 16}
    weft.models.hf.save(
        weft.models.HybridModel(weft.models.HybridConfig(pattern="[*E][*E]", **sizes)), tmp_path / "theirs"
    )
    losses = losses_in(run("hf_hybrid.py", tmp_path / "theirs", tmp_path / "trained", "--steps", 40))
    assert losses[-1] < losses[0] - 0.5
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert trained.config.model_type == "mixtral"
