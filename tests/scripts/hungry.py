"""A script that takes more memory than a small container has."""

eaten = [b"x" * (64 << 20) for _ in range(64)]
