"""Training scripts of one rank that attendees convert: launched on several, observed, and judged."""
