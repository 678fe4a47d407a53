"""The costs of a hybrid grid before it runs: memory, seconds and bytes, searched and simulated."""
