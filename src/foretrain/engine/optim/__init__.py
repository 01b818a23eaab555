"""Optimizers, their fused kernels, and moments in few bits."""
