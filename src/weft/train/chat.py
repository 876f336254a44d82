"""Conversations as text: the chat template of a published tokenizer, and the text that the assistant writes.

A template is written in Jinja. It is the file `chat_template.jinja`, or `chat_template` in tokenizer_config.json.

Text between {% generation %} and {% endgeneration %} counts as written by the assistant. For a template without these
tags, a conversation is rendered twice for each message of the assistant. The first rendering ends with the generation
prompt before the message, the second with the end of the message. The text that the second rendering adds is the
assistant's.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weft.train.errors import ConfigError

Messages = Sequence[Mapping[str, Any]]
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
BEGIN, END = "\ud800", "\ud801"
"""Unpaired surrogates, which no valid text contains. They mark the assistant's text in rendered templates until it is
extracted."""


class _Generation(Extension):
    """The Jinja tags {% generation %}...{% endgeneration %}, around text that the assistant writes."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


class ChatTemplate:
    """A tokenizer's chat template and special tokens. Raises ConfigError for an invalid template."""

    def __init__(self, text: str, special: Mapping[str, str], name: str = "chat template") -> None:
        self.name, self.special = name, dict(special)
        self.marks = "endgeneration" in text
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise ConfigError(f"{name}: is not a chat template ({error}); use an undamaged copy") from error

    def render(self, messages: Messages, *, prompt: bool = False) -> str:
        """Return a conversation as text. With `prompt`, append the generation prompt."""
        return self._marked(messages, prompt).replace(BEGIN, "").replace(END, "")

    def spans(self, messages: Messages) -> tuple[str, list[tuple[int, int]]]:
        """Return a conversation as text, and the ranges (begin, end) of the characters that the assistant writes.

        Raises ConfigError if the template rejects the messages. A template without {% generation %} must render a
        message alike with and without later messages, and must begin each answer with the generation prompt; otherwise
        raises ConfigError too.
        """
        if self.marks:
            return _unmarked(self._marked(messages, False))
        text, found = self.render(messages), []
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self.render(messages[:number], prompt=True)
            until = self.render(messages[: number + 1])
            if not (until.startswith(before) and text.startswith(until)):
                reason = (
                    "differently when others follow" if until.startswith(before) else "without the generation prompt"
                )
                raise ConfigError(
                    f"{self.name}: has no {{% generation %}} around the assistant's text, and renders message "
                    f"{number + 1} {reason}; add {{% generation %}} to the template"
                )
            found.append((len(before), len(until)))
        return text, found

    def _marked(self, messages: Messages, prompt: bool) -> str:
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=prompt, **self.special
            )
        except (TemplateError, SecurityError, TypeError, ValueError, LookupError) as error:
            raise ConfigError(
                f"the chat template of {self.name} rejects these messages ({error}); correct them"
            ) from error


def template_of(files: Mapping[str, bytes], name: str) -> ChatTemplate | None:
    """Return the chat template of a tokenizer, or None if it has none. `files`: file name -> content, for the
    tokenizer's files. `name`: the template's name in errors. Raises ConfigError for a damaged file."""
    try:
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
        text = config.get("chat_template")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{name}: tokenizer_config.json is damaged ({error}); use an undamaged copy") from error
    if "chat_template.jinja" in files:
        try:
            text = files["chat_template.jinja"].decode()
        except ValueError as error:
            raise ConfigError(f"{name}: chat_template.jinja is not UTF-8 ({error}); use an undamaged copy") from error
    if isinstance(text, list):  # several named templates; "default" is for plain conversations
        text = {each.get("name"): each.get("template") for each in text if isinstance(each, dict)}.get("default")
    if text is None:
        return None
    if not isinstance(text, str):
        raise ConfigError(f"{name}: chat_template is {type(text).__name__}; must be text")
    special = {}
    for token in SPECIAL:
        value = config.get(token)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            special[token] = value
    return ChatTemplate(text, special, name)


def _unmarked(text: str) -> tuple[str, list[tuple[int, int]]]:
    spans: list[tuple[int, int]] = []
    parts: list[str] = []
    length, begin = 0, 0
    for part in text.split(BEGIN):
        inside, mark, behind = part.partition(END)
        parts += [inside, behind]
        if mark:
            begin = length
            spans.append((begin, begin + len(inside)))
        length += len(inside) + len(behind)
    return "".join(parts), spans


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)
