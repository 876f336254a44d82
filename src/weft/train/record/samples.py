"""Generates a sample after each validation: the model's continuation of `train.sample`."""

from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.backends import world
from weft.comm.collectives import broadcast
from weft.models import HybridModel
from weft.models.hf.generation import generation_of
from weft.train.config import TrainConfig
from weft.train.modes import in_eval_mode
from weft.train.texts import continuation_texts
from weft.train.tokenizer import load_tokenizer
from weft.train.toml_values import show


class Samples:
    """Continues the prompt `train.sample` as `weft sample --temperature 0` does, by at most `train.sample_tokens`
    tokens. All ranks generate each sample together. Raises ConversionError for invalid generation settings in the files
    of a loaded model."""

    def __init__(self, config: TrainConfig, model: HybridModel, device: torch.device) -> None:
        self._model, self._agreed, self._text = model, _Agreed(model, device), config.train.sample
        tokenizer = load_tokenizer(config.data.tokenizer)
        self._prompt = tokenizer.encode(self._text.encode()).tolist()
        self._options: Any = {
            "tokenizer": tokenizer,
            "generation": generation_of(model.origin),
            "vocab_size": model.cfg.vocab_size,
            "tokens": config.train.sample_tokens,
        }

    def write(self) -> str:
        """Return the prompt with its greedy continuation. Collective."""
        with in_eval_mode(self._model):
            parts = continuation_texts(self._agreed, [self._prompt], temperature=0, **self._options)
            return self._text + "".join(part for _, part in parts)


class _Agreed(nn.Module):
    """A model whose last logits are those of rank 0 on all ranks. Otherwise rounding could make a rank choose an end
    token, while the other ranks continue and wait for it."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.model, self.device = model, device

    def forward(self, tokens: Tensor, *, cache: Any) -> Tensor:
        """Return the logits of the next token, [B, 1, V]."""
        logits = self.model(tokens.to(self.device), cache=cache)[:, -1:].contiguous()
        broadcast(logits, world(), "the logits of a sample")
        return logits.to(tokens.device)  # with `sharding.offload`, the parameters and the tokens are in CPU memory


def in_one_line(step: int, text: str) -> str:
    """Return a sample as one line for the terminal."""
    return f"sample of step {step}: {show(text)}"
