"""Memory of sharded training: flat buffers, the pool that they share, and CPU offload."""
