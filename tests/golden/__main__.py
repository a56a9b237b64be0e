"""`python -m tests.golden --update`: write what today's code does into the golden traces and the docs."""

import sys

from tests.golden.documents import PROTOCOL, with_rules
from tests.golden.files import replayed, trace_files


def main() -> int:
    """Say which files differ; with `--update`, write them."""
    update = "--update" in sys.argv[1:]
    wanted = {path: replayed(path) for path in trace_files()}
    wanted[PROTOCOL] = with_rules(PROTOCOL.read_text())
    changed = [path for path in wanted if wanted[path] != path.read_text()]
    for path in changed:
        if update:
            path.write_text(wanted[path])
        sys.stdout.write(f"{'updated' if update else 'differs'}: {path.name}\n")
    return 0 if update or not changed else 1


if __name__ == "__main__":
    sys.exit(main())
