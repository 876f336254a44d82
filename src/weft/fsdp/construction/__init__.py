"""Builds the parameter groups of a unit from the arguments of `fully_shard`."""
