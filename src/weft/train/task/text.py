"""A hybrid model on text, as a configuration describes them."""

import torch

import weft
from weft.models import HybridModel, shard
from weft.train.config import TrainConfig
from weft.train.data import Batch, Batches, Validation, load_corpus
from weft.train.data.bigram import Bigram
from weft.train.errors import ConfigError
from weft.train.experts import ExpertBalance
from weft.train.task.blocks import prepare
from weft.train.task.sharding import meshes_of, options_of
from weft.train.task.task import Losses


class TextTask:
    """One rank's part. Raises ConfigError for what is wrong with the text, or a model that finds no memory."""

    unit = "tokens"
    adds_losses = True

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        meshes = meshes_of(config, device)
        self.corpus = load_corpus(config.data, dp_size=meshes.dp_size)
        sizes = {
            "sequence_length": config.data.sequence_length,
            "microbatch_size": config.train.microbatch_size,
            "global_batch_size": config.train.global_batch_size,
            "dp_rank": meshes.dp_rank,
            "dp_size": meshes.dp_size,
        }
        self.batches = Batches(self.corpus.train, seed=config.data.seed, **sizes)
        self.validation = Validation(self.corpus.validation, batches=config.train.validation_batches, **sizes)
        self.units_per_step = config.train.global_batch_size * config.data.sequence_length
        self.description = self.corpus.description
        model = _build(config, meshes, device)
        stacks = (model.decoder, *model.depths)
        prepare([(stack.layers, number) for stack in stacks for number in range(len(stack.layers))], config.train)
        self.model = shard(model, meshes, **options_of(config, model))
        self.experts = ExpertBalance(self.model, meshes.dense, config.train.expert_bias_rate)

    def loss(self, microbatch: Batch) -> Losses:
        tokens, labels = microbatch
        return self.model(tokens, labels=labels), {}

    def validation_values(self, loss: float) -> dict[str, float]:
        return {"loss": loss, "nats_per_byte": loss / self.corpus.bytes_per_token}

    def baseline(self) -> float:
        """Of the bigram table of the same text, in nats per byte."""
        table = Bigram.fit(self.corpus.train, self.corpus.vocab_size)
        return table.cross_entropy(*self.validation.pairs()) / self.corpus.bytes_per_token


def _build(config: TrainConfig, meshes: weft.Meshes, device: torch.device) -> HybridModel:
    torch.manual_seed(config.train.seed)
    try:
        with device:
            return HybridModel(config.model, meshes=meshes)
    except (RuntimeError, OverflowError, MemoryError) as error:
        raise ConfigError(
            f"model.hidden_size = {config.model.hidden_size}, model.vocab_size = {config.model.vocab_size}, "
            f"model.pattern = {config.model.pattern!r}: finds no memory ({' '.join(str(error).split())[:120]}); make "
            "the model smaller"
        ) from error
