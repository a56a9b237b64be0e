"""Which numbers of nodes a generation may have: any, multiples of a number, or listed ones.

A model that is sharded over the nodes, or a batch that divides by some numbers only,
trains on sizes that its owner chose; the nodes beyond such a size stand by.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedSizes:
    """The sizes, as a job declares them.

    Attributes:
        multiple_of: Every size is a multiple of this.
        listed: The only sizes, ascending; empty: all multiples.
    """

    multiple_of: int = 1
    listed: tuple[int, ...] = ()

    @property
    def are_all(self) -> bool:
        """Whether every number of nodes is allowed."""
        return not self.listed and self.multiple_of == 1

    def largest_within(self, nodes: int) -> int:
        """Return the largest size that so many nodes can form, 0 if there is none."""
        if not self.listed:
            return max(nodes, 0) // self.multiple_of * self.multiple_of
        at = bisect_right(self.listed, nodes)
        return self.listed[at - 1] if at else 0

    def least_from(self, nodes: int) -> int:
        """Return the smallest size of at least so many nodes, 0 if there is none."""
        if not self.listed:
            return -(-nodes // self.multiple_of) * self.multiple_of
        return next((size for size in self.listed if size >= nodes), 0)

    def describe(self) -> str:
        """Return the sizes in words."""
        if self.listed:
            return (
                ", ".join(map(str, self.listed[:-1])) + " or " * (len(self.listed) > 1) + f"{self.listed[-1]}"
            )
        return f"a multiple of {self.multiple_of}" if self.multiple_of > 1 else "any number"


ALL_SIZES: Final = AllowedSizes()


def parse_sizes(text: str) -> AllowedSizes | None:
    """Return what a command line says: "2,4,8" is a list, "x4" the multiples of 4, "" all; None: neither."""
    if not text:
        return ALL_SIZES
    match = re.fullmatch(r"x([1-9]\d{0,4})|([1-9]\d{0,4}(?:,[1-9]\d{0,4})*)", text)
    if not match:
        return None
    listed = tuple(sorted({int(size) for size in match[2].split(",")})) if match[2] else ()
    return AllowedSizes(multiple_of=int(match[1] or 1), listed=listed)
