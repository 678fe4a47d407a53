"""Failures, their cost, and ways to go on with a training: checkpoints, stragglers, flipped bits."""
