"""Failures: what they cost, and how a training goes on: checkpoints, stragglers, flipped bits."""
