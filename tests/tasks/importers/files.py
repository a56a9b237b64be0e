"""Foreign files as people have them, written anew: the keys are theirs, the values are ours."""

from __future__ import annotations

from typing import Any

import yaml


def petctl_specs(**worker: Any) -> str:
    group = {
        "instance_type": "p3.2xlarge",
        "accelerator": "gpu",
        "instance_role": "trainers",
        "key_pair": "mine",
        "efs_file_system_id": "fs-1",
        "subnets": ["subnet-1", "subnet-2"],
        "security_groups": ["sg-1"],
        "user_data_template": "config/user_data_worker",
        "docker_image": "torchelastic/aws:0.1.0rc1",
        "s3_bucket": "bucket",
        "s3_prefix": "jobs",
        "ebs_volume_size": 200,
    } | worker
    rdzv = {"instance_type": "t2.small", "accelerator": "none", "user_data_template": "config/user_data_rdzv"}
    return yaml.safe_dump({"rdzv": rdzv, "worker": group}, sort_keys=False)


def elastic_job(
    *args: str, endpoint: str = "etcd-service:2379", limits: dict[str, Any] | None = None, **spec: Any
) -> str:
    container: dict[str, Any] = {
        "name": "trainer",
        "image": "torchelastic/examples:0.2.0",
        "args": list(args),
    }
    if limits:
        container["resources"] = {"limits": limits}
    workers = {
        "replicas": 2,
        "restartPolicy": "ExitCode",
        "template": {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [container]}},
    }
    return yaml.safe_dump(
        {
            "apiVersion": "elastic.pytorch.org/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": "sample", "namespace": "elastic-job"},
            "spec": {
                "rdzvEndpoint": endpoint,
                "minReplicas": 1,
                "maxReplicas": 2,
                **spec,
                "replicaSpecs": {"Worker": workers},
            },
        },
        sort_keys=False,
    )


def pytorch_job(policy: dict[str, Any], *command: str, **worker: Any) -> str:
    container = {
        "name": "pytorch",
        "image": "registry.example/trainer:1.0",
        "imagePullPolicy": "IfNotPresent",
        "env": [{"name": "LOGLEVEL", "value": "DEBUG"}],
        "resources": {"requests": {"cpu": 4}},
        "command": list(command),
    }
    return yaml.safe_dump(
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": "echo"},
            "spec": {
                "elasticPolicy": policy,
                "pytorchReplicaSpecs": {
                    "Worker": {"replicas": 2, **worker, "template": {"spec": {"containers": [container]}}}
                },
            },
        },
        sort_keys=False,
    )


def dlrover_job(command: str) -> str:
    limits = {"cpu": "1", "memory": "2Gi"}
    container = {
        "name": "main",
        "image": "registry.example/mnist:1",
        "command": ["/bin/bash", "-c", command],
        "resources": {"limits": limits, "requests": limits},
    }
    template = {"spec": {"restartPolicy": "Always", "containers": [container]}}
    return yaml.safe_dump(
        {
            "apiVersion": "elastic.iml.github.io/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": "torch-mnist", "namespace": "dlrover"},
            "spec": {
                "distributionStrategy": "AllreduceStrategy",
                "optimizeMode": "single-job",
                "replicaSpecs": {"worker": {"replicas": 4, "template": template}},
            },
        },
        sort_keys=False,
    )


SCALE_PLAN = """
apiVersion: elastic.iml.github.io/v1alpha1
kind: ScalePlan
metadata: {name: plan-0}
spec: {ownerJob: mnist, replicaResourceSpecs: {worker: {replicas: 2}}}
"""

COMPOSE = """
version: '2'
networks: {app-tier: {driver: bridge}}
services:
  etcd-server:
    image: bitnami/etcd:latest
    environment: [ALLOW_NONE_AUTHENTICATION=yes]
    ports: ["2379:2379"]
  example:
    image: torchelastic/examples:0.2.0
    shm_size: 2g
    volumes: ["~/project:/workspace/project"]
    command: --nnode=1 --nproc_per_node=2 --rdzv_endpoint=etcd-server /workspace/echo.py --lr 0.1
    networks: [app-tier]
"""

SKYPILOT = """
name: minGPT-ddp
resources:
  cpus: 4+
  accelerators: L4:2
num_nodes: 2
setup: |
  git clone --depth 1 https://example.org/examples
  pip install -r requirements.txt
run: |
  cd examples
  source .venv/bin/activate
  cd mingpt
  export LOGLEVEL=INFO
  ADDRESS=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
  if [ $SKYPILOT_NODE_RANK -eq 0 ]; then
      ADDRESS=localhost
  fi
  torchrun \\
    --nnodes=$SKYPILOT_NUM_NODES \\
    --nproc_per_node=$SKYPILOT_NUM_GPUS_PER_NODE \\
    --rdzv_backend=c10d \\
    --rdzv_endpoint=$ADDRESS:29500 \\
    --rdzv_id $SKYPILOT_TASK_ID \\
    main.py --lr 0.1
"""

JOB_GROUP = """
name: elastic
execution: parallel
primary_tasks: [controller]
---
name: controller
resources: {cpus: 1, job_recovery: {strategy: DYNAMIC_NODE_SET, min_nodes: 1}}
run: python controller.py
---
name: workers
resources: {cpus: 0.1, job_recovery: {strategy: DYNAMIC_NODE_SET, min_nodes: 1000}}
num_nodes: 1500
run: python worker.py
"""

BATCH_JOB = """
apiVersion: batch/v1
kind: Job
metadata: {name: trainer}
spec:
  template:
    spec:
      containers:
      - name: trainer
        image: registry.example/trainer:3
        command: [/bin/bash, -c]
        args: ["python /mnt/code/main.py --input_path /mnt/data"]
        env:
        - {name: RDZV_ENDPOINT, value: "10.255.255.5:2379"}
        - {name: ETCD_PROTOCOL, value: https}
        - {name: ETCD_CACERT, value: /etc/certs/ca.crt}
        - {name: ETCD_CERT, value: /etc/certs/client.crt}
        - {name: ETCD_KEY, value: /etc/certs/client.key}
"""

RAY = """
cluster_name: default
min_workers: 2
max_workers: 2
initial_workers: 2
provider: {type: aws, region: us-west-2, availability_zone: "us-west-2a,us-west-2b"}
worker_nodes: {InstanceType: p2.xlarge, ImageId: ami-1}
setup_commands: ["sudo mount -t efs {{FileSystemId}}:/ efs"]
"""
