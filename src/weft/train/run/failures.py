"""Exit codes, and errors for which one line is printed instead of a traceback."""

import errno

from weft.checkpoint import CheckpointError
from weft.errors import RunFailed, StorageError

SUCCESS, FAILURE, WRONG_CALL, INTERRUPTED, NOT_BEGUN = range(5)
"""Exit codes. INTERRUPTED: the run was asked to stop, and its last step is saved. NOT_BEGUN: the run was asked to stop
before it had anything to save."""

_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


class Interrupted(Exception):
    """Raised if a rank is asked to stop before the first step of a run that starts or resumes."""

    def explained(self, step: int | None) -> str:
        """Return text: this error's message, then what is saved. `step`: the step of the run's newest checkpoint; None
        without one."""
        saved = f"step {step} is still the newest checkpoint" if step else "nothing was trained and nothing was saved"
        return f"{self}; {saved}"


def as_one_line(error: BaseException) -> str:
    """Return `in_one_line(error)` or, if that is None, the type and the message of `error` on one line."""
    return in_one_line(error) or f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def in_one_line(error: BaseException) -> str | None:
    """Return a line that explains a CheckpointError, a RunFailed, failed storage or lack of memory.

    Returns None for other errors, which need a traceback unless `is_refusal` returns True."""
    if isinstance(error, CheckpointError | RunFailed):
        return str(error)
    if isinstance(error, StorageError) or (isinstance(error, OSError) and error.errno in _STORAGE):
        where = f" ({error.filename})" if error.filename else ""
        room = ": make room" if error.errno in _STORAGE else ""
        return f"{error.strerror}{where}{room}; earlier files are unchanged"
    no_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if no_memory or "can't allocate memory" in str(error):
        first = " ".join(str(error).split())[:200]
        return (
            f"out of memory ({first}): lower train.microbatch_size or data.sequence_length, set "
            "train.activation_checkpointing = true, or use more ranks"
        )
    return None
