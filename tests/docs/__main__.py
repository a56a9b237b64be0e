"""`python -m tests.docs [--update]`: are the pages of `docs/reference` what the code says?"""

from __future__ import annotations

import sys

from tests.docs.reference import pages


def main() -> int:
    """Say which pages differ; with `--update`, write them."""
    update = "--update" in sys.argv[1:]
    changed = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    for path in changed:
        if update:
            path.write_text(pages()[path])
        sys.stdout.write(f"{'updated' if update else 'differs'}: {path.name}\n")
    return 0 if update or not changed else 1


if __name__ == "__main__":
    sys.exit(main())
