"""Where durable things lie that are no directory."""
