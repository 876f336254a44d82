"""Memory of sharded training: flat buffers, the pool of transient buffers, and CPU offload."""
