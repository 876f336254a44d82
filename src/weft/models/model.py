"""The hybrid language model."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.mesh import Meshes
from weft.models.config import HybridConfig
from weft.models.context import Borders, Slices, require_borders
from weft.models.cut import cut_of
from weft.models.layers import Cache, Embedding, dispatcher_of
from weft.models.layers.positions import Positions
from weft.models.layers.rotary import changes_rotation
from weft.models.loss import cross_entropy
from weft.models.prediction import PredictionDepth, Predictions, shifted
from weft.models.shared import check_context, check_shared
from weft.models.stack import Stack
from weft.models.tensor_parallel import ends_of, share, tensor_ranks
from weft.models.vocabulary import cut_cross_entropy
from weft.moe.linear import Linear
from weft.moe.mlp import scaled
from weft.moe.parts import part, units_of
from weft.moe.source import WeightSource
from weft.overlap import StagedLayer
from weft.pipeline.actions import LOOP


class HybridModel(nn.Module):
    """A language model: an embedding, the layers that `cfg.pattern` describes, and a head that scores the next token.

    The pattern may also describe prediction depths (multi-token prediction). With tied embeddings, the head uses the
    weight of the embedding.

    Initial weights depend only on `cfg`, the dtype, the type of device, and a seed that is drawn from torch's CPU
    generator when the first weight is filled. They depend neither on `meshes` nor, for a model on the meta device, on
    the order in which its modules are materialized (`to_empty` and `reset_parameters`).

    With a pipeline (`meshes.pp`), this rank has only some stages of the model. If the pattern has `|`, each segment of
    the pattern is a stage. Otherwise the layers are cut into stages of about equal cost. Parameters have the same names
    and initial values as in the whole model. Run a pipeline with `weft.overlap.forward_backward`.

    - `chunks`: the number of stages on each rank. Default: the number of segments divided by the number of pipeline
      ranks, or 1 for a pattern without `|`. Without pipeline ranks, the model has stages only if `chunks` is above 1.
    - `placement`: which stages a rank gets, "loop" or "v" (see `weft.pipeline.placement`).

    With `meshes.tp`, layers are split over the ranks of that axis (see `weft.models.tensor_parallel`), experts only
    with `meshes.etp`. All of these ranks call the model with the same tokens, and get the same logits and the same
    loss. The parameters are DTensors (those of whole experts that are spread over ranks, only after
    `weft.models.shard`).

    A tensor-parallel rank has the hidden states of only some positions. Where a docstring of this class gives their
    shape as [batch, seq, hidden] or [B, S, D], such a rank has [batch, seq / tp, hidden].

    With `meshes`, all ranks must build their models in the same order, because the constructor may create process
    groups.

    Raises `ValueError` if an axis of `meshes`, or the size of an axis, does not fit the model, such as `ep` for a
    pattern without experts. Also raises it if `chunks` or `placement` does not fit the pattern and the ranks.
    """

    origin: Any = None
    """The other files of a loaded model, such as its tokenizer: a `weft.models.hf.origin.Origin`, or None."""

    def __init__(
        self, cfg: HybridConfig, meshes: Meshes | None = None, *, chunks: int | None = None, placement: str = LOOP
    ) -> None:
        super().__init__()
        if meshes is not None:
            require_usable(cfg, meshes)
        self.cfg = cfg
        self.context_ranks = 1 if meshes is None or meshes.cp is None else meshes.cp.size()
        self.cut = cut = cut_of(cfg, meshes, chunks, placement)
        begins, ends = cut is None or cut.is_first, cut is None or cut.is_last
        here = None if cut is None else [number for segment in cut.mine for number in segment]
        source = WeightSource()
        self.embedding: Any = None
        if begins or (cut is not None and cut.has_copies):
            self.embedding = Embedding(cfg.vocab_size, cfg.hidden_size, source / "embedding", cfg.pad_token_id)
        self.decoder = Stack(cfg, cfg.parsed.layers, source / "decoder", meshes, here=here, ends=ends)
        self.ranks = tensor_ranks(meshes)
        self.output_layer: Any = None
        if ends and not cfg.tie_word_embeddings:
            self.output_layer = Linear(cfg.hidden_size, cfg.vocab_size, source / "output_layer")
        if self.ranks is not None:
            for name in ("embedding", "output_layer"):
                if (module := getattr(self, name)) is not None:
                    share(module, ends_of(cfg), self.ranks, name)
            if self.embedding is not None:
                self.embedding.ranks = self.ranks
        self.mtp = Predictions(cfg, source / "mtp", meshes) if ends and cfg.parsed.depths else None
        if not ends and "E" in "".join(layer.symbols for layer in cfg.parsed.prediction):
            for _ in range(cfg.parsed.depths):  # makes process groups: all ranks of the world must call it
                dispatcher_of(cfg, meshes)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "HybridModel":
        """Apply `fn` to all tensors as `nn.Module` does, but keep the attributes of parameters. torch drops the
        attributes of DTensors when it moves them to another dtype or device."""
        before = [
            (module, name, vars(p))
            for module in self.modules()
            for name, p in module._parameters.items()
            if p is not None
        ]
        super()._apply(fn, recurse)
        for module, name, attributes in before:
            parameter = module._parameters[name]
            vars(parameter).update(attributes)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "HybridModel":
        """Copy the model as `nn.Module` does, but keep the attributes of parameters, such as the mark of `keep_dtype`,
        which torch drops."""
        made = memo[id(self)] = type(self).__new__(type(self))
        vars(made).update(deepcopy(vars(self), memo))
        for before, after in zip(self.parameters(), made.parameters()):
            vars(after).update(deepcopy(vars(before), memo))
        return made

    @property
    def staged_layers(self) -> Sequence[StagedLayer]:
        """This rank's logical layers, which `weft.overlap` schedules."""
        return list(self.decoder.layers)  # type: ignore[arg-type]

    @property
    def chunks(self) -> list[list[StagedLayer]]:
        """One list of logical layers for each stage on this rank, in the order in which a microbatch visits the stages.

        A model that is not cut into stages has one list, with all layers.
        """
        layers = iter(self.staged_layers)
        segments = [self.staged_layers] if self.cut is None else self.cut.mine
        return [list(islice(layers, len(segment))) for segment in segments]

    @property
    def tied_ends(self) -> Sequence[nn.Module]:
        """This rank's modules that the model uses both before and after its layers.

        If a tied head or prediction depths use the embedding too, this is the embedding, or this rank's copy of it.
        Otherwise, and on a rank without either, the list is empty.
        """
        ties = self.cfg.tie_word_embeddings or self.cfg.parsed.depths > 0
        return [self.embedding] if ties and self.embedding is not None else []

    @property
    def shared_ends(self) -> Sequence[nn.Module]:
        """`tied_ends`, if the first and the last stage are on different ranks that each have a copy of the embedding.

        In all other cases, an empty list.
        """
        return self.tied_ends if self.cut is not None and self.cut.shares_ends else []

    @property
    def depths(self) -> Sequence[PredictionDepth]:
        """The prediction depths, first to last."""
        return [] if self.mtp is None else list(self.mtp.layers)

    def embed(self, tokens: Tensor, documents: Borders | None = None) -> Tensor:
        """Embed tokens; [batch, seq] int64 -> [batch, seq, hidden].

        `documents` do not change the result. Raises `TypeError` if they are neither `Documents` nor from
        `context_part`, and `ValueError` if their shape differs from the shape of `tokens`.
        """
        require_borders(documents, tokens)
        x_BSD, multiplier = self.embedding(tokens), self.cfg.embedding_multiplier
        if self.cfg.embedding_multiplier_rounded:
            multiplier = _rounded(multiplier, x_BSD.dtype)
        return scaled(x_BSD, multiplier)

    def logits(self, x_BSD: Tensor) -> Tensor:
        """Apply the final norm and the head to the last layer's output; [B, S, D] -> [B, S, vocabulary]."""
        return self._all_scores(self.final_norm(x_BSD))

    def prediction_logits(self, tokens: Tensor, documents: Borders | None = None) -> list[Tensor]:
        """Compute the logits of each prediction depth, [B, S, vocabulary] each.

        At position s, depth n = 1, 2, ... reads the token at s + n and predicts the token at s + n + 1. If the document
        ends before s + n, the depth reads the token id 0. (Without `documents`, each row is one document.) See
        `forward` for the arguments.
        """
        return self(tokens, documents=documents, depths=True)  # a call, so that hooks of sharding run

    def _all_scores(self, hidden_BSD: Tensor) -> Tensor:
        """Compute the logits of the whole vocabulary on every tensor-parallel rank."""
        scores = self._scores(hidden_BSD)
        if self.ranks is None:
            return scores
        sizes = [units_of(self.cfg.vocab_size, self.ranks.size, rank)[1] for rank in range(self.ranks.size)]
        return self.ranks.joined(scores, scores.dim() - 1, sizes)

    def loss(
        self,
        x_BSD: Tensor,
        tokens: Tensor,
        labels: Tensor,
        losses: Sequence[Tensor],
        documents: Borders | None = None,
    ) -> Tensor:
        """Return the mean cross-entropy, a scalar. In training mode, add `losses` and the losses of prediction depths.

        `x_BSD`: the last layer's output, before the final norm. `losses`: the auxiliary losses of the layers (the
        losses of their routers), each a scalar. The other arguments: see `forward`.
        """
        outputs, added = self._outputs(x_BSD, tokens, self.depths if self.training else (), documents)
        return self.total_loss(outputs, labels, [*losses, *added], documents)

    def _outputs(
        self, x_BSD: Tensor, tokens: Tensor, depths: Sequence[PredictionDepth], documents: Borders | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return two results. The first: the final hidden states of the model and of each of `depths`, from which the
        logits are computed. The second: the auxiliary losses of the layers in `depths`."""
        outputs, losses = [self.final_norm(x_BSD)], []
        for number, depth in enumerate(depths):
            output_BSD, added = depth(self.following(number, tokens, documents), outputs[-1], documents)
            outputs.append(output_BSD)
            losses += added
        return outputs, losses

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Normalize the last layer's output."""
        return self.decoder.final_layernorm(hidden)

    def following(self, number: int, tokens: Tensor, documents: Borders | None = None) -> Tensor:
        """Embed the tokens that depth `number` (from 0) reads: `tokens` shifted left by `number` + 1.

        Past the end of a document, the depth reads the token id 0. (Without `documents`, each row is one document.)
        """
        return self.embed(shifted(tokens, number + 1, 0, documents))

    def total_loss(
        self, hidden: Sequence[Tensor], labels: Tensor, losses: Sequence[Tensor], documents: Borders | None = None
    ) -> Tensor:
        """Compute the loss from the hidden states of the model and, in training mode, of each prediction depth.

        `hidden`: the hidden states [B, S, D] of the model, then of each depth in order, all after their final norms.
        `losses`: scalars that are added in training mode. The other arguments: see `forward`.
        """
        if documents is not None:
            labels = documents.labels(labels)
        self._require_slices(documents)
        loss = self._cross_entropy(hidden[0], labels)
        if isinstance(documents, Slices):
            loss, losses = documents.mean(loss, labels), [documents.average(each) for each in losses]
        if not self.training:
            return loss
        if self.mtp is not None:
            losses = [*losses, *self.mtp.losses(hidden[1:], labels, self._cross_entropy, documents)]
        return sum(losses, loss)

    def _require_slices(self, documents: Borders | None) -> None:
        """Raise `ValueError` if the model has context ranks and `documents` are not the `Slices` from
        `context_part`."""
        if self.context_ranks > 1 and not isinstance(documents, Slices):
            raise ValueError(
                f"cp={self.context_ranks}: each context rank has a part of every row, but this batch is not cut: cut "
                f"it with weft.models.context_part; to generate, use a model without cp"
            )

    def _cross_entropy(self, hidden_BSD: Tensor, labels: Tensor) -> Tensor:
        scores = self._scores(hidden_BSD)
        if self.ranks is None:
            return cross_entropy(scores, labels)
        first, _ = units_of(self.cfg.vocab_size, self.ranks.size, self.ranks.rank)
        return cut_cross_entropy(scores, labels, first, self.cfg.vocab_size, self.ranks.group)

    def _scores(self, hidden_BSD: Tensor) -> Tensor:
        """Compute the logits. With tensor parallelism, these are the logits of this rank's part of the vocabulary."""
        with Positions(self.ranks, hidden_BSD) as positions:
            if self.cfg.tie_word_embeddings:
                scores = F.linear(positions.whole, part(self.embedding, "weight"))
            else:
                scores = self.output_layer(positions.whole)
        return scores if self.cfg.logits_scaling == 1 else scores / self.cfg.logits_scaling

    def _check_cache(self, cache: Cache, rows: int) -> None:
        states = [cache[module] for module in self.modules() if module in cache]
        if not states:
            raise ValueError(
                "the cache has states of another model's layers, or of copies of this model's: copy.deepcopy also "
                "copies the layers, which are its keys; copy it as {layer: dict(state) for layer, state in "
                "cache.items()}, and begin with an empty dict for each model"
            )
        known = next((tensor.shape[0] for state in states for tensor in state.values()), rows)
        if known != rows:
            raise ValueError(
                f"tokens has {rows} rows and the cache {known}: each row continues the same row of earlier calls; "
                f"begin with an empty dict for other rows"
            )

    def _to_read(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Return the tokens to read, usually `tokens`. If the sequence has become so long that the rotation of earlier
        positions changes, empty the cache and return the whole sequence."""
        if (scaling := self.decoder.scaling_by_length) is None:
            return tokens
        known = cache.get(self, {}).get("tokens", tokens[:, :0])
        whole = torch.cat((known, tokens), dim=1)
        if again := changes_rotation(scaling, known.shape[1], whole.shape[1]):
            cache.clear()
            cache[self] = {"tokens": known}  # if this call fails and is repeated, it reads the whole sequence
        return whole if again else tokens

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        cache: Cache | None = None,
        documents: Borders | None = None,
        depths: bool = False,
    ) -> Any:
        """Compute the logits or, with labels, the loss.

        Args:
            tokens: [batch, seq] int64.
            labels: [batch, seq] int64. `labels[b, s]` is the token that follows `tokens[b, s]` (already shifted), or
                -100 to ignore the position.
            cache: a dict for generation. Pass an empty dict to the first call, and the same dict to later calls, whose
                `tokens` continue the sequence. Each call updates the dict and returns the logits of its own `tokens`.
                Within rounding, they equal the logits from one call with the sequence up to the last of these `tokens`.
                The exception is a `capacity_factor`, which applies to the tokens of each call separately. With a
                `rope_scaling` of type "dynamic" or "longrope", a call that changes the rotation of earlier positions
                recomputes these positions.
            documents: the documents and the padding in the rows. No information passes between documents, except in
                routers, whose auxiliary losses and capacities ignore the borders of documents. The label at a
                document's last position is ignored (for the exception see `Documents.continues`).
            depths: if True, return only a list with the logits of each prediction depth (see `prediction_logits`).

        Without labels, returns the logits [batch, seq, vocabulary]. With labels, returns a scalar: the mean
        cross-entropy over the labels that are not -100 (see `weft.models.loss.cross_entropy`). In training mode the
        losses of routers and prediction depths are added to it.

        Raises:
            ValueError:
                - The shape of `documents` or `labels` differs from the shape of `tokens`.
                - `documents` together with a cache, or `depths` together with labels or a cache.
                - The cache holds only states of other models, or has a different number of rows.
                - With tensor parallelism: any cache, or rows whose length is not a multiple of tp.
                - With context parallelism: a batch that is not from `context_part`.
            TypeError: `documents` has a wrong type.
            RuntimeError: the model is cut into pipeline stages on several ranks.
        """
        if self.cut is not None and self.cut.ranks > 1:
            raise RuntimeError(
                f"this rank has stages of a model that is split over pp={self.cut.ranks} ranks, not the whole model: "
                f"call weft.overlap.forward_backward"
            )
        self._require_slices(documents)
        if depths and (labels is not None or cache is not None):
            raise ValueError("depths=True with labels or a cache: it returns logits of whole rows; leave one out")
        if self.ranks is not None and cache is not None:
            raise ValueError(f"tp={self.ranks.size}: a cache needs whole layers; generate with a model without tp")
        if documents is not None and cache is not None:
            raise ValueError("documents with a cache: a cache continues one sequence per row; leave one out")
        if cache:
            self._check_cache(cache, tokens.shape[0])
        read = tokens if cache is None else self._to_read(tokens, cache)
        beside = {} if documents is None else {"documents": documents}  # a subclass may take none, as in a schedule
        x_BSD, losses = self.decoder(self.embed(read, **beside), cache, documents)
        if cache is not None and self.decoder.scaling_by_length is not None:
            known = cache.get(self, {}).get("tokens", tokens[:, :0])
            cache[self] = {"tokens": torch.cat((known, tokens), dim=1)}
        x_BSD = x_BSD if read is tokens else x_BSD[:, -tokens.shape[1] :]
        if depths:
            outputs, _ = self._outputs(x_BSD, tokens, self.depths, documents)
            return [self._all_scores(output) for output in outputs[1:]]
        return self.logits(x_BSD) if labels is None else self.loss(x_BSD, tokens, labels, losses, **beside)


@cache
def _rounded(number: float, dtype: torch.dtype) -> float:
    return torch.tensor(number, dtype=dtype, device="cpu").item()


def require_usable(cfg: HybridConfig, meshes: Meshes) -> None:
    """Raise `ValueError` if an axis of `meshes` or its size does not suit a model of `cfg`."""
    if meshes.tp is not None:
        check_shared(cfg, meshes.tp.size(), 1 if meshes.etp is None else meshes.etp.size())
    if meshes.cp is not None:
        check_context(cfg, meshes.cp.size(), 1 if meshes.tp is None else meshes.tp.size())
    if meshes.ep is not None and "E" not in cfg.pattern:
        raise ValueError(
            f"ep={meshes.ep.size()}: pattern {cfg.pattern!r} has no 'E', so there are no experts to spread; use ep=1"
        )
