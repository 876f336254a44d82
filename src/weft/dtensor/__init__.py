"""DTensors with uneven shards, and their operators."""

from weft.dtensor import placements as placements  # the placements of these DTensors
from weft.dtensor import rules as rules  # the rules of their operators
from weft.dtensor import steps as steps  # optimizer steps over many of these DTensors
