"""The gain of more ranks: a step's profile, models of overlap, and simulated steps."""
