"""NCCL's transport: torch's collectives, which can average instead of sum."""

from weft.comm.builtin import BuiltIn

TRANSPORT = BuiltIn(averages=True)
