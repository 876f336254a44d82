"""The one error of the trainer that a person can repair without reading code."""


class ConfigError(ValueError):
    """A wrong setting: one line that names the value, the rule it breaks and the fix."""
