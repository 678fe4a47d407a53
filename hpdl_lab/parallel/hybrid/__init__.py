"""Hybrid parallelism: an unchanged model over a mesh of dp, pp and tp, and its checkpoints."""
