"""Where the time of a training step goes: processors as data, their bounds, and the share of them that is used."""
