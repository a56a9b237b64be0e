"""A campaign for the leader key on a store that says no."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest

from elastic_core.agent.leadership import Leadership
from elastic_core.errors import StoreRefused
from elastic_core.ids import Revision
from elastic_core.store.protocol import Condition, Operation, TxnResult
from elastic_core.testing.memory_store import MemoryServer, MemoryStore
from tests.elastic_core.agent.test_driver import KEYS, Term, World


class RefusingStore(MemoryStore):
    """Refuses the first writes, as for a lease that has just ended, or for a right that is given later."""

    def __init__(self, server: MemoryServer, refusals: int) -> None:
        super().__init__(server)
        self.left = refusals
        self.refused = threading.Event()

    def transact(self, conditions: Sequence[Condition], operations: Sequence[Operation]) -> TxnResult:
        if self.left:
            self.left -= 1
            self.refused.set()
            raise StoreRefused("requested lease not found")
        return super().transact(conditions, operations)


@pytest.fixture
def world() -> Iterator[World]:
    with World() as world:
        yield world


def test_a_campaign_that_the_store_refuses_is_tried_again_and_ends_no_thread(world: World) -> None:
    term = Term()
    store = RefusingStore(world.server, refusals=1)
    with closing(Leadership(store, KEYS, make_term=lambda _: term)) as leadership:
        leadership.stand(world.register("a.1"))
        assert store.refused.wait(5)
        assert term.serving.wait(5)


def test_a_refused_campaign_ends_at_once_when_the_node_stands_down(world: World) -> None:
    store = RefusingStore(world.server, refusals=1_000_000)
    leadership = Leadership(store, KEYS, make_term=lambda _: Term())
    leadership.stand(world.register("a.1"))
    assert store.refused.wait(5)
    leadership.close()
    assert "leadership" not in {thread.name for thread in threading.enumerate()}


def test_a_term_that_the_store_refuses_to_serve_is_followed_by_a_campaign(world: World) -> None:
    class RefusedTerm(Term):
        def run(self) -> bool:
            raise StoreRefused("permission denied")

    terms = [RefusedTerm(), term := Term()]

    def make(_: Revision) -> Term:
        return terms.pop(0)

    with closing(Leadership(MemoryStore(world.server), KEYS, make_term=make)) as leadership:
        leadership.stand(world.register("a.1"))
        assert term.serving.wait(5)
