"""Documents that are packed whole are apart: in the data, in the model's own layers, and in a model of transformers."""

import numpy as np
import pytest
import torch

from tests.train.command import write_config
from tests.train.test_factory import Tokens, configured
from weft.models import Documents
from weft.train.config import load_config, parse_config
from weft.train.data.cache import Part
from weft.train.data.sequences import Mixture, sequences
from weft.train.errors import ConfigError
from weft.train.task.choice import task_of

LENGTHS = [5, 9, 3, 3, 40, 7, 2, 16, 1, 17]


def test_no_document_predicts_the_next_and_no_label_of_one_is_lost():
    part = Part(np.arange(1, sum(LENGTHS) + 1, dtype=np.uint16), np.cumsum([0, *LENGTHS[:-1]]))
    packed = sequences(part, 16, "whole", 1)
    every = np.arange(len(packed))
    batch = Mixture([packed]).batch(np.zeros(len(packed), dtype=int), every)
    tokens, labels, documents = batch["tokens"], batch["labels"], batch["documents"]
    assert documents.shape == tokens.shape and torch.equal(documents.labels(labels), labels)
    counted = (labels != -100).sum(1)
    assert counted.tolist() == packed.labels(every).tolist()
    # A document of 40 is cut into three sequences, which share a token: no label is lost.
    assert counted.sum() == sum(length - 1 for length in LENGTHS)
    begins = set(part.starts.tolist())
    for row, place in (labels != -100).nonzero().tolist():
        assert labels[row, place] == tokens[row, place] + 1 and int(tokens[row, place]) not in begins - {0}
    crossing = sequences(part, 16, "whole", 1, cross_documents=True)
    tokens, labels = Mixture([crossing]).batch(np.zeros(len(packed), dtype=int), every)
    assert (labels != -100).sum() > counted.sum() and crossing.labels(every).sum() == (labels != -100).sum()


def write_documents(folder):
    """Documents of many lengths as JSON lines."""
    lines = "".join(f'{{"text": "{"ab cd ef" * (1 + number % 5)} {number}."}}\n' for number in range(400))
    (folder / "documents.jsonl").write_text(lines)
    return [f'data.paths=["{folder / "documents.jsonl"}"]', "data.kind=jsonl", "data.packing=whole"]


def losses_of(path, changes):
    """Of one microbatch packed, as the trainer computes it, and of its documents one after the other."""
    task = task_of(load_config(path, changes), torch.device("cpu"), lambda line: None)
    (batch,) = task.batches.next_step()[:1]
    task.model.eval()
    with torch.no_grad():
        packed = task.loss(batch)[0]
        if not isinstance(batch, dict):
            return packed
        total, count, numbers = 0.0, 0, batch["documents"].numbers()
        for number in range(len(batch["documents"].starts)):
            row, places = (numbers == number).nonzero()[0, 0], (numbers == number).nonzero()[:, 1]
            tokens, labels = (batch[name][row, places][None] for name in ("tokens", "labels"))
            if (labels != -100).any():
                total += task.model(tokens, labels) * (labels != -100).sum()
                count += int((labels != -100).sum())
        assert len(batch["documents"].starts) > 4 and count == (batch["labels"] != -100).sum()
        return packed, total / count


@pytest.mark.slow
def test_the_losses_of_packed_documents_are_those_of_documents_alone(pool, tmp_path):
    changes = ["model.pattern=M*-", *write_documents(tmp_path)]
    path = write_config(tmp_path, train__microbatch_size=2, data__sequence_length=128)
    packed, alone = pool.run(1, losses_of, path, changes)[0]
    torch.testing.assert_close(packed, alone)
    crossing = pool.run(1, losses_of, path, [*changes, "train.cross_documents=true"])[0]
    assert crossing != packed


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    with torch.device("cpu"):
        return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))


def seen_by_llama(path, changes):
    """The losses of one document, before and after a token of the one before it changes."""
    task = task_of(load_config(path, changes), torch.device("cpu"), lambda line: None)
    (batch,) = task.batches.next_step()[:1]
    second = batch["documents"].numbers() == 1
    batch["labels"] = batch["labels"].where(second, -100)
    found = []
    for change in (0, 1):
        batch["tokens"][0, 0] += change
        found.append(task.loss(batch)[0].detach())
    return found


def test_a_model_of_transformers_receives_the_document_boundaries(pool, tmp_path):
    path = configured(tmp_path, factory=f'"{__name__}:llama"')
    changes = [*write_documents(tmp_path), "data.sequence_length=128"]
    before, after = pool.run(1, seen_by_llama, path, changes)[0]
    assert before > 0 and torch.equal(before, after)


class Recurrent(Tokens):
    """It is told of borders, and adds a mean over all tokens before."""

    def forward(self, tokens, position_ids):
        before = self.embedding(tokens).cumsum(1) / torch.arange(1, 1 + tokens.shape[1])[:, None]
        return self.head(before) + super().forward(tokens)


def looks_beyond(path, changes):
    with pytest.raises(
        ConfigError, match=r"Recurrent receives .*, but the logits of a document change by \d+\.\d% with"
    ):
        task_of(load_config(path, changes), torch.device("cpu"), lambda line: None)
    task_of(load_config(path, [*changes, "train.cross_documents=true"]), torch.device("cpu"), lambda line: None)


class Noisy(Tokens):
    """It draws random numbers, and one of its modules stays in evaluation mode."""

    def __init__(self, width):
        super().__init__(width)
        self.blocks[0].eval()

    def forward(self, tokens, position_ids):
        scores = super().forward(tokens)
        return scores + torch.randn_like(scores)


def state_after_check(path, changes):
    task = task_of(load_config(path, changes), torch.device("cpu"), lambda line: None)
    return [module.training for module in task.model.modules()], torch.get_rng_state()


def test_the_check_of_documents_leaves_modes_and_random_numbers_as_they_were(pool, tmp_path):
    path = configured(tmp_path, factory=f'"{__name__}:Noisy"', options="{width = 16}")
    changes = write_documents(tmp_path)
    (checked, drawn), (unchecked, expected) = (
        pool.run(1, state_after_check, path, each)[0] for each in (changes, [*changes, "train.cross_documents=true"])
    )
    assert checked == unchecked and checked.count(False) == 1
    assert torch.equal(drawn, expected)


def test_a_model_that_ignores_document_boundaries_is_refused(pool, tmp_path):
    path = configured(tmp_path, factory=f'"{__name__}:Recurrent"', options="{width = 16}")
    pool.run(1, looks_beyond, path, write_documents(tmp_path))


def refused(path, changes):
    with pytest.raises(ConfigError, match=r'data\.packing = "whole": .*Tokens\.forward takes neither position_ids'):
        task_of(load_config(path, changes), torch.device("cpu"), lambda line: None)
    task_of(load_config(path, [*changes, "train.cross_documents=true"]), torch.device("cpu"), lambda line: None)


def test_a_model_that_cannot_receive_document_boundaries_is_refused(pool, tmp_path):
    path = configured(tmp_path, factory='"tests.train.test_factory:Tokens"', options="{width = 16}")
    pool.run(1, refused, path, write_documents(tmp_path))


def test_to_see_across_documents_is_asked_for_where_they_would_not():
    with pytest.raises(
        ConfigError, match=r"train\.cross_documents = true: has no effect with data\.packing = \"stream\""
    ):
        parse_config("", ["train.cross_documents=true"])
    assert Documents(1, 2, (0,)).is_plain
