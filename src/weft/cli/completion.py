"""Completion for shells, generated from the command line's parser.

weft <Tab>                  commands
weft train --<Tab>          options of the command
weft train --set <Tab>      settings, as section.name=
anything else               files
"""

import argparse
import shlex
from collections.abc import Iterator
from typing import NamedTuple

SHELLS = ("bash", "zsh", "fish")
VALUES = {"--completion": SHELLS}


class _Option(NamedTuple):
    name: str
    help: str
    takes_value: bool


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion script for `shell`, one of SHELLS, with the commands and options of `parser`."""
    from weft.train.settings import settings

    names = [f"{each.section}.{each.name}=" for each in settings()]
    if shell == "fish":
        return _fish(parser, names)
    first = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n" if shell == "zsh" else ""
    return first + _bash(parser, names)


def _bash(parser: argparse.ArgumentParser, settings: list[str]) -> str:
    commands = commands_of(parser)
    cases = [
        f"            {name}) words={shlex.quote(' '.join(each.name for each in options_of(command)))} ;;"
        for name, (command, _) in commands.items()
    ]
    own = [each.name for each in options_of(parser)]
    return "\n".join(
        [
            f"_{parser.prog}() {{",
            '    local cur="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""',
            '    if [[ "$before" = --completion ]]; then',
            f"        words={shlex.quote(' '.join(SHELLS))}",
            '    elif [[ "$COMP_CWORD" = 1 ]]; then',
            f"        words={shlex.quote(' '.join([*commands, *own]))}",
            '    elif [[ "$before" = --set ]]; then',
            f"        words={shlex.quote(' '.join(settings))}",
            "        type compopt &>/dev/null && compopt -o nospace",
            '    elif [[ "$cur" = -* ]]; then',
            '        case "${COMP_WORDS[1]}" in',
            *cases,
            "        esac",
            "    fi",
            '    COMPREPLY=($(compgen -W "$words" -- "$cur"))',
            "}",
            f"complete -o default -F _{parser.prog} {parser.prog}",
            "",
        ]
    )


def _fish(parser: argparse.ArgumentParser, settings: list[str]) -> str:
    first = f"complete -c {parser.prog} -n __fish_use_subcommand -f"
    lines = [_of_fish(first, each, settings) for each in options_of(parser)]
    for name, (command, help_text) in commands_of(parser).items():
        lines.append(f"{first} -a {name} -d {shlex.quote(help_text)}")
        inside = f"complete -c {parser.prog} -n '__fish_seen_subcommand_from {name}'"
        lines += [_of_fish(inside, each, settings) for each in options_of(command)]
    return "\n".join(lines) + "\n"


def _of_fish(begin: str, option: _Option, settings: list[str]) -> str:
    values = settings if option.name == "--set" else VALUES.get(option.name, ())
    what = f" -x -a {shlex.quote(' '.join(values))}" if values else " -r" if option.takes_value else ""
    return f"{begin} -l {option.name.removeprefix('--')}{what} -d {shlex.quote(option.help)}"


def commands_of(parser: argparse.ArgumentParser) -> dict[str, tuple[argparse.ArgumentParser, str]]:
    """Return the commands: name -> (parser, line of help)."""
    (found,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    lines = {each.dest: each.help or "" for each in found._choices_actions}
    return {name: (command, lines[name]) for name, command in found.choices.items()}


def options_of(parser: argparse.ArgumentParser) -> Iterator[_Option]:
    """Yield the options of a parser that begin with "--"."""
    for action in parser._actions:
        if names := [name for name in action.option_strings if name.startswith("--")]:
            yield _Option(names[0], action.help or "", action.nargs != 0)
