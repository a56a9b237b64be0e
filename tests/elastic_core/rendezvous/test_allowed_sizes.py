"""A run that may train on some numbers of nodes only."""

from elastic_core.model.membership import Cause
from elastic_core.model.sizes import AllowedSizes
from tests.elastic_core.rendezvous.scenes import causes, lost, running, scenario

EVEN = AllowedSizes(multiple_of=2)


def test_the_first_generation_is_the_largest_size_that_the_ready_nodes_can_form() -> None:
    run = scenario(max_nodes=8, sizes=AllowedSizes(multiple_of=4))
    for name in "abcdef":
        run.seen(name)
    run.now = 5.0
    run.tick()
    assert run.members == ("a", "b", "c", "d")


def test_a_newcomer_that_makes_up_no_size_stands_by_until_another_comes() -> None:
    run = running("a", "b", sizes=EVEN)
    run.seen("c")
    assert run.members == ("a", "b")
    assert run.coordinator.reason == "generation 1 trains on 2 nodes, 1 standing by"
    run.seen("d")
    assert run.members == ("a", "b", "c", "d")
    assert causes(run) == [Cause.JOIN]


def test_a_loss_shrinks_to_the_next_size_at_once_and_its_rest_stands_by() -> None:
    run = running("a", "b", "c", "d", sizes=EVEN)
    run.gone("b")
    for survivor in "acd":
        run.answered(survivor)
    assert run.members == ("a", "c")
    assert lost(run) == {"b": "lease ended", "d": "released"}
    assert causes(run) == [Cause.LOSS]


def test_a_standby_fills_the_size_that_a_loss_broke() -> None:
    run = running("a", "b", sizes=EVEN)
    run.seen("c")
    run.gone("a")
    run.answered("b")
    assert run.members == ("b", "c")


def test_a_target_between_two_sizes_means_the_smaller_one() -> None:
    run = running("a", "b", "c", "d", sizes=EVEN)
    run.target(3)
    assert run.members == ("a", "b")
    run.enter()
    run.target(1)
    assert run.members == ("a", "b"), "below the least size the least size trains"


def test_who_waits_below_the_least_size_is_told_which_sizes_there_are() -> None:
    run = scenario(sizes=AllowedSizes(listed=(2, 4)))
    run.seen("a")
    assert run.coordinator.reason == "1 of 2 nodes (allowed: 2 or 4), waiting (timeout 60 s)"
