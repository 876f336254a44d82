"""What is multiplied with embeddings is rounded exactly where transformers rounds it."""

import pytest
import torch

from tests.models.hf.released import make
from weft.models import hf


@pytest.mark.parametrize("name", ["gemma-3-1b-it", "granite-3.3-2b-instruct"])
def test_embeddings_in_bf16_are_those_of_transformers_bit_for_bit(tmp_path, name):
    theirs = make(name, tmp_path, torch.bfloat16)
    ours = hf.from_pretrained(tmp_path, dtype=torch.bfloat16)
    multiplier = ours.cfg.embedding_multiplier
    tokens = torch.arange(61)[None]
    first = []
    theirs.model.layers[0].register_forward_pre_hook(lambda module, given: first.append(given[0]))
    theirs(input_ids=tokens)
    assert torch.equal(ours.embed(tokens), first[0])
    rounded = ours.embedding(tokens) * torch.tensor(multiplier, dtype=torch.bfloat16)
    assert torch.equal(ours.embedding(tokens) * multiplier, rounded) != (name == "gemma-3-1b-it")
