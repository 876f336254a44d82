"""Where trained weights are: a run, one of its checkpoints, or the directory of a model."""

import json
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.checkpoint import CheckpointManager, ModelState, committed_steps
from weft.checkpoint.directory import path_of
from weft.models import HybridConfig, HybridModel, hf
from weft.models.generate import generate
from weft.models.hf.directory import OURS, THEIRS
from weft.models.renumber import renumbered
from weft.train.config import TrainConfig, load_config
from weft.train.errors import ConfigError
from weft.train.run.runs import CHECKPOINTS, CONFIG, refuse_own_task
from weft.train.tokenizer import Tokenizer, load_tokenizer

UNFINISHED = "\ufffd"
"""How the start of a character looks whose other bytes are still to come."""


class Source:
    """Weights on disk, with the configuration and the tokenizer that belong to them.

    A run's are those of its newest intact checkpoint when they are loaded; `say` is told which damaged ones are passed
    over. Raises ConfigError for a path that is no run, checkpoint or directory of a model.
    """

    def __init__(self, path: str | Path, say: Callable[[str], None] | None = None) -> None:
        self.path = path = Path(path)
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
            return hf.config_of(self.path)
        model = self._run_config.model
        if not isinstance(model, HybridConfig):
            raise ConfigError(f"{self.run}: is a run of a model of one's own, {model.factory}; load it where that is")
        return model

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Of the text that the model knows. Raises ConfigError where there is none."""
        if self.run is not None:
            if self._run_config.data.kind == "tokens":
                raise ConfigError(
                    f'{self.run}: data.kind = "tokens", and nobody knows the tokenizer that made them; write the model '
                    "with weft convert, put the tokenizer.json beside it, and name that directory"
                )
            return load_tokenizer(self._run_config.data.tokenizer)
        if not (path := self.path / "tokenizer.json").is_file():
            raise ConfigError(f"{self.path}: has no {path.name}; put that of the model there, or name the run")
        return load_tokenizer(str(path))

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
            hf.load(model, self.path)
            return
        with CheckpointManager(self.run / CHECKPOINTS, progress=self._say) as checkpoints:
            checkpoints.load(renumbered({"model": ModelState(model)}, model.cfg), self.step)

    def continued(
        self, prompt: str, *, tokens: int = 200, temperature: float = 0.8, top_p: float = 0.95, seed: int = 0
    ) -> Iterator[str]:
        """`prompt`, and what a model with these weights adds to it, part by part; at most `tokens` tokens.

        It ends where the model ends a text. The same seed gives the same text. Only what the tokenizer has is drawn:
        models often have room for more. Raises ConfigError for a prompt that the model has no tokens for.
        """
        encoded = self.tokenizer.encode(prompt.encode())
        if not len(encoded):
            raise ConfigError("the prompt is empty: give a text to continue")
        rows = self.model_config.vocab_size
        if (largest := int(encoded.max())) >= rows:
            raise ConfigError(
                f"{self.path}: its tokenizer makes token {largest} of the prompt, and the model has {rows}; put the "
                "tokenizer.json of that model there"
            )
        generator = torch.Generator().manual_seed(seed)
        model = HybridModel(self.model_config)
        self.load(model)
        yield prompt
        known = torch.tensor(encoded.astype("int64"))[None]
        among = torch.tensor(sorted(each for each in {*self.tokenizer.ids.tolist(), *self._ends} if each < rows))
        options: Any = {"among": among, "temperature": temperature, "top_p": top_p}
        chosen: list[int] = []
        shown = ""
        for _, token in zip(range(tokens), generate(model.eval(), known, generator=generator, **options)):
            if int(token) in self._ends:
                break
            chosen.append(int(token))
            text = self.tokenizer.decode(np.asarray(chosen))
            if not text.endswith(UNFINISHED):
                yield text[len(shown) :]
                shown = text

    @property
    def _ends(self) -> set[int]:
        """The tokens that end a text."""
        if self.run is not None:
            return set()
        ours = self.path / OURS
        fields = json.loads(ours.read_text())["kept"] if ours.exists() else json.loads((self.path / THEIRS).read_text())
        ends = fields.get("eos_token_id")
        return set(ends) if isinstance(ends, list) else {ends} - {None}

    @cached_property
    def _run_config(self) -> TrainConfig:
        assert self.run is not None
        refuse_own_task(self.run)
        return load_config(self.run / CONFIG)
