"""When a run grows, shrinks or replaces nodes: ordered rules."""
