"""Where nodes come from: the provider protocol."""
