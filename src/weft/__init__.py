"""weft: sharded training for large PyTorch models."""
