"""`weft check`: compares one step of a small model on several ranks, in one process, with the same step on one rank.

small       the configuration with small sizes, on at most a few ranks, and with the same kinds of layers
run         runs one step in fp64 on one rank, and on several ranks, which are threads of this process
findings    explains differences between the two steps: the parameter, the mesh axis and the broken rule
"""

from weft.train.check.apart import check_apart
from weft.train.check.run import Checked, check

__all__ = ["Checked", "check", "check_apart"]
