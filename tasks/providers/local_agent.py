"""Run an agent as a local node, and leave its exit code on disk.

`python -m tasks.providers.local_agent EXIT_FILE MODULE ARG...`

The flow that started a node may be dead when the node ends, and nobody else is
its parent; so the agent's own process writes the code down as its last act. A
missing file therefore means that the process was killed.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    """Run the module as a program would be run, in this process."""
    exit_file, module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    code: int | str | None = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ending:
        code = ending.code
        raise
    finally:
        Path(exit_file).write_text(str(_status(code)))


def _status(code: int | str | None) -> int:
    """Return what the interpreter makes of a SystemExit's code."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


if __name__ == "__main__":
    main()
