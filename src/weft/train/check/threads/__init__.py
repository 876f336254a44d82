"""Ranks that are threads of one process: `run_ranks`, and their process group."""
