"""`make docs` builds, and no link of the site is broken."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.sources import ROOT


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert (done.returncode, warnings) == (0, []), done.stderr
    assert (tmp_path / "reference" / "job" / "index.html").exists()
