"""`python -m tests.golden --update`: write today's reactions into the golden traces."""

import sys

from tests.golden.files import replayed, trace_files


def main() -> int:
    """Say which traces differ; with `--update`, write them."""
    update = "--update" in sys.argv[1:]
    changed = [path for path in trace_files() if replayed(path) != path.read_text()]
    for path in changed:
        if update:
            path.write_text(replayed(path))
        sys.stdout.write(f"{'updated' if update else 'differs'}: {path.name}\n")
    return 0 if update or not changed else 1


if __name__ == "__main__":
    sys.exit(main())
