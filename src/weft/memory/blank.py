"""Marks unfilled memory with a byte pattern that can be recognized later.

dtype                                  pattern                       a tensor is unfilled if it has the pattern in
-------------------------------------  ----------------------------  -----------------------------------
complex, and floating except float8    NaN, with every bit set       any element
bool                                   neither False nor True        any element
integers of 32 and 64 bits             an improbable number          any element
integers of 8 and 16 bits, float8      bytes 0xA5; float8: 0xFF      all elements, if the tensor has 8 bytes or more
"""

import torch

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPARED_AT_ONCE = 1 << 20
_ENOUGH_TO_TELL = 8


def blank(tensor: torch.Tensor) -> None:
    """Overwrite a contiguous plain `tensor` (no subclass) with its dtype's byte pattern, to mark it as unfilled."""
    tensor.detach().view(-1).view(torch.uint8).fill_(_empty_byte(tensor.dtype))


def blank_storage(tensor: torch.Tensor) -> None:
    """Overwrite the storage of `tensor` with its dtype's byte pattern. The tensor must be plain (of no subclass), and
    may have any strides."""
    storage = tensor.untyped_storage()
    torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(_empty_byte(tensor.dtype))


def has_blank(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is unfilled, by the rule for its dtype in the table above. False for an empty tensor."""
    dtype = tensor.dtype
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    rows = tensor if tensor.ndim else tensor.unsqueeze(0)
    word = _WORDS[rows.dtype.itemsize]
    empty = int.from_bytes(bytes([_empty_byte(dtype)]) * word.itemsize, "little", signed=True)
    at_once = max(1, _COMPARED_AT_ONCE * len(rows) // max(1, rows.numel()))
    exact = dtype == torch.bool or dtype.itemsize >= (2 if dtype.is_floating_point or dtype.is_complex else 4)
    if not rows.numel() or (not exact and tensor.nbytes < _ENOUGH_TO_TELL):
        return False
    decide = torch.any if exact else torch.all
    return bool(decide(torch.stack([decide(part.view(word) == empty) for part in rows.split(at_once)])))


def _empty_byte(dtype: torch.dtype) -> int:
    return 0xFF if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool else 0xA5
