"""Machines of the emulated cloud: every instance is a container with its address, IMDS and user data.

What the start script does with docker, mount, aws and shutdown comes here over a
socket: `docker run --net=host` becomes a container in the machine's network, EFS
is a directory, and a shutdown ends the instance as its template says.
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import subprocess
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Self

import docker
from docker.errors import APIError, NotFound
from docker.types import IPAMConfig, IPAMPool
from moto.ec2.models.instances import Instance
from moto.efs.models import efs_backends

from tasks.emulator.cloud import NOTICE, Cloud

LABEL: Final = "elastic.emulator"
HOST_IMAGE: Final = "elastic-emulated-host"
STOP_S: Final = 40
_DROPPED: Final = ("--log-driver", "--log-opt", "--gpus")
_WITH_VALUE: Final = ("--name", "-v", "--tmpfs", "--user", "--stop-timeout", "--log-opt", "--log-driver")


@dataclass(slots=True)
class Hosts:
    """The machines of one cloud.

    Args:
        cloud: Its listener becomes this layer.
        root: Directory of machines and file systems; short, since socket paths are limited to 108 bytes.
        base: Base of the machines' image: anything with Python 3 and apt.
    """

    cloud: Cloud
    root: Path
    base: str = ""
    client: Any = field(default_factory=docker.from_env)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16, "host"))
    _sockets: dict[str, socket.socket] = field(default_factory=dict)
    _work: list[Future[None]] = field(default_factory=list)
    _closed: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        """Build the machines' image if there is none, and serve the cloud."""
        with contextlib.suppress(APIError):
            self.sweep()
        options = {"buildargs": {"BASE": self.base}} if self.base else {}
        self.client.images.build(path=str(Path(__file__).parent / "host"), tag=HOST_IMAGE, rm=True, **options)
        self.root.mkdir(parents=True, exist_ok=True)
        self.cloud.listener = self.changed
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self.cloud.listener = None
        for link in self._sockets.values():
            link.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.sweep()

    def sweep(self) -> None:
        """Remove every container and network of the emulator."""
        for container in self.client.containers.list(all=True, filters={"label": LABEL}):
            with contextlib.suppress(NotFound, APIError):
                container.remove(force=True)
        for network in self.client.networks.list(filters={"label": LABEL}):
            with contextlib.suppress(NotFound):
                network.remove()

    # ---- what happens to machines --------------------------------------------------------------

    def changed(self, instance: Instance) -> None:
        """Start or end an instance's machine in the background."""
        act = {"pending": self._start, "shutting-down": self._end}.get(instance.state)
        if act is not None and not self._closed.is_set():
            self._work.append(self._pool.submit(act, instance))

    def interrupt(self, name: str, events: Any, after: timedelta = NOTICE) -> None:
        """Announce a spot interruption on the machine and on the event bus, then take it."""
        due = datetime.now(UTC) + after
        notice = json.dumps({"action": "terminate", "time": due.strftime("%Y-%m-%dT%H:%M:%SZ")})
        self._describe(self.cloud.instance(name), {"spot/instance-action": notice})
        self.cloud.warn(name, events, after)

        def take() -> None:
            if not self._closed.wait(after.total_seconds()):
                self.cloud.take(name)

        threading.Thread(target=take, name=f"take-{name}", daemon=True).start()

    def crash(self, name: str) -> None:
        """End a machine without a word, as a failed host does."""
        for container in self._containers(name):
            with contextlib.suppress(NotFound, APIError):
                container.kill()
        self.cloud.ended(name, "Server.InternalError: the host failed")

    def wait(self) -> None:
        """Wait until everything that was asked for is done; raise what went wrong."""
        while self._work:
            self._work.pop().result()

    # ---- machines ------------------------------------------------------------------------------

    def _directory(self, name: str) -> Path:
        return self.root / name

    def _containers(self, name: str) -> list[Any]:
        found = self.client.containers.list(all=True, filters={"label": f"{LABEL}={name}"})
        return sorted(found, key=lambda container: container.name == name)  # what runs on it first

    def _start(self, instance: Instance) -> None:
        directory = self._directory(instance.id)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "user-data").write_text(_user_data(instance))
        self._describe(instance, {})
        self._serve(instance)
        network = self._network(instance)
        container = self.client.containers.create(
            HOST_IMAGE,
            name=instance.id,
            hostname=str(instance.private_dns_name).split(".")[0],
            labels={LABEL: instance.id},
            cap_add=["NET_ADMIN"],
            init=True,
            volumes={str(directory): {"bind": "/machine/lab", "mode": "rw"}},
            network_mode="none",
        )
        self.client.networks.get("none").disconnect(container)
        network.connect(container, ipv4_address=instance.private_ip)
        container.start()
        self.cloud.booted(instance.id)
        # It waits as long as the machine lives, so it must not hold a worker of the pool.
        threading.Thread(target=self._watch, args=(instance, container), daemon=True).start()

    def _watch(self, instance: Instance, container: Any) -> None:
        """Notice a machine that shut itself down."""
        with contextlib.suppress(Exception):  # the engine's client times out on long waits
            container.wait(timeout=24 * 3600)
        if not self._closed.is_set() and instance.state == "running":
            self._clear(instance.id)
            self.cloud.ended(instance.id, "Client.InstanceInitiatedShutdown: Instance initiated shutdown")

    def _end(self, instance: Instance) -> None:
        self._clear(instance.id)
        self.cloud.ended(instance.id)

    def _clear(self, name: str) -> None:
        for container in self._containers(name):
            with contextlib.suppress(NotFound, APIError):
                container.stop(timeout=STOP_S)
                (self._directory(name) / f"{container.name}.log").write_bytes(container.logs())
                container.remove(force=True)
        link = self._sockets.pop(name, None)
        if link is not None:
            link.close()

    def _network(self, instance: Instance) -> Any:
        """Return the network of an instance's VPC, with the VPC's own addresses."""
        name = f"elastic-{instance.vpc_id}"
        for network in self.client.networks.list(names=[f"^{name}$"]):
            return network
        vpc = instance.ec2_backend.get_vpc(instance.vpc_id)
        gateway = f"{vpc.cidr_block.rsplit('.', 2)[0]}.255.254"
        pool = IPAMPool(subnet=vpc.cidr_block, gateway=gateway)
        with contextlib.suppress(APIError):  # another machine's thread made it
            return self.client.networks.create(
                name, driver="bridge", labels={LABEL: "network"}, ipam=IPAMConfig(pool_configs=[pool])
            )
        return self.client.networks.list(names=[f"^{name}$"])[0]

    def _describe(self, instance: Instance, notices: dict[str, str]) -> None:
        """Write what the metadata service says."""
        tags = {tag["key"]: tag["value"] for tag in instance.get_tags()}
        path = self._directory(instance.id) / "instance.json"
        known = json.loads(path.read_text())["metadata"] if path.exists() else {}
        metadata = {
            **known,
            "instance-id": instance.id,
            "instance-type": instance.instance_type,
            "local-ipv4": instance.private_ip,
            "placement/availability-zone": instance.availability_zone,
            "placement/region": instance.region_name,
            **notices,
        }
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps({"metadata": metadata, "tags": tags}))
        draft.replace(path)

    # ---- what machines ask for -----------------------------------------------------------------

    def _serve(self, instance: Instance) -> None:
        path = self._directory(instance.id) / "emulator.sock"
        path.unlink(missing_ok=True)
        link = socket.socket(socket.AF_UNIX)
        link.bind(str(path))
        path.chmod(0o777)
        link.listen()
        self._sockets[instance.id] = link
        threading.Thread(target=self._accept, args=(instance, link), daemon=True).start()

    def _accept(self, instance: Instance, link: socket.socket) -> None:
        while True:
            try:
                peer, _ = link.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._answer, args=(instance, peer), daemon=True).start()

    def _answer(self, instance: Instance, peer: socket.socket) -> None:
        with peer, peer.makefile("rwb") as stream:
            request = json.loads(stream.readline())

            def say(**what: Any) -> None:
                with contextlib.suppress(OSError):
                    stream.write(json.dumps(what).encode() + b"\n")
                    stream.flush()

            act = {"docker": self._docker, "mount": self._mount, "shutdown": self._shutdown}.get(
                request["command"]
            )
            say(exit=act(instance, request["arguments"], say) if act else 0)

    def _mount(self, instance: Instance, arguments: list[str], say: Any) -> int:
        """`mount -t efs`: the file system must exist with a mount target in the machine's zone."""
        file_system = next((a.split(":")[0] for a in arguments if a.startswith("fs-")), "")
        backend = efs_backends[instance.owner_id][instance.region_name]
        targets = [t for t in backend.mount_targets_by_id.values() if t.file_system_id == file_system]
        if not any(target.subnet_id == instance.subnet_id for target in targets):
            say(text=f'Failed to resolve "{file_system}.efs": no mount target in this zone\n')
            return 1
        (self.root / "efs" / file_system).mkdir(parents=True, exist_ok=True)
        (self.root / "efs" / file_system).chmod(0o777)
        (self._directory(instance.id) / "mounted").write_text(file_system)
        return 0

    def _shutdown(self, instance: Instance, arguments: list[str], say: Any) -> int:  # noqa: ARG002
        delay = next((a for a in arguments if a.startswith("+")), "+0")
        halt = self._directory(instance.id) / "halt"
        timer = threading.Timer(60.0 * int(delay[1:]), halt.touch)
        timer.daemon = True
        timer.start()
        return 0

    def _docker(self, instance: Instance, arguments: list[str], say: Any) -> int:
        if arguments[0] != "run":
            known = arguments[:2] != ["image", "inspect"]
            return (
                0
                if known
                else subprocess.run(
                    ["docker", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
                ).returncode
            )
        with subprocess.Popen(
            ["docker", "run", *self._translated(instance, arguments[1:])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            for line in process.stdout or ():
                say(text=line)
        return process.returncode

    def _translated(self, instance: Instance, arguments: list[str]) -> list[str]:
        """Rewrite `docker run` so that its container is on the machine and sees its file system."""
        mounted = self._directory(instance.id) / "mounted"
        file_system = self.root / "efs" / (mounted.read_text() if mounted.exists() else "none")
        result = [f"--label={LABEL}={instance.id}"]
        words = iter(arguments)
        for word in words:
            if not word.startswith("-"):  # the image: what follows is the agent's
                return [*result, word, *words]
            value = [next(words)] if word in _WITH_VALUE else []
            if word.split("=")[0] in _DROPPED:
                continue
            if word in ("--net=host", "--network=host"):
                word = f"--net=container:{instance.id}"
            elif word == "--name":
                value = [f"{instance.id}-{value[0]}"]
            elif word == "-v" and value[0].startswith("/mnt/elastic:"):
                value = [value[0].replace("/mnt/elastic", str(file_system), 1)]
            result += [word, *value]
        return result


def _user_data(instance: Instance) -> str:
    text = str(instance.user_data or "")
    with contextlib.suppress(ValueError):
        return base64.b64decode(text).decode()
    return text
