"""Arithmetic without tensors or communication: offsets of all elements, sharing of memory, and plans of steps."""
