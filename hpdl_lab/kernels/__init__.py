"""Kernels and copies on their own, without ranks: a GPU's, in CUDA and in Python, and what stands in for a GPU."""
