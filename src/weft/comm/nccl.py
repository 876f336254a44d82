"""NCCL's transport: torch's collectives, which can average in place of a sum."""

from weft.comm.builtin import BuiltIn

TRANSPORT = BuiltIn(averages=True)
