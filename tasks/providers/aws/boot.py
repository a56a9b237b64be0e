"""What a machine does when it boots: one plain script, the same under cloud-init and in the emulator.

It holds no secret and no job data beyond a command line. A machine that cannot
mount or pull ends itself, so that nothing is billed that does not train.
"""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from elastic_core.errors import InvalidRequest
from elastic_core.store.endpoint import DEFAULT_PORT
from elastic_core.store.server import EtcdOptions, upkeep_flags
from tasks.providers.aws import certificates
from tasks.providers.aws.base import Base

MAX_USER_DATA: Final = 16_384
"""Bytes that EC2 takes, before base64."""

_ENVIRONMENT: Final[Mapping[str, str]] = {"HOME": "/tmp", "USER": "elastic"}  # noqa: S108 (the container's own)
"""The user may have no name and no home in the image; libraries cache where they can write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot(ABC):
    """One machine's start.

    Attributes:
        mount: Where the file system is seen, on this machine and where the flow runs.
        max_minutes: The dead-man timer: the machine shuts down, and so terminates, after so long.
    """

    base: Base
    image: str
    mount: str
    max_minutes: int

    def script(self) -> str:
        """Return the user data.

        Raises:
            InvalidRequest: It is longer than EC2 takes.
        """
        start = _START.format(
            minutes=self.max_minutes,
            region=shlex.quote(self.base.region),
            file_system=shlex.quote(self.base.file_system),
            access_point=shlex.quote(self.base.access_point),
            registry=shlex.quote(self.base.repository_url.split("/", 1)[0]),
            image=shlex.quote(self.image),
            mount=shlex.quote(self.mount),
        )
        text = start + self._work()
        size = len(text.encode())
        if size > MAX_USER_DATA:
            raise InvalidRequest(
                f"the node's start script has {size} bytes and EC2 takes {MAX_USER_DATA}: "
                "shorten training.args, or put them into a file"
            )
        return text

    @abstractmethod
    def _work(self) -> str:
        """Return what the machine does once it has its file system and its image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBoot(Boot):
    """The start of a node that trains.

    Attributes:
        command: The agent's arguments after `--name`, passed on byte for byte.
        logs: Directory of the nodes' logs, on the file system: `<node>/agent.log`.
        gpus: Whether the container gets the machine's GPUs.
    """

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    logs: Path
    shm_gib: float
    gpus: bool

    def _work(self) -> str:
        return _NODE.format(
            region=shlex.quote(self.base.region),
            log_group=shlex.quote(self.base.log_group),
            logs=shlex.quote(str(self.logs)),
            mount=shlex.quote(f"{self.mount}:{self.mount}"),
            options=" ".join(self._options()),
            image=shlex.quote(self.image),
            command=" ".join(shlex.quote(argument) for argument in self.command),
        )

    def _options(self) -> list[str]:
        options = [f"--shm-size={int(self.shm_gib * 1024)}m"]
        if self.gpus:
            options.append("--gpus=all")
        variables = {**_ENVIRONMENT, **self.environment}
        options += [f"--env={shlex.quote(f'{key}={value}')}" for key, value in sorted(variables.items())]
        return options


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdBoot(Boot):
    """The start of the machine that runs a run's etcd.

    Attributes:
        home: Directory of the server's data and certificates, on the file system.
    """

    home: Path

    def _work(self) -> str:
        return _ETCD.format(
            home=shlex.quote(str(self.home)),
            server=shlex.quote(str(self.home / "tls" / f"{certificates.SERVER}.pem")),
            mount=shlex.quote(f"{self.mount}:{self.mount}"),
            image=shlex.quote(self.image),
            flags=" ".join(map(shlex.quote, self._flags())),
            port=DEFAULT_PORT,
        )

    def _flags(self) -> list[str]:
        tls = self.home / "tls"
        peers = f"http://127.0.0.1:{DEFAULT_PORT + 1}"
        return [
            *("--name=elastic", f"--data-dir={self.home / 'data'}"),
            f"--listen-client-urls=https://0.0.0.0:{DEFAULT_PORT}",
            *(f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"),
            f"--initial-cluster=elastic={peers}",
            *("--client-cert-auth", f"--trusted-ca-file={tls / certificates.CA}"),
            f"--cert-file={tls / certificates.SERVER}.pem",
            f"--key-file={tls / certificates.SERVER}.key",
            "--logger=zap",  # etcd 3.4 writes to one place only by its default
            f"--log-outputs=stderr,{self.home / 'etcd.log'}",
            *upkeep_flags(EtcdOptions()),
        ]


_START = """#!/bin/bash
# Elastic Train. Whatever happens here, the machine ends itself.
set -uo pipefail
shutdown -h +{minutes} "dead-man timer" || true

end() {{ echo "elastic-node: $1" | tee /dev/console; shutdown -h now; exit 1; }}

imds() {{
    token=$(curl -sf -m 2 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 300' \\
        http://169.254.169.254/latest/api/token) &&
        curl -sf -m 2 -H "X-aws-ec2-metadata-token: $token" "http://169.254.169.254/latest/meta-data/$1"
}}

instance=$(imds instance-id) || end "the metadata service does not answer"

# A file system's name resolves and its mount target answers only some time after they were made.
mkdir -p {mount}
for attempt in $(seq 30); do
    mount -t efs -o tls,iam,accesspoint={access_point} {file_system}:/ {mount} && break
    [ "$attempt" = 30 ] && end "the file system could not be mounted"
    sleep 5
done

aws ecr get-login-password --region {region} | docker login --username AWS --password-stdin {registry} || true
for attempt in $(seq 5); do
    docker image inspect {image} >/dev/null 2>&1 || docker pull -q {image} && break
    [ "$attempt" = 5 ] && end "the image could not be pulled"
    sleep 5
done
"""

_NODE = """
mkdir -p {logs}/"$instance"
docker run --name elastic-agent --init --net=host --restart=no --read-only --tmpfs /tmp \\
    --cap-drop=ALL --security-opt=no-new-privileges --user 1000:1000 --stop-timeout 35 {options} \\
    --log-driver=awslogs --log-opt awslogs-region={region} --log-opt awslogs-group={log_group} \\
    --log-opt "awslogs-stream=$instance" -v {mount} \\
    {image} --name "$instance" {command} 2>&1 | tee -a {logs}/"$instance"/agent.log
echo "elastic-node: agent exited with ${{PIPESTATUS[0]}}" | tee /dev/console
shutdown -h now
"""

_ETCD = """
address=$(imds local-ipv4) || end "the metadata service does not know this machine's address"
for attempt in $(seq 300); do
    [ -s {server} ] && break
    [ "$attempt" = 300 ] && end "no certificate came"
    sleep 1
done
# etcd's data are safe at any moment: one that died is started again with them.
while true; do
    docker run --rm --name elastic-etcd --init --net=host --read-only --tmpfs /tmp --no-healthcheck \\
        --cap-drop=ALL --security-opt=no-new-privileges --user 1000:1000 --entrypoint=etcd -v {mount} \\
        {image} {flags} --advertise-client-urls="https://$address:{port}"
    sleep 1
done
"""
