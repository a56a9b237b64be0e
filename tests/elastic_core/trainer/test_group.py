from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from elastic_core.testing.sessions import DEADLINE_S, FORKS, free_port
from elastic_core.trainer.group import Group, GroupBroken, Seat, Wishes
from elastic_core.trainer.pace import Load
from elastic_core.trainer.sockets import Connections, interface_of

Work = Callable[..., Any]


def seat(rank: int, world_size: int, port: int, generation: int = 1) -> Seat:
    return Seat(generation=generation, rank=rank, world_size=world_size, host="127.0.0.1", port=port)


def _member(work: Work, answer: Connection, rank: int, world_size: int, port: int) -> None:
    torch.set_num_threads(1)
    group = Group(seat(rank, world_size, port))
    group.form()
    answer.send(work(group))
    group.part()
    group.destroy()


def together(work: Work, world_size: int) -> list[Any]:
    """Return what `work(group)` gave in each rank's process."""
    port = free_port()
    answers, processes = [], []
    for rank in range(world_size):
        receiver, sender = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=_member, args=(work, sender, rank, world_size, port), daemon=True)
        process.start()
        sender.close()
        answers.append(receiver)
        processes.append(process)
    results = [answer.recv() for answer in answers if answer.poll(DEADLINE_S)]
    for process in processes:
        process.join(DEADLINE_S)
    return results


# ---- forming ---------------------------------------------------------------------------------


def _name_after_a_failure(answer: Connection) -> None:
    """Send the name under which torch would meet its peers after a group was not formed."""
    torch.set_num_threads(1)
    failing = Group(seat(0, 2, 0), timeout_s=0.2)
    failing._meet = lambda: (HashStore(), "")  # type: ignore[method-assign]  # all met, then one died
    with pytest.raises(GroupBroken):
        failing.form()
    failing.destroy()
    Group(seat(0, 1, 0)).form()
    answer.send(dist.group.WORLD.group_name)  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_group_that_was_not_formed_leaves_no_trace_in_the_name_of_the_next() -> None:
    """Torch counts its groups; members whose counts differ wait for each other under other names."""
    receiver, sender = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_name_after_a_failure, args=(sender,), daemon=True)
    process.start()
    sender.close()
    assert receiver.poll(DEADLINE_S)
    assert receiver.recv() == "0"
    process.kill()
    process.join(DEADLINE_S)


# ---- collectives -----------------------------------------------------------------------------


def _sum_of_ranks(group: Group) -> list[float]:
    return group.reduce(torch.full((5,), float(group.rank + 1))).tolist()


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_sum_is_the_same_on_every_rank(world_size: int) -> None:
    total = world_size * (world_size + 1) / 2
    assert together(_sum_of_ranks, world_size) == [[total] * 5] * world_size


def _one_wishes(group: Group) -> list[Wishes]:
    seen = []
    for step in range(3):
        if step == 1 and group.rank == 1:
            group.want(Wishes(leave=True))
        if step == 2 and group.rank == 0:
            group.want(Wishes(stop=True, save=True))
        group.reduce(torch.zeros(2))
        seen.append(group.agreed)
    return seen


def test_a_wish_is_known_to_all_ranks_at_the_same_step() -> None:
    expected = [Wishes(), Wishes(leave=True), Wishes(leave=True, stop=True, save=True)]
    assert together(_one_wishes, 2) == [expected, expected]


def _loads(group: Group) -> list[Load]:
    group.load = Load(0.25 * (group.rank + 1), 4.0, group.rank)
    group.reduce(torch.zeros(2))
    return list(group.loads)


def test_the_load_of_each_rank_is_known_to_all() -> None:
    assert together(_loads, 2) == [[Load(0.25, 4.0, 0.0), Load(0.5, 4.0, 1.0)]] * 2


def _shard_values() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(100, generator=generator) * 10**number for number in range(7)]


def _shards(group: Group) -> list[float]:
    values = _shard_values()
    own = {number: values[number] for number in range(group.rank, 7, group.world_size)}
    return group.reduce_shards(own, 7).tolist()


@pytest.mark.slow
def test_shards_are_summed_to_the_same_bits_at_every_world_size() -> None:
    sums = [result for world_size in (1, 2, 3) for result in together(_shards, world_size)]
    assert len(sums) == 6
    assert all(result == sum(_shard_values()).tolist() for result in sums)


def test_shards_of_another_rank_are_refused() -> None:
    group = Group(seat(0, 1, 0))
    with pytest.raises(ValueError, match=r"rank 0 gave shards \[1\]: it has \[0, 1\]"):
        group.reduce_shards({1: torch.zeros(1)}, 2)


def _broadcast(group: Group) -> Any:
    state = {"w": torch.arange(6.0).view(2, 3) * group.rank, 3: [True, None, "text", (float("inf"), 1)]}
    received = group.broadcast_state(state if group.rank == 1 else None, source=1)
    return received["w"].tolist(), received[3]


def test_a_state_is_broadcast_from_any_rank() -> None:
    expected = ([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], [True, None, "text", (float("inf"), 1)])
    assert together(_broadcast, 3) == [expected] * 3


def _exchange(group: Group) -> list[tuple[int, ...]]:
    return group.exchange([group.rank, 2**60 + group.rank])


def test_numbers_are_exchanged_in_full() -> None:
    assert together(_exchange, 2) == [[(0, 2**60), (1, 2**60 + 1)]] * 2


def _flag_of_one(group: Group) -> bool:
    return group.part(group.rank == 0)


def test_a_flag_at_parting_is_known_to_all() -> None:
    assert together(_flag_of_one, 2) == [True, True]


# ---- beginning and end -----------------------------------------------------------------------


@pytest.fixture
def port() -> int:
    return free_port()


def test_torch_is_initialised_in_a_world_of_one(port: int) -> None:
    group = Group(seat(0, 1, port))
    group.form()
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    group.destroy()
    assert not dist.is_initialized()


def test_generations_do_not_pile_up_exception_hooks(port: int) -> None:
    hook = sys.excepthook
    for generation in range(3):
        group = Group(seat(0, 1, port, generation))
        group.form()
        group.destroy()
        assert sys.excepthook.__module__ == dist.distributed_c10d.__name__
        assert getattr(Group.hook_before, "__module__", "") != sys.excepthook.__module__
    sys.excepthook = hook


def test_generations_leave_no_threads_and_no_descriptors_behind(port: int) -> None:
    counts = []
    for generation in range(6):
        group = Group(seat(0, 1, port, generation))
        group.form()
        group.reduce(torch.zeros(2))
        group.destroy()
        del group
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))  # noqa: PTH208
    assert counts[-1] == counts[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_meeting_that_is_given_up_ends_at_once(port: int, rank: int) -> None:
    """Rank 0 waits for the members, the others for rank 0."""
    group = Group(seat(rank, 2, port))
    timer = threading.Timer(0.1, group.abort, ["generation 2 is known"])
    timer.start()
    start = time.monotonic()
    with pytest.raises(GroupBroken, match="generation 1 was not formed: generation 2 is known"):
        group.form()
    assert time.monotonic() - start < 0.5
    group.destroy()
    timer.join()


def test_strangers_at_the_door_do_not_count_as_members(port: int) -> None:
    group = Group(seat(0, 3, port), meeting_s=0.5)
    hellos = [b"1 1\n", b"1 3\n", b"1 0\n", b"2 2\n", b"GET / HTTP/1.1\r\n", b"x" * 10_000, b""]
    guests: list[socket.socket] = []

    def visit() -> None:
        for hello in hellos:
            while True:
                try:
                    guests.append(socket.create_connection(("127.0.0.1", port)))
                    break
                except ConnectionRefusedError:
                    continue
            guests[-1].sendall(hello)

    visitor = threading.Thread(target=visit)
    visitor.start()
    with pytest.raises(GroupBroken, match=r"ranks \[2\] did not come"):
        group.form()
    visitor.join()
    for guest in guests:
        guest.close()


def test_members_that_do_not_come_are_named(port: int) -> None:
    group = Group(seat(0, 3, port), meeting_s=0.1)
    with pytest.raises(GroupBroken, match=r"ranks \[1, 2\] did not come"):
        group.form()


def test_a_port_that_the_agent_still_holds_for_a_moment_is_waited_for(port: int) -> None:
    holder = socket.create_server(("127.0.0.1", port))
    timer = threading.Timer(0.2, holder.close)
    timer.start()
    group = Group(seat(0, 2, port), meeting_s=0.5)
    with pytest.raises(GroupBroken, match=r"ranks \[1\] did not come"):
        group.form()
    timer.join()


def test_a_group_that_was_aborted_refuses_every_collective(port: int) -> None:
    group = Group(seat(0, 1, port))
    group.form()
    group.abort("the agent is gone")
    for collective in (lambda: group.reduce(torch.zeros(1)), lambda: group.exchange([1])):
        with pytest.raises(GroupBroken, match="the agent is gone"):
            collective()
    group.destroy()


def _survive(answer: Connection, port: int) -> None:
    torch.set_num_threads(1)
    times = []
    for round_ in range(3):
        group = Group(seat(0, 2, port + round_))
        group.form()
        answer.send(None)
        threading.Timer(0.3, group.abort, ["a newer generation"]).start()
        start = time.monotonic()
        try:
            group.reduce(torch.zeros(10))
        except GroupBroken as error:
            times.append((time.monotonic() - start, str(error)))
        group.destroy()
    answer.send((times, len(os.listdir("/proc/self/task"))))  # noqa: PTH208


def _be_victim(does: int, port: int) -> None:
    group = Group(seat(1, 2, port))
    group.form()
    os.kill(os.getpid(), does)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "least", "most", "why"),
    [(signal.SIGKILL, 0.0, 0.25, "Connection|reset"), (signal.SIGSTOP, 0.25, 0.8, "a newer generation")],
)
def test_a_lost_peer_frees_the_others_and_a_frozen_one_does_when_they_give_up(
    does: int, least: float, most: float, why: str
) -> None:
    port = free_port()
    receiver, sender = FORKS.Pipe(duplex=False)
    survivor = FORKS.Process(target=_survive, args=(sender, port), daemon=True)
    survivor.start()
    victims = []
    for round_ in range(3):
        victims.append(FORKS.Process(target=_be_victim, args=(does, port + round_), daemon=True))
        victims[-1].start()
        assert receiver.poll(DEADLINE_S)
        receiver.recv()
    assert receiver.poll(DEADLINE_S)
    times, threads = receiver.recv()
    survivor.join(DEADLINE_S)
    for victim in victims:
        victim.kill()
        victim.join()
    assert survivor.exitcode == 0
    assert [least <= seconds <= most for seconds, _ in times] == [True] * 3, times
    assert threads < 12


# ---- sockets ---------------------------------------------------------------------------------


def test_only_own_connections_are_shut_down_and_no_listening_socket() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    stranger = socket.create_connection(server.getsockname())
    connections = Connections()
    own = socket.create_connection(server.getsockname())
    own_server = socket.create_server(("127.0.0.1", 0))
    pair = socket.socketpair()
    connections.settle()
    later = socket.create_connection(server.getsockname())
    connections.shut_down()
    own.settimeout(5)
    assert own.recv(1) == b""
    for untouched in (stranger, later, pair[0]):
        assert untouched.send(b"x") == 1
    socket.create_connection(own_server.getsockname()).close()
    for each in (server, stranger, own, own_server, later, *pair):
        each.close()


def test_a_descriptor_that_was_given_to_another_socket_is_left_alone() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    connections = Connections()
    own = socket.create_connection(server.getsockname())
    connections.settle()
    descriptor = own.fileno()
    own.close()
    other = socket.create_connection(server.getsockname())
    assert other.fileno() == descriptor
    connections.shut_down()
    assert other.send(b"x") == 1
    other.close()
    server.close()


def test_the_interface_of_an_address_is_found_or_none() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""
