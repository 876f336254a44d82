"""`weft sample` and `weft chat`: generate text with a model."""

import argparse
import math
import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

from weft.cli import commands


def sample(options: argparse.Namespace) -> int:
    """Print each prompt, followed by a trained model's continuation. Raises ValueError for options out of range."""
    choices = _choices(options)
    for prompt in options.prompt:
        if not _is_text(prompt):
            raise ValueError(f"--prompt {prompt!a}: is not UTF-8 text; pass UTF-8 text")
    source = _source(options)
    begun = False
    try:
        if len(options.prompt) == 1:
            for part in source.continued(options.prompt[0], **choices):
                begun = True
                print(part, end="", flush=True)
            return 0
        texts = list(options.prompt)
        for row, part in source.added(options.prompt, **choices):
            texts[row] += part
        begun = True
        print(*texts, sep="\n\n", end="")
    finally:
        if begun:
            print()
    return 0


def chat(options: argparse.Namespace) -> int:
    """Read each nonempty line of standard input as the next message of one conversation, and print the answer to it."""
    choices = _choices(options)
    source = _source(options)
    _ = source.template, source.tokenizer  # raises before the first message if the model lacks one
    messages = [{"role": "system", "content": options.system}] if options.system else []
    for line in _lines():
        messages.append({"role": "user", "content": line})
        answer = ""
        try:
            for part in source.answered(messages, **choices):
                answer += part
                print(part, end="", flush=True)
        finally:
            print(flush=True)
        messages.append({"role": "assistant", "content": answer})
    return 0


def _lines() -> Iterable[str]:
    """Yield the nonempty lines of standard input. Prints a prompt in a terminal."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line


def _choices(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling options as keyword arguments of `Source.added`. Raises ValueError if one is out of range."""
    best = "must be at least 0; 0 chooses the most likely token"
    for name, good, rule in (
        ("tokens", options.tokens >= 0, "must be at least 0"),
        ("temperature", options.temperature is None or 0 <= options.temperature < math.inf, best),
        ("top-k", options.top_k is None or options.top_k >= 0, "must be at least 0; 0 draws from all tokens"),
        ("top-p", options.top_p is None or 0 < options.top_p <= 1, "must be more than 0 and at most 1"),
        ("seed", -(1 << 63) <= options.seed < 1 << 64, "must be at least -2**63 and below 2**64"),
    ):
        if not good:
            raise ValueError(f"--{name} {getattr(options, name.replace('-', '_'))}: {rule}")
    given = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}
    return {"tokens": options.tokens, "seed": options.seed} | {
        name: value for name, value in given.items() if value is not None
    }


def _source(options: argparse.Namespace) -> Any:
    from weft.train.source import Source
    from weft.train.texts import DEFAULTS

    warn = partial(commands.warn, options)
    source = Source(options.source, warn, ignored=options.ignored)
    generation = source.generation
    temperature = (generation.sampling or DEFAULTS).temperature if options.temperature is None else options.temperature
    for name in ("top_k", "top_p"):
        if temperature == 0 and getattr(options, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(options, name)}: has no effect when the most likely token is "
                "chosen; pass --temperature too"
            )
    if generation.not_followed:
        warn(f"generation_config.json: weft ignores {', '.join(generation.not_followed)}")
    return source


def _is_text(given: str) -> bool:
    """Return whether the argument `given` was valid UTF-8. Python decodes other bytes as surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in given)
