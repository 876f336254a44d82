"""Runs whose ranks share every sequence."""

import pytest
import torch

from tests.train.command import write_config
from tests.train.test_documents import write_documents
from tests.train.test_loop import train_on
from weft.train.config import parse_config
from weft.train.errors import ConfigError


def assert_same_run(found, expected):
    """Losses, norms and weights that `train_on` returns are those of another run."""
    for one, two in zip(expected[:2], found[:2]):
        for here, there in zip(one, two, strict=True):
            for name in ("loss", "loss_depth_1", "gradient_norm"):
                if name in here:
                    assert there[name] == pytest.approx(here[name], rel=1e-4)
    torch.testing.assert_close(found[2], expected[2], rtol=1e-3, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("pattern", ["M*-", "+G-/[+-]"])
def test_a_run_over_context_ranks_has_the_losses_of_one_rank_and_resumes_on_one(pool, tmp_path, pattern):
    path = write_config(tmp_path, train__validate_every=2, data__sequence_length=64)
    changes = [f"model.pattern={pattern}", *write_documents(tmp_path)]
    alone = pool.run(1, train_on, path, tmp_path / "alone", changes, stop_at=4)[0]
    shared = [*changes, "sharding.cp=2"]
    pool.run(2, train_on, path, tmp_path / "both", shared, stop_at=2)
    both = pool.run(1, train_on, path, tmp_path / "both", changes, stop_at=4, resume_from=2)[0]
    assert_same_run(both, alone)


def test_sizes_that_do_not_fit_are_refused():
    def config(*changes):
        return parse_config(
            "", ["model.pattern=[*-]", "train.global_batch_size=8", "train.microbatch_size=2", *changes]
        )

    config("sharding.cp=2").validate(4)
    assert config("sharding.cp=2").microbatches_per_step(2) == 2
    with pytest.raises(ConfigError, match=r"sharding\.cp = 3: must divide .* ranks, 4; choose from \[1, 2, 4\]"):
        config("sharding.cp=3").validate(4)
    heads = "model.context_attention=heads"
    config("sharding.cp=2", heads)
    for changes in ((heads,), ("model.pattern=M", "sharding.cp=2", heads)):
        with pytest.raises(ConfigError, match=r'model\.context_attention = "heads": has no effect'):
            config(*changes)
    with pytest.raises(ConfigError, match=r"sharding\.cp = 3: model\.num_attention_heads=4 .*cp=3: make"):
        config("sharding.cp=3", heads)
    convolving = ["model.pattern=M", "sharding.cp=2"]
    config(*convolving, "data.sequence_length=9")
    with pytest.raises(ConfigError, match=r"data\.sequence_length = 8: must be at least 9 with sharding\.cp = 2"):
        config(*convolving, "data.sequence_length=8")
    for symbol, setting, kernel in (("M", "mamba_kernel", "mamba_ssm"), ("G", "delta_kernel", "fla")):
        with pytest.raises(ConfigError, match=rf"sharding\.cp = 2: model\.{setting}='{kernel}' on cp=2 ranks"):
            config(f"model.pattern={symbol}", "sharding.cp=2", f"model.{setting}={kernel}")
    with pytest.raises(ConfigError, match=r"sharding\.dp_shard = 4: must be the number of ranks, 4 / sharding\.cp = 2"):
        config("sharding.cp=2", "sharding.dp_shard=4").validate(4)
