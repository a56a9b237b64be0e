"""Fakes that pass the same contracts as the real things, and the simulator. Shipped for users' tests."""
