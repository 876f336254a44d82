"""The trainer: from a TOML file to a trained model, a report and checkpoints."""
