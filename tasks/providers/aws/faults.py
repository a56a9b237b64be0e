"""AWS's errors as those that say what the caller should do; retries are decided here and only here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

from elastic_core.errors import (
    InsufficientCapacity,
    InvalidRequest,
    ProviderError,
    ProviderUnavailable,
    QuotaExceeded,
)

CAPACITY: Final = frozenset(
    {
        "InsufficientInstanceCapacity",
        "InsufficientFreeAddressesInSubnet",
        "InsufficientHostCapacity",
        "SpotMaxPriceTooLow",
        "UnfulfillableCapacity",
        "Unsupported",  # "your requested instance type is not supported in this Availability Zone"
    }
)
QUOTA: Final = frozenset(
    {
        "InstanceLimitExceeded",
        "MaxSpotInstanceCountExceeded",
        "MaxSpotFleetRequestCountExceeded",
        "VcpuLimitExceeded",
        "FileSystemLimitExceeded",
    }
)
THROTTLED: Final = frozenset(
    {"RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequestsException"}
)
UNAVAILABLE: Final = frozenset({"InternalError", "InternalFailure", "ServiceUnavailable", "Unavailable"})
DENIED: Final = frozenset({"UnauthorizedOperation", "AccessDenied", "AccessDeniedException", "AuthFailure"})

QUOTA_CONSOLE: Final = "https://console.aws.amazon.com/servicequotas/home"

CLIENT_CONFIG: Final = Config(
    retries={"mode": "adaptive", "total_max_attempts": 8},  # throttling: backoff with jitter, rate-limited
    connect_timeout=5,
    read_timeout=30,
    user_agent_extra="elastic-train",
)
"""botocore retries throttling and server errors by itself; nothing above it retries those again."""


def code_of(error: ClientError) -> str:
    """Return AWS's name of an error."""
    return str(error.response.get("Error", {}).get("Code", ""))


def named(code: str, message: str, call: str) -> ProviderError:
    """Return the exception for an error code, be it raised or found in a fleet's answer."""
    told = f"{call}: {code}: {message}"
    if code in CAPACITY:
        return InsufficientCapacity(told)
    if code in QUOTA:
        return QuotaExceeded(
            f"{told} Ask for more at {QUOTA_CONSOLE}; another zone of the region will not do."
        )
    if code in THROTTLED or code in UNAVAILABLE:
        return ProviderUnavailable(told)
    if code in DENIED:
        return InvalidRequest(
            f"{told} The flow's role lacks this permission: attach the base's controller policy."
        )
    return InvalidRequest(told)


@contextmanager
def naming(call: str) -> Iterator[None]:
    """Turn botocore's errors of one call into ours.

    Raises:
        ProviderError: The subclass says what to do.
    """
    try:
        yield
    except ClientError as error:
        raise named(code_of(error), _message(error), call) from error
    except NoCredentialsError as error:
        raise InvalidRequest(
            f"{call}: no AWS credentials; set AWS_PROFILE, or run where a role is attached"
        ) from error
    except BotoCoreError as error:
        raise ProviderUnavailable(f"{call}: {error}") from error


def _message(error: ClientError) -> str:
    details: Any = error.response.get("Error", {})
    text = str(details.get("Message", "")).strip()
    return text if text.endswith(".") or not text else f"{text}."
