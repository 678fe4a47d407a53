"""What a hybrid grid costs before it runs: memory, seconds and bytes, searched and simulated."""
