"""The task of a language model on text, as a configuration describes it."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.comm.groups import exchange_objects
from weft.models import Documents, HybridConfig, HybridModel, context_part, shard
from weft.models.loss import cross_entropy
from weft.overlap import evaluate
from weft.train.config import TrainConfig
from weft.train.data import Batch, Batches, Validation, load_corpora
from weft.train.data.bigram import Bigram
from weft.train.errors import ConfigError
from weft.train.experts import ExpertBalance
from weft.train.imported import imported
from weft.train.modes import in_eval_mode
from weft.train.run.turns import first_rank_first
from weft.train.sections import OwnModelConfig
from weft.train.task.blocks import prepare
from weft.train.task.callables import check_callable
from weft.train.task.own import own_model, with_numbers
from weft.train.task.sharding import meshes_of, options_of
from weft.train.task.task import Losses


class TextTask:
    """This rank's part of training a model on text. Raises ConfigError for an unusable text, or for a model that does
    not fit into memory."""

    unit = "tokens"
    adds_losses: bool = True

    def __init__(self, config: TrainConfig, device: torch.device, say: Callable[[str], None] = print) -> None:
        meshes = meshes_of(config, device)
        data = config.data
        runs = config.run.directory
        self.corpora = first_rank_first(lambda: load_corpora(data, dp_size=meshes.dp_size, say=say, runs=runs))
        options: dict[str, Any] = {
            "sequence_length": data.sequence_length,
            "microbatch_size": config.train.microbatch_size,
            "global_batch_size": config.train.global_batch_size,
            "dp_rank": meshes.dp_rank,
            "dp_size": meshes.dp_size,
            "packing": data.packing,
            "cross_documents": config.train.cross_documents,
            **({} if meshes.cp is None else {"cut": partial(_context_part, meshes=meshes)}),
            "vocabulary": _vocabulary(config),
        }
        training = [corpus.training for corpus in self.corpora]
        apart = bool(data.validation_paths)
        held = [corpus.held for corpus in self.corpora[: 1 if apart else None]]
        self.batches = Batches(training, seed=data.seed, weights=data.weights, held=held, **options)
        _compare([part.name for part in (*training, *held)], self.batches.state_dict()["texts"])
        options |= {"weights": () if apart else data.weights, "batches": config.train.validation_batches}
        self.validation = Validation(held, **options)
        self.validation_weights = self.validation.microbatch_weights
        self.at_once = 2 * config.sharding.pp if config.sharding.pp > 1 else 1
        self.units_per_step = config.train.global_batch_size * data.sequence_length
        validated = "nats/byte" if self._bytes_per_token is not None else "nats/token"
        self.loss_units: Mapping[str, str] = {
            "loss": validated if self._bytes_per_token == 1 else "nats/token",
            "validation_loss": validated,
        }
        self.description = "; ".join(corpus.description for corpus in self.corpora)
        self._loss: Callable[..., Any] | None = None
        if isinstance(config.model, OwnModelConfig):
            self.adds_losses = False
            self._loss = imported("model.loss", config.model.loss) if config.model.loss else next_token_loss
            self.model: Any = own_model(factory_of(config.model), None, config, meshes, device)
            if self._loss is next_token_loss and data.packing == "whole" and not config.train.cross_documents:
                text = np.resize(training[0].tokens[:4096], (config.train.microbatch_size, data.sequence_length))
                _require_documents(self.model, torch.from_numpy(text.astype(np.int64)).to(device))
        else:
            self.model = hybrid(config, config.model, meshes, device)
        self.experts = ExpertBalance(self.model, meshes.dense, config.train.expert_bias_rate)

    def count(self, microbatches: Sequence[Batch]) -> float:
        return self.units_per_step / dist.get_world_size()

    def loss(self, microbatch: Batch) -> Losses:
        if self._loss is not None:
            return with_numbers(self._loss(self.model, for_own_model(microbatch)))
        if isinstance(microbatch, dict):
            return self.model(**microbatch), {}
        tokens, labels = microbatch
        return self.model(tokens, labels=labels), {}

    def validation_losses(self, microbatches: Sequence[Batch]) -> list[Losses]:
        if self._loss is None and self.model.cut is not None:
            return [(loss, {}) for loss in evaluate(self.model, microbatches)]
        return [self.loss(microbatch) for microbatch in microbatches]

    def validation_values(self, loss: float) -> dict[str, float]:
        size = self._bytes_per_token
        return {"loss": loss, "nats_per_byte": loss / size} if size else {"loss": loss}

    def baseline(self) -> float | None:
        """Return the validation loss of a bigram table, fitted to the training text, in nats per byte.

        Return None for several texts, for token files, and for texts in which some positions have no label.
        """
        corpus, size = self.corpora[0], self._bytes_per_token
        if size is None or corpus.vocab_size is None or self.validation.has_gaps:
            return None
        return Bigram.fit(corpus.train, corpus.vocab_size).cross_entropy(*self.validation.pairs()) / size

    @property
    def _bytes_per_token(self) -> float | None:
        """The bytes per token of the validation text. None if unknown, or if there are several texts."""
        return self.corpora[0].bytes_per_token if len(self.corpora) == 1 else None


def _compare(names: Sequence[str], texts: list[Any]) -> None:
    """Raise ConfigError on every rank if the texts of any rank differ from those of the first rank. Collective."""
    everyone = exchange_objects(texts, what="the texts of the ranks")
    for rank, theirs in enumerate(everyone):
        for name, first, other in zip(names, everyone[0], theirs):
            if first != other:
                length = f"it is {other[0]} long there and {first[0]} on rank 0"
                how = length if first[0] != other[0] else "it has the same length but other tokens"
                raise ConfigError(
                    f"{name}: differs between rank {rank} and rank 0 ({how}); copy the same files to every host, or "
                    f"name a folder that all of them share"
                )


def factory_of(model: OwnModelConfig) -> Callable[[], nn.Module]:
    """Return the function that `model.factory` names, with `model.options` bound. Raises ConfigError if the function
    does not take these options."""
    factory = imported("model.factory", model.factory)
    check_callable("model.factory", factory, [], "a callable that takes the names in model.options", model.options)
    return partial(factory, **model.options)


def _context_part(batch: Batch, meshes: weft.Meshes) -> Batch:
    given = batch if isinstance(batch, dict) else {"tokens": batch[0], "labels": batch[1]}
    return context_part(given, meshes)


def for_own_model(microbatch: Batch) -> Batch:
    """Return a microbatch in the form that the loss of your own model receives.

    A dictionary with "documents" becomes a dictionary of "tokens", "labels", "position_ids" and "cu_seqlens". A tuple
    (tokens, labels) is returned unchanged.
    """
    if not isinstance(microbatch, dict):
        return microbatch
    tokens, documents = microbatch["tokens"], microbatch["documents"]
    given = {name: getattr(documents, name)(tokens.device) for name in DOCUMENT_NAMES}
    return {"tokens": tokens, "labels": microbatch["labels"], **given}


DOCUMENT_NAMES = ("position_ids", "cu_seqlens")
"""The arguments of `forward` that tell your own model where documents begin."""


def _require_documents(model: nn.Module, text: torch.Tensor) -> None:
    """Raise ConfigError for a model whose `forward` has none of `DOCUMENT_NAMES`, or in which the logits of a document
    depend on the previous document.

    `text`: tokens with the shape of a microbatch, so that nothing is compiled for another shape.
    """
    takes = inspect.signature(model.forward).parameters
    if not any(name in takes for name in DOCUMENT_NAMES):
        raise ConfigError(
            f'data.packing = "whole": {type(model).__name__}.forward takes neither position_ids nor cu_seqlens, so '
            "documents of a sequence would attend to each other; add one of them, set model.loss to "
            "your own loss, or set train.cross_documents = true"
        )
    change = _seen_of_others(model, text)
    if change > 0:
        raise ConfigError(
            f'data.packing = "whole": {type(model).__name__} receives the document boundaries, but the logits of a '
            f"document change by {change:.1%} with the tokens of the previous one; layers such as recurrences and "
            "convolutions often ignore boundaries; use a model.pattern, set model.loss to your own loss, or set "
            "train.cross_documents = true"
        )


@torch.no_grad()
def _seen_of_others(model: nn.Module, text: torch.Tensor) -> float:
    """Return the largest change of a document's logits if the tokens of the previous document change.

    The change is relative to the largest logit, and is 0 if it is within rounding error. `text`: tokens [batch, seq].
    """
    half, found = text.shape[1] // 2, []
    documents = Documents.from_ids((torch.arange(text.shape[1]) >= half).long().expand(text.shape))
    other = text.clone()
    other[:, :half] = text[:, -1:]
    with in_eval_mode(model):
        for tokens in (text, other):
            with torch.random.fork_rng():  # both passes draw the same numbers; training is unaffected
                scores = _scores(model, for_own_model({"tokens": tokens, "labels": tokens, "documents": documents}))
            found.append(scores[:, half:].clone())  # not a view, so that the rest can be freed
            del scores
    one, two = found
    change = ((one - two).abs().max() / one.abs().max()).item()
    return change if change > torch.finfo(one.dtype).eps ** 0.5 / 4 else 0.0  # rounding of sums over experts is smaller


def next_token_loss(model: nn.Module, microbatch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy of the logits of `model(tokens)`: the output's attribute `logits` or, without one,
    the output itself.

    If the microbatch has documents, the model also gets `position_ids`, `cu_seqlens` and `use_cache=False`, each only
    if `forward` has that argument. With a cache, models of `transformers` would ignore that positions restart in each
    document.
    """
    labels = microbatch["labels"] if isinstance(microbatch, dict) else microbatch[1]
    return cross_entropy(_scores(model, microbatch), labels)


def _scores(model: nn.Module, microbatch: Batch) -> torch.Tensor:
    given: dict[str, Any] = {}
    if isinstance(microbatch, dict):
        takes = inspect.signature(model.forward).parameters
        given = {name: microbatch[name] for name in DOCUMENT_NAMES if name in takes}
        if "use_cache" in takes:
            given["use_cache"] = False
    found = model(microbatch["tokens"] if isinstance(microbatch, dict) else microbatch[0], **given)
    return getattr(found, "logits", found)


def _vocabulary(config: TrainConfig) -> int | None:
    """Return the vocabulary size for token files, whose tokens must all be below it. Return None for other data, and
    for your own model."""
    known = config.data.kind == "tokens" and isinstance(config.model, HybridConfig)
    return config.model.vocab_size if known else None  # type: ignore[union-attr]


def hybrid(
    config: TrainConfig,
    sizes: HybridConfig,
    meshes: weft.Meshes,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> HybridModel:
    """Build and shard the model that `sizes` describe. If `dtype` is given, the initial weights are cast to it."""
    model = _build(config, sizes, meshes, device)
    if dtype is not None:
        model = model.to(dtype)
    stacks = (model.decoder, *model.depths)
    prepare([(stack.layers, number) for stack in stacks for number in range(len(stack.layers))], config.train)
    return shard(model, meshes, **options_of(config, model))


def _build(config: TrainConfig, sizes: HybridConfig, meshes: weft.Meshes, device: torch.device) -> HybridModel:
    torch.manual_seed(config.train.seed)
    try:
        with device:
            return HybridModel(sizes, meshes, **_stages(config, meshes))
    except (RuntimeError, OverflowError, MemoryError) as error:
        raise ConfigError(
            f"model.hidden_size = {sizes.hidden_size}, model.vocab_size = {sizes.vocab_size}, "
            f"model.pattern = {sizes.pattern!r}: does not fit into memory ({' '.join(str(error).split())[:120]}); make "
            "the model smaller"
        ) from error


def _stages(config: TrainConfig, meshes: weft.Meshes) -> dict[str, Any]:
    """Return the arguments of HybridModel that assign layers to pipeline ranks."""
    if meshes.pp is None:
        return {}
    return {"chunks": config.chunks, "placement": config.table(dist.get_world_size()).placement}
