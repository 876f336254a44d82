"""DTensors with uneven shards, and their operators."""

from weft.dtensor import clipping as clipping  # which is done to many of them at once
from weft.dtensor import placements as placements  # what they say of themselves
from weft.dtensor import rules as rules  # by which their operators run
from weft.dtensor import steps as steps  # which optimizers take over many of them
