"""Tensors that tell the truth about their cuts."""

from weft.dtensor import rules as rules  # by which their operators run
