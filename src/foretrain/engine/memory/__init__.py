"""Where tensors are: use of memory, host memory, offload."""
