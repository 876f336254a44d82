"""Decides whether code that the configuration of a run directory names may be imported.

The config.toml of a run directory may name code, such as `model.factory`, loggers or an optimizer. The code is imported
without --trust only if this user made the directory on this machine, or has resumed its run with --trust. Code that the
command line names (`--set`) does not need --trust.

The facts.json of a trusted directory has a mark: an HMAC of the directory's path and the named code, with a key in the
user's state folder. Machines that share the state folder count as one. A directory that was copied or moved to another
path has no valid mark.
"""

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from weft.train.config import TrainConfig
from weft.train.errors import ConfigError
from weft.train.sections import OwnModelConfig

_MARK = "mark"
_KEY_BYTES = 32


def named_code(config: TrainConfig) -> dict[str, str]:
    """Return setting -> value for settings whose value is an import path of a Python object ("package.module:name")."""
    data, found = config.data, {}
    if isinstance(config.model, OwnModelConfig):
        found = {"model.factory": config.model.factory, "model.loss": config.model.loss}
    found |= {"data.factory": data.factory, "data.validation_factory": data.validation_factory}
    found["optimizer.name"] = config.optimizer.name
    found["run.loggers"] = ", ".join(name for name in config.run.loggers if ":" in name)
    return {name: value for name, value in found.items() if ":" in value}


def require_trust(directory: Path, config: TrainConfig, overrides: Sequence[str], *, trust: bool, asked: str) -> None:
    """Raise ConfigError if the configuration of a run directory names code that is not trusted.

    Code is trusted if `trust` is True, if it comes from `overrides`, or if `mark_as_own` has marked `directory` with
    this code.

    - `config`: the configuration of the directory, with `overrides` applied.
    - `asked`: the option or path that named the directory, for the message.
    """
    given = {override.partition("=")[0].strip() for override in overrides}
    code = {name: value for name, value in named_code(config).items() if name not in given}
    if trust or not code or _is_marked(directory, code):
        return
    named = "; ".join(f"{name} = {value}" for name, value in code.items())
    raise ConfigError(
        f"{asked}: its configuration names code that would be imported ({named}), and the run is not known to be "
        f"created by this user in this place; inspect that code, and add --trust"
    )


def mark_as_own(directory: Path, config: TrainConfig) -> None:
    """Mark `directory` as made or trusted by this user with the code that `config` names. If the mark cannot be
    written, later uses of the directory need --trust."""
    if code := named_code(config):
        with suppress(OSError):
            from weft.train.report.facts import keep_facts  # imports torch, not needed to start ranks

            keep_facts(directory, {_MARK: {name: _mark(directory, name, value) for name, value in code.items()}})


def _is_marked(directory: Path, code: dict[str, str]) -> bool:
    from weft.train.report.facts import read_facts  # see above

    marks = read_facts(directory).get(_MARK)
    if not isinstance(marks, dict):
        return False
    with suppress(OSError):
        return all(
            hmac.compare_digest(str(marks.get(name, "")), _mark(directory, name, value)) for name, value in code.items()
        )
    return False


def _mark(directory: Path, name: str, value: str) -> str:
    said = json.dumps([str(directory.resolve()), name, value]).encode()
    return hmac.new(_key(), said, hashlib.sha256).hexdigest()


def _key() -> bytes:
    """Return this user's key, which is created on first use."""
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    path = Path(home) / "weft" / "key"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileExistsError):
        made = path.with_name(f"key.{secrets.token_hex(8)}")
        descriptor = os.open(made, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(secrets.token_bytes(_KEY_BYTES))
        try:
            os.link(made, path)  # if several processes make a key, the first one stays
        finally:
            made.unlink()
    return path.read_bytes()
