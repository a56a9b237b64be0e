"""The Prefect UI as a person sees it: a real server, a real training, headless Chromium.

`make test-ui` runs this. With ELASTIC_PICTURES=DIRECTORY it leaves there what it saw.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tasks import prefect_server, prefect_worker

pytestmark = [pytest.mark.ui, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]
WAIT_MS = 60_000

Visit = Callable[[str, str, str], str]
"""Opens a page, waits until a text is on it, takes a picture by a name; returns what can be read there."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ui")


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[prefect_server.ServerRecord]:
    """A server with our deployments and a finished training of the digits."""
    record = prefect_server.begin(home)
    try:
        prefect_server.wait_healthy(record, home)
        prefect_worker.deploy_all(record, home, project=ROOT / "prefect.yaml")
        _train(record, home)
        yield record
    finally:
        prefect_server.stop(home)


def _train(record: prefect_server.ServerRecord, home: Path) -> None:
    command = (
        sys.executable,
        "-m",
        "flows.cli",
        "train",
        "examples/digits.yaml",
        "--runs",
        str(home / "runs"),
    )
    environment = prefect_server.client_environment(record, home)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def api(server: prefect_server.ServerRecord) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.api, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def visit(server: prefect_server.ServerRecord) -> Iterator[Visit]:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    assert chromium, "chromium is missing: apt-get install chromium"
    pictures = os.environ.get("ELASTIC_PICTURES", "")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1360, "height": 1000})

        def open_page(path: str, text: str, name: str) -> str:
            page.goto(f"{server.url}{path}", timeout=WAIT_MS)
            page.get_by_text(re.compile(text)).first.wait_for(timeout=WAIT_MS)
            page.wait_for_load_state("networkidle", timeout=WAIT_MS)
            if pictures:
                page.screenshot(path=str(Path(pictures) / f"{name}.png"), full_page=True)
            return page.locator("body").inner_text()

        yield open_page
        browser.close()


def test_the_page_of_a_run_says_how_it_ended_and_why_in_its_log(visit: Visit, api: httpx.Client) -> None:
    (run,) = api.post("/flow_runs/filter", json={"flows": {"name": {"any_": ["elastic-train"]}}}).json()
    seen = visit(f"/runs/flow-run/{run['id']}", "2 nodes are ready", "ui-run")
    assert "Completed" in seen
    assert "launching 2 nodes: 2 nodes more, to have 2" in seen
    assert re.search(r"generation 1: 2 nodes are ready", seen)


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("progress", ["step 184 of 184", "100%"]),
        ("nodes", ["node-1", "node-2", "exit 0"]),
        ("generations", ["start", "world size", "node-1", "node-2", "2 nodes are ready"]),
        ("report", ["spent on", "succeeded", "0 steps lost", "was used exactly once in each of 8 epochs"]),
    ],
)
def test_each_artifact_can_be_read(visit: Visit, api: httpx.Client, kind: str, texts: list[str]) -> None:
    wanted = {"artifacts": {"key": {"like_": f"%-{kind}"}}}
    (artifact,) = api.post("/artifacts/latest/filter", json=wanted).json()
    seen = visit(f"/artifacts/artifact/{artifact['latest_id']}", re.escape(texts[0]), f"ui-{kind}")
    assert [text for text in texts if text not in seen] == []


def test_the_report_shows_its_pictures(visit: Visit, api: httpx.Client) -> None:
    (artifact,) = api.post(
        "/artifacts/latest/filter", json={"artifacts": {"key": {"like_": "%-report"}}}
    ).json()
    content = api.get(f"/artifacts/{artifact['latest_id']}").json()["data"]
    assert re.findall(r"!\[(\w+\.png)\]\(data:image/png;base64,", content) == [
        "curve.png",
        "timeline.png",
        "ledger.png",
    ]


def test_the_form_of_a_run_names_the_fields_of_a_job(visit: Visit, api: httpx.Client) -> None:
    deployment = api.get("/deployments/name/elastic-train/elastic-train").json()["id"]
    seen = visit(f"/deployments/deployment/{deployment}/run", "Nodes to launch and keep", "ui-form")
    assert "Nodes beyond so many stand by." in seen
