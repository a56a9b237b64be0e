"""Flows that read like the story, and the command line in front of them."""
