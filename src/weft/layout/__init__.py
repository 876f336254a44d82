"""Arithmetic without tensors or communication: where elements are in buffers, which buffers share memory, and plans."""
