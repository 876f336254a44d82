"""Generates a sample after each validation: the model's continuation of `train.sample`."""

from itertools import islice

import numpy as np
import torch

from weft.models import HybridConfig, HybridModel
from weft.models.generate import Sampling, generate
from weft.train.config import TrainConfig
from weft.train.modes import in_eval_mode
from weft.train.sections.rules import require
from weft.train.tokenizer import load_tokenizer
from weft.train.toml_values import show


class Samples:
    """Continues the prompt `train.sample`. All ranks generate each sample together.

    Raises ConfigError for your own model, for data without a tokenizer, with `pp`, `cp` or `tp` above 1, and for a
    prompt without tokens.
    """

    def __init__(self, config: TrainConfig, model: HybridModel, device: torch.device) -> None:
        prompt, sharding = config.train.sample, config.sharding
        rule = "needs a model described by [model] and a tokenizer; leave it out"
        require("train.sample", prompt, isinstance(config.model, HybridConfig) and config.data.kind != "tokens", rule)
        for name, value in (("pp", sharding.pp), ("cp", sharding.cp), ("tp", sharding.tp)):
            rule = f"each rank needs the whole model and whole sequences, and sharding.{name} = {value}; leave it out"
            require("train.sample", prompt, value == 1, rule)
        self._model, self._tokens = model, config.train.sample_tokens
        self._tokenizer = load_tokenizer(config.data.tokenizer)
        self._prompt = torch.tensor(self._tokenizer.prompt(prompt).astype(np.int64), device=device)[None]
        require("train.sample", prompt, self._prompt.numel() > 0, "has no token; set it to some text")
        self._among = torch.tensor(self._tokenizer.ids, device=device)

    def write(self) -> str:
        """Return the prompt with its greedy continuation. Collective."""
        with in_eval_mode(self._model):
            chosen = generate(self._model, self._prompt, sampling=Sampling(temperature=0), among=self._among)
            tokens = [int(token) for token in islice(chosen, self._tokens)]
        return self._tokenizer.decode(np.array([*self._prompt[0].tolist(), *tokens]))


def in_one_line(step: int, text: str) -> str:
    """Return a sample as one line for the terminal."""
    return f"sample of step {step}: {show(text)}"
