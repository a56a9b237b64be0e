"""The process group of one generation: formed, used for a number of steps, left or broken.

It is torch's default group, so that code which asks `torch.distributed` gets the right
answers. Every failure of a collective is a `GroupBroken`: a peer has gone, or this
worker was told to go on without it. Then this group is destroyed, and the same
process forms the group of the next generation.

With NCCL a step is awaited on the host, so that a broken one is known before anything is
updated, and `abort` is NCCL's own.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Final, Literal, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from elastic_core.errors import ElasticError, RefusedInput
from elastic_core.pulse import Pulse
from elastic_core.trainer.meeting import Meeting, MeetingFailed
from elastic_core.trainer.order import shards_of
from elastic_core.trainer.pace import Load
from elastic_core.trainer.snapshot import Layout, put_together, take_apart
from elastic_core.trainer.sockets import Connections, interface_of

Backend = Literal["gloo", "nccl"]

_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
_CPU: Final = torch.device("cpu")
_LOAD: Final = 3
"""Numbers of a `Load`."""


class GroupBroken(ElasticError):
    """A collective of this generation failed or was given up: wait for the next generation."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What some rank wants at the next step boundary; all ranks learn of it in the same step.

    Attributes:
        leave: A newer generation is known.
        stop: The training is to end.
        save: With a durable checkpoint before.
    """

    leave: bool = False
    stop: bool = False
    save: bool = False

    def __or__(self, other: Wishes) -> Wishes:
        """Return what either wants."""
        return Wishes(self.leave or other.leave, self.stop or other.stop, self.save or other.save)

    def __bool__(self) -> bool:
        """Return whether the group is to be left."""
        return self.leave or self.stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """This worker's place in a generation."""

    generation: int
    rank: int
    world_size: int
    host: str
    port: int


class Group:
    """A worker's end of the process group of one generation; a `trainee.Reducer`.

    `abort`, `want` and the attributes may be used from any thread, all else from the one that trains.
    """

    hook_before: ClassVar[Any] = sys.excepthook
    """What handled uncaught exceptions before torch wrapped it, to print the rank."""

    def __init__(
        self,
        seat: Seat,
        *,
        backend: Backend = "gloo",
        timeout_s: float = 600.0,
        meeting_s: float = 120.0,
        pulse: Pulse | None = None,
    ) -> None:
        """Prepare a group; nothing happens before `form`.

        Args:
            seat: Who this worker is, and where rank 0 is.
            backend: "nccl" for CUDA tensors, one GPU a worker.
            timeout_s: A collective that takes longer is broken, if nobody gave it up before.
            meeting_s: All members must have come together by then.
            pulse: Told of the times that are spent waiting for peers.
        """
        self.seat = seat
        self.is_formed = False
        self.agreed = Wishes()
        self._backend = backend
        self._timeout = timedelta(seconds=timeout_s)
        self._meeting_s = meeting_s
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else _CPU
        self._lock = threading.Lock()
        self._left = threading.Event()
        self._why = ""
        self._wishes = Wishes()
        self.load = Load()
        """What the step before was for this worker; the others learn of it in the next reduction."""
        self.loads: tuple[Load, ...] = ()
        """What it was for each rank, as of the last reduction."""
        self._connections: Connections | None = None
        self._kept: tuple[object, ...] = ()
        """What a collective that broke may still refer to."""
        self._open = False
        self._pulse = pulse or Pulse()

    @classmethod
    def of_program(cls, generation: int, *, world_size: int) -> Self:
        """Return this worker's end of the group that the program formed itself, and ends itself.

        Raises:
            RefusedInput: There are several workers and no group.
        """
        if not dist.is_initialized():
            if world_size > 1:
                raise RefusedInput(
                    [f"there are {world_size} workers: call torch.distributed.init_process_group() before"]
                )
            return cls(Seat(generation=generation, rank=0, world_size=1, host="", port=0))
        rank, world_size = dist.get_rank(), dist.get_world_size()
        seat = Seat(generation=generation, rank=rank, world_size=world_size, host="", port=0)
        return cls(seat, backend="gloo" if "gloo" in dist.get_backend() else "nccl")

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self.seat.rank

    @property
    def world_size(self) -> int:
        """Workers in this generation."""
        return self.seat.world_size

    # ---- beginning and end -------------------------------------------------------------------

    def form(self) -> None:
        """Meet the other members and connect to each.

        Raises:
            GroupBroken: They did not come together, or `abort` was called.
        """
        connections = Connections()
        try:
            store, interface = self._meet()
            with self._lock:
                self._connections = connections
            self._check()
            _unwrap_hook()
            with _variable(_INTERFACE, interface):
                self._initialise(PrefixStore(f"generation-{self.seat.generation}", store))
        except (MeetingFailed, RuntimeError) as error:
            why = self._why or _plain(error)
            raise GroupBroken(f"generation {self.seat.generation} was not formed: {why}") from error
        with self._lock:
            self._open = True
            connections.settle()
        self._check()
        self.is_formed = True

    def _initialise(self, store: Store) -> None:
        try:
            dist.init_process_group(
                self._backend,
                store=store,
                rank=self.rank,
                world_size=self.world_size,
                timeout=self._timeout,
            )
        except RuntimeError:
            # Torch has counted this group, and its members meet under that count: one whose count
            # differs from the others' would wait for them for ever. It begins anew when one is destroyed.
            if not dist.is_initialized():
                dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
                dist.destroy_process_group()
            raise

    def _meet(self) -> tuple[Store, str]:
        """Return the members' store, and the interface to listen on or "" if that is decided already."""
        if self.world_size == 1:
            return HashStore(), ""
        meeting = Meeting(
            generation=self.seat.generation,
            host=self.seat.host,
            port=self.seat.port,
            rank=self.rank,
            world_size=self.world_size,
            left=self._left,
            timeout_s=self._meeting_s,
        )
        store, address = meeting.attend()
        # Left alone, Gloo listens where the machine's name points to, which is often the loopback.
        return store, "" if _INTERFACE in os.environ else interface_of(address)

    def abort(self, why: str) -> None:
        """Make every waiting and every later call of this group raise `GroupBroken`; may be repeated."""
        with self._lock:
            self._why = self._why or why
            self._left.set()
            if self._backend == "nccl" and self._open:
                with suppress(RuntimeError):
                    dist.distributed_c10d._abort_process_group()
            elif self._connections is not None:
                self._connections.shut_down()

    def part(self, flag: bool = False) -> bool:
        """Wait at an agreed end until every rank is here, and return whether any rank gave a flag.

        Without it a rank could close a connection that still carries another's last result. A peer
        that has gone by now is no error any more.
        """
        with suppress(GroupBroken):
            return any(given for (given,) in self.exchange([int(flag)]))
        return flag

    def destroy(self) -> None:
        """Close the connections and forget the group; another one can be formed then."""
        with self._lock:
            was_open, self._open = self._open, False
            if self._connections is not None and self._backend == "gloo":
                # Children of this process (data loaders) hold copies of the descriptors: closing
                # would not end the connections, and peers would wait.
                self._connections.shut_down()
            self._connections = None
        if was_open or dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()

    # ---- collectives -------------------------------------------------------------------------

    def want(self, wishes: Wishes) -> None:
        """Carry wishes along with the next reductions."""
        self._wishes = self._wishes | wishes

    def reduce(self, flat: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in its own memory, and learn of all ranks' wishes and loads."""
        wishes = self._word()
        with self._collective():
            if self.world_size > 1:
                # Beside the sum and not in it: copying a large model's gradients would cost more.
                side = dist.all_reduce(wishes, async_op=True)
                self._kept = (side, wishes, flat)
                dist.all_reduce(flat)
                side.wait()
        self._agree(wishes)
        return flat

    def reduce_shards(self, shards: Mapping[int, torch.Tensor], total: int) -> torch.Tensor:
        """Sum per-shard tensors in the order of their numbers, at the cost of gathering them all."""
        numbers = shards_of(self.rank, self.world_size, total)
        if list(shards) != list(numbers):
            raise ValueError(f"rank {self.rank} gave shards {list(shards)}: it has {list(numbers)}")
        example = shards[numbers[0]]
        gathered = [torch.empty_like(example) for _ in range(self.world_size)]
        wishes, result = self._word(), torch.empty_like(example)
        with self._collective():
            if self.world_size > 1:
                dist.all_reduce(wishes)
            for start in range(0, total, self.world_size):
                own = shards.get(start + self.rank, example)  # in the last round some have none
                self._gather(gathered, own.contiguous())
                for number, shard in enumerate(gathered[: total - start], start):
                    result = result.add_(shard) if number else result.copy_(shard)
        self._agree(wishes)
        return result

    def exchange(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Return what each rank gave, rank by rank; all give equally many numbers."""
        own = torch.tensor(values, dtype=torch.int64, device=self._device)
        gathered = [torch.empty_like(own) for _ in range(self.world_size)]
        with self._collective():
            self._gather(gathered, own)
        return [tuple(tensor.tolist()) for tensor in gathered]

    def broadcast_state(self, state: Any, *, source: int) -> Any:
        """Return the state of rank `source` on every rank, in host memory; others' `state` is ignored.

        Layout and tensors travel as one flat tensor of bytes each; nothing is unpickled. The source
        gets its own state back.
        """
        if self.world_size == 1:
            self._check()
            return state
        is_source = self.rank == source
        parts = take_apart(state) if is_source else None
        text = Layout.of(parts).to_json() if parts is not None else b""
        (length,) = self.exchange([len(text)])[source]
        header = torch.frombuffer(bytearray(text or length), dtype=torch.uint8).to(self._device)
        with self._collective():
            dist.broadcast(header, source)
        layout = Layout.from_json(bytes(header.tolist()))
        flat = torch.empty(layout.size, dtype=torch.uint8, device=self._device)
        if parts is not None:
            for view, tensor in zip(layout.views(flat), parts.tensors, strict=True):
                view.copy_(tensor)
        with self._collective():
            dist.broadcast(flat, source)
        return state if is_source else put_together(layout.outline, layout.views(flat.cpu()))

    # ---- inside ------------------------------------------------------------------------------

    def _gather(self, gathered: list[torch.Tensor], own: torch.Tensor) -> None:
        if self.world_size > 1:
            dist.all_gather(gathered, own)
        else:
            gathered[0] = own

    def _word(self) -> torch.Tensor:
        """Return what this rank says beside a sum: its wishes, and its load in a place of its own."""
        wishes, load = self._wishes, self.load
        before, after = [0.0] * (_LOAD * self.rank), [0.0] * (_LOAD * (self.world_size - self.rank - 1))
        own = [load.seconds, load.samples, load.node]
        word = [wishes.leave, wishes.stop, wishes.save, *before, *own, *after]
        return torch.tensor(word, dtype=torch.float32, device=self._device)

    def _agree(self, total: torch.Tensor) -> None:
        leave, stop, save, *rest = total.tolist()
        self.agreed = self.agreed | Wishes(leave > 0, stop > 0, save > 0)
        self.loads = tuple(Load(*rest[at : at + _LOAD]) for at in range(0, len(rest), _LOAD))

    def _check(self) -> None:
        if self._left.is_set():
            raise GroupBroken(f"generation {self.seat.generation} was given up: {self._why}")

    @contextmanager
    def _collective(self) -> Iterator[None]:
        """Turn every failure of a collective into `GroupBroken`."""
        self._check()
        try:
            if self._backend == "nccl":  # what the device still computes is this worker's own work
                torch.cuda.current_stream().synchronize()
            with self._pulse.waiting():
                yield
                if self._backend == "nccl":
                    torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            why = self._why or _plain(error)
            raise GroupBroken(f"generation {self.seat.generation} broke: {why}") from error
        if self._backend == "nccl":
            self._check()


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for the time of the block, unless the value is ""."""
    if value:
        os.environ[name] = value
    try:
        yield
    finally:
        if value:
            del os.environ[name]


def _plain(error: Exception) -> str:
    """Return what Gloo says without its source file's place and its advice."""
    text = (str(error) or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[[^]]*\] ", "", text).split(". This is typically")[0]


def _unwrap_hook() -> None:
    """Undo what torch did to the exception hook: it would add one more wrapper in each generation."""
    if getattr(sys.excepthook, "__module__", "") == dist.distributed_c10d.__name__:
        sys.excepthook = Group.hook_before
    Group.hook_before = sys.excepthook
