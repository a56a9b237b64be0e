"""What a node does when it boots: one plain script, the same under cloud-init and in the emulator.

It holds no secret and no job data beyond the agent's command line. A node that
cannot mount or pull ends itself, so that nothing is billed that does not train.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_core.errors import InvalidRequest
from tasks.providers.aws.base import Base

MAX_USER_DATA = 16_384
"""Bytes that EC2 takes, before base64."""

MOUNT = "/mnt/elastic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Boot:
    """One node's start.

    Attributes:
        command: The agent's arguments after `--name`, passed on byte for byte.
        max_minutes: The dead-man timer: the node shuts down, and so terminates, after so long.
        gpus: Whether the container gets the node's GPUs.
    """

    base: Base
    image: str
    command: Sequence[str]
    environment: Mapping[str, str]
    shm_gib: float
    max_minutes: int
    gpus: bool

    def script(self) -> str:
        """Return the user data.

        Raises:
            InvalidRequest: It is longer than EC2 takes.
        """
        text = _SCRIPT.format(
            minutes=self.max_minutes,
            region=shlex.quote(self.base.region),
            file_system=shlex.quote(self.base.file_system),
            access_point=shlex.quote(self.base.access_point),
            registry=shlex.quote(self.base.repository_url.split("/", 1)[0]),
            image=shlex.quote(self.image),
            mount=MOUNT,
            log_group=shlex.quote(self.base.log_group),
            options=" ".join(self._options()),
            command=" ".join(shlex.quote(argument) for argument in self.command),
        )
        size = len(text.encode())
        if size > MAX_USER_DATA:
            raise InvalidRequest(
                f"the node's start script has {size} bytes and EC2 takes {MAX_USER_DATA}: "
                "shorten training.args, or put them into a file"
            )
        return text

    def _options(self) -> list[str]:
        options = [f"--shm-size={int(self.shm_gib * 1024)}m"]
        if self.gpus:
            options.append("--gpus=all")
        options += [
            f"--env={shlex.quote(f'{key}={value}')}" for key, value in sorted(self.environment.items())
        ]
        return options


_SCRIPT = """#!/bin/bash
# Elastic Train node. Whatever happens here, the node ends itself.
set -uo pipefail
shutdown -h +{minutes} "dead-man timer" || true

end() {{ echo "elastic-node: $1"; shutdown -h now; exit 1; }}

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

docker run --name elastic-agent --init --net=host --restart=no --read-only --tmpfs /tmp \\
    --cap-drop=ALL --security-opt=no-new-privileges --user 1000:1000 --stop-timeout 35 {options} \\
    --log-driver=awslogs --log-opt awslogs-region={region} --log-opt awslogs-group={log_group} \\
    --log-opt "awslogs-stream=$instance" -v {mount}:{mount} \\
    {image} --name "$instance" {command}
echo "elastic-node: agent exited with $?"
shutdown -h now
"""
