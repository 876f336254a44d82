"""Records of a run in training: metrics on disk, loggers, and the terminal."""
