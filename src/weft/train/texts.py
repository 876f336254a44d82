"""Continues texts with a model: `weft sample`, `weft chat`, and the samples of a run."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from weft.models.generate import Sampling, continuations
from weft.models.hf.generation import Generation
from weft.train.tokenizer import Tokenizer

CONTEXT = 8
"""The number of tokens at the end of a prompt that are decoded together with the generated tokens."""
UNFINISHED = "\ufffd"
"""The character that a decoder returns in place of a character whose bytes are not all generated yet."""
DEFAULTS = Sampling(temperature=0.8, top_p=0.95)
"""The sampling options if the model's files have none."""


def continuation_texts(
    model: Any,
    prompts: Sequence[list[int]],
    *,
    tokenizer: Tokenizer,
    generation: Generation,
    vocab_size: int,
    tokens: int = 200,
    seed: int = 0,
    **choices: Any,
) -> Iterator[tuple[int, str]]:
    """Generate continuations of `prompts`, each a list of tokens. Yield pairs: the index of a prompt, and the next part
    of the text of its continuation.

    - `tokens`: the maximum length of a continuation, which ends earlier at an end token of `generation`.
    - `seed`: seeds the random choices.
    - `choices`: fields of `Sampling`. They replace fields of `generation.sampling` or, if that is unset, of `DEFAULTS`.
    - `vocab_size`: the vocabulary size of the model. Even if it is larger than the tokenizer's, only tokens of the
      tokenizer and end tokens are drawn.
    """
    device = next(model.parameters()).device
    ids = sorted(each for each in {*tokenizer.ids.tolist(), *generation.ends} if each < vocab_size)
    options: Any = {"among": torch.tensor(ids, device=device), "generator": torch.Generator(device).manual_seed(seed)}
    options["sampling"] = dataclasses.replace(generation.sampling or DEFAULTS, **choices)
    chosen: list[list[int]] = [[] for _ in prompts]
    # Some decoders strip a blank from the first token they see, so the last tokens of the prompt are decoded too.
    before = [np.asarray(each[-CONTEXT:], np.int64) for each in prompts]
    shown = [tokenizer.decode(each) for each in before]
    for step in continuations(model, prompts, ends=generation.ends, most=tokens, **options):
        for row, token in enumerate(step):
            if token is None:
                continue
            chosen[row].append(token)
            text = tokenizer.decode(np.concatenate((before[row], chosen[row])))
            if not text.endswith(UNFINISHED):
                yield row, text[len(shown[row]) :]
                shown[row] = text
