"""Loads trained weights from a run, one of its checkpoints, or a model directory."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from weft.checkpoint import CheckpointManager, ModelState, committed_steps
from weft.checkpoint.directory import path_of
from weft.checkpoint.storage import require_exists
from weft.models import HybridConfig, HybridModel, hf
from weft.models.hf.directory import OURS, THEIRS
from weft.models.hf.generation import Generation, generation_of
from weft.models.hf.origin import Origin, origin_of
from weft.models.renumber import renumbered
from weft.train.chat import ChatTemplate, Messages, template_of
from weft.train.config import TrainConfig, load_config
from weft.train.errors import ConfigError
from weft.train.run.runs import CHECKPOINTS, CONFIG, ORIGIN, refuse_own_task
from weft.train.texts import continuation_texts
from weft.train.tokenizer import Tokenizer, load_tokenizer


class Source:
    """Weights on disk, with the configuration and the tokenizer that belong to them.

    - `path`: a run, a checkpoint of a run, or a model directory. Raises ConfigError for any other path. For a run,
      `load` uses the newest intact checkpoint.
    - `say`: called on the first rank with a line about each damaged checkpoint that is skipped.
    - `ignored`: fields of config.json to ignore (see `hf.config_of`); only for a model directory.
    """

    def __init__(
        self, path: str | Path, say: Callable[[str], None] | None = None, *, ignored: Sequence[str] = ()
    ) -> None:
        self.path = path = Path(path)
        self.ignored = tuple(ignored)
        self._say = say
        self.step: int | None = None
        """The step of the checkpoint, if `path` is a checkpoint. Otherwise None."""
        self.run: Path | None = None
        require_exists(path, "name a run, one of its checkpoints, or a model's directory")
        if any((path / name).is_file() for name in (THEIRS, OURS)):
            return
        if committed_steps(path / CHECKPOINTS):
            self.run = path
        # `path` may be a link to a checkpoint, which is resolved first. In the path as given, the folder `checkpoints`
        # may itself be a link to another disk. If both forms name a checkpoint, the path as given counts.
        for place in (path.resolve(), Path(os.path.abspath(path))):
            folder = place.parent.parent / CHECKPOINTS
            named = {path_of(folder, step): step for step in committed_steps(folder)}
            if place in named and place.exists() and os.path.samefile(place, path):
                self.run, self.step = folder.parent, named[place]
        if self.run is None or not (self.run / CONFIG).is_file():
            raise ConfigError(
                f"{path}: must be a run with a checkpoint, a checkpoint in its run's directory "
                f"(RUN/checkpoints/step-00000010), or a model's directory with {THEIRS} or {OURS}; name one of these"
            )
        if ignored:
            raise ConfigError(
                f"--ignore-field {ignored[0]}: has no effect on a run, which has its own configuration; leave it out"
            )

    @cached_property
    def model_config(self) -> HybridConfig:
        """The configuration of the model."""
        if self.run is None:
            return hf.config_of(self.path, ignored=self.ignored)
        model = self._run_config.model
        if not isinstance(model, HybridConfig):
            raise ConfigError(
                f"{self.run}: is a run of your own model, {model.factory}; load it in a program that has that model"
            )
        return model

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model. Raises ConfigError if the run or the directory has none."""
        if self.run is not None:
            if self._run_config.data.kind == "tokens":
                raise ConfigError(
                    f'{self.run}: data.kind = "tokens", and the tokenizer that made them is unknown; write the model '
                    "with weft convert, add the tokenizer.json, and name that directory"
                )
            return load_tokenizer(self._run_config.data.tokenizer)
        if not (path := self.path / "tokenizer.json").is_file():
            raise ConfigError(
                f"{self.path}: has no {path.name}; put the model's {path.name} there, or name the run "
                "(transformers writes one from older files: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
            )
        return load_tokenizer(str(path))

    @property
    def tokenizer_file(self) -> Path | None:
        """The path of the tokenizer.json of a run's text. None for a model directory, or if the run uses none."""
        if self.run is None or self._run_config.data.kind == "tokens" or self._run_config.data.tokenizer == "bytes":
            return None
        return Path(self._run_config.data.tokenizer)

    def load(self, model: Any) -> None:
        """Load the weights into `model`, sharded or not. Collective.

        The pattern of `model` may group the layers differently from the saved model. Raises ConfigError if `model`
        would compute a different function of the weights than the saved model, even if all shapes fit.
        """
        if different := hf.differences(model.cfg, self.model_config):
            raise ConfigError(
                f"{self.path}: has the weights of another model: {'; '.join(different)}; use that model in [model], "
                f"with the pattern in any grouping"
            )
        if self.run is None:
            hf.load(model, self.path, ignored=self.ignored)
            return
        with CheckpointManager(self.run / CHECKPOINTS, progress=self._say) as checkpoints:
            checkpoints.load(renumbered({"model": ModelState(model)}, model.cfg), self.step)
        model.origin = self.origin

    @cached_property
    def origin(self) -> Origin | None:
        """The files of the published model that the weights come from. None for weights trained from scratch."""
        if self.run is None:
            return origin_of(self.path, self.ignored)
        return origin_of_run(self.run)

    @cached_property
    def generation(self) -> Generation:
        """The sampling options and end tokens in the model's files."""
        return generation_of(self.origin)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template. Raises ConfigError if the model has none."""
        found = template_of(self.origin.files, str(self.path)) if self.origin is not None else None
        if found is None:
            raise ConfigError(f"{self.path}: has no chat template; use weft sample, or a model that has one")
        return found

    @cached_property
    def model(self) -> HybridModel:
        """The unsharded model with these weights, in evaluation mode."""
        model = HybridModel(self.model_config)
        self.load(model)
        return model.eval()

    def continued(self, prompt: str, **options: Any) -> Iterator[str]:
        """Yield `prompt`, and then the model's continuation, part by part. `options`: the options of `added`."""
        encoded = self._encoded(prompt)
        yield prompt
        for _, text in self.added([encoded], **options):
            yield text

    def added(self, prompts: Sequence[str | list[int]], **options: Any) -> Iterator[tuple[int, str]]:
        """Generate continuations of `prompts`, each a text or a list of tokens. Yield pairs: the index of a prompt, and
        the next part of the text of its continuation.

        With a model directory, the special tokens with which the tokenizer begins a text are prepended to texts. With a
        run, no special tokens are added, as in training. Lists of tokens are used unchanged.

        `options`: `tokens`, `seed` and `choices` of `weft.train.texts.continuation_texts`. Raises ConfigError for an
        empty text, or for a text with tokens that the model does not have.
        """
        encoded = [self._encoded(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        yield from continuation_texts(
            self.model,
            encoded,
            tokenizer=self.tokenizer,
            generation=self.generation,
            vocab_size=self.model_config.vocab_size,
            **options,
        )

    def answered(self, messages: Messages, **options: Any) -> Iterator[str]:
        """Yield the assistant's next message in a conversation, part by part. `options`: the options of `added`."""
        text = self.template.render(messages, prompt=True)
        for _, part in self.added([self._checked(self.tokenizer.encode(text.encode()))], **options):
            yield part

    def _encoded(self, prompt: str) -> list[int]:
        return self._checked(
            self.tokenizer.prompt(prompt) if self.run is None else self.tokenizer.encode(prompt.encode())
        )

    def _checked(self, encoded: np.ndarray) -> list[int]:
        if not len(encoded):
            raise ConfigError("the prompt is empty: pass a text to continue")
        if (largest := int(encoded.max())) >= self.model_config.vocab_size:
            raise ConfigError(
                f"{self.path}: its tokenizer maps the prompt to token {largest}, but model.vocab_size = "
                f"{self.model_config.vocab_size}; put the tokenizer.json of that model there"
            )
        return encoded.tolist()

    @cached_property
    def _run_config(self) -> TrainConfig:
        assert self.run is not None
        refuse_own_task(self.run)
        return load_config(self.run / CONFIG)


def origin_of_run(run: Path) -> Origin | None:
    """Return the files of the published model whose weights the run in the directory `run` started from. None if it
    did not start from a published model."""
    return origin_of(run / ORIGIN) if (run / ORIGIN / OURS).is_file() else None
