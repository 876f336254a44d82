"""Weights into sharded models and out of them."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from tests.pool import distributed
from weft.mesh import init_meshes
from weft.models import HybridConfig, HybridModel, hf, shard
from weft.models.hf.directory import TensorFiles

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8}
QWEN3_NEXT = {
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "rms_norm_eps": 1e-6,
    "attention_output_gate": True,
    "qk_norm": "head",
    "zero_centered_norm": True,
    "shared_expert_gate": True,
    "shared_expert_intermediate_size": 8,
}


def tensors(directory):
    files = TensorFiles(directory)
    return {name: files[name][:] for name in files}


@pytest.mark.slow
@distributed(2)
def test_a_sharded_model_is_read_and_written_part_by_part(tmp_path):
    theirs, written = tmp_path / "theirs", tmp_path / "written"
    torch.manual_seed(1)
    whole = HybridModel(HybridConfig(pattern="[GE][*E]/[*E]", **SIZES, **QWEN3_NEXT))
    hf.save(whole, theirs)
    dist.barrier()
    meshes = init_meshes("cpu", ep=2)
    with torch.device("meta"):
        sharded = HybridModel(hf.config_of(theirs), meshes)
    shard(sharded, meshes)
    hf.load(sharded, theirs)
    tokens = torch.arange(20)[None]
    assert_close(sharded(tokens), whole(tokens), rtol=1e-4, atol=1e-5)
    hf.save(sharded, written)
    dist.barrier()
    if dist.get_rank() == 0:
        expected, found = tensors(theirs), tensors(written)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
