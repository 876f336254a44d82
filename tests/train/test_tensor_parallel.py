"""Runs whose ranks share every layer."""

import pytest

from tests.train.command import write_config
from tests.train.test_context import assert_same_run
from tests.train.test_documents import write_documents
from tests.train.test_loop import train_on
from weft.train.config import parse_config
from weft.train.errors import ConfigError

SIZES = ["model.mamba_num_heads=2", "model.mamba_head_dim=8", "model.ssm_state_size=8"]


@pytest.mark.long
def test_a_run_over_tensor_parallel_ranks_has_the_losses_of_one_rank_and_resumes_on_any_number(pool, tmp_path):
    path = write_config(tmp_path, train__validate_every=2, data__sequence_length=32)
    changes = ["model.pattern=M*[*-]/[+-]", "model.num_attention_heads=2", *SIZES, *write_documents(tmp_path)]
    alone = pool.run(1, train_on, path, tmp_path / "alone", changes, stop_at=4)[0]
    shared = [*changes, "sharding.tp=2"]
    pool.run(2, train_on, path, tmp_path / "both", shared, stop_at=2)
    both = pool.run(1, train_on, path, tmp_path / "both", changes, stop_at=4, resume_from=2)[0]
    pool.run(1, train_on, path, tmp_path / "later", changes, stop_at=2)
    later = pool.run(2, train_on, path, tmp_path / "later", shared, stop_at=4, resume_from=2)[0]
    for found in (both, later):
        assert_same_run(found, alone)


@pytest.mark.long
def test_a_run_with_whole_experts_over_tensor_parallel_ranks_has_the_losses_of_one_rank(pool, tmp_path):
    path = write_config(tmp_path, data__sequence_length=32)
    changes = ["model.pattern=[*E]", "model.num_experts=4", "model.moe_intermediate_size=16"]
    alone = pool.run(1, train_on, path, tmp_path / "alone", changes, stop_at=2)[0]
    shared = [*changes, "sharding.tp=2", "sharding.etp=1", "sharding.ep=2"]
    assert_same_run(pool.run(2, train_on, path, tmp_path / "both", shared, stop_at=2)[0], alone)


def test_sizes_that_do_not_fit_are_refused():
    def config(*changes):
        return parse_config(
            "", ["model.pattern=[*-]", "train.global_batch_size=8", "train.microbatch_size=2", *changes]
        )

    config("sharding.tp=2").validate(4)
    assert config("sharding.tp=2", "sharding.cp=2").microbatches_per_step(2) == 2
    with pytest.raises(ConfigError, match=r"sharding\.tp = 2: must divide .* ranks, 3; choose from \[1, 3\]"):
        config("sharding.tp=2").validate(3)
    with pytest.raises(ConfigError, match=r"sharding\.tp = 3: model\.num_attention_heads=4 is split over tp=3 ranks"):
        config("sharding.tp=3")
    with pytest.raises(ConfigError, match=r"data\.sequence_length = 33: must be a multiple of sharding\.tp = 2"):
        config("sharding.tp=2", "data.sequence_length=33")
    whole = config("model.pattern=[*E]", "sharding.tp=2", "sharding.etp=1", "sharding.ep=4")
    whole.validate(4)  # experts are spread over tensor-parallel ranks, too
    with pytest.raises(ConfigError, match=r"sharding\.ep = 4: .* ranks, 2 \(all ranks / sharding\.tp = 2\)"):
        config("model.pattern=[*E]", "sharding.tp=2", "sharding.ep=4").validate(4)
    with pytest.raises(ConfigError, match=r"sharding\.etp = 3: must be 1 or sharding\.tp = 2; choose from \[1, 2\]"):
        config("sharding.tp=2", "sharding.etp=3")
