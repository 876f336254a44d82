"""What is learnt of conversations is what TRL's fine-tuning learns: tokens, labels and losses."""

import json

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.train.test_conversations import TEMPLATES, conversations, tokenizer_in
from weft.models import HybridConfig, HybridModel, hf
from weft.train.data import Batches
from weft.train.data.cache import Part
from weft.train.data.conversations import ConversationTokenizer

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

COUNT = 40
"""Conversations for each template: 200 of five."""


def trainer_of(directory, talks, fast):
    """TRL's trainer of a small Llama in `directory`, which learns what an assistant writes."""
    args = trl.SFTConfig(
        output_dir=str(directory / "out"),
        assistant_only_loss=True,
        max_length=None,
        packing=False,
        per_device_train_batch_size=COUNT,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    dataset = datasets.Dataset.from_list([{"messages": talk} for talk in talks])
    return trl.SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=fast)


def packed(ours, talks):
    """All conversations in one row."""
    encoded = [ours.encode(json.dumps(talk).encode()) for talk in talks]
    starts = np.cumsum([0, *map(len, encoded)])
    part = Part(np.concatenate(encoded), starts[:-1], conversations=ours.tokens)
    options = {"packing": "whole", "microbatch_size": 1, "global_batch_size": 1}
    (batch,) = Batches([part], sequence_length=int(starts[-1]), **options).next_step()
    return batch


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_labels_and_losses_of_forty_conversations_are_those_of_trl(tmp_path, name):
    fast, path = tokenizer_in(tmp_path, TEMPLATES[name])
    ours = ConversationTokenizer(path)
    torch.manual_seed(0)
    model = HybridModel(HybridConfig(pattern="[*-]", vocab_size=len(fast), hidden_size=16))
    hf.save(model, tmp_path)
    talks = list(conversations(COUNT))
    trainer = trainer_of(tmp_path, talks, fast)
    assert len(trainer.train_dataset) == len(talks)
    learnt = 0
    for talk, row in zip(talks, trainer.train_dataset):
        tokens, written = ours.labeled(talk)
        assert tokens.tolist() == row["input_ids"]
        assert np.where(written, tokens.astype(int), -100).tolist() == row["labels"]
        learnt += int(written.sum())
    assert learnt > COUNT

    # TRL pads the conversations to one length, and takes the mean over what all assistants write.
    padded = trainer.data_collator([trainer.train_dataset[number] for number in range(len(talks))])
    with torch.no_grad():
        expected = trainer.compute_loss(trainer.model.eval(), padded)
        found = model.eval()(**packed(ours, talks))
    assert_close(found, expected)
