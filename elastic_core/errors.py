"""The library's exceptions, named by what the caller should do.

ElasticError
├── RefusedInput          exit 2: a person corrects the named field
├── IllegalEvent          a bug: a machine met an event that its table does not have
├── StoreError
│   ├── StoreUnavailable  no answer in time: the write may or may not have happened
│   └── StoreRefused      the store answered no (too large, not permitted, bad request)
├── LeaseLost             the lease ended: stop the workers, then register anew
└── ProviderError
    ├── InsufficientCapacity   try another pool, zone or type
    ├── QuotaExceeded          ask a person: no other zone of the region will do
    ├── ProviderUnavailable    try again later
    └── InvalidRequest         a bug or a bad job: stop
"""

from __future__ import annotations

from collections.abc import Sequence


class ElasticError(Exception):
    """Any failure that this library names."""


class RefusedInput(ElasticError):
    """Bad input, found before anything was started.

    Attributes:
        problems: One line each, naming field, value and remedy.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class IllegalEvent(ElasticError):
    """A machine met an event that is not in its table; its state did not change."""

    def __init__(self, *, state: str, event: object, story: Sequence[str] = ()) -> None:
        self.state = state
        self.event = event
        self.story = tuple(story)
        lines = "".join(f"\n  {line}" for line in self.story)
        super().__init__(f"no transition from {state} on {event!r}; the story so far:{lines}")


class StoreError(ElasticError):
    """The store could not do what was asked."""


class StoreUnavailable(StoreError):
    """No answer in time; a write may have happened nevertheless."""


class StoreRefused(StoreError):
    """The store answered, and the answer was no."""


class LeaseLost(ElasticError):
    """A lease ended: its keys are gone and its owner is fenced."""


class ProviderError(ElasticError):
    """A node provider could not do what was asked."""


class InsufficientCapacity(ProviderError):
    """There are no such machines now: try another pool, zone or type."""


class QuotaExceeded(ProviderError):
    """The account's limit is reached: only a person can raise it."""


class ProviderUnavailable(ProviderError):
    """The provider gave no answer or asked to slow down: try again later."""


class InvalidRequest(ProviderError):
    """The request can never succeed as it is."""
