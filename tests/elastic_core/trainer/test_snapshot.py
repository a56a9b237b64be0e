from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_core.trainer.snapshot import HostBuffers, Layout, put_together, take_apart

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
tensors = st.builds(
    lambda dtype, shape: (torch.arange(24) % 7).to(dtype)[: int(np.prod(shape))].reshape(shape),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=2),
)
states = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers(0, 5) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@given(states)
def test_a_state_is_the_same_after_its_way_through_one_flat_tensor(state: Any) -> None:
    parts = take_apart(state)
    layout = Layout.of(parts)
    flat = torch.empty(layout.size, dtype=torch.uint8)
    for view, tensor in zip(layout.views(flat), parts.tensors, strict=True):
        view.copy_(tensor)
    received = Layout.from_json(layout.to_json())
    assert same(put_together(received.outline, received.views(flat)), state)


@given(states)
def test_a_host_copy_equals_the_state_and_shares_nothing_with_it(state: Any) -> None:
    copy = HostBuffers().copy(state)
    assert same(copy, state)
    own = {tensor.data_ptr() for tensor in take_apart(state).tensors if tensor.numel()}
    assert own.isdisjoint(tensor.data_ptr() for tensor in take_apart(copy).tensors)


def test_the_next_copy_reuses_the_memory_of_the_last() -> None:
    buffers = HostBuffers()
    first = buffers.copy({"w": torch.ones(3)})["w"]
    second = buffers.copy({"w": torch.full((3,), 2.0)})["w"]
    assert first.data_ptr() == second.data_ptr()
    assert buffers.copy({"w": torch.ones(4)})["w"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [1, {2, 3}]}, r"state\.a\.1 is of type builtins\.set"),
        ({"lr": np.float64(0.1)}, r"state\.lr is of type numpy\.float64"),
        ({"f": print}, r"state\.f is of type builtins\.builtin_function_or_method"),
        ({(1, 2): 3}, r"state has the key \(1, 2\) of type tuple"),
    ],
)
def test_what_is_not_plain_is_refused_with_its_place(state: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        take_apart(state)


@pytest.mark.parametrize("outline", [["tensor", 1], ["call", "os.system"], None, ["dict", 3]])
def test_a_strange_outline_is_refused(outline: Any) -> None:
    with pytest.raises(ValueError, match="not the outline of a state"):
        put_together(outline, [torch.ones(1)])
