"""One emulated account a process: moto keeps its state in module globals."""

from tests.tasks.emulator.account import account, cloud

__all__ = ["account", "cloud"]
