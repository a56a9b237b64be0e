"""Planted bugs that the suite must find: the proof that its properties can fail."""
