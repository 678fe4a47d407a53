"""The time of a training step: processors as data, their bounds, and the share of them that is used."""
