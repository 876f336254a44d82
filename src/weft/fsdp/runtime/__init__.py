"""The runtime that the units of a model share: passes, prefetching, reductions, and agreement between ranks."""
