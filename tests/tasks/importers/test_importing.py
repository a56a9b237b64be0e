"""Job files of other launchers become a job of ours, with a warning for each loss, or one refusal."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import classy_vision
import pytest
import yaml

from elastic_core.errors import RefusedInput
from elastic_core.model.job import AwsPool, ClassyTraining, DockerPool, JobSpec, ScriptTraining
from tasks.importers.importing import Imported, Pool, import_command, import_file, import_text
from tests.tasks.importers import files

ECHO = ("--nproc_per_node=1", "/workspace/echo.py")
CONFIGS = Path(classy_vision.__file__).parent / "configs"


def read(text: str, *command: str, pool: Pool = "", gpus: int = 0, source: str = "theirs.yaml") -> Imported:
    imported = import_text(text, source, command, pool=pool, gpus=lambda: gpus)
    assert JobSpec.model_validate(yaml.safe_load(imported.text())) == imported.job
    return imported


def refusal(text: str, *command: str, pool: Pool = "", source: str = "theirs.yaml") -> list[str]:
    with pytest.raises(RefusedInput) as caught:
        import_text(text, source, command, pool=pool, gpus=lambda: 0)
    return list(caught.value.problems)


def warned(imported: Imported, *words: str) -> bool:
    return any(all(word in line for word in words) for line in imported.warnings)


def bounds(imported: Imported) -> tuple[int, int, int]:
    nodes = imported.job.nodes
    return nodes.min, nodes.target, nodes.max


def aws(imported: Imported) -> AwsPool:
    assert isinstance(imported.job.pool, AwsPool)
    return imported.job.pool


def docker(imported: Imported) -> DockerPool:
    assert isinstance(imported.job.pool, DockerPool)
    return imported.job.pool


def script(imported: Imported) -> ScriptTraining:
    assert isinstance(imported.job.training, ScriptTraining)
    return imported.job.training


# ---- petctl -------------------------------------------------------------------------------------


@pytest.mark.case("F01")
def test_petctls_specs_become_a_job_for_aws_and_what_the_base_has_is_told() -> None:
    command = shlex.split("petctl run_job --size 2 --min_size 1 --max_size 3 --name mine train.py --lr 0.1")
    imported = read(files.petctl_specs(), *command)
    assert imported.job.name == "mine"
    assert bounds(imported) == (1, 2, 3)
    assert aws(imported).instance_types == ("p3.2xlarge",)
    assert aws(imported).market == "on-demand"
    assert (script(imported).script, script(imported).args) == ("train.py", ("--lr", "0.1"))
    assert warned(imported, "worker.user_data_template (line 16)", "config/user_data_worker")
    assert warned(imported, "worker.docker_image", "torchelastic/aws:0.1.0rc1", "elastic-agent")
    assert warned(imported, "worker.s3_bucket", "not uploaded")
    dropped = ("rdzv", "instance_role", "key_pair", "subnets", "security_groups", "efs_file", "ebs_volume")
    assert all(warned(imported, key) for key in dropped)


@pytest.mark.case("F01")
def test_every_placeholder_of_petctls_specs_is_named() -> None:
    text = files.petctl_specs(instance_role="<YOUR EC2 INSTANCE ROLE>", s3_bucket="{{ bucket }}")
    assert refusal(text) == [
        "theirs.yaml: worker.instance_role (line 8): is '<YOUR EC2 INSTANCE ROLE>': "
        "fill in '<YOUR EC2 INSTANCE ROLE>'",
        "theirs.yaml: worker.s3_bucket (line 18): is '{{ bucket }}': fill in '{{ bucket }}'",
    ]


@pytest.mark.case("F01")
def test_placeholders_of_a_template_that_is_no_yaml_yet_are_named_by_line() -> None:
    problems = refusal('{"worker": {\n "instance_type": {{ type }},\n "size": {{ size }}}}')
    assert problems[0] == "theirs.yaml: line 2: fill in '{{ type }}'"
    assert problems[1:] == ["theirs.yaml: line 3: fill in '{{ size }}'"]


@pytest.mark.case("F02")
def test_a_spot_price_of_petctl_becomes_the_spot_market() -> None:
    imported = read(files.petctl_specs(max_spot_price="0.90"))
    assert aws(imported).market == "spot"
    assert warned(imported, "worker.max_spot_price", "'0.90'", "pool.budget_usd")


def test_petctl_without_its_command_line_says_that_the_script_is_missing() -> None:
    imported = read(files.petctl_specs())
    assert warned(imported, "its command line", "-- petctl run_job")


def test_a_size_outside_petctls_own_bounds_is_refused() -> None:
    assert refusal(files.petctl_specs(), "petctl", "--size", "5", "--max_size", "3", "train.py") == [
        "petctl: --size 5 does not lie between 5 and 3"
    ]


def test_gpus_on_a_type_that_has_none_are_refused() -> None:
    (problem,) = refusal(files.petctl_specs(instance_type="m5.large"))
    assert "worker.accelerator (line 7): 1 GPU are asked for, but nodes of pool 'aws' have none" in problem


# ---- ElasticJob ---------------------------------------------------------------------------------


@pytest.mark.case("F03")
def test_the_sample_of_classy_vision_becomes_an_elastic_job(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "resnet50_synthetic_image_classy_config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ["--nproc_per_node=4", "/w/classy_train.py", "--config_file", str(tmp_path / "config.json")]
    imported = read(files.elastic_job(*flags, "--num_workers=0"))
    training = imported.job.training
    assert isinstance(training, ClassyTraining)
    assert isinstance(training.config, dict)
    assert [training.config["dataset"][phase]["num_workers"] for phase in ("train", "test")] == [0, 0]
    assert imported.job.workers_per_node == 4
    assert training.elastic.virtual_shards == 8
    assert warned(imported, "--num_workers=0", "moved to num_workers")
    assert warned(imported, "restartPolicy", "'ExitCode'", "128 to 255")


@pytest.mark.case("F03")
def test_the_endpoint_that_a_sample_leaves_open_is_refused() -> None:
    (problem,) = refusal(files.elastic_job(*ECHO, endpoint="<your_etcd_endpoint>:<your_etcd_port>"))
    assert "spec.rdzvEndpoint (line 7)" in problem
    assert "fill in '<your_etcd_endpoint>'" in problem


@pytest.mark.case("F04")
def test_a_limit_of_gpus_becomes_gpus_of_the_container() -> None:
    imported = read(files.elastic_job(*ECHO, limits={"nvidia.com/gpu": 1}))
    assert docker(imported).gpus == 1


@pytest.mark.case("F04")
def test_gpus_on_a_machine_without_any_are_refused() -> None:
    text = files.elastic_job(*ECHO, limits={"nvidia.com/gpu": 1})
    (problem,) = refusal(text, pool="local")
    assert "1 GPU are asked for, but nodes of pool 'local' have none here" in problem
    assert read(text, pool="local", gpus=1).job.pool.kind == "local"


@pytest.mark.case("F05")
def test_what_the_operator_dropped_in_silence_is_told() -> None:
    text = files.elastic_job(*ECHO, endpoint="etcd0.elastic-job:2379", ttlSecondsAfterFinished=10)
    imported = read(text)
    assert warned(
        imported, "spec.ttlSecondsAfterFinished (line 10): 10 is dropped", "as soon as the run ends"
    )
    assert warned(imported, "metadata.namespace (line 5)", "'elastic-job'")
    assert imported.job.etcd.endpoints == "etcd0.elastic-job:2379"
    assert warned(imported, "spec.rdzvEndpoint (line 7)", "etcd0.elastic-job:2379 is kept")


def test_a_key_that_nobody_knows_is_never_dropped_in_silence() -> None:
    imported = read(files.elastic_job(*ECHO, priorityClassName="high"))
    assert warned(imported, "spec.priorityClassName (line 10): 'high' is dropped")


def test_a_wrong_type_is_refused_with_its_line() -> None:
    assert refusal(files.elastic_job(*ECHO, minReplicas="many")) == [
        "theirs.yaml: spec.minReplicas (line 8): input should be a valid integer, "
        "unable to parse string as an integer, not 'many'"
    ]


# ---- PyTorchJob ---------------------------------------------------------------------------------

ELASTIC = {"rdzvBackend": "c10d", "minReplicas": 1, "maxReplicas": 2, "maxRestarts": 100}
LAUNCH = ("python", "-m", "torch.distributed.run")


@pytest.mark.case("F06")
def test_c10d_of_a_pytorch_job_is_replaced_by_etcd() -> None:
    imported = read(files.pytorch_job(ELASTIC, *LAUNCH, "--rdzv_backend=c10d", "./echo.py"))
    assert bounds(imported) == (1, 2, 2)
    assert imported.job.max_restarts == 100
    assert script(imported).script == "./echo.py"
    assert warned(imported, "spec.elasticPolicy", "'c10d' is replaced by etcd v3")
    assert warned(imported, "command", "'c10d' is replaced by etcd v3")


@pytest.mark.case("F07")
def test_the_autoscaler_of_a_pytorch_job_is_told_to_be_ignored() -> None:
    cpu = {"type": "Resource", "resource": {"name": "cpu", "target": {"averageUtilization": 80}}}
    policy = {**ELASTIC, "maxReplicas": 3, "metrics": [cpu]}
    text = files.pytorch_job(policy, *LAUNCH, "main.py", "--epochs=1", restartPolicy="OnFailure")
    imported = read(text)
    assert bounds(imported) == (1, 2, 3)
    assert docker(imported).cpus == 4
    assert docker(imported).gpus == 0
    assert warned(imported, "spec.elasticPolicy.metrics", "follows nodes.target")
    assert warned(imported, "restartPolicy", "'OnFailure'", "maxRestarts")
    assert warned(imported, "env[0]", "'LOGLEVEL'")


@pytest.mark.case("F08")
def test_an_etcd_of_a_pytorch_job_is_kept() -> None:
    policy = {"rdzvBackend": "etcd", "rdzvHost": "etcd", "rdzvPort": 2379, "minReplicas": 2, "maxReplicas": 3}
    imported = read(files.pytorch_job(policy, *LAUNCH, "main.py"))
    assert bounds(imported) == (2, 2, 3)
    assert imported.job.etcd.endpoints == "etcd:2379"
    assert warned(imported, "spec.elasticPolicy", "etcd:2379 is kept")
    policy["rdzvHost"] = "http://etcd"
    (problem,) = refusal(files.pytorch_job(policy, *LAUNCH, "main.py"))
    assert "'http://etcd:2379': has a scheme; write host:port" in problem


# ---- DLRover ------------------------------------------------------------------------------------


@pytest.mark.case("F09")
def test_a_shell_string_that_calls_dlrover_is_understood() -> None:
    imported = read(
        files.dlrover_job(
            "dlrover-run --network-check --nnodes=3:$NODE_NUM --nproc_per_node=2 --max_restarts=3 "
            "--rdzv_conf pend_timeout=600 examples/cnn_train.py --num_epochs 2"
        )
    )
    assert bounds(imported) == (3, 4, 4)
    assert (imported.job.workers_per_node, imported.job.max_restarts) == (2, 3)
    assert imported.job.timeouts.join == 600
    assert (docker(imported).cpus, docker(imported).memory_gib) == (1, 2)
    assert script(imported).args == ("--num_epochs", "2")
    assert warned(imported, "--network-check is dropped")


@pytest.mark.case("F09")
def test_what_surrounds_the_call_is_told() -> None:
    imported = read(
        files.dlrover_job("(bash chaos.sh overload &) && dlrover-run --nnodes=3:$WORKER_NUM a.py")
    )
    assert imported.job.nodes.max == 4
    assert warned(imported, "( bash chaos.sh overload &)", "nobody runs it")


@pytest.mark.case("F09")
def test_a_shell_string_that_cannot_be_read_is_refused_with_its_text() -> None:
    (problem,) = refusal(files.dlrover_job("dlrover-run --nnodes=3 'a.py"))
    assert "containers[0].command (line" in problem
    assert '"dlrover-run --nnodes=3 \'a.py" is no shell command: No closing quotation' in problem


@pytest.mark.case("F10")
def test_a_scale_plan_is_no_job() -> None:
    (problem,) = refusal(files.SCALE_PLAN)
    assert "a ScalePlan is not a job" in problem
    assert problem.endswith("elastic-train scale RUN --target 2")


# ---- Classy Vision ------------------------------------------------------------------------------


@pytest.mark.case("F11")
@pytest.mark.parametrize("name", ["resnet50_synthetic_image_classy_config", "r3d34_synthetic_video"])
def test_a_synthetic_config_is_taken_as_it_is(name: str) -> None:
    path = CONFIGS / f"{name}.json"
    imported = import_file(path)
    assert imported.job.training == ClassyTraining(config=str(path))
    assert imported.warnings[:-1] == ()


@pytest.mark.case("F12")
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("imagenet/*.json")), ids=lambda path: path.stem)
def test_configs_of_imagenet_take_another_directory(path: Path, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    with pytest.raises(RefusedInput, match="--data DIRECTORY"):
        import_file(path)
    if "fine_tuning" in path.stem:
        with pytest.raises(RefusedInput, match="pretrained_checkpoint: is required"):
            import_file(path, data=str(tmp_path))
        return
    training = import_file(path, data=str(tmp_path)).job.training
    assert isinstance(training, ClassyTraining)
    assert isinstance(training.config, dict)
    assert training.config["dataset"]["train"]["image_folder"] == str(tmp_path / "train")
    assert training.config["dataset"]["test"]["image_folder"] == str(tmp_path / "val")


@pytest.mark.case("F12")
@pytest.mark.parametrize("folder", ["kinetics400", "ucf101", "hmdb51"])
def test_configs_of_videos_are_refused_with_the_keys_they_left_empty(folder: str) -> None:
    for path in (CONFIGS / folder).glob("*.json"):
        with pytest.raises(RefusedInput) as caught:
            import_file(path)
        told = "\n".join(caught.value.problems)
        assert "dataset.train.video_dir: is empty" in told
        assert "no longer decodes video" in told


def config(**changes: Any) -> str:
    base = json.loads((CONFIGS / "resnet50_synthetic_image_classy_config.json").read_text())
    return json.dumps(base | changes, indent=2)


@pytest.mark.case("F13")
def test_the_path_that_a_vit_config_leaves_open_is_refused() -> None:
    data = {"name": "image_path", "image_folder": "PATH/TO/IMAGENET/train", "batchsize_per_replica": 64}
    problems = refusal(config(dataset={"train": data, "test": None}), source="vit.json")
    assert any("dataset.train.image_folder: is 'PATH/TO/IMAGENET/train'" in line for line in problems)


@pytest.mark.case("F15")
def test_an_expression_in_a_checkpoint_folder_is_refused_and_many_epochs_are_not() -> None:
    folder = "./classy_checkpoint_{time.time()}"
    problems = refusal(config(checkpoint_folder=folder, num_epochs=3_000_000), source="config.json")
    assert any("checkpoint_folder: is no key of a task" in line for line in problems)
    assert not any("num_epochs" in line for line in problems)
    assert read(config(num_epochs=3_000_000), source="config.json").job.name == "config"


# ---- Compose, SkyPilot, command lines -----------------------------------------------------------


@pytest.mark.case("F16")
def test_a_compose_file_is_read_with_its_abbreviated_flag_and_no_port() -> None:
    imported = read(files.COMPOSE)
    assert bounds(imported) == (1, 1, 1)
    assert imported.job.workers_per_node == 2
    assert docker(imported).shm_gib == 2
    (mount,) = docker(imported).mounts
    assert (mount.source, mount.target) == (str(Path.home() / "project"), "/workspace/project")
    assert script(imported).args == ("--lr", "0.1")
    assert warned(imported, "services.etcd-server (line 5)", "brings its own etcd")
    assert warned(imported, "services.example.command", "'etcd-server' is dropped")


@pytest.mark.case("F17")
def test_a_skypilot_task_becomes_a_job_for_aws() -> None:
    imported = read(files.SKYPILOT)
    assert imported.job.name == "mingpt-ddp"
    assert bounds(imported) == (1, 2, 2)
    assert imported.job.workers_per_node == 2
    assert aws(imported).instance_types == ("g6.12xlarge",)
    assert (script(imported).script, script(imported).args) == ("examples/mingpt/main.py", ("--lr", "0.1"))
    assert warned(imported, "setup (line 7)", "it is not run")
    assert warned(imported, "run (line 10)", "statements around the launcher are not run")
    assert warned(imported, "accelerators", "g6.12xlarge", "it has 4")


@pytest.mark.case("F18")
def test_a_job_group_is_refused_in_one_line() -> None:
    assert refusal(files.JOB_GROUP) == [
        "theirs.yaml: has 3 documents: a job group is not supported; give one task of it alone"
    ]


@pytest.mark.case("F19")
@pytest.mark.parametrize(
    ("line", "nodes", "workers"),
    [
        ("python -m torchelastic.distributed.launch --nnodes=1:4 --nproc_per_node=8 --rdzv_id=j "
         "--rdzv_backend=etcd --rdzv_endpoint=etcd:2379 main.py", (1, 4), 8),
        ("torchrun --nnodes=1:3 --nproc_per_node=1 --max_restarts=100 --rdzv_id=1 --rdzv_backend=c10d "
         "--rdzv_endpoint=172.21.114.242:60001 main.py", (1, 3), 1),
        ("PET_NNODES=2 PET_RDZV_ENDPOINT=host:29500 PET_NPROC_PER_NODE=2 torchrun main.py", (2, 2), 2),
        ("torchrun --nnodes 1:100 --nproc-per-node=gpu --max-restarts=1000 main.py", (1, 100), 4),
        ("torchrun --nnodes=2 --rdzv-conf=last_call_timeout=10,colour=red --no-python bash -c 'echo 1'",
         (2, 2), 1),
        ("torchrun --nproc-per-node=auto -m package.train", (1, 1), 4),
    ],
)  # fmt: skip
def test_command_lines_of_torchrun_are_understood(line: str, nodes: tuple[int, int], workers: int) -> None:
    imported = import_command(shlex.split(line), gpus=lambda: 4)
    assert (imported.job.nodes.min, imported.job.nodes.max) == nodes
    assert imported.job.workers_per_node == workers


@pytest.mark.case("F19")
def test_what_a_command_line_says_of_restarts_waits_and_program_is_kept() -> None:
    words = ["torchrun", "--max_restarts=7", "--rdzv-conf=last_call_timeout=10,colour=red,timeout=900"]
    imported = import_command([*words, "--no-python", "bash", "-c", "echo 1"])
    assert imported.job.max_restarts == 7
    assert (imported.job.timeouts.last_call, imported.job.timeouts.join) == (10, 900)
    assert (script(imported).entry, script(imported).script) == ("program", "bash")
    assert script(imported).args == ("-c", "echo 1")
    assert warned(imported, "--rdzv-conf colour is dropped")


def test_a_variable_in_an_argument_is_told_where_no_shell_expands_it() -> None:
    imported = import_command(["torchrun", "a.py", "--out", "$HOME/x"])
    assert warned(imported, "argument '$HOME/x' reaches the program as it is")
    shell = import_command(["torchrun", "--no-python", "bash", "-c", "echo $RANK"])
    assert shell.warnings == ()


@pytest.mark.case("F19")
def test_a_worker_for_each_gpu_is_refused_where_there_is_none() -> None:
    with pytest.raises(RefusedInput, match="--nproc-per-node=gpu: 1 GPU are asked for"):
        import_command(["torchrun", "--nproc-per-node=gpu", "main.py"], gpus=lambda: 0)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["torchrun", "--nnodes=two", "a.py"], "--nnodes 'two': write a number, or MIN:MAX"),
        (["torchrun", "--nnodez=2", "a.py"], "unknown flag '--nnodez' (did you mean '--nnodes'?)"),
        (["torchrun"], "the following arguments are required: program, args"),
        (["mpirun", "-n", "4", "a.py"], "'mpirun' starts no workers that are known here"),
    ],
)
def test_a_command_line_that_means_nothing_is_refused(words: list[str], told: str) -> None:
    with pytest.raises(RefusedInput) as caught:
        import_command(words)
    assert told in str(caught.value)


# ---- what is no job -----------------------------------------------------------------------------


@pytest.mark.case("F20")
def test_a_batch_job_is_refused_with_its_tls_as_flags_of_the_agent() -> None:
    (problem,) = refusal(files.BATCH_JOB)
    assert (
        "elastic-agent --rdzv-endpoint=10.255.255.5:2379 --etcd-ca=/etc/certs/ca.crt "
        "--etcd-cert=/etc/certs/client.crt --etcd-key=/etc/certs/client.key" in problem
    )


@pytest.mark.case("F21")
def test_a_ray_cluster_is_refused_with_the_keys_that_mean_the_same() -> None:
    (problem,) = refusal(files.RAY)
    same = ("min_workers 2 is nodes.min", "max_workers 2 is nodes.max", "'us-west-2' is pool.region")
    assert all(words in problem for words in (*same, "'p2.xlarge' is pool.instance_types"))


@pytest.mark.case("F22")
def test_prefects_own_file_is_refused_with_how_both_are_deployed() -> None:
    (problem,) = refusal("deployments:\n- name: theirs\n  schedule:\n  work_pool: {job_variables: {}}\n")
    assert "prefect deploy --all" in problem


@pytest.mark.case("F23")
def test_terraform_is_refused() -> None:
    text = 'resource "aws_autoscaling_group" "g" {\n  wait_for_capacity_timeout = "10m"\n}\n'
    (problem,) = refusal(text, source="group.tf")
    assert "is Terraform, not a job" in problem


@pytest.mark.parametrize("text", ["", "---\n", "[1, 2]", "just words", "a: 1\n", "name: x\ntraining: {}\n"])
def test_what_is_no_foreign_job_is_refused_in_one_line(text: str) -> None:
    assert len(refusal(text)) == 1
