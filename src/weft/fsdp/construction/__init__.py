"""From the arguments of `fully_shard` to the parameter groups of a unit."""
