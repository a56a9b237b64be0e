"""Nodes with networks and names of their own: what others can reach decides, not what a node is called."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.network import Namespaces, network
from elastic_core.store.etcd import EtcdStore
from elastic_core.testing.agents import AgentProcess
from elastic_core.testing.etcd_cluster import EtcdCluster
from tests.elastic_core.agent.node import wait_until
from tests.elastic_core.agent.test_agent_torchrun import SCRIPTS, ScriptRun

pytestmark = [pytest.mark.slow]

ETCD_NAMES = ("etcd-host", "etcd-host.example.org")


class Machines:
    """Nodes whose host names only they themselves know, as the address of their loopback."""

    def __init__(self, net: Namespaces, run: ScriptRun) -> None:
        self.net, self.run = net, run
        self._hosts: list[Path] = []

    def node(self, name: str, *arguments: str, nodes: str, steps: int = 40) -> AgentProcess:
        within = self.net.attach(name)
        return self.run.start(
            name,
            f"--nnodes={nodes}",
            "--rdzv-conf=lease_ttl=2,last_call_timeout=1,join_timeout=60",
            *arguments,
            *(str(SCRIPTS / "gloo_steps.py"), str(self.run.shared), f"--steps={steps}"),
            within=(*within, *self._named(within[-1], name)),
        )

    def _named(self, space: str, name: str) -> Sequence[str]:
        """Let a namespace have a host name and a list of hosts of its own."""
        hosts = Path("/etc/netns", space, "hosts")
        hosts.parent.mkdir(parents=True, exist_ok=True)
        hosts.write_text(f"127.0.0.1 localhost {name}-host\n{self.net.host} {' '.join(ETCD_NAMES)}\n")
        self._hosts.append(hosts)
        return ("unshare", "--uts", "sh", "-c", f'hostname {name}-host; exec "$@"', "sh")

    def close(self) -> None:
        for hosts in self._hosts:
            hosts.unlink(missing_ok=True)
            hosts.parent.rmdir()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    net = network()
    if not isinstance(net, Namespaces):
        if os.environ.get("CI"):
            pytest.fail("network namespaces need root, ip and iptables")
        pytest.skip("network namespaces need root, ip and iptables")
    with net, EtcdCluster(tmp_path / "etcd", host=net.host) as etcd:
        store = EtcdStore(etcd.endpoints)
        directory = tmp_path / "run"
        directory.mkdir()
        with ScriptRun(store, etcd.endpoints, directory) as run:
            made = Machines(net, run)
            yield made
            made.close()
        store.close()


@pytest.mark.case("R14")
@pytest.mark.case("R15")
@pytest.mark.case("R16")
def test_nodes_that_cannot_resolve_each_others_names_form_a_group_whatever_they_call_the_store(
    machines: Machines,
) -> None:
    port = machines.run._endpoint.split(",")[0].rpartition(":")[2]
    forms = {"a": machines.net.host, "b": ETCD_NAMES[0], "c": ETCD_NAMES[1]}
    agents = [
        machines.node(name, f"--rdzv-endpoint={form}:{port}", nodes="3") for name, form in forms.items()
    ]
    assert [agent.wait() for agent in agents] == [0, 0, 0]
    (entry,) = machines.run.facts().history.values()
    addresses = [member.address for member in entry.members]
    assert len(set(addresses)) == 3
    assert all(address.startswith(machines.net.host.rpartition(".")[0]) for address in addresses)


@pytest.mark.case("R14")
def test_a_peer_that_cannot_be_reached_is_named_with_its_address_and_port(machines: Machines) -> None:
    nowhere = f"{machines.net.host.rpartition('.')[0]}.250"
    first = machines.node("a", f"--advertise={nowhere}", nodes="2")
    machines.run.wait_for(lambda facts: len(facts.nodes) == 1, "a is registered")
    began = time.monotonic()
    second = machines.node("b", nodes="2")
    told = re.compile(rf"fencing the neighbour.*neighbour='a\..*never answered at {re.escape(nowhere)}:\d+ ")
    wait_until(lambda: told.search(second.output()) is not None, "b names a and its address")
    assert time.monotonic() - began < 10
    assert first.is_running
