"""Horovod's ideas: tensor fusion, negotiation, a response cache, an optimizer in three changed lines."""
