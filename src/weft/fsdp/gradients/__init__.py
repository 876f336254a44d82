"""Gradients: packing, reduction, and `.grad` of the sharded parameters."""
