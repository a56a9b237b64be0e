"""Whatever a file holds: it becomes a job, or it is refused; it never ends in a traceback."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_core.errors import RefusedInput
from elastic_core.model.job import JobSpec
from tasks.importers.importing import import_command, import_text
from tests.tasks.importers import files

ELASTIC_JOB: dict[str, Any] = yaml.safe_load(files.elastic_job("--nproc_per_node=2", "a.py", ttl=1))
TEMPLATES: list[dict[str, Any]] = [
    ELASTIC_JOB,
    yaml.safe_load(files.pytorch_job({"minReplicas": 1, "metrics": [1]}, "torchrun", "a.py")),
    yaml.safe_load(files.dlrover_job("dlrover-run --nnodes=1:$NODE_NUM a.py")),
    yaml.safe_load(files.petctl_specs(max_spot_price=1)),
    yaml.safe_load(files.COMPOSE),
    yaml.safe_load(files.SKYPILOT),
    yaml.safe_load(files.RAY),
    yaml.safe_load(files.BATCH_JOB),
    {"dataset": {"train": {"name": "image_path", "image_folder": "x"}}, "model": {"name": "m"}},
]
WORDS = [
    "torchrun", "python", "-m", "torch.distributed.run", "--nnodes", "1:2", "--rdzv-conf=a=b,timeout=-1",
    "--", "--standalone", "a.py", "PET_NNODES=x", "--nproc-per-node=0", "--redirects", "3", "",
    "classy_train.py", "--config_file", "--max_restarts=1e3", "env", "$X", "é",
]  # fmt: skip
ALIASES = "a0: &a0 [1, 1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]\n" for n in range(1, 9)
)
EXAMPLES = 1500 if os.environ.get("ELASTIC_NIGHTLY") else 50
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70_000), st.floats(), st.text(max_size=8),
    st.sampled_from(["", "torchrun --nnodes=0 a.py", "1:0", "--x", "$A", "2g", "1e400", "v1", "ElasticJob"]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)


def survives(text: str, source: str) -> None:
    problems: tuple[str, ...] | None = None
    try:
        imported = import_text(text, source, gpus=lambda: 0)
    except RefusedInput as refusal:
        problems = refusal.problems
    if problems is None:
        assert JobSpec.model_validate(yaml.safe_load(imported.text())) == imported.job
    else:
        assert problems
        assert all(problem.strip() for problem in problems)


@st.composite
def mutilated(draw: st.DrawFn) -> Any:
    """Return one of the known files with some of its values replaced or removed."""
    data = json.loads(json.dumps(draw(st.sampled_from(TEMPLATES))))
    for _ in range(draw(st.integers(1, 3))):
        section: Any = data
        while isinstance(section, dict | list) and section:
            key = draw(st.sampled_from(sorted(section) if isinstance(section, dict) else range(len(section))))
            inner = section[key]
            if not isinstance(inner, dict | list) or not inner or draw(st.integers(0, 3)) == 0:
                if isinstance(section, dict) and draw(st.booleans()):
                    del section[key]
                else:
                    section[key] = draw(VALUES)
                break
            section = inner
    return data


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(mutilated())
def test_a_known_file_with_anything_in_it_never_ends_in_a_traceback(data: Any) -> None:
    survives(yaml.safe_dump(data), "theirs.yaml")


@settings(max_examples=EXAMPLES, deadline=None)
@given(VALUES)
def test_any_yaml_never_ends_in_a_traceback(data: Any) -> None:
    survives(yaml.safe_dump(data), "any.yaml")


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.text(max_size=60))
def test_any_text_never_ends_in_a_traceback(text: str) -> None:
    survives(text, "any.yaml")


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(st.sampled_from(WORDS), max_size=7))
def test_any_command_line_never_ends_in_a_traceback(words: list[str]) -> None:
    with contextlib.suppress(RefusedInput):
        import_command(words, gpus=lambda: 0)


@pytest.mark.parametrize(
    "text",
    [
        ALIASES,
        "a: &a [*a]",
        "[" * 5000,
        "? {x: 1}\n: 2",
        "a: !!python/object/apply:os.system [\"touch /tmp/pwned\"]",
        "when: 2020-99-99",
        "n: " + "9" * 6000,
        "\x00",
        "{\"a\":\t1}",
    ],
    ids=["aliases", "itself", "deep", "complex-key", "tag", "no-date", "long-number", "control", "tab"],
)  # fmt: skip
def test_what_is_made_to_harm_is_refused(text: str) -> None:
    with pytest.raises(RefusedInput):
        import_text(text, "any.yaml")
