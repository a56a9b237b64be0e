"""Machines of the emulated cloud: every instance is a container with its address, IMDS and user data.

What the start script does with docker, mount, aws and shutdown comes here over a
socket: `docker run --net=host` becomes a container in the machine's network, EFS
is a directory, and a shutdown ends the instance as its template says.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Final, Self

import docker
from docker.errors import APIError, NotFound
from docker.types import IPAMConfig, IPAMPool
from moto.ec2.models.instances import Instance
from moto.efs.models import efs_backends

from tasks.emulator.account import NFS_PORT
from tasks.emulator.cloud import ACCOUNT, NOTICE, Cloud

LABEL: Final = "elastic.emulator"
OWNER: Final = "elastic.emulator.owner"
"""Label with the emulator's process id: several emulators may share an engine."""

EFS: Final = "/machine/efs"
"""Where a machine's container has all file systems; `mount` makes a link to one of them."""

HOST_IMAGE: Final = "elastic-emulated-host"
HOST_BASE: Final = "python:3.11-slim-bookworm"
STOP_S: Final = 40
_LOOK_S: Final = 0.1
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
        self.sweep()
        options = {"buildargs": {"BASE": self.base}} if self.base else {}
        self.client.images.build(path=str(Path(__file__).parent / "host"), tag=HOST_IMAGE, rm=True, **options)
        self.file_systems.mkdir(parents=True, exist_ok=True)
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
        """Remove every container and network of this emulator, and of those whose process is gone."""
        things = [
            *self.client.containers.list(all=True, filters={"label": OWNER}, ignore_removed=True),
            *self.client.networks.list(filters={"label": OWNER}),
        ]
        for thing in things:
            owner = thing.attrs.get("Labels", thing.attrs.get("Config", {}).get("Labels"))[OWNER]
            if owner != str(os.getpid()) and Path("/proc", owner).exists():
                continue
            with contextlib.suppress(NotFound, APIError):
                thing.remove(**({"force": True} if hasattr(thing, "logs") else {}))

    @property
    def file_systems(self) -> Path:
        """Directory of all file systems, one by its creation token."""
        return self.root / "efs"

    def place_of(self, file_system: str, access_point: str) -> Path:
        """Return the directory that an access point shows."""
        backend = efs_backends[ACCOUNT]
        for regional in backend.values():
            if access_point in regional.access_points:
                point = regional.access_points[access_point]
                token = regional.file_systems_by_id[file_system].creation_token
                path: str = point.root_directory["Path"]
                return self.file_systems / token / path.strip("/")
        raise LookupError(access_point)

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
        self.cloud.ended(name, "Server.InternalError: the host failed")
        machine = self.client.containers.get(name)
        for network in machine.attrs["NetworkSettings"]["Networks"]:  # silence comes before the end
            self.client.networks.get(network).disconnect(machine, force=True)
        self._clear(name, stop_s=0)

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
            labels={LABEL: instance.id, OWNER: str(os.getpid())},
            cap_add=["NET_ADMIN"],
            init=True,
            volumes={
                str(directory): {"bind": "/machine/lab", "mode": "rw"},
                str(self.file_systems): {"bind": EFS, "mode": "rw"},
            },
            network_mode="none",
        )
        self.client.networks.get("none").disconnect(container)
        network.connect(container, ipv4_address=instance.private_ip)
        self._boot(container)
        self.cloud.booted(instance.id)
        # It waits as long as the machine lives, so it must not hold a worker of the pool.
        threading.Thread(target=self._watch, args=(instance, container), daemon=True).start()

    def _boot(self, container: Any) -> None:
        """Start a machine, once the one that had its address before is gone.

        The account gives an address out again when an instance is ended; its machine takes a moment
        longer, and on AWS no two machines ever have one address.
        """
        deadline = time.monotonic() + 2 * STOP_S
        while not self._closed.is_set():
            try:
                container.start()
            except APIError as error:
                if "Address already in use" not in str(error) or time.monotonic() > deadline:
                    raise
                self._closed.wait(_LOOK_S)
            else:
                return

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

    def _clear(self, name: str, stop_s: int = STOP_S) -> None:
        while containers := self._containers(name):  # what a start script began meanwhile ends too
            for container in containers:
                with contextlib.suppress(NotFound, APIError):
                    container.stop(timeout=stop_s)
                    said = container.logs()
                    (self._directory(name) / f"{container.name}.log").write_bytes(said)
                    if container.name == name:
                        self.cloud.said(name, said.decode(errors="replace"))
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
                name,
                driver="bridge",
                labels={LABEL: "network", OWNER: str(os.getpid())},
                ipam=IPAMConfig(pool_configs=[pool]),
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
        # Who asked may be gone before the answer: a pipe's end, a machine that was terminated.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError), peer, peer.makefile("rwb") as stream:
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
        """`mount -t efs`: refused for the reasons that the real helper meets, in words like its own."""
        file_system = next((a.split(":")[0] for a in arguments if a.startswith("fs-")), "")
        point = next(
            (w.partition("=")[2] for a in arguments for w in a.split(",") if "accesspoint=" in w), ""
        )
        backend = efs_backends[instance.owner_id][instance.region_name]
        targets = [t for t in backend.mount_targets_by_id.values() if t.file_system_id == file_system]
        target = next((t for t in targets if t.subnet_id == instance.subnet_id), None)
        if target is None:
            say(text=f'Failed to resolve "{file_system}.efs": no mount target in this zone\n')
            return 1
        if not _admits_nfs(instance, target.security_groups or ()):
            say(text=f"mount.nfs4: Connection timed out: no rule lets us reach {target.ip_address}:2049\n")
            return 1
        try:
            place = self.place_of(file_system, point)
        except LookupError:
            say(text=f'mount.nfs4: access denied: the access point "{point}" does not exist\n')
            return 1
        place.mkdir(parents=True, exist_ok=True)
        inside = f"{EFS}/{place.relative_to(self.file_systems)}"
        say(link=[inside, arguments[-1]])
        mounted = {"target": arguments[-1], "source": str(place)}
        (self._directory(instance.id) / "mounted").write_text(json.dumps(mounted))
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
            if arguments[0] not in ("image", "pull"):
                return 0
            # There is no registry: an image that the engine does not have cannot be pulled.
            looked = ["docker", "image", "inspect", arguments[-1]]
            return subprocess.run(looked, capture_output=True, check=False).returncode
        if instance.state in ("shutting-down", "terminated"):
            return 1
        with subprocess.Popen(
            ["docker", "run", *self._translated(instance, arguments[1:])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a Ctrl-C is for the one who started us
        ) as process:
            for line in process.stdout or ():
                say(text=line)
        return process.returncode

    def _translated(self, instance: Instance, arguments: list[str]) -> list[str]:
        """Rewrite `docker run` so that its container is on the machine and sees its file system."""
        result = [f"--label={LABEL}={instance.id}", f"--label={OWNER}={os.getpid()}"]
        words = iter(arguments)
        for word in words:
            if not word.startswith("-"):  # the image: what follows is its program's
                return [*result, word, *words]
            value = [next(words)] if word in _WITH_VALUE else []
            if word.split("=")[0] in _DROPPED:
                continue
            if word in ("--net=host", "--network=host"):
                word = f"--net=container:{instance.id}"
            elif word == "--name":
                value = [f"{instance.id}-{value[0]}"]
            elif word == "--user":
                # An access point makes one user of all; here that is who owns the directory.
                value = [f"{os.getuid()}:{os.getgid()}"]
            elif word == "-v":
                value = [self._volume(instance, value[0])]
            result += [word, *value]
        return result

    def _volume(self, instance: Instance, volume: str) -> str:
        """Return a bind of the machine as one of the engine's."""
        source, _, rest = volume.partition(":")
        mounted = self._directory(instance.id) / "mounted"
        known = json.loads(mounted.read_text()) if mounted.exists() else {"target": "", "source": ""}
        if source == known["target"]:
            return f"{known['source']}:{rest}"
        disk = self._directory(instance.id) / "disk" / source.strip("/")
        disk.mkdir(parents=True, exist_ok=True)
        return f"{disk}:{rest}"


def free_network(client: Any) -> IPv4Network:
    """Return a private range of addresses that no network of the engine overlaps."""
    taken = [
        IPv4Network(config["Subnet"], strict=False)
        for network in client.networks.list()
        for config in network.attrs["IPAM"]["Config"] or ()
        if ":" not in config["Subnet"]
    ]
    candidates = (IPv4Network(f"10.{number}.0.0/16") for number in range(42, 255))
    return next(network for network in candidates if not any(map(network.overlaps, taken)))


def _admits_nfs(instance: Any, groups: Any) -> bool:
    """Return whether a mount target's security groups let an instance in."""
    mine = {group.id for group in instance.security_groups}
    for name in groups:
        for rule in instance.ec2_backend.get_security_group_from_id(name).ingress_rules:
            covers = rule.ip_protocol == "-1" or rule.from_port <= NFS_PORT <= rule.to_port
            if covers and rule.source_group.get("GroupId") in mine:
                return True
    return False


def _user_data(instance: Instance) -> str:
    text = str(instance.user_data or "")
    with contextlib.suppress(ValueError):
        return base64.b64decode(text).decode()
    return text
