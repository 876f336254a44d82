"""The one form of this room's errors about a single value."""


def require(name: str, value: object, fits: bool, rule: str) -> None:
    """Raise ValueError, with the value and the rule, unless it fits."""
    if not fits:
        raise ValueError(f"{name}={value!r}: {name} must be {rule}")
