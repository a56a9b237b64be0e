"""The job: what a person writes, the only user input of the product.

One job file runs unchanged on local processes, on Docker and on AWS; only
`pool` differs. Models are frozen and refuse unknown keys; every default is
plain, so that the bare deployment run is accepted and the run form is usable.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from elastic_core.ids import NAME_PATTERN
from elastic_core.model.sizes import AllowedSizes

Precision = Literal["float32", "bf16"]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NodeBounds(_Model):
    """How many nodes train."""

    model_config = ConfigDict(title="Nodes")

    min: int = Field(1, ge=1, le=10_000, description="Training waits below so many nodes.")
    max: int = Field(4, ge=1, le=10_000, description="Nodes beyond so many stand by.")
    target: int = Field(2, ge=1, le=10_000, description="Nodes to launch and keep.")
    standby: int = Field(
        0,
        ge=0,
        le=1_000,
        description="Nodes beyond the target, set up to replace a lost one at once.",
    )
    multiple_of: int = Field(1, ge=1, le=10_000, description="Train on multiples of so many nodes only.")
    sizes: tuple[Annotated[int, Field(ge=1, le=10_000)], ...] = Field(
        (), description="Train on these numbers of nodes only; empty: on any within the bounds."
    )

    changes_per_hour: int = Field(
        0, ge=0, description="End the run when nodes come or go more often within an hour; 0: never."
    )

    @property
    def allowed(self) -> AllowedSizes:
        """The numbers of nodes that may train together."""
        return AllowedSizes(multiple_of=self.multiple_of, listed=tuple(sorted(set(self.sizes))))

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min is {self.min} and max is {self.max}: raise max or lower min")
        if not self.min <= self.target <= self.max:
            raise ValueError(f"target is {self.target}: choose one from min ({self.min}) to max ({self.max})")
        if self.sizes and self.multiple_of > 1:
            raise ValueError(f"sizes and multiple_of ({self.multiple_of}) are both given: drop one of them")
        if self.allowed.largest_within(self.target) != self.target:
            allowed = self.allowed.describe()
            raise ValueError(f"target is {self.target}: choose an allowed size ({allowed})")
        return self


class ElasticOptions(_Model):
    """How the training stays the same at every world size."""

    model_config = ConfigDict(title="Elastic options")

    global_batch: int = Field(
        0,
        ge=0,
        description="Samples in one optimizer step at every world size; "
        "0: the config's batchsize_per_replica times the target's workers.",
    )
    virtual_shards: int = Field(
        4,
        ge=1,
        le=4096,
        description="Fixed slices of a global batch, dealt to the workers: no more workers than this.",
    )
    deterministic: bool = Field(
        False, description="Reduce gradients in one fixed order: bitwise equal on CPU, slower."
    )
    precision: Precision = Field(
        "float32", description="What the model computes in; bf16 halves its memory. Weights are float32."
    )
    non_finite: Literal["stop", "skip"] = Field(
        "stop",
        description="A loss that is no number: stop with the step and samples named, or skip: pass over the "
        "step, ten in a row at most.",
    )
    seed: int = Field(0, ge=0, description="Seed of sample order, augmentation and dropout.")
    audit_samples: bool = Field(
        True, description="Record the ids of every step, so that exactly-once can be shown."
    )


class ClassyTraining(_Model):
    """Train a Classy Vision task on the elastic API: survivors keep process and state."""

    model_config = ConfigDict(title="Classy Vision")

    kind: Literal["classy"] = "classy"
    config: str | dict[str, Any] = Field(
        "examples/digits.json", description="Path of a Classy Vision JSON config, or the config."
    )
    user_package: str = Field(
        "",
        description="Python package that registers your own datasets, models and transforms; "
        "several with commas between them.",
    )
    warm_start: str = Field(
        "", description="Directory of an exported model whose weights to begin with; empty: begin anew."
    )
    elastic: ElasticOptions = ElasticOptions()


class ScriptTraining(_Model):
    """Run any script that runs under torchrun; it restarts from its own checkpoints, warm."""

    model_config = ConfigDict(title="Script")

    kind: Literal["script"] = "script"
    script: str = Field(..., min_length=1, description="Path of a Python script, or what `entry` says.")
    entry: Literal["script", "module", "program"] = Field(
        "script", description="What `script` names: a file, a module (python -m), or any program."
    )
    args: tuple[str, ...] = Field((), description="Its arguments, passed on byte for byte.")
    preload: tuple[str, ...] = Field(
        (), description="Modules that the fork server imports before workers start."
    )
    start_method: Literal["fork", "spawn"] = Field(
        "fork", description="fork: from a warmed process; spawn: a fresh interpreter each time."
    )


class LocalPool(_Model):
    """Nodes are process groups on this machine."""

    model_config = ConfigDict(title="Local processes")

    kind: Literal["local"] = "local"


class DirectoryMount(_Model):
    """A directory of the engine's machine, seen in every container."""

    model_config = ConfigDict(title="Mount")

    source: str = Field(..., min_length=1, description="Directory on the engine's machine.")
    target: str = Field(..., pattern="^/", description="Absolute path in the container.")
    read_only: bool = Field(True, description="Whether the container may only read it.")


class DockerPool(_Model):
    """Nodes are containers of the Docker engine that the environment names."""

    model_config = ConfigDict(title="Docker")

    kind: Literal["docker"] = "docker"
    image: str = Field("elastic-train:latest", min_length=1, description="Image of agent and workers.")
    shm_gib: float = Field(
        1.0, ge=0.0625, description="Shared memory of a container in GiB; loader workers need it."
    )
    memory_gib: float = Field(0, ge=0, description="Memory limit of a container in GiB; 0: none.")
    cpus: float = Field(0, ge=0, description="CPUs that a container may use; 0: all.")
    gpus: int = Field(0, ge=-1, description="GPUs of a container; -1: all.")
    mounts: tuple[DirectoryMount, ...] = Field((), description="Directories with data, mounted read-only.")


class AwsPool(_Model):
    """Nodes are EC2 instances of a cluster whose base Terraform made (`infra/terraform`)."""

    model_config = ConfigDict(title="AWS (EC2)")

    kind: Literal["aws"] = "aws"
    cluster: str = Field("elastic", pattern=NAME_PATTERN, max_length=32, description="Name of the base.")
    base: str = Field(
        "",
        description="The base's ids, as `elastic-train base apply` or `terraform output -json` writes them; "
        "default: `.elastic/base/<cluster>/base.json`.",
    )
    mount: str = Field(
        "/mnt/elastic",
        pattern="^/.",
        description="Where the cluster's file system is mounted: on nodes, and where the flow runs.",
    )
    region: str = Field("us-west-2", pattern=r"^[a-z]{2}(-[a-z]+)+-[0-9]$", description="AWS region.")
    zones: tuple[str, ...] = Field(
        (), description="Zones to use, the preferred one first; empty: all of the base."
    )
    instance_types: tuple[str, ...] = Field(
        ("g5.xlarge", "g5.2xlarge", "g5.4xlarge"),
        min_length=1,
        description="Acceptable types; more of them find capacity sooner. The slowest sets the pace.",
    )
    market: Literal["spot", "spot-then-on-demand", "on-demand"] = Field(
        "spot", description="What to pay: spot only, on-demand as a last resort, or on-demand only."
    )
    image: str = Field("", description="Container image, by digest; empty: `latest` of the base's registry.")
    etcd_instance_type: str = Field(
        "t3.small", min_length=1, description="Type of the on-demand instance that runs etcd."
    )
    shm_gib: float = Field(8.0, ge=0.0625, description="Shared memory of the agent's container in GiB.")
    max_hours: float = Field(24.0, gt=0, le=24 * 30, description="A node ends itself after so long.")
    budget_usd: float = Field(
        0.0, ge=0, description="Refuse launches if all nodes, run to max_hours, would cost more; 0: no limit."
    )
    on_demand_usd: dict[str, float] = Field(
        {}, description="Dollars an hour on demand by instance type; spot prices are looked up."
    )
    endpoint_url: str = Field("", description="Address of the emulator; empty: AWS itself.")


class EtcdTls(_Model):
    """PEM files by which TLS is spoken with an etcd; nodes read them at the same paths."""

    model_config = ConfigDict(title="TLS")

    ca: str = Field("", description="Authority of etcd's certificate; empty: no TLS.")
    cert: str = Field("", description="Certificate for an etcd that asks for one, with its key.")
    key: str = Field("", description="The certificate's key.")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if bool(self.cert) != bool(self.key):
            raise ValueError("give certificate and key, or neither")
        if self.cert and not self.ca:
            raise ValueError("a certificate needs TLS: give the ca, too")
        return self


class EtcdSource(_Model):
    """An etcd of yours; by default each run starts one of its own."""

    model_config = ConfigDict(title="etcd")

    endpoints: str = Field(
        "", description="host:port of its members, with commas between them; empty: the run's own etcd."
    )
    tls: EtcdTls = EtcdTls()
    user: str = Field("", description="Its user; the password comes from ELASTIC_STORE_PASSWORD.")
    password_file: str = Field("", description="Or from this file, which nodes read at the same path.")

    @model_validator(mode="after")
    def _named(self) -> Self:
        given = [name for name in ("user", "password_file") if getattr(self, name)]
        given += ["tls"] if self.tls.ca else []
        if given and not self.endpoints:
            raise ValueError(f"{given[0]} is given, but no endpoints: the run's own etcd asks for nothing")
        if self.password_file and not self.user:
            raise ValueError("password_file is given, but no user")
        return self


class CheckpointPolicy(_Model):
    """When durable checkpoints are written."""

    model_config = ConfigDict(title="Checkpoints")

    directory: str = Field(
        "",
        description="Where: a directory that all nodes see, or a URL (s3://bucket/prefix…); "
        "empty: `checkpoints` in the run's directory.",
    )
    every_steps: int = Field(0, ge=0, description="Write after so many steps; 0: by time.")
    every_seconds: float = Field(
        0.0,
        ge=0,
        description="Write when so many seconds have passed; "
        "0: chosen from what a checkpoint costs and how often training broke.",
    )
    keep: int = Field(3, ge=1, description="Newest checkpoints kept; the last good one always is.")


class Timeouts(_Model):
    """Waits of the rendezvous, in seconds."""

    model_config = ConfigDict(title="Timeouts")

    lease_ttl: float = Field(3.0, ge=2, le=60, description="A silent node is gone after so long.")
    last_call: float = Field(
        5.0, ge=0, description="Wait for more nodes once min are ready and the target is not known."
    )
    join: float = Field(600.0, gt=0, description="Give up when min nodes have not come by then.")
    probe: float = Field(0.3, gt=0, description="A node that does not answer a probe so long is lost.")
    suspect: float = Field(0.7, gt=0, description="A silent neighbour is fenced after so long.")
    stop_grace: float = Field(30.0, ge=0, description="Between SIGTERM and SIGKILL of a worker.")
    flow: float = Field(
        86_400.0,
        ge=0,
        description="Nodes save and end when no flow drove the run for so long; 0: they train on for ever.",
    )


class HealthPolicy(_Model):
    """How workers and nodes that are there and do not work are found."""

    model_config = ConfigDict(title="Health")

    hang_timeout: float = Field(
        0,
        ge=0,
        description="A worker that makes no step for so many seconds is replaced; 0: twenty times its "
        "longest step, at least 30 s, and 300 s for its first one.",
    )
    slow_node: Literal["warn", "replace"] = Field(
        "warn",
        description="A node whose own work takes half as long again as the others' (trainers of the "
        "elastic API only) is told of, or drained and replaced.",
    )
    exclude_after: int = Field(
        2,
        ge=0,
        le=100,
        description="A node on which so many failures in a row began is drained and replaced; 0: none is.",
    )
    preflight: bool = Field(
        True,
        description="Whether a node looks at its disk, its checkpoint directory, a matrix product and a "
        "collective before it can be counted on.",
    )
    partial_exit: float = Field(
        3600, gt=0, description="Once a worker ended with code 0, the others may run on for so many seconds."
    )


class MetricsEndpoint(_Model):
    """Where Prometheus reads the figures of a run."""

    model_config = ConfigDict(title="Metrics")

    port: int = Field(0, ge=0, le=65535, description="Port of the machine that the flow runs on; 0: none.")
    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on; it asks for no login.")


class JobSpec(_Model):
    """A training job.

    Raises:
        pydantic.ValidationError: All mistakes at once; `elastic_core.model.job_file` words them.
    """

    model_config = ConfigDict(title="Job")

    name: str = Field("digits", pattern=NAME_PATTERN, description="Lower-case letters, digits, dashes.")
    pool: Annotated[
        LocalPool | DockerPool | AwsPool,
        Field(
            discriminator="kind",
            description="Where nodes come from: kind local, docker or aws, each with options of its own.",
        ),
    ] = LocalPool()
    nodes: NodeBounds = NodeBounds()
    workers_per_node: int = Field(1, ge=1, le=64, description="Training processes on each node.")
    training: Annotated[
        ClassyTraining | ScriptTraining,
        Field(
            discriminator="kind",
            description="kind classy: a Classy Vision config; kind script: any script made for torchrun.",
        ),
    ] = ClassyTraining()
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    resume: Literal["auto", "require", "never"] = Field(
        "auto", description="auto: go on where an unfinished run of this job stopped."
    )
    max_restarts: int = Field(3, ge=0, description="Failures of workers, job-wide; never node losses.")
    timeouts: Timeouts = Timeouts()
    health: HealthPolicy = HealthPolicy()
    etcd: EtcdSource = EtcdSource()
    metrics: MetricsEndpoint = MetricsEndpoint()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if isinstance(self.training, ClassyTraining):
            workers = self.nodes.max * self.workers_per_node
            shards = self.training.elastic.virtual_shards
            if workers > shards:
                raise ValueError(
                    f"training.elastic.virtual_shards is {shards}, but nodes.max x workers_per_node is "
                    f"{workers}: raise virtual_shards or lower nodes.max"
                )
        return self
