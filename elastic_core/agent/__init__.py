"""One node's agent: a pure machine, its driver, and the worker processes."""
