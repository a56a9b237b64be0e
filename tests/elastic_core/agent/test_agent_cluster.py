"""Real agents on an etcd of three members with TLS and users, which lose one; and on one that dies, too."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from elastic_core.model.membership import Cause
from elastic_core.store.endpoint import Credentials
from elastic_core.store.etcd import EtcdStore
from elastic_core.store.server import EtcdServer
from elastic_core.testing.agents import descendants
from elastic_core.testing.etcd_cluster import EtcdCluster
from tests.elastic_core.agent.node import environment_of, wait_until
from tests.elastic_core.agent.test_agent_elastic import StubRun
from tests.elastic_core.store.certificates import Authority

PASSWORD = "s3cret"
TTL_S = 2.0


@pytest.mark.slow
def test_training_outlives_the_leader_of_a_guarded_cluster_and_a_node_joins_afterwards(
    tmp_path: Path,
) -> None:
    tls = Authority(tmp_path / "authority").issue("127.0.0.1")
    (tmp_path / "password").write_text(PASSWORD)
    flags = [
        f"--etcd-ca={tls.ca}",
        f"--etcd-cert={tls.cert}",
        f"--etcd-key={tls.key}",
        "--etcd-user=trainer",
        f"--etcd-password-file={tmp_path / 'password'}",
    ]
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(EtcdCluster(tmp_path, tls=tls))
        console = cluster.console("member-1")
        console.set_up_users({"trainer": ["/elastic/"]}, {"root": "r00t", "trainer": PASSWORD})
        credentials = Credentials("trainer", PASSWORD)
        store = stack.enter_context(
            contextlib.closing(EtcdStore(cluster.endpoints, tls=tls, credentials=credentials))
        )
        run = stack.enter_context(StubRun(store, cluster.endpoints, tmp_path))
        for name in "ab":
            run.node(name, "2:3", *flags)
        run.wait_members(2)
        run.wait_step(10)
        cluster.members[cluster.leader()].kill()
        run.wait_step(run.step() + 100)
        assert list(run.facts().history) == [1], "nobody is lost with a member of etcd"
        run.node("c", "2:3", *flags)
        entry = run.wait_members(3)
        assert (entry.generation.number, entry.generation.cause) == (2, Cause.JOIN)
        for pid in descendants(run.agent_of("a.1").pid):
            assert not any(PASSWORD in variable for variable in environment_of(pid))


@pytest.mark.case("E06")
@pytest.mark.slow
def test_a_node_that_died_with_etcd_is_gone_a_lease_after_the_restart(
    etcd_server: EtcdServer, tmp_path: Path
) -> None:
    with (
        contextlib.closing(EtcdStore(etcd_server.endpoint)) as store,
        StubRun(store, etcd_server.endpoint, tmp_path) as run,
    ):
        for name in "ab":
            run.node(name, "1:2")
        before = run.wait_members(2)
        run.wait_step(10)
        victim = before.members[1].node_id
        etcd_server.kill()
        run.agent_of(victim).kill()
        lost_at = time.monotonic()
        wait_until(lambda: time.monotonic() > lost_at + 2 * TTL_S, "its lease would be over")
        etcd_server.start()
        back_at = time.monotonic()
        entry = run.wait_entered(2, 30)
        took = time.monotonic() - back_at
    assert (entry.generation.cause, list(entry.lost)) == (Cause.LOSS, [victim])
    assert took < TTL_S + 5
