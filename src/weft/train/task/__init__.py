"""Tasks: the text of a configuration, or your own model and data."""
