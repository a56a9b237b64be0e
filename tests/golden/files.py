"""The golden traces: where they are, and what they should say."""

from pathlib import Path

from elastic_core.testing.scenario import play

TRACES = Path(__file__).parent / "traces"


def trace_files() -> list[Path]:
    """Return all traces in their order."""
    return sorted(TRACES.glob("*.trace"))


def replayed(path: Path) -> str:
    """Return a trace's events with today's reactions."""
    return play(path.read_text())
