"""The emulated cloud: moto, patched, behind the front door, on a loopback port."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from moto.ec2.models import ec2_backends
from moto.ec2.models.instances import Instance, InstanceState, StateReason
from moto.efs.models import efs_backends
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import BaseWSGIServer, make_server

from tasks.emulator import patches
from tasks.emulator.frontdoor import FrontDoor
from tasks.emulator.market import SpotMarket

ACCOUNT = "123456789012"
NOTICE = timedelta(minutes=2)

Listener = Callable[[Instance], None]


class _SilentHandler(MotoRequestHandler):
    """The terminal is for whoever uses the emulator."""

    def log_request(self, *_: Any) -> None:
        """Say nothing of a call; the front door counts it."""


@dataclass(slots=True)
class Cloud:
    """One emulated account in this process.

    Attributes:
        market: Capacity and prices.
        door: Call counts and injected faults.
        listener: Called for each instance that was launched or is to end; a host layer starts and
            ends machines there. Without one, instances run and end at once.
    """

    port: int = 0
    market: SpotMarket = field(default_factory=SpotMarket)
    listener: Listener | None = None
    door: FrontDoor = field(init=False)
    _server: BaseWSGIServer = field(init=False)
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        patches.apply(self.market, self._changed)
        self.door = FrontDoor(DomainDispatcherApplication(create_backend_app))
        self._server = make_server(
            "127.0.0.1", self.port, self.door, threaded=True, request_handler=_SilentHandler
        )
        self._thread = threading.Thread(target=self._server.serve_forever, name="cloud", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        """Address for `AWS_ENDPOINT_URL`."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def reset(self) -> None:
        """Make the account empty and whole again."""
        self.door.reset()
        self.market.reset()
        for backends in (ec2_backends, efs_backends):
            backends.reset()

    # ---- instances -----------------------------------------------------------------------------

    def instances(self) -> Iterator[Instance]:
        """Yield every instance of every region."""
        for backend in self.backends():
            yield from backend.all_instances()

    def backends(self) -> list[Any]:
        """Return moto's EC2 of every region in use."""
        return list(ec2_backends[ACCOUNT].values())

    def instance(self, name: str) -> Instance:
        """Return one instance."""
        return next(instance for instance in self.instances() if instance.id == name)

    def booted(self, name: str) -> None:
        """A host started: the instance is `running`."""
        instance = self.instance(name)
        if instance.state == "pending":
            instance._state = InstanceState("running", 16)

    def ended(self, name: str, reason: str = "") -> None:
        """A host ended: the instance is `terminated`."""
        instance: Any = self.instance(name)
        if instance.state != "terminated":
            instance.finish_termination(reason)

    def said(self, name: str, text: str) -> None:
        """A host's console shows this."""
        instance: Any = self.instance(name)
        instance.console = text

    def warn(self, name: str, client: Any, after: timedelta = NOTICE) -> datetime:
        """Announce a spot interruption on the event bus; return when it will happen.

        Args:
            name: The instance.
            client: An `events` client of its region.
            after: Time until it is taken.
        """
        now = datetime.now(UTC)
        self._emit(
            client, name, "EC2 Spot Instance Interruption Warning", {"instance-action": "terminate"}, now
        )
        return now + after

    def take(self, name: str) -> None:
        """Take a spot instance away, unless it ended before: the host ends, the reason says so."""
        instance = self.instance(name)
        if instance.state == "terminated":
            return
        instance.terminate()
        instance.state_reason = StateReason(
            "Server.SpotInstanceTermination: Spot instance termination", "Server.SpotInstanceTermination"
        )

    def _emit(self, client: Any, name: str, kind: str, detail: dict[str, str], at: datetime) -> None:
        client.put_events(
            Entries=[
                {
                    "Source": "aws.ec2",
                    "DetailType": kind,
                    "Detail": json.dumps({"instance-id": name, **detail}),
                    "Time": at,
                }
            ]
        )

    def _changed(self, instance: Instance) -> None:
        if self.listener is not None:
            self.listener(instance)
        elif instance.state == "pending":
            instance._state = InstanceState("running", 16)
        elif instance.state == "shutting-down":
            whole: Any = instance
            whole.finish_termination("")
