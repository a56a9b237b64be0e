from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic_core.agent.arguments import parse_arguments
from elastic_core.agent.notices import NoticeSource
from elastic_core.agent.process import Entrypoint
from elastic_core.agent.settings import AgentSettings, Waits
from elastic_core.errors import RefusedInput
from elastic_core.model.sizes import AllowedSizes
from elastic_core.store.endpoint import Credentials, TlsFiles

BASE = ("--rdzv-endpoint=store:2379", "--rdzv-id=run-1", "--name=node-1")


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.touch()
    return path


def parse(
    *flags: str, program: Sequence[str] = ("train.py",), gpus: int = 0, **variables: str
) -> AgentSettings:
    return parse_arguments([*BASE, *flags, *program], variables, device_count=gpus)


def refusals(*flags: str, program: Sequence[str] = ("train.py",), gpus: int = 0) -> tuple[str, ...]:
    with pytest.raises(RefusedInput) as refused:
        parse(*flags, program=program, gpus=gpus)
    return refused.value.problems


# ---- accepted --------------------------------------------------------------------------------


@pytest.mark.case("G07")
def test_notices_are_looked_for_where_the_environment_says_and_the_time_may_be_used() -> None:
    assert parse().notice_source is None
    assert parse("--notices=imds").notice_source == NoticeSource(endpoint="http://169.254.169.254")
    variables = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1338"}
    assert parse("--notices=imds", "--leave-before=30", **variables).notice_source == NoticeSource(
        endpoint="http://127.0.0.1:1338", leave_before=30
    )


def test_mistakes_in_the_flags_of_notices_are_told_all_at_once() -> None:
    assert refusals("--notices=imsd", "--notices-endpoint=ftp://x", "--leave-before=soon") == (
        "--notices 'imsd': must be none or imds",
        "--notices-endpoint 'ftp://x': give an address like http://169.254.169.254",
        "--leave-before 'soon': must be seconds, 0 (at once) or more",
    )


def test_the_shortest_line_is_one_node_with_one_worker() -> None:
    assert parse() == AgentSettings(
        min_nodes=1,
        max_nodes=1,
        slots=1,
        run="run-1",
        name="node-1",
        entrypoint=Entrypoint("script", "train.py"),
        endpoint="store:2379",
    )


@pytest.mark.parametrize(
    ("text", "bounds"), [("2", (2, 2)), ("1:3", (1, 3)), ("1:100", (1, 100)), ("3:3", (3, 3))]
)
def test_nodes_are_a_number_or_bounds(text: str, bounds: tuple[int, int]) -> None:
    settings = parse("--nnodes", text)
    assert (settings.min_nodes, settings.max_nodes) == bounds


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("2,8,4", AllowedSizes(listed=(2, 4, 8))), ("x2", AllowedSizes(multiple_of=2)), ("", AllowedSizes())],
)
def test_sizes_are_a_list_or_the_multiples_of_a_number(text: str, sizes: AllowedSizes) -> None:
    assert parse("--nnodes=1:8", f"--node-sizes={text}").sizes == sizes


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("2,,4", "write numbers with commas (2,4,8), or xN for multiples of N"),
        ("x0", "write numbers with commas (2,4,8), or xN for multiples of N"),
        ("x5", "none lies between min (2) and max (4)"),
        ("1,8", "none lies between min (2) and max (4)"),
    ],
)
def test_sizes_that_can_never_form_are_refused(text: str, remedy: str) -> None:
    assert refusals("--nnodes=2:4", f"--node-sizes={text}") == (f"--node-sizes {text!r}: {remedy}",)


@pytest.mark.parametrize(
    ("text", "gpus", "slots"),
    [("4", 0, 4), ("auto", 3, 3), ("gpu", 2, 2), ("auto", 0, os.cpu_count()), ("cpu", 3, os.cpu_count())],
)
def test_workers_are_a_number_or_what_the_machine_has(text: str, gpus: int, slots: int) -> None:
    assert parse(f"--nproc-per-node={text}", gpus=gpus).slots == slots


@pytest.mark.parametrize("flag", ["--nproc-per-node", "--nproc_per_node"])
def test_flags_have_dashes_or_underscores(flag: str) -> None:
    assert parse(flag, "3").slots == 3


def test_unique_beginnings_of_flags_are_accepted() -> None:
    assert parse("--nnode=2", "--max-r=4").max_restarts == 4


def test_torchruns_variables_set_what_no_flag_sets() -> None:
    settings = parse(
        "--max-restarts=1", PET_NNODES="2:4", PET_MAX_RESTARTS="9", PET_RDZV_CONF="join_timeout=7"
    )
    assert (settings.min_nodes, settings.max_nodes, settings.max_restarts) == (2, 4, 1)
    assert settings.waits.join == 7


def test_the_arguments_of_the_program_are_kept_as_they_are() -> None:
    odd = ["--note", "a b", "$HOME", "50%d", "", "--nnodes=7", "-m", "--", "é"]
    assert parse(program=["train.py", *odd]).args == tuple(odd)


@pytest.mark.parametrize(
    ("flag", "program", "entrypoint"),
    [
        ("-m", "package.module", Entrypoint("module", "package.module")),
        ("--module", "package.module", Entrypoint("module", "package.module")),
        ("--no-python", "bash", Entrypoint("command", "bash")),
        ("--no_python", "bash", Entrypoint("command", "bash")),
    ],
)
def test_programs_are_scripts_modules_or_commands(flag: str, program: str, entrypoint: Entrypoint) -> None:
    assert parse(flag, program=[program, "-c", "x"]).entrypoint == entrypoint


def test_waits_come_from_the_rendezvous_configuration() -> None:
    conf = (
        "last_call_timeout=3,join_timeout=60,lease_ttl=2.5,probe_timeout=0.2,suspect_timeout=1,stop_grace=0"
    )
    assert parse("--rdzv-conf", conf).waits == Waits(
        last_call=3, join=60, lease_ttl=2.5, probe=0.2, suspect=1, stop_grace=0
    )
    assert parse("--rdzv-conf=timeout=61").waits.join == 61
    assert parse("--shutdown-timeout=40").waits.stop_grace == 40


def test_unknown_and_foreign_keys_of_the_configuration_are_told_and_ignored() -> None:
    settings = parse("--rdzv-conf=is_host=0,last_cal_timeout=9")
    assert settings.waits == Waits()
    assert settings.notices == (
        "--rdzv-conf is_host: has no meaning with etcd v3, ignored",
        "--rdzv-conf last_cal_timeout: unknown key, ignored (did you mean 'last_call_timeout'?)",
    )


@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_the_backends_of_old_mean_etcd_v3_and_that_is_said_once(backend: str) -> None:
    assert parse(f"--rdzv-backend={backend}").notices == (f"--rdzv-backend {backend}: using etcd v3",)


def test_flags_of_torchrun_without_a_meaning_here_are_told_and_ignored() -> None:
    assert parse("--monitor-interval=5", "-r", "3").notices == (
        "--monitor-interval: has no meaning here, ignored",
        "--redirects: has no meaning here, ignored",
    )


def test_the_default_port_is_etcds() -> None:
    assert parse("--rdzv-endpoint=etcd-server").endpoint == "etcd-server:2379"
    assert parse("--rdzv-endpoint=[::1],b:1").endpoint == "[::1]:2379,b:1"


def test_a_run_id_of_digits_as_torch_has_them_is_given_a_letter() -> None:
    assert parse("--rdzv-id=101").run == "run-101"


def test_logs_lie_in_the_runs_directory_under_the_instances_name() -> None:
    assert parse("--run-dir=runs/r").log_dir == Path("runs/r/logs/node-1").absolute()
    assert parse("--run-dir=runs/r", "--log-dir=logs").log_dir == Path("logs/node-1").absolute()


def test_a_standalone_agent_needs_neither_endpoint_nor_run() -> None:
    settings = parse_arguments(["--standalone", "train.py"], {}, device_count=0)
    assert settings.standalone
    assert settings.run.startswith("standalone-")


def test_the_attempt_comes_from_the_flows_variable() -> None:
    assert parse(ELASTIC_ATTEMPT="4").attempt == 4


def test_the_address_may_be_given_in_our_words_or_torchruns() -> None:
    assert parse("--advertise=10.0.0.7").advertise == "10.0.0.7"
    assert parse("--local-addr=10.0.0.7").advertise == "10.0.0.7"


def pem_files(directory: Path) -> tuple[Path, Path, Path]:
    files = directory / "ca.pem", directory / "node.pem", directory / "node.key"
    for path in files:
        path.touch()
    return files


def test_the_store_may_want_tls_and_a_user_whose_password_is_no_argument(tmp_path: Path) -> None:
    ca, cert, key = pem_files(tmp_path)
    settings = parse(
        "--etcd-ca=ca.pem",
        f"--etcd-cert={cert}",
        f"--etcd-key={key}",
        "--etcd-user=trainer",
        ELASTIC_STORE_PASSWORD="s3cret",
    )
    assert settings.tls == TlsFiles(ca=ca, cert=cert, key=key)
    assert settings.credentials == Credentials("trainer", "s3cret")
    assert "s3cret" not in repr(settings)


def test_user_and_password_also_come_from_variable_and_file(tmp_path: Path) -> None:
    pem_files(tmp_path)
    (tmp_path / "secret").write_text("s3cret\n")
    settings = parse("--etcd-password-file=secret", PET_ETCD_CA="ca.pem", ELASTIC_STORE_USER="trainer")
    assert settings.credentials == Credentials("trainer", "s3cret")


# ---- refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--etcd-ca=none.pem"], "--etcd-ca, --etcd-cert, --etcd-key: TLS file '{here}/none.pem' cannot be "
         "read: check the path and its permissions"),
        (["--etcd-ca=ca.pem", "--etcd-key=node.key"], "--etcd-ca, --etcd-cert, --etcd-key: TLS: only the key "
         "is given; give certificate and key, or neither"),
        (["--etcd-cert=node.pem", "--etcd-key=node.key"],
         "--etcd-ca '': a certificate needs TLS; give the file of etcd's authority"),
        (["--etcd-ca=ca.pem", "--etcd-user=trainer"],
         "--etcd-user 'trainer': has no password; set ELASTIC_STORE_PASSWORD"),
        (["--etcd-user=trainer", "--etcd-password-file=ca.pem"],
         "--etcd-user 'trainer': has no password; set ELASTIC_STORE_PASSWORD"),
        (["--etcd-user=trainer", "--etcd-password-file=none"],
         "--etcd-password-file 'none': it cannot be read; check path and permissions"),
        (["--etcd-user=trainer", "--etcd-password-file=secret"],
         "--rdzv-endpoint: endpoint store:2379: a password needs TLS; give the CA's file"),
        (["--etcd-ca=ca.pem", "--etcd-password-file=secret"],
         "--etcd-user '': a password is given; give the name of its user too"),
    ],
)  # fmt: skip
def test_a_store_that_could_not_be_entered_is_refused(flags: list[str], said: str, tmp_path: Path) -> None:
    pem_files(tmp_path)
    (tmp_path / "secret").write_text("s3cret\n")
    assert refusals(*flags) == (said.replace("{here}", str(tmp_path)),)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--nnodes=3:2", "--nnodes '3:2': min is 3 and max is 2: raise max or lower min"),
        ("--nnodes=0", "--nnodes '0': at least 1 node is needed"),
        ("--nnodes=two", "--nnodes 'two': write a number, or MIN:MAX"),
        ("--nproc-per-node=gpu", "--nproc-per-node 'gpu': this node has no GPU; use cpu, auto or a number"),
        ("--nproc-per-node=0", "--nproc-per-node '0': must be a number from 1 to 1024, auto, gpu or cpu"),
        ("--max-restarts=-1", "--max-restarts '-1': must be a whole number, 0 or more"),
        ("--rdzv-backend=c10d", "--rdzv-backend 'c10d': only etcd3 is there"),
        ("--rdzv-backend=etcd4", "--rdzv-backend 'etcd4': only etcd3 is there (did you mean 'etcd3'?)"),
        ("--worker-api=elastik", "--worker-api 'elastik': must be torchrun or elastic "
         "(did you mean 'elastic'?)"),
        ("--rdzv-conf=join_timeout", "--rdzv-conf 'join_timeout': write key=value,key=value"),
        ("--rdzv-conf=lease_ttl=1", "--rdzv-conf lease_ttl '1': must be seconds, 2 or more"),
        ("--rdzv-conf=join_timeout=soon", "--rdzv-conf join_timeout 'soon': must be seconds, 0.1 or more"),
        ("--rdzv-endpoint=http://x", "--rdzv-endpoint: endpoint 'http://x': has a scheme; write host:port, "
         "and give the CA file to use TLS"),
        ("--rdzv-endpoint=", "--rdzv-endpoint '': give host:port of etcd, or --standalone for one node"),
        ("--rdzv-id=", "--rdzv-id '': give the run's id, the same on all of its nodes"),
        ("--job=none.json", "--job 'none.json': it cannot be read; give the path of the job's JSON"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_field_value_and_remedy(flag: str, said: str) -> None:
    assert refusals(flag) == (said,)


@pytest.mark.case("X06")
@pytest.mark.parametrize("name", ["a b", "../x", "x;id", "é", "x" * 300, "-x"])
def test_names_that_could_be_more_than_names_are_refused(name: str) -> None:
    (problem,) = refusals(f"--rdzv-id={name}")
    assert problem.startswith("--rdzv-id: run name ")
    assert "use 1 to 63 lower-case letters" in problem


def test_all_mistakes_are_told_at_once() -> None:
    assert (
        len(refusals("--nnodes=3:2", "--nproc-per-node=x", "--max-restarts=y", program=["missing.py"])) == 4
    )


def test_a_missing_or_unreadable_script_is_named(script: Path, tmp_path: Path) -> None:
    assert refusals(program=["train"]) == (
        f"script 'train': there is no such file in {tmp_path}; give its path",
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become nobody")
def test_a_script_below_a_directory_that_this_user_may_not_enter_is_refused_in_one_line(
    script: Path, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    read, write = os.pipe()
    if not (child := os.fork()):
        os.setuid(65534)
        os.write(write, "\n".join(refusals(program=[str(script.absolute())])).encode())
        os._exit(0)
    os.waitpid(child, 0)
    told = os.read(read, 4096).decode()
    assert (
        told == f"script '{script.absolute()}': it cannot be read; check its permissions and its directories'"
    )


def test_an_unknown_flag_is_taken_by_nobody() -> None:
    with pytest.raises(RefusedInput, match=r"required: program"):
        parse_arguments(["--nonsense=1"], {}, device_count=0)


# ---- the command -----------------------------------------------------------------------------


def agent(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "elastic_core.agent", *arguments], capture_output=True, text=True, timeout=60
    )


def test_refused_input_ends_with_2_and_starts_nothing(script: Path) -> None:
    done = agent("--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=x", "--log-dir=logs", str(script))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "elastic-agent: endpoint 127.0.0.1:1: connection refused: is etcd running there, and listening on "
        "this address and port?"
    ]
    assert not Path("logs").exists()


def test_help_teaches_with_examples_and_the_exit_codes() -> None:
    done = agent("--help")
    assert done.returncode == 0
    assert "examples:" in done.stdout
    assert "75   stopped on purpose, resumable" in done.stdout
