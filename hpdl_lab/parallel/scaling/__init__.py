"""What more ranks would bring: a step's profile, models of overlap, and simulated steps."""
