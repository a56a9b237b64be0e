from pathlib import Path

from elastic_core.agent.environment import WorkerSettings, base_environment
from elastic_core.ids import RunId

SETTINGS = WorkerSettings(
    run=RunId("run-1"),
    slots=1,
    run_dir="",
    job="",
    attempt=1,
    role="default",
    max_restarts=0,
    interface="",
    errors=Path("errors"),
)


def test_workers_see_neither_the_stores_password_nor_what_steers_others() -> None:
    inherited = {
        "HOME": "/root",
        "ELASTIC_STORE_USER": "trainer",
        "ELASTIC_STORE_PASSWORD": "s3cret",
        "PREFECT_API_KEY": "key",
        "PET_NNODES": "2",
    }
    seen = base_environment(SETTINGS, inherited)
    assert seen.keys() & inherited.keys() == {"HOME"}
    assert "s3cret" not in seen.values()
