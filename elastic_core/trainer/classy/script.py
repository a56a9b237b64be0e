"""What can be said of a script before it runs: it is there, it can be read, it compiles."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from elastic_core.model.job import ScriptTraining
from elastic_core.trainer.classy.legacy import is_classy_train, suggest


def find_script_problems(training: ScriptTraining, base: Path) -> Iterator[str]:
    """Yield every mistake of a script job; the script is compiled, never run."""
    if is_classy_train(training.script):
        yield suggest(training)
    if training.entry == "script":
        yield from _file_problems(training.script, base)
    for module in training.preload:
        if not _is_importable(module):
            yield f"training.preload: module {module!r} is not installed where this runs"


def _file_problems(script: str, base: Path) -> Iterator[str]:
    try:
        source = (base / script).read_bytes()
    except OSError as error:
        yield f"training.script: {script!r}: {error.strerror}; give the path of a Python script"
    else:
        yield from _syntax_problems(script, source)


def _syntax_problems(name: str, source: bytes) -> Iterator[str]:
    try:
        compile(source, name, "exec", dont_inherit=True)
    except SyntaxError as error:
        yield f"training.script: {name}:{error.lineno}: {error.msg}: {(error.text or '').strip()!r}"
    except ValueError as error:
        yield f"training.script: {name!r} is not Python source: {error}"


def _is_importable(module: str) -> bool:
    try:
        return find_spec(module.split(".")[0]) is not None
    except (ImportError, ValueError):
        return False
