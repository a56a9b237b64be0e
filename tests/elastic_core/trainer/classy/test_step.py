from __future__ import annotations

import torch

from elastic_core.trainer.classy.step import StepTensor

SHARDS = 12
"""With so many equal weights the sum in float32 is 0.99999988: it must not be cut to zero."""


def test_buffers_move_by_the_weighted_mean_of_the_shards_and_whole_numbers_by_whole_numbers() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    mean, count, constant = torch.tensor([1.0]), torch.tensor(5), torch.tensor([0.1])
    step = StepTensor([weight], [mean, count, constant])
    step.start()
    for number in range(SHARDS):
        assert (mean.item(), count.item()) == (1.0, 5), "every shard starts from the step's buffers"
        mean += number
        count += 1
        step.add_shard(weight=1 / SHARDS, loss=2.0, correct=1, samples=3)
    assert mean.item() == 1.0, "nothing changes before the reduction"
    figures = step.apply(step.flat, dealt=3 * SHARDS)
    assert mean.item() == torch.tensor(1 + sum(range(SHARDS)) / SHARDS)
    assert count.item() == 6
    assert constant.item() == torch.tensor(0.1).item()
    assert figures["correct"] == SHARDS
    assert figures["samples"] == 3 * SHARDS
    assert abs(figures["loss"] - 2.0) < 1e-6


def test_gradients_of_all_shards_add_up_and_a_new_step_forgets_them() -> None:
    weight = torch.nn.Parameter(torch.tensor([3.0]))
    step = StepTensor([weight], [])
    step.start()
    (weight * 2).backward()
    (weight * 5).backward()
    sent = step.flat
    step.start()
    assert sent[0].item() == 7, "a collective may still be reading it"
    assert step.flat[0].item() == 0
    step.apply(torch.tensor([11.0, 0, 0, 1]), dealt=1)
    assert weight.grad is not None
    assert weight.grad.item() == 11


def test_a_buffer_of_truth_values_is_left_alone() -> None:
    flag = torch.tensor([True, False])
    step = StepTensor([torch.nn.Parameter(torch.zeros(1))], [flag])
    step.start()
    step.apply(step.flat, dealt=0)
    assert flag.tolist() == [True, False]


def test_samples_that_could_not_be_read_leave_the_mean_over_the_others() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    step = StepTensor([weight], [])
    step.start()
    (weight * 6.0 * (3 / 4)).sum().backward()  # three of four samples, whose mean gradient is 6
    step.add_shard(weight=3 / 4, loss=2.0, correct=1, samples=3)
    figures = step.apply(step.flat, dealt=4)
    assert weight.grad is not None
    assert weight.grad.tolist() == [6.0]
    assert figures == {"loss": 2.0, "correct": 1.0, "samples": 3.0}
