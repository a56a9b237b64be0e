"""Instances as containers: boot, metadata, notice, crash, shutdown. Needs a Docker engine."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import docker
import pytest
from moto.efs.models import efs_backends

from elastic_core.cluster.provider import LaunchRequest
from elastic_core.exits import ExitCode
from elastic_core.ids import RunId
from tasks.emulator.cloud import ACCOUNT
from tasks.emulator.hosts import LABEL, Hosts
from tasks.providers.aws.inventory import AwsClients, Inventory
from tasks.providers.aws.provider import AwsProvider
from tests.tasks.emulator.account import Account

pytestmark = [pytest.mark.aws, pytest.mark.docker, pytest.mark.slow]

RUN = RunId("digits-1")
BASE = os.environ.get("ELASTIC_TEST_BASE", "elastic-base:bookworm")
STUB = "elastic-stub:test"


@pytest.fixture
def hosts(account: Account, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    stub = Path(__file__).parents[1] / "providers" / "stub_agent.py"
    context = tmp_path_factory.mktemp("stub")
    (context / "stub_agent.py").write_text(stub.read_text())
    (context / "Dockerfile").write_text(
        f'FROM {BASE}\nCOPY stub_agent.py /\nENTRYPOINT ["python3", "-u", "/stub_agent.py"]\n'
    )
    docker.from_env().images.build(path=str(context), tag=STUB, rm=True)
    root = tmp_path_factory.mktemp("h")
    with Hosts(account.cloud, root, base=BASE) as made:
        yield made


def provider(account: Account) -> AwsProvider:
    pool = account.pool(instance_types=("m5.large",), image=STUB, shm_gib=0.0625)
    inventory = Inventory(base=account.base, clients=AwsClients.of(pool), wait=lambda _: None)
    return AwsProvider(pool=pool, inventory=inventory, runs=Path("/mnt/elastic/runs"))


def eventually(is_true: Callable[[], bool], what: str) -> None:
    """Look again until it is true; machines have no event that a test could wait for."""
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline, f"{what} did not come"
        threading.Event().wait(0.1)


def agents(name: str) -> list[str]:
    found = docker.from_env().containers.list(filters={"label": f"{LABEL}={name}"})
    return [container.logs().decode() for container in found if container.name.endswith("elastic-agent")]


def launch(account: Account, hosts: Hosts, *arguments: str) -> tuple[AwsProvider, str]:
    subject = provider(account)
    request = LaunchRequest(run=RUN, token="start", count=1, command=arguments)
    name = subject.launch(request).launched[0].name
    hosts.wait()
    return subject, name


def test_a_machine_boots_and_runs_its_agent_until_it_is_terminated(account: Account, hosts: Hosts) -> None:
    subject, name = launch(account, hosts, "--note", "a b", "$HOME", "50%d", "")
    eventually(lambda: any("name" in log for log in agents(name)), "the agent's first line")
    assert f"name {name} rest ['--note', 'a b', '$HOME', '50%d', '']" in agents(name)[0]
    assert subject.list_nodes(RUN)[0].address.startswith("10.42.")
    subject.terminate(RUN, [name])
    hosts.wait()
    assert account.living() == []
    assert docker.from_env().containers.list(all=True, filters={"label": f"{LABEL}={name}"}) == []


def test_an_agent_that_ends_ends_its_instance(account: Account, hosts: Hosts) -> None:
    subject, _ = launch(account, hosts, "--exit", "0")
    eventually(lambda: account.living() == [], "the end of the instance")
    assert (
        subject.list_nodes(RUN)[0].detail == "Client.InstanceInitiatedShutdown: Instance initiated shutdown"
    )


def test_a_notice_is_seen_on_the_machine_before_it_is_taken(account: Account, hosts: Hosts) -> None:
    _, name = launch(account, hosts)
    eventually(lambda: bool(agents(name)), "the agent")
    machine = docker.from_env().containers.get(name)
    ask = (
        "t=$(curl -s -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' http://169.254.169.254/latest/api/token);"
        "curl -s -o /dev/stdout -w '%{http_code}' -H \"X-aws-ec2-metadata-token: $t\" "
        "http://169.254.169.254/latest/meta-data/spot/instance-action"
    )
    assert machine.exec_run(["bash", "-c", ask]).output.decode() == "404"
    hosts.interrupt(name, account.client("events"), after=timedelta(seconds=2))
    assert '"action": "terminate"' in machine.exec_run(["bash", "-c", ask]).output.decode()
    eventually(lambda: account.living() == [], "the interruption")
    assert account.cloud.instance(name).state_reason.code == "Server.SpotInstanceTermination"


def test_without_a_token_the_metadata_service_refuses(account: Account, hosts: Hosts) -> None:
    _, name = launch(account, hosts)
    eventually(lambda: bool(agents(name)), "the agent")
    machine = docker.from_env().containers.get(name)
    ask = "curl -s -o /dev/null -w '%{http_code}' http://169.254.169.254/latest/meta-data/instance-id"
    assert machine.exec_run(["bash", "-c", ask]).output.decode() == "401"


def test_a_crashed_host_ends_without_a_word(account: Account, hosts: Hosts) -> None:
    subject, name = launch(account, hosts)
    hosts.crash(name)
    assert subject.list_nodes(RUN)[0].detail == "Server.InternalError: the host failed"


def test_an_address_is_given_to_the_next_machine_once_the_last_one_is_gone(
    account: Account, hosts: Hosts
) -> None:
    subject, first = launch(account, hosts)
    address = account.cloud.instance(first).private_ip
    account.cloud.ended(first)  # the account has its address back, and its machine still runs
    second = subject.launch(LaunchRequest(run=RUN, token="next", count=1, command=())).launched[0].name
    assert account.cloud.instance(second).private_ip == address
    machines = docker.from_env().containers
    eventually(lambda: bool(machines.list(all=True, filters={"name": f"^{second}$"})), "the machine")
    hosts.crash(first)
    hosts.wait()
    assert account.living() == [second]


def machine_says(name: str) -> str:
    return str(docker.from_env().containers.get(name).logs().decode())


@pytest.mark.case("A07")
def test_a_file_system_that_does_not_resolve_yet_is_mounted_later(account: Account, hosts: Hosts) -> None:
    (backend,) = (one for one in efs_backends[ACCOUNT].values() if one.mount_targets_by_id)
    targets = dict(backend.mount_targets_by_id)
    backend.mount_targets_by_id.clear()
    _, name = launch(account, hosts)
    eventually(lambda: "Failed to resolve" in machine_says(name), "the first try")
    assert agents(name) == []
    backend.mount_targets_by_id.update(targets)
    eventually(lambda: bool(agents(name)), "the agent")


@pytest.mark.case("A07")
def test_a_machine_that_cannot_begin_ends_and_its_reason_is_told(account: Account, hosts: Hosts) -> None:
    subject = replace(provider(account), pool=account.pool(instance_types=("m5.large",), image="nowhere:1"))
    (name,) = (
        one.name
        for one in subject.launch(LaunchRequest(run=RUN, token="start", count=1, command=())).launched
    )
    eventually(lambda: account.cloud.instance(name).state == "terminated", "the end")
    (node,) = subject.list_nodes(RUN)
    assert (node.exit_code, node.detail) == (ExitCode.UNFIT, "the image could not be pulled")


@pytest.mark.case("X04")
def test_no_shell_reads_what_a_job_says(account: Account, hosts: Hosts) -> None:
    hostile = ["train.py;touch /tmp/one", "$(touch /tmp/two)", "`touch /tmp/three`", "a'; touch /tmp/four; '"]
    _, name = launch(account, hosts, *hostile)
    eventually(lambda: any("name" in log for log in agents(name)), "the agent's first line")
    assert f"name {name} rest {hostile}" in agents(name)[0]
    machine = docker.from_env().containers.get(name)
    traces = machine.exec_run(["sh", "-c", "ls /tmp/one /tmp/two /tmp/three /tmp/four 2>/dev/null"])
    assert traces.output == b""
