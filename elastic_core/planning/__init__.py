"""Desired nodes against observed ones."""
