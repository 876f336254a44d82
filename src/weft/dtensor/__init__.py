"""Tensors that tell the truth about their cuts."""
