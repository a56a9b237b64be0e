"""Whether the kernel killed for want of memory: told by this node's control group, version 1 or 2.

A container's engine calls a container out of memory when its first process was killed. A worker is not
the first process: only the group's own count tells its end by memory from any other SIGKILL.
Source: the kernel's admin-guide, cgroup-v1/memory and cgroup-v2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

GROUPS: Final = Path("/sys/fs/cgroup")
_COUNTS: Final = ("memory.events", "memory/memory.oom_control")
_LIMITS: Final = ("memory.max", "memory/memory.limit_in_bytes")
_KILLS: Final = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_MIB: Final = 1 << 20
_ENDLESS: Final = 1 << 60
"""Version 1 says about 2**63 where there is no limit; version 2 says "max"."""


@dataclass(slots=True)
class KernelKills:
    """Counts the kernel's kills for want of memory.

    Attributes:
        groups: Where control groups are mounted: this process's own, in a container.
    """

    groups: Path = GROUPS
    _seen: int = field(init=False)

    def __post_init__(self) -> None:
        self._seen = self._count()

    def blame(self) -> str:
        """Return "out of memory" with the limit if the kernel killed since the last call, else ""."""
        count = self._count()
        is_new, self._seen = count > self._seen, count
        if not is_new:
            return ""
        limit = self._limit()
        return f"out of memory, limit {limit // _MIB} MiB" if limit else "out of memory"

    def _count(self) -> int:
        found = _KILLS.search(self._read(_COUNTS))
        return int(found[1]) if found else 0

    def _limit(self) -> int:
        """Return bytes, 0 for no limit."""
        text = self._read(_LIMITS).strip()
        limit = int(text) if text.isdigit() else 0
        return limit if limit < _ENDLESS else 0

    def _read(self, names: tuple[str, ...]) -> str:
        for name in names:
            try:
                return (self.groups / name).read_text()
            except OSError:
                continue
        return ""
