"""Classy Vision on the elastic API: any classification config, the same model at every world size."""
