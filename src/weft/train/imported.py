"""Imports Python objects that a configuration names as "package.module:attribute"."""

import importlib
import sys
from pathlib import Path
from typing import Any

from weft.train.errors import ConfigError


def imported(setting: str, place: str) -> Any:
    """Import the object at `place`, which has the form "package.module:attribute". Return the object.

    Appends the working directory to `sys.path`, so that modules there are found too. If there is no such object, raises
    ConfigError, which names `setting`.
    """
    module, colon, attribute = place.partition(":")
    if not (colon and module and attribute):
        raise ConfigError(f'{setting} = "{place}": must be the path of a Python object: "package.module:name"')
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f'{setting} = "{place}": cannot be imported ({error}); install the package, or start in its folder'
        ) from error
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise ConfigError(f'{setting} = "{place}": {module} has no {name}; name one of its attributes')
        found = getattr(found, name)
    return found
