"""The Prefect UI as a person sees it: real server, real run, headless Chromium.

`make test-ui` runs this. With ELASTIC_PICTURES=DIRECTORY the pictures of the docs are taken there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from elastic_core.model.job import ClassyTraining, ElasticOptions, JobSpec, NodeBounds
from tasks import prefect_server, prefect_worker
from tests.elastic_core.trainer.classy.images import picture_config

pytestmark = [pytest.mark.ui, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

PROJECT = Path(__file__).parents[2] / "prefect.yaml"
WAIT_MS = 60_000

Visit = Callable[[str, str], str]
"""Opens a page, waits until a text is on it, and returns everything that can be read there."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ui")


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[prefect_server.ServerRecord]:
    """A server with our deployments and a retrained job."""
    record = prefect_server.begin(place / "home")
    try:
        prefect_server.wait_healthy(record, place / "home")
        prefect_worker.deploy_all(record, place / "home", project=PROJECT)
        _retrain(record, place)
        yield record
    finally:
        prefect_server.stop(place / "home")


def _retrain(record: prefect_server.ServerRecord, place: Path) -> None:
    config = picture_config(place / "data", "ant", "bee")
    options = ElasticOptions(global_batch=8, virtual_shards=2)
    job = JobSpec(
        name="insects",
        nodes=NodeBounds(min=1, max=2, target=2),
        training=ClassyTraining(config=config, elastic=options),
    )
    (place / "insects.yaml").write_text(job.model_dump_json())
    environment = prefect_server.client_environment(record, place / "home")
    environment["PYTHONPATH"] = str(PROJECT.parent)
    command = [sys.executable, "-m", "flows.cli", "retrain", "insects.yaml"]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def api(server: prefect_server.ServerRecord) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.api, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def visit(server: prefect_server.ServerRecord) -> Iterator[Visit]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    chromium = shutil.which("chromium")
    assert chromium, "apt-get install chromium"
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page: Any = browser.new_page(viewport={"width": 1360, "height": 900})

        def open_page(path: str, text: str) -> str:
            page.goto(f"{server.url}{path}", timeout=WAIT_MS)
            page.get_by_text(re.compile(text)).first.wait_for(timeout=WAIT_MS)
            page.wait_for_load_state("networkidle", timeout=WAIT_MS)
            _take(page, path)
            return str(page.locator("body").inner_text())

        yield open_page
        browser.close()


def _take(page: Any, path: str) -> None:
    """Take a picture for the docs, if somebody wants them."""
    wanted = os.environ.get("ELASTIC_PICTURES", "")
    if wanted:
        name = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "", path).strip("/").replace("/", "-").strip("-")
        page.screenshot(path=str(Path(wanted) / f"ui-{re.sub('-+', '-', name)}.png"), full_page=True)


def _run_of(api: httpx.Client, flow: str) -> str:
    found = api.post("/flow_runs/filter", json={"flows": {"name": {"any_": [flow]}}}).json()
    finished = [run["id"] for run in found if run["state_type"] == "COMPLETED"]
    return str(finished[0])


def _artifact(api: httpx.Client, key: str) -> str:
    found = api.post("/artifacts/filter", json={"artifacts": {"key": {"like_": f"%{key}"}}}).json()
    return str(found[0]["id"])


def test_the_run_page_shows_its_tasks_and_how_it_ended(visit: Visit, api: httpx.Client) -> None:
    seen = visit(f"/runs/flow-run/{_run_of(api, 'elastic-train')}", "generation 1")
    assert "Completed" in seen
    assert re.search(r"generation 1: (2 nodes are|1 node is) ready", seen)


@pytest.mark.parametrize(
    ("key", "texts"),
    [
        ("-report", ["steps lost", "spent on", "train"]),
        ("-nodes", ["node-1", "node-2", "Nodes of the run"]),
        ("-generations", ["start", "world size"]),
        ("insects-comparison", ["promoted: the first champion", "ant", "bee", "min_gain 0"]),
    ],
)
def test_each_artifact_can_be_read(visit: Visit, api: httpx.Client, key: str, texts: list[str]) -> None:
    seen = visit(f"/artifacts/artifact/{_artifact(api, key)}", re.escape(texts[0]))
    assert [text for text in texts if text not in seen] == []


def test_the_run_form_names_the_fields_of_a_job(visit: Visit, api: httpx.Client) -> None:
    deployment = api.get("/deployments/name/elastic-train/elastic-train").json()["id"]
    seen = visit(f"/deployments/deployment/{deployment}/run", "Nodes to launch and keep")
    assert "Nodes beyond so many stand by." in seen
    assert "Samples in one optimizer step" in seen
