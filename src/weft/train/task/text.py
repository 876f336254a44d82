"""A hybrid model on text, as a configuration describes them."""

from typing import Any

import torch
import torch.distributed as dist

import weft
from weft.models import HybridModel, shard
from weft.overlap import evaluate
from weft.train.config import TrainConfig
from weft.train.data import Batch, Batches, Validation, load_corpus
from weft.train.data.bigram import Bigram
from weft.train.errors import ConfigError
from weft.train.experts import ExpertBalance
from weft.train.task.precision import mixed_precision
from weft.train.task.task import Losses


class TextTask:
    """One rank's part. Raises ConfigError for what is wrong with the text, or a model that finds no memory."""

    unit = "tokens"
    adds_losses = True

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        cut = config.sharding
        meshes = weft.init_meshes(device.type, pp=cut.pp, dp_shard=cut.dp_shard, ep=cut.ep)
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
        if config.train.activation_checkpointing:
            _recompute_layers(model)
        policy = mixed_precision(config.train.precision)
        self.model = shard(model, meshes, strategy=config.sharding.strategy, mp_policy=policy)
        self.experts = ExpertBalance(self.model, meshes.dense, config.train.expert_bias_rate)

    def loss(self, microbatch: Batch) -> Losses:
        tokens, labels = microbatch
        if self.model.cut is not None:  # trained by a schedule: this is validation
            return evaluate(self.model, [(tokens, labels)])[0], {}
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
            return HybridModel(config.model, meshes, **_stages(config, meshes))
    except (RuntimeError, OverflowError, MemoryError) as error:
        raise ConfigError(
            f"model.hidden_size = {config.model.hidden_size}, model.vocab_size = {config.model.vocab_size}, "
            f"model.pattern = {config.model.pattern!r}: finds no memory ({' '.join(str(error).split())[:120]}); make "
            "the model smaller"
        ) from error


def _stages(config: TrainConfig, meshes: weft.Meshes) -> dict[str, Any]:
    """How the layers are dealt to the ranks of a pipeline."""
    if meshes.pp is None:
        return {}
    return {"chunks": config.chunks, "placement": config.table(dist.get_world_size()).placement}


def _recompute_layers(model: HybridModel) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for stack in (model.decoder, *model.depths):
        for number, layer in enumerate(stack.layers):
            stack.layers[number] = checkpoint_wrapper(layer)
