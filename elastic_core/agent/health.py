"""Whether the agent of this machine lives: `python -m elastic_core.agent.health` exits with 0 if it does.

For a container's health check. It asks as another node would, by a probe, so that a
frozen agent is as ill as a dead one.
"""

from __future__ import annotations

import queue
import sys
import tempfile
from pathlib import Path
from typing import Final

from elastic_core.agent.directory import PREFIX
from elastic_core.agent.probe import Prober
from elastic_core.ids import NodeId
from elastic_core.model.codec import decode, encode
from elastic_core.model.node import NodeRecord

_FILE: Final = "record.json"
_PATIENCE_S: Final = 2.0


def leave_record(directory: Path, record: NodeRecord) -> None:
    """Write down where the agent that owns `directory` answers probes."""
    draft = directory / f"{_FILE}.draft"
    draft.write_bytes(encode(record))
    draft.replace(directory / _FILE)


def is_healthy(directories: Path, patience_s: float = _PATIENCE_S) -> bool:
    """Tell whether an agent that left its record below `directories` answers a probe."""
    records = [decode(NodeRecord, path.read_bytes()) for path in directories.glob(f"{PREFIX}*/{_FILE}")]
    heard: queue.SimpleQueue[NodeId] = queue.SimpleQueue()
    prober = Prober(heard.put)
    prober.ask(records)
    try:
        heard.get(timeout=patience_s if records else 0.001)
    except queue.Empty:
        return False
    finally:
        prober.close()
    return True


if __name__ == "__main__":
    sys.exit(0 if is_healthy(Path(tempfile.gettempdir())) else 1)
