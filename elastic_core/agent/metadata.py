"""EC2's metadata service (IMDSv2), asked by a thread of its own: it can neither stop nor hold up training.

Only the standard library: boto3 would cost every node a second and 50 MB. No proxy
is used, whatever the environment says: the service is on this machine's own link.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException
from typing import Final
from urllib.parse import urlsplit

import structlog

from elastic_core.agent.notices import Notice, NoticeSource, read_interruption, read_rebalance

ENDPOINT: Final = "http://169.254.169.254"
ENDPOINT_VARIABLE: Final = "AWS_EC2_METADATA_SERVICE_ENDPOINT"

_LOG = structlog.get_logger()
_TIMEOUT_S: Final = 1.0
_TOKEN_S: Final = 21_600
_TOKEN_HEADER: Final = "X-aws-ec2-metadata-token"  # noqa: S105 (a header's name)
_INTERRUPTION: Final = "/latest/meta-data/spot/instance-action"
_REBALANCE: Final = "/latest/meta-data/events/recommendations/rebalance"
_MAX_BODY: Final = 65_536


class MetadataUnavailable(Exception):
    """The service gave no answer that means anything."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the service said.

    Attributes:
        at: When, by the service's own clock; by ours if it does not say.
    """

    body: str
    at: datetime


class MetadataService:
    """One machine's metadata; a token is taken when it is needed, and again when it has ended."""

    def __init__(self, endpoint: str, timeout_s: float = _TIMEOUT_S) -> None:
        address = urlsplit(endpoint)
        self._host, self._port = address.hostname or "", address.port or 80
        self._timeout_s = timeout_s
        self._token = ""

    def get(self, path: str) -> Answer | None:
        """Return what is there, None if nothing is (404, the normal answer).

        Raises:
            MetadataUnavailable: No answer in time, or none that means anything.
        """
        status, answer = self._ask("GET", path, {_TOKEN_HEADER: self._token}) if self._token else (401, None)
        if status == 401:
            self._token = self._new_token()
            status, answer = self._ask("GET", path, {_TOKEN_HEADER: self._token})
        if status == 404:
            return None
        if status != 200 or answer is None:
            raise MetadataUnavailable(f"GET {path} was answered with {status}")
        return answer

    def _new_token(self) -> str:
        status, answer = self._ask(
            "PUT", "/latest/api/token", {f"{_TOKEN_HEADER}-ttl-seconds": str(_TOKEN_S)}
        )
        if status != 200 or answer is None:
            raise MetadataUnavailable(f"a token was refused with {status}")
        return answer.body.strip()

    def _ask(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, Answer | None]:
        connection = HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        try:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            body = response.read(_MAX_BODY).decode(errors="replace")
            return response.status, Answer(body, _date(response.headers.get("Date")))
        except (OSError, HTTPException, ValueError) as error:
            raise MetadataUnavailable(
                f"http://{self._host}:{self._port} does not answer: {error or type(error).__name__}"
            ) from error
        finally:
            connection.close()


class NoticeWatch:
    """Looks for notices until one came, on a thread; `tell` is called once, when it is time to leave."""

    def __init__(self, source: NoticeSource, tell: Callable[[Notice], None]) -> None:
        self._source = source
        self._service = MetadataService(source.endpoint)
        self._tell = tell
        self._closing = threading.Event()
        self._is_away = False
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; a question that it asks just now is not waited for."""
        self._closing.set()
        self._thread.join(timeout=0.1)

    def _run(self) -> None:
        while not self._closing.is_set():
            notice = self._look()
            if notice is not None:
                self._leave(notice)
                return
            self._closing.wait(self._source.period)

    def _leave(self, notice: Notice) -> None:
        wait_s = notice.wait_s(self._source.leave_before)
        _LOG.warning("notice", text=notice.text, seconds_left=notice.seconds_left, leaving_in=wait_s)
        if not self._closing.wait(wait_s):
            left = None if notice.seconds_left is None else notice.seconds_left - wait_s
            self._tell(Notice(kind=notice.kind, text=notice.text, seconds_left=left))

    def _look(self) -> Notice | None:
        """Return a notice, if there is one; the service's troubles are told once, and change nothing."""
        try:
            notice = self._ask()
        except MetadataUnavailable as error:
            if not self._is_away:
                _LOG.warning("no spot notices: training goes on without them", reason=str(error))
            self._is_away = True
            return None
        if self._is_away:
            _LOG.info("spot notices can be heard again")
        self._is_away = False
        return notice

    def _ask(self) -> Notice | None:
        answer = self._service.get(_INTERRUPTION)
        if answer is not None:
            return read_interruption(answer.body, answer.at)
        return read_rebalance() if self._service.get(_REBALANCE) is not None else None


def _date(header: str | None) -> datetime:
    try:
        told = parsedate_to_datetime(header or "")
    except ValueError:
        return datetime.now(UTC)
    return told if told.tzinfo else told.replace(tzinfo=UTC)
