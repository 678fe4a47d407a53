"""Kernels of csrc/cuda on their own, one GPU and no other rank: to be read, checked and timed."""
