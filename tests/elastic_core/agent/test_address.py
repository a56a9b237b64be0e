import pytest

from elastic_core.agent.address import address_towards
from elastic_core.errors import RefusedInput
from elastic_core.store.endpoint import Endpoint

LOST = Endpoint("no-such-member.invalid")


def test_a_member_whose_name_is_gone_does_not_hide_the_others() -> None:
    assert address_towards(LOST, Endpoint("127.0.0.1")) == "127.0.0.1"


def test_without_a_route_to_any_member_each_has_its_line() -> None:
    with pytest.raises(RefusedInput) as refused:
        address_towards(LOST, Endpoint("other.invalid", 1))
    assert [problem.split(": no route")[0] for problem in refused.value.problems] == [
        "the store's endpoint no-such-member.invalid:2379",
        "the store's endpoint other.invalid:1",
    ]
