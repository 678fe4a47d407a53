"""Tensor parallelism: a layer on several ranks, cut by columns, rows, heads, words, or positions, or images by rows."""
