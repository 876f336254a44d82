"""weft's public errors. Each is a `WeftError`, and a ValueError or RuntimeError as well.

    from weft.errors import CollectiveMismatch

    try:
        train()
    except CollectiveMismatch as error:  # the message says what the ranks did
        ...

    raised by      a ValueError: invalid argument or input        a RuntimeError: something went wrong
    -------------  ---------------------------------------------  ---------------------------------------------------
    communication                                                 `CollectiveMismatch`
    sharding                                                      `WeightsGone`, `WeightsWritten`
    schedules      `TableError`                                   `UndeclaredTensor`
    checkpoints    `CheckpointMismatch`                           `CheckpointError`, `CheckpointGone`, `StorageError`
    models         `PatternError`, `ConversionError`              `KernelError`
    trainer        `ConfigError`, `NotReadable`, `TokensDamaged`  `RunFailed`
    debugging                                                     `StreamOrderError`

Elsewhere, an argument with a wrong value or type usually raises a plain ValueError or TypeError.
"""

__all__ = [
    "CheckpointError",
    "CheckpointGone",
    "CheckpointMismatch",
    "CollectiveMismatch",
    "ConfigError",
    "ConversionError",
    "KernelError",
    "NotReadable",
    "PatternError",
    "RunFailed",
    "StorageError",
    "StreamOrderError",
    "TableError",
    "TokensDamaged",
    "UndeclaredTensor",
    "WeftError",
    "WeightsGone",
    "WeightsWritten",
]


class WeftError(Exception):
    """The base class of weft's public errors."""


# --- what went wrong --------------------------------------------------------------------------------------------------


class CollectiveMismatch(WeftError, RuntimeError):
    """Ranks differ in their collectives, models or arguments, or a rank stopped while others waited for it.

    The message says how the ranks differ, or which rank stopped.
    """


class RunFailed(WeftError, RuntimeError):
    """A run of the trainer cannot begin or continue, for example because ranks are missing or a connection was lost.

    The message is one line.
    """


class WeightsGone(WeftError, RuntimeError):
    """Gathered weights were read after they were freed. The message names the unit and the parameter."""


class WeightsWritten(WeftError, RuntimeError):
    """Code wrote to weights at a time when the write would be lost, or would make gradients or other weights wrong.

    - A write to gathered weights, which are copies, or to their memory after they were freed.
    - A write, between a forward and its backward, to main weights, which the optimizer updates.

    The message names the unit and the parameter.
    """


class UndeclaredTensor(WeftError, RuntimeError):
    """A node of a schedule (`weft.overlap`) used a tensor that is neither its input nor a parameter of its module.

    Only tensors that need a gradient count. The message names the node.
    """


class StreamOrderError(WeftError, RuntimeError):
    """Two operations that may run at the same time use the same memory, and at least one writes to it or frees it.

    The message names both operations, with their streams.
    """


class CheckpointError(WeftError, RuntimeError):
    """A checkpoint could not be written or read.

    For example, another run uses the directory, or a file does not match the checkpoint's manifest.
    """


class CheckpointGone(CheckpointError):
    """The checkpoint does not exist. A run that is still training may have removed it after saving newer ones."""


class StorageError(WeftError, OSError, RuntimeError):
    """A file operation failed. The message names the rank, operation and file. `errno`: the system's error number."""

    def __str__(self) -> str:
        return str(self.strerror)


class KernelError(WeftError, RuntimeError):
    """A kernel that was selected by name is not installed, or does not support the device, tensors or settings."""


# --- invalid arguments and input --------------------------------------------------------------------------------------


class ConfigError(WeftError, ValueError):
    """A setting, a path or an argument of the trainer is wrong. The message says what is wrong and how to fix it."""


class NotReadable(WeftError, ValueError):
    """A file is not a regular file, or is larger than weft allows, or its content is nested too deeply."""


class TokensDamaged(WeftError, ValueError):
    """The cached token files of a text have changed since they were written."""


class CheckpointMismatch(WeftError, ValueError):
    """The checkpoint does not fit the state into which it is loaded.

    Keys, shapes or dtypes differ, or an optimizer has another class or other parameter groups.
    """


class ConversionError(WeftError, ValueError):
    """A model cannot be read, represented or written as requested."""


class PatternError(WeftError, ValueError):
    """A layer pattern breaks a rule. The offending `part` begins at index `position` of `pattern`."""

    def __init__(self, pattern: str, position: int, part: str, rule: str) -> None:
        super().__init__(f"pattern {pattern!r}, position {position}, {part!r}: {rule}")
        self.pattern = pattern
        self.position = position
        self.part = part
        self.rule = rule

    @property
    def shown(self) -> str:
        """Two lines: the pattern; then carets under the offending part, followed by the rule."""
        return f"{self.pattern}\n{' ' * self.position}{'^' * max(1, len(self.part))} {self.rule}"

    def __reduce__(self) -> tuple:
        return type(self), (self.pattern, self.position, self.part, self.rule)


class TableError(WeftError, ValueError):
    """A schedule table cannot run. The entry at index `position` of rank `rank` is wrong; `reason` says what is wrong.

    If an entry is missing at the end, `position` is one more than the index of the rank's last entry.
    """

    def __init__(self, message: str, rank: int, position: int, reason: str) -> None:
        super().__init__(message)
        self.rank, self.position, self.reason = rank, position, reason

    def __reduce__(self) -> tuple:
        return type(self), (str(self), self.rank, self.position, self.reason)
