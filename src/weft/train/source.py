"""Sources of trained weights: a run, one of its checkpoints, or the directory of a model."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.checkpoint import CheckpointManager, ModelState, committed_steps
from weft.checkpoint.directory import path_of
from weft.models import HybridConfig, HybridModel, hf
from weft.models.generate import Sampling, continuations
from weft.models.hf.directory import OURS, THEIRS
from weft.models.hf.generation import Generation, generation_of
from weft.models.hf.origin import Origin, origin_of
from weft.models.renumber import renumbered
from weft.train.chat import ChatTemplate, Messages, template_of
from weft.train.config import TrainConfig, load_config
from weft.train.errors import ConfigError
from weft.train.run.runs import CHECKPOINTS, CONFIG, ORIGIN, refuse_own_task
from weft.train.tokenizer import Tokenizer, load_tokenizer

CONTEXT = 8
"""The number of tokens at the end of a prompt that are decoded again with the tokens that follow."""
UNFINISHED = "\ufffd"
"""How a character decodes before all of its bytes have been generated."""
DEFAULTS = Sampling(temperature=0.8, top_p=0.95)
"""How tokens are chosen if the model's files do not say."""


class Source:
    """Weights on disk, with the configuration and the tokenizer that belong to them.

    A run's are those of its newest intact checkpoint when they are loaded; `say` is told which damaged ones are passed
    over. `ignored`: fields of a config.json to pass over (see `hf.config_of`). Raises ConfigError for a path that is no
    run, checkpoint or directory of a model.
    """

    def __init__(
        self, path: str | Path, say: Callable[[str], None] | None = None, *, ignored: Collection[str] = ()
    ) -> None:
        self.path = path = Path(path)
        self.ignored = tuple(ignored)
        self._say = say
        self.step: int | None = None
        """Of the checkpoint that is named; None for the newest one."""
        self.run: Path | None = None
        if any((path / name).is_file() for name in (THEIRS, OURS)):
            return
        place = path.resolve()
        folder = place.parent.parent / CHECKPOINTS
        if place in (named := {path_of(folder, step): step for step in committed_steps(folder)}):
            self.run, self.step = folder.parent, named[place]
        elif committed_steps(path / CHECKPOINTS):
            self.run = path
        if self.run is None or not (self.run / CONFIG).is_file():
            raise ConfigError(
                f"{path}: is no run with a checkpoint, no checkpoint where its run has it "
                "(RUN/checkpoints/step-00000010), and no model's directory; name one of these"
            )

    @cached_property
    def model_config(self) -> HybridConfig:
        """Of the model that the weights are for."""
        if self.run is None:
            return hf.config_of(self.path, ignored=self.ignored)
        model = self._run_config.model
        if not isinstance(model, HybridConfig):
            raise ConfigError(f"{self.run}: is a run of your own model, {model.factory}; load it where that is")
        return model

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Of the text that the model knows. Raises ConfigError where there is none."""
        if self.run is not None:
            if self._run_config.data.kind == "tokens":
                raise ConfigError(
                    f'{self.run}: data.kind = "tokens", and the tokenizer that made them is unknown; write the model '
                    "with weft convert, put the tokenizer.json beside it, and name that directory"
                )
            return load_tokenizer(self._run_config.data.tokenizer)
        if not (path := self.path / "tokenizer.json").is_file():
            raise ConfigError(
                f"{self.path}: has no {path.name}; put that of the model there, or name the run "
                "(transformers writes one from older files: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        return load_tokenizer(str(path))

    @property
    def tokenizer_file(self) -> Path | None:
        """The tokenizer.json that a run's text was made with; None where there is none."""
        if self.run is None or self._run_config.data.kind == "tokens" or self._run_config.data.tokenizer == "bytes":
            return None
        return Path(self._run_config.data.tokenizer)

    def load(self, model: Any) -> None:
        """Fill the weights of `model`, sharded or not; all ranks call it.

        The model may group the same symbols in another way. Raises ConfigError if it is another function of its
        weights, even where all shapes fit.
        """
        if different := hf.differences(model.cfg, self.model_config):
            raise ConfigError(
                f"{self.path}: has the weights of another model: {'; '.join(different)}; take that in [model], the "
                "pattern in any grouping"
            )
        if self.run is None:
            hf.load(model, self.path, ignored=self.ignored)
            return
        with CheckpointManager(self.run / CHECKPOINTS, progress=self._say) as checkpoints:
            checkpoints.load(renumbered({"model": ModelState(model)}, model.cfg), self.step)
        model.origin = self.origin

    @cached_property
    def origin(self) -> Origin | None:
        """The files that the model was loaded with; None for a model trained from initial weights."""
        if self.run is None:
            return origin_of(self.path, self.ignored)
        return origin_of(self.run / ORIGIN) if (self.run / ORIGIN / OURS).is_file() else None

    @cached_property
    def generation(self) -> Generation:
        """How the model chooses tokens, and where it ends, by its own files."""
        return generation_of(self.origin)

    @cached_property
    def template(self) -> ChatTemplate:
        """How conversations are written. Raises ConfigError for a model without a chat template."""
        found = template_of(self.origin.files, str(self.path)) if self.origin is not None else None
        if found is None:
            raise ConfigError(f"{self.path}: has no chat template; use weft sample, or take a model that has one")
        return found

    @cached_property
    def model(self) -> HybridModel:
        """The model with these weights, in this process alone."""
        model = HybridModel(self.model_config)
        self.load(model)
        return model.eval()

    def continued(self, prompt: str, **options: Any) -> Iterator[str]:
        """`prompt`, and what the model adds to it, part by part. `options`: those of `added`."""
        encoded = self._encoded(prompt)
        yield prompt
        for _, text in self.added([encoded], **options):
            yield text

    def added(
        self, prompts: Sequence[str | list[int]], *, tokens: int = 200, seed: int = 0, **choices: Any
    ) -> Iterator[tuple[int, str]]:
        """What a model with these weights adds to each of `prompts`, texts or tokens: (which of them, the next part).

        Before a text stands what the tokenizer of a published model puts there; a run has learnt without that.

        A text has at most `tokens` tokens and ends where the model ends it. `choices`: fields of `Sampling` in place of
        those of the model's generation_config.json. The same seed gives the same texts. Only what the tokenizer has is
        drawn: models often have room for more. Raises ConfigError for a prompt that the model has no tokens for.
        """
        encoded = [self._encoded(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        rows = self.model_config.vocab_size
        ends = self.generation.ends
        among = torch.tensor(sorted(each for each in {*self.tokenizer.ids.tolist(), *ends} if each < rows))
        options: Any = {"among": among, "generator": torch.Generator().manual_seed(seed)}
        options["sampling"] = dataclasses.replace(self.generation.sampling or DEFAULTS, **choices)
        chosen: list[list[int]] = [[] for _ in prompts]
        # Decoders strip a blank from the first token they see, so the last tokens of the prompt are decoded too.
        before = [np.asarray(each[-CONTEXT:], np.int64) for each in encoded]
        shown = [self.tokenizer.decode(each) for each in before]
        for step in continuations(self.model, encoded, ends=ends, most=tokens, **options):
            for row, token in enumerate(step):
                if token is None:
                    continue
                chosen[row].append(token)
                text = self.tokenizer.decode(np.concatenate((before[row], chosen[row])))
                if not text.endswith(UNFINISHED):
                    yield row, text[len(shown[row]) :]
                    shown[row] = text

    def answered(self, messages: Messages, **options: Any) -> Iterator[str]:
        """The assistant's next message in a conversation, part by part. `options`: those of `added`."""
        text = self.template.render(messages, prompt=True)
        for _, part in self.added([self.tokenizer.encode(text.encode()).tolist()], **options):
            yield part

    def _encoded(self, prompt: str) -> list[int]:
        encoded = self.tokenizer.encode(prompt.encode())
        if len(encoded) and self.run is None:
            encoded = self.tokenizer.prompt(prompt)
        if not len(encoded):
            raise ConfigError("the prompt is empty: give a text to continue")
        if (largest := int(encoded.max())) >= self.model_config.vocab_size:
            raise ConfigError(
                f"{self.path}: its tokenizer makes token {largest} of the prompt, and the model has "
                f"{self.model_config.vocab_size}; put the tokenizer.json of that model there"
            )
        return encoded.tolist()

    @cached_property
    def _run_config(self) -> TrainConfig:
        assert self.run is not None
        refuse_own_task(self.run)
        return load_config(self.run / CONFIG)
