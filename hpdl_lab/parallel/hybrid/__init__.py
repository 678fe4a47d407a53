"""Hybrid parallelism: an unchanged model over a mesh of dp, pp, tp, cp and ep, and its checkpoints."""
