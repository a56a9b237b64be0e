"""`prefect.yaml` holds no key that Prefect would ignore in silence, and its deployment can be run bare."""

import importlib
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from prefect.utilities.callables import parameter_schema
from pydantic import BaseModel, ConfigDict, ValidationError

FILE = Path(__file__).parents[2] / "prefect.yaml"


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class WorkPool(Strict):
    name: str
    work_queue_name: str | None = None
    job_variables: dict[str, Any] = {}


class Trigger(Strict):
    name: str
    type: Literal["event"]
    expect: list[str]
    match_related: dict[str, str] = {}
    for_each: list[str] = []
    after: list[str] = []
    posture: Literal["Reactive", "Proactive"]
    threshold: int
    within: int
    parameters: dict[str, Any]


class Deployment(Strict):
    name: str
    description: str
    tags: list[str] = []
    entrypoint: str
    parameters: dict[str, Any] = {}
    enforce_parameter_schema: bool = True
    schedules: list[dict[str, Any]] = []
    triggers: list[Trigger] = []
    work_pool: WorkPool


class ProjectFile(Strict):
    """No `concurrency_limit` on purpose: its lease kills runs that outlive a server's restart."""

    name: str
    pull: list[dict[str, Any]]
    deployments: list[Deployment]


def project() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text())


def test_every_key_is_known() -> None:
    assert [deployment.name for deployment in ProjectFile.model_validate(project()).deployments] == [
        "elastic-train",
        "elastic-retrain",
        "elastic-reconcile",
        "elastic-rescale",
        "elastic-teardown",
        "elastic-status",
    ]


def test_the_check_sees_a_misspelt_key() -> None:
    data = project()
    data["deployments"][0]["conccurrency_limit"] = 1
    with pytest.raises(ValidationError, match="conccurrency_limit"):
        ProjectFile.model_validate(data)


def test_entrypoints_name_flows_of_the_deployments_name() -> None:
    for deployment in ProjectFile.model_validate(project()).deployments:
        path, _, attribute = deployment.entrypoint.partition(":")
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        assert getattr(module, attribute).name == deployment.name


def test_the_bare_deployment_run_is_accepted_because_no_parameter_is_required() -> None:
    from flows.retrain import elastic_retrain
    from flows.train import elastic_train

    for flow in (elastic_train, elastic_retrain):
        schema = parameter_schema(flow)
        assert not schema.required
        assert "required" not in schema.definitions["JobSpec"]


def test_no_schedule_says_whether_it_is_active_and_each_has_a_slug() -> None:
    schedules = [one for deployment in project()["deployments"] for one in deployment.get("schedules", ())]
    assert all(schedule["slug"] and "active" not in schedule for schedule in schedules)
    assert len(schedules) == 2


def test_silence_is_longer_than_some_heartbeats_that_were_late() -> None:
    train, *_ = project()["deployments"]
    heartbeat = int(train["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
    triggers = [one for each in project()["deployments"] for one in each.get("triggers", ())]
    (silence,) = [one for one in triggers if one["posture"] == "Proactive"]
    assert silence["after"] == ["prefect.flow-run.heartbeat"]
    assert silence["within"] >= 3 * heartbeat


def test_only_what_acts_on_one_run_must_be_told_which() -> None:
    from flows.reconcile import elastic_reconcile, elastic_status, elastic_teardown
    from flows.rescale import elastic_rescale

    flows = (elastic_reconcile, elastic_status, elastic_teardown, elastic_rescale)
    required = [parameter_schema(flow).required for flow in flows]
    assert required == [[], [], ["run"], ["run", "wish"]]
    for flow in flows:
        fields = parameter_schema(flow).properties.values()
        assert all(field.get("description") for field in fields)


def test_every_parameter_explains_itself_in_the_form() -> None:
    from flows.train import elastic_train

    properties = parameter_schema(elastic_train).properties
    assert set(properties) == {"job", "run_id", "max_time", "runs"}
    assert all(field.get("description") for field in properties.values())
