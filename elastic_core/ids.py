"""Names of things: which strings are ids, and the one rule they obey.

Every id ends up in an etcd key, a container name, a tag or a file name, so one
strict rule covers them all: lower-case letters, digits and dashes, starting
with a letter, at most 63 characters. A node id carries an incarnation because
addresses and instance names come back, and a fenced node must never be taken
for its successor.
"""

from __future__ import annotations

import re
from typing import Final, NewType

RunId = NewType("RunId", str)
NodeId = NewType("NodeId", str)
LeaseId = NewType("LeaseId", int)
Revision = NewType("Revision", int)

NO_LEASE: Final = LeaseId(0)
NO_REVISION: Final = Revision(0)
"""The revision of a key that does not exist."""

NO_NODE: Final = NodeId("")
"""Where a node could be named and none is."""

NAME_PATTERN: Final = r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$"
_NAME: Final = re.compile(NAME_PATTERN)
_INCARNATION: Final = re.compile(r"^[a-z0-9]{1,16}$")


def check_name(kind: str, text: str) -> str:
    """Return `text` if it is a valid name.

    Args:
        kind: What is named, for the message: "job", "run", "node".
        text: The proposed name.

    Raises:
        ValueError: The text breaks the rule; the message holds kind, text and rule.
    """
    if not _NAME.match(text):
        shown = text if len(text) <= 80 else text[:77] + "..."
        raise ValueError(
            f"{kind} name {shown!r} is not allowed: use 1 to 63 lower-case letters, digits and "
            "dashes, starting with a letter and not ending with a dash"
        )
    return text


def make_node_id(instance: str, incarnation: str) -> NodeId:
    """Join an instance's name and one incarnation of its agent to a node id.

    Raises:
        ValueError: Either part breaks its rule.
    """
    check_name("node", instance)
    if not _INCARNATION.match(incarnation):
        raise ValueError(f"incarnation {incarnation!r} must be 1 to 16 lower-case letters or digits")
    return NodeId(f"{instance}.{incarnation}")


def instance_of(node_id: NodeId) -> str:
    """Return the instance's name within a node id."""
    return node_id.rsplit(".", 1)[0]
