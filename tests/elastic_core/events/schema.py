"""`python -m tests.elastic_core.events.schema --update`: write the schema of `report.json` into the docs."""

import json
import sys
from pathlib import Path

from elastic_core.events.report import RunReport

SCHEMA_FILE = Path(__file__).parents[3] / "docs" / "report.schema.json"


def schema_text() -> str:
    """Return the schema as the docs have it."""
    return json.dumps(RunReport.model_json_schema(), indent=2) + "\n"


def main() -> int:
    """Say whether the docs are up to date; with `--update`, bring them up to date."""
    is_same = SCHEMA_FILE.exists() and SCHEMA_FILE.read_text() == schema_text()
    if "--update" in sys.argv[1:]:
        SCHEMA_FILE.write_text(schema_text())
        return 0
    sys.stdout.write("" if is_same else f"differs: {SCHEMA_FILE.name}\n")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
