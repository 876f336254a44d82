"""Ranks that are threads of one process: `run_ranks`, and the process group that joins them."""
