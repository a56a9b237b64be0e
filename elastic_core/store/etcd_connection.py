"""Connections to etcd: calls with a deadline, streams, users, and the move to another member.

Calls wait for the connection within their deadline, so a restarting server costs
time and no error. Only reads are repeated; a write without an answer raises, for
it may have happened. What was certainly not sent goes to the next member.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc
from etcd3 import etcdrpc

from elastic_core.clock import Clock
from elastic_core.errors import StoreError, StoreRefused, StoreUnavailable
from elastic_core.store.endpoint import Access, Endpoint, TlsFiles

_CHANNEL_OPTIONS: Final = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),  # despite its name: how long one connection attempt may take
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.keepalive_time_ms", 6_000),  # etcd ends a connection that pings more often than every 5 s
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),  # the one that counts in gRPC 1.85; a minute by default
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel shares the dead connection of the old
    ("grpc.enable_http_proxy", 0),  # stores have private addresses
)
_RETRY_PAUSE_S: Final = 0.05

_NO_ANSWER: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
_STALE_TOKEN: Final = ("invalid auth token", "auth store is old", "user name is empty")
_OVERLOADED: Final = "too many requests"
_NOT_SENT: Final = "failed to connect to all addresses"
_NEEDS_LEADER: Final = ("hasleader", "true")
"""Metadata that ends a stream on a member which lost its cluster, instead of leaving it silent."""


class Link:
    """A channel to one endpoint with its stubs."""

    def __init__(self, endpoint: Endpoint, tls: TlsFiles | None) -> None:
        self.endpoint = endpoint
        if tls is None:
            self.channel = grpc.insecure_channel(str(endpoint), options=_CHANNEL_OPTIONS)
        else:
            key, cert = (path.read_bytes() if path else None for path in (tls.key, tls.cert))
            credentials = grpc.ssl_channel_credentials(tls.ca.read_bytes(), key, cert)
            self.channel = grpc.secure_channel(str(endpoint), credentials, options=_CHANNEL_OPTIONS)
        self.kv = etcdrpc.KVStub(self.channel)
        self.lease = etcdrpc.LeaseStub(self.channel)
        self.watch = etcdrpc.WatchStub(self.channel)
        self.auth = etcdrpc.AuthStub(self.channel)


_Method = Callable[[Link], Any]
_Started = Callable[[Any], None]


class _NoToken(Exception):
    """There was no answer to the question for a token, or no such user: nothing else was sent."""

    def __init__(self, failure: StoreError) -> None:
        self.failure = failure


class Connection:
    """Calls and streams to one of the endpoints; moves on to the next when one does not answer."""

    def __init__(self, access: Access, clock: Clock) -> None:
        self._access = access
        self._clock = clock
        self._lock = threading.Lock()
        self._authenticating = threading.Lock()
        self._links: dict[Endpoint, Link] = {}
        self._turn = 0
        self._token = ""
        self._closed = threading.Event()

    def call(
        self,
        method: _Method,
        request: Any,
        *,
        what: str,
        repeatable: bool = False,
        started: _Started | None = None,
    ) -> Any:
        """Make one call within the deadline and return the answer.

        `what` says in a few words what it does, for errors; a `repeatable` one may be sent again
        when its answer did not come; `started` gets each attempt's future, to cancel it.
        """
        deadline = self._clock.monotonic() + self._access.timeout_s
        token_renewed = False
        failure: StoreError
        while True:
            link = self._link()
            patience = self._patience(deadline, repeatable=repeatable)
            try:
                return self._attempt(link, method(link), request, patience=patience, started=started)
            except grpc.FutureCancelledError as error:
                raise _closed_error() from error
            except ValueError as error:  # the channel was closed: the store, or a silent member was left
                failure, again = _closed_error(), True
                failure.__cause__ = error
            except _NoToken as error:
                failure, again = error.failure, isinstance(error.failure, StoreUnavailable)
            except grpc.RpcError as error:
                if self._access.credentials and not token_renewed and _is_stale_token(error):
                    token_renewed, self._token = True, ""
                    continue
                failure = error_of(error, what=what, endpoint=link.endpoint)
                failure.__cause__ = error
                again = isinstance(failure, StoreUnavailable) and (repeatable or _was_not_sent(error))
                if isinstance(failure, StoreUnavailable):
                    self.rotate(link, error)
            left = deadline - self._clock.monotonic()
            if not again or left <= _RETRY_PAUSE_S or self._closed.wait(_RETRY_PAUSE_S):
                raise failure

    def _patience(self, deadline: float, *, repeatable: bool) -> float:
        """Return how long one attempt may take; what can be repeated leaves time for another member."""
        left = max(deadline - self._clock.monotonic(), 0.001)
        return left / 2 if repeatable and self._has_choice else left

    @property
    def _has_choice(self) -> bool:
        return len(self._access.endpoints) > 1

    def _attempt(
        self, link: Link, method: Any, request: Any, *, patience: float, started: _Started | None
    ) -> Any:
        options = {
            "metadata": self._token_metadata(link),
            "timeout": patience,
            "wait_for_ready": not self._has_choice,  # else the next member is asked at once
        }
        if started is None:
            return method(request, **options)
        future = method.future(request, **options)
        started(future)
        return future.result()

    def stream(self, method: _Method, requests: Iterator[Any]) -> tuple[Link, Any]:
        """Open a stream; return it with the link that it uses."""
        link = self._link()
        try:
            return link, method(link)(requests, metadata=(_NEEDS_LEADER, *self._token_metadata(link)))
        except _NoToken as error:
            raise error.failure from error
        except ValueError as error:
            raise _closed_error() from error

    def rotate(self, link: Link, error: grpc.RpcError) -> None:
        """Use the next endpoint from now on, if `link` is the one in use and we did not end the call.

        A member that let a call's time pass is left by the streams too: it may be frozen.
        """
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            self.leave(link.endpoint)
        elif error.code() is not grpc.StatusCode.CANCELLED:
            with self._lock:
                self._move_on(link)

    def leave(self, endpoint: Endpoint) -> None:
        """Break all calls and streams to a silent endpoint, if there is another to go on with."""
        with self._lock:
            link = self._links.get(endpoint)
        if link is not None and self._has_choice:
            self.renew(link)

    def renew(self, link: Link) -> None:
        """Give up the link's connection: the next use of its endpoint dials anew."""
        with self._lock:
            self._move_on(link)
            if self._links.get(link.endpoint) is link:
                del self._links[link.endpoint]
        link.channel.close()

    def _move_on(self, link: Link) -> None:
        if self._endpoint() == link.endpoint:
            self._turn += 1

    def close(self) -> None:
        """End all calls and streams."""
        self._closed.set()
        with self._lock:
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            link.channel.close()

    def _endpoint(self) -> Endpoint:
        return self._access.endpoints[self._turn % len(self._access.endpoints)]

    def _link(self) -> Link:
        with self._lock:
            if self._closed.is_set():
                raise _closed_error()
            endpoint = self._endpoint()
            if endpoint not in self._links:
                self._links[endpoint] = Link(endpoint, self._access.tls)
            return self._links[endpoint]

    def _token_metadata(self, link: Link) -> tuple[tuple[str, str], ...]:
        credentials = self._access.credentials
        if credentials is None:
            return ()
        with self._authenticating:
            if not self._token:
                request = etcdrpc.AuthenticateRequest(name=credentials.user, password=credentials.password)
                timeout_s = self._access.timeout_s / (2 if self._has_choice else 1)
                try:
                    answer = link.auth.Authenticate(
                        request, timeout=timeout_s, wait_for_ready=not self._has_choice
                    )
                except grpc.RpcError as error:
                    what = f"authenticate as {credentials.user!r}"
                    failure = error_of(error, what=what, endpoint=link.endpoint)
                    if isinstance(failure, StoreUnavailable):
                        self.rotate(link, error)
                    raise _NoToken(failure) from error
                self._token = answer.token
            return (("token", self._token),)


def error_of(error: grpc.RpcError, *, what: str, endpoint: Endpoint) -> StoreError:
    """Return whether the store gave no answer, or which answer it gave, as an error of ours."""
    code, details = error.code(), error.details() or ""
    if code in _NO_ANSWER or _OVERLOADED in details:
        return StoreUnavailable(f"etcd at {endpoint}: no answer to {what}: {code.name}: {details}")
    return StoreRefused(f"etcd at {endpoint} refused to {what}: {details or code.name}")


def _closed_error() -> StoreUnavailable:
    return StoreUnavailable("the connection to the store was closed on this side")


def _was_not_sent(error: grpc.RpcError) -> bool:
    return _NOT_SENT in (error.details() or "")


def _is_stale_token(error: grpc.RpcError) -> bool:
    details = error.details() or ""
    return any(text in details for text in _STALE_TOKEN)
