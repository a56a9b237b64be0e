"""A plain PyTorch loop that goes on where it was: state in memory and on disk, samples exactly once."""
