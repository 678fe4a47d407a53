"""Distributed inference: an engine that generates tokens for many requests at once, on one rank or several."""
