"""Weights into sharded models and out of them."""

import json

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


@pytest.mark.slow
@distributed(2, 4, long=4)
def test_a_sharded_model_is_trained_and_written_with_what_it_came_with(tmp_path):
    theirs, written = tmp_path / "theirs", tmp_path / "written"
    torch.manual_seed(1)
    hf.save(HybridModel(HybridConfig(pattern="[GE][*E]", **SIZES, **QWEN3_NEXT)), theirs)
    dist.barrier()
    if dist.get_rank() == 0:
        raw = json.loads((theirs / "config.json").read_text())
        raw |= {"eos_token_id": [7, 11], "max_position_embeddings": 4321, "_name_or_path": "somewhere"}
        (theirs / "config.json").write_text(json.dumps(raw))
        for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
            (theirs / name).write_text(json.dumps({"name": name}))
    dist.barrier()
    model = hf.from_pretrained(theirs, meshes=init_meshes("cpu", ep=2)).train()
    before = hf.from_pretrained(theirs).state_dict()
    model(torch.arange(20)[None], labels=torch.arange(20)[None]).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    hf.save_pretrained(model, written)
    dist.barrier()
    again = hf.from_pretrained(written)
    assert any(not torch.equal(again.state_dict()[name], tensor) for name, tensor in before.items())
    expected = json.loads((theirs / "config.json").read_text())
    assert json.loads((written / "config.json").read_text()) == expected
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (written / name).read_text() == (theirs / name).read_text()
