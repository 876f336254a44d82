"""Configurations as they are published: `released/NAME.json` has the keys of a release, its values, and small sizes.

`python -m tests.models.hf.released` prints the table of docs/huggingface.md.
"""

import json
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from weft.errors import ConversionError
from weft.models import hf
from weft.models.hf.directory import TensorFiles
from weft.models.hf.spelling import text_of

FOLDER = Path(__file__).parent / "released"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
REFUSED = {
    "deepseek-r1": r"quantized by 'fp8'",
    "deepseek-v3": r"quantized by 'fp8'",
    "gpt-oss-20b": r"quantized by 'mxfp4'",
    "granite-3.1-1b-a400m-base": r"attention_dropout=0\.1",
    "kimi-k2-instruct": r"model_type='kimi_k2'",
    "minimax-m2": r"quantized by 'fp8'",
}
"""Releases that are refused as they are, and for what."""
IGNORED = {"granite-3.1-1b-a400m-base": ("attention_dropout",)}
"""Fields that have to be passed over to read a release."""
READ = [name for name in NAMES if name not in REFUSED or name in IGNORED]


def config(name):
    """The content of its config.json."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def _of_each_family():
    """model_type -> the family and one release of it."""
    found = {}
    for name in READ:
        kind = text_of(config(name))["model_type"]
        found.setdefault(kind, (hf.families.FAMILIES[kind], name))
    return found


FAMILIES = _of_each_family()


def make(name, directory, dtype=torch.float32):
    """A model of transformers with random weights, and its directory with the config.json of the release."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text((FOLDER / f"{name}.json").read_text())
    described = AutoConfig.from_pretrained(directory)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(described.get_text_config(), attn_implementation="eager", dtype=dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.1, 0.1)
    model.save_pretrained(directory)
    (directory / "config.json").write_text((FOLDER / f"{name}.json").read_text())
    return model.eval()


def tensors(directory):
    """All tensors in a directory."""
    files = TensorFiles(directory)
    return {name: files[name][...] for name in files}


def table():
    """The releases as a table of Markdown, made by reading them.

    test_released.py converts every release that is read, back too, and has transformers read it without its own
    config.json.
    """
    rows = [
        "| release | `model_type` | pattern of the small model | read | converted, and back | read by `transformers` |"
    ]
    rows.append("|---|---|---|---|---|---|")
    for name in NAMES:
        raw = config(name)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(raw))
            try:
                pattern, found = f"`{hf.config_of(folder, ignored=IGNORED.get(name, ())).pattern}`", "yes"
            except ConversionError as error:
                pattern, found = "", f"no: {str(error).split('config.json: ')[1].split(': choose from')[0]}"
        if name in IGNORED:
            found = f"with `--ignore-field {IGNORED[name][0]}`"
        others = "bit for bit | yes" if name in READ else " | "
        rows.append(f"| {name} | `{text_of(raw)['model_type']}` | {pattern} | {found} | {others} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(table(), end="")
