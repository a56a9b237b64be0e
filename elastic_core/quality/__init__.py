"""How good a model is, and whether it may take another one's place."""
