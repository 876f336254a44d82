"""What weft replaces in torch is replaced at the first `fully_shard`, all of it or nothing."""

import re
import subprocess
import sys

import pytest
import torch

from weft.fsdp import patches
from weft.fsdp.patches import PATCHES, Patch

AT_FIRST = """
import torch, torch.distributed as dist, weft, weft.fsdp, weft.models, weft.optim, weft.overlap, weft.train
from weft.fsdp import patches
from torch.nn.modules.module import _global_module_registration_hooks as hooks

def there():
    return [vars(each.owner())[each.name] for each in patches.PATCHES]

before = there()
code = [getattr(each.owner(), each.name).__code__.co_filename for each in patches.PATCHES]
assert all(file.startswith(torch.__path__[0]) for file in code), "at import"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
weft.fully_shard(torch.nn.Linear(2, 2))
first = there()
assert all(ours is not theirs for ours, theirs in zip(first, before))
weft.fully_shard(torch.nn.Linear(2, 2))
assert there() == first and len(hooks) == 1, "once"
patches.undo()
assert there() == before and not hooks
"""


@pytest.mark.long
def test_torch_is_as_it_was_until_the_first_model_is_sharded():
    subprocess.run([sys.executable, "-c", AT_FIRST], check=True, timeout=120)


@pytest.mark.parametrize(
    "lacks",
    [
        Patch("optim.adam", "no_such_step", lambda theirs: theirs),
        Patch("no.such.place", "step", lambda theirs: theirs),
        Patch("optim.adam", "adam", lambda theirs: theirs, ("params", "beta3")),
    ],
    ids=["a name", "a place", "a parameter"],
)
def test_a_torch_that_lacks_a_name_is_refused_and_left_as_it_is(monkeypatch, lacks):
    monkeypatch.setattr(patches, "_undo", [])
    monkeypatch.setattr(patches, "PATCHES", (*PATCHES, lacks))
    before = sys.modules["torch.optim.adam"].adam
    names = f"torch.{lacks.of}.{lacks.name}" + "(params, beta3)" * bool(lacks.parameters)
    with pytest.raises(RuntimeError, match=rf"torch {torch.__version__[:3]}.* has no {re.escape(names)}, which"):
        patches.apply()
    assert sys.modules["torch.optim.adam"].adam is before and not patches._undo
