"""In front of moto: counts calls, injects faults, and keeps AWS's promise on client tokens.

moto ignores `ClientToken`; AWS returns the first call's answer to the same call,
and refuses the token with other arguments
(docs.aws.amazon.com/ec2/latest/devguide/ec2-api-idempotency.html).
"""

from __future__ import annotations

import io
import json
import re
import socket
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
Application = Callable[[Environ, StartResponse], Iterable[bytes]]

IDEMPOTENT: Final = frozenset(
    {"RunInstances", "CreateFleet", "CreateLaunchTemplate", "CreateLaunchTemplateVersion"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong with one call.

    Attributes:
        action: Name of the call ("CreateFleet"), or a regular expression that matches it whole.
        skip: Calls that go well before.
        times: Calls that fail then.
        code: AWS's error code; ignored where the reply is lost.
        lose_reply: The call is done, and the connection ends without its answer.
    """

    action: str
    code: str = "InternalError"
    message: str = "injected"
    status: int = 400
    skip: int = 0
    times: int = 1
    lose_reply: bool = False


@dataclass(slots=True)
class _Armed:
    fault: Fault
    seen: int = 0

    def fires(self) -> bool:
        self.seen += 1
        return self.fault.skip < self.seen <= self.fault.skip + self.fault.times


@dataclass(frozen=True, slots=True)
class _Answer:
    status: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    digest: str


@dataclass(slots=True)
class FrontDoor:
    """WSGI middleware around moto.

    Attributes:
        calls: How often each action was called, failed calls included.
        fired: Faults that happened, in order; a test asserts on them.
    """

    application: Application
    calls: Counter[str] = field(default_factory=Counter)
    fired: list[Fault] = field(default_factory=list)
    _armed: list[_Armed] = field(default_factory=list)
    _answers: dict[tuple[str, str], _Answer] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def inject(self, *faults: Fault) -> None:
        """Arm faults; each counts calls from now on."""
        with self._lock:
            self._armed += [_Armed(fault) for fault in faults]

    def heal(self) -> None:
        """Disarm all faults."""
        with self._lock:
            self._armed.clear()

    def reset(self) -> None:
        """Forget faults, counts and tokens."""
        with self._lock:
            self._armed.clear()
            self.calls.clear()
            self.fired.clear()
            self._answers.clear()

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Serve one request."""
        body = _body(environ)
        action = _action(environ, body)
        if not action:
            return self.application(environ, start_response)
        with self._lock:
            self.calls[action] += 1
            fault = next(
                (a.fault for a in self._armed if re.fullmatch(a.fault.action, action) and a.fires()), None
            )
            if fault is not None:
                self.fired.append(fault)
        if fault is not None and not fault.lose_reply:
            return _refuse(environ, start_response, fault)
        answer = self._answered(action, environ, body)
        if fault is not None:
            _hang_up(environ)
            return []
        start_response(answer.status, list(answer.headers))
        return [answer.body]

    def _answered(self, action: str, environ: Environ, body: bytes) -> _Answer:
        form = parse_qs(body.decode(errors="replace"))
        token = form.get("ClientToken", [""])[0]
        if not token or action not in IDEMPOTENT:
            return self._ask(environ, "")
        digest = repr(sorted((key, value) for key, value in form.items() if key != "ClientToken"))
        with self._lock:  # one at a time, so that two calls with one token never both reach moto
            known = self._answers.get((action, token))
            if known is None:
                answer = self._ask(environ, digest)
                if answer.status.startswith("200"):
                    self._answers[action, token] = answer
                return answer
            if known.digest == digest:
                return known
        return _Answer(
            "400 BAD REQUEST",
            (("Content-Type", "text/xml"),),
            _ec2_error(
                "IdempotentParameterMismatch", f"The client token {token} was used with other arguments"
            ),
            digest,
        )

    def _ask(self, environ: Environ, digest: str) -> _Answer:
        said: list[tuple[str, list[tuple[str, str]]]] = []

        def start(status: str, headers: list[tuple[str, str]], *_: Any) -> None:
            said.append((status, headers))

        chunks = self.application(environ, start)
        body = b"".join(chunks)
        status, headers = said[-1]
        return _Answer(status, tuple(headers), body, digest)


def _body(environ: Environ) -> bytes:
    length = int(environ.get("CONTENT_LENGTH") or 0)
    body: bytes = environ["wsgi.input"].read(length) if length else b""
    environ["wsgi.input"] = io.BytesIO(body)
    return body


def _action(environ: Environ, body: bytes) -> str:
    """Return the call's name: of a query call, a JSON call, or a REST call as "METHOD /path"."""
    target: str = environ.get("HTTP_X_AMZ_TARGET", "")
    if target:
        return target.rsplit(".", 1)[-1]
    if b"Action=" in body:
        return parse_qs(body.decode(errors="replace")).get("Action", [""])[0]
    path: str = environ.get("PATH_INFO", "")
    if path.startswith("/moto-api"):
        return ""
    return f"{environ['REQUEST_METHOD']} {path}"


def _ec2_error(code: str, message: str) -> bytes:
    return (
        '<?xml version="1.0" encoding="UTF-8"?><Response><Errors><Error>'
        f"<Code>{escape(code)}</Code><Message>{escape(message)}</Message></Error></Errors>"
        f"<RequestID>{uuid.uuid4()}</RequestID></Response>"
    ).encode()


def _refuse(environ: Environ, start_response: StartResponse, fault: Fault) -> list[bytes]:
    json_call = bool(environ.get("HTTP_X_AMZ_TARGET")) or "elasticfilesystem" in environ.get(
        "HTTP_AUTHORIZATION", ""
    )
    if json_call:
        body = json.dumps({"__type": fault.code, "ErrorCode": fault.code, "Message": fault.message}).encode()
        headers = [("Content-Type", "application/x-amz-json-1.1"), ("x-amzn-ErrorType", fault.code)]
    else:
        body, headers = _ec2_error(fault.code, fault.message), [("Content-Type", "text/xml")]
    start_response(f"{fault.status} ERROR", headers)
    return [body]


def _hang_up(environ: Environ) -> None:
    """End the connection without an answer, as a network does."""
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError(f"reply of {environ['REQUEST_METHOD']} lost on purpose")
