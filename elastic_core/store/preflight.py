"""Looking at an endpoint before anything depends on it: each way to be wrong has a line of its own.

A store's client can only say "connection failed". This module dials by hand and
tells a wrong name, a refused port, a silent address, a TLS and plaintext mismatch
and each certificate mistake apart.
"""

from __future__ import annotations

import socket
import ssl
from typing import Final

from elastic_core.errors import RefusedInput
from elastic_core.store.endpoint import Endpoint, TlsFiles, parse_endpoints

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How an HTTP/2 client begins, with empty settings; an etcd server answers with its settings."""

_FRAME_HEADER: Final = 9
_SETTINGS: Final = 4
_TLS_ALERT: Final = 21


def check_endpoint(endpoints: str, *, tls: TlsFiles | None = None, timeout_s: float = 2.0) -> None:
    """Return if one of the endpoints answers as etcd would.

    Raises:
        RefusedInput: None does; one line for each says why and what to do.
    """
    problems = []
    for endpoint in parse_endpoints(endpoints):
        problem = _problem_of(endpoint, tls=tls, timeout_s=timeout_s)
        if not problem:
            return
        problems.append(f"endpoint {endpoint}: {problem}")
    raise RefusedInput(problems)


def _problem_of(endpoint: Endpoint, *, tls: TlsFiles | None, timeout_s: float) -> str:
    try:
        with socket.create_connection((endpoint.host, endpoint.port), timeout=timeout_s) as plain:
            if tls is None:
                return _plain_problem(plain, timeout_s)
            return _tls_problem(plain, endpoint, tls, timeout_s)
    except socket.gaierror as error:
        return f"the name does not resolve ({error.strerror}): check its spelling and the DNS"
    except ConnectionRefusedError:
        return "connection refused: is etcd running there, and listening on this address and port?"
    except TimeoutError:
        return f"no answer within {timeout_s:g} s: check address, firewall and security group"
    except OSError as error:
        return f"not reachable: {error.strerror or error}"


def _plain_problem(plain: socket.socket, timeout_s: float) -> str:
    answer = _greet(plain)
    if answer is None:
        return f"connected, but no answer within {timeout_s:g} s: is the server frozen?"
    if not answer or answer[0] == _TLS_ALERT:
        return "closed the plaintext connection: the server speaks TLS; give the CA's file"
    return "" if _is_settings(answer) else "something answers, but not etcd: check the port"


def _tls_problem(plain: socket.socket, endpoint: Endpoint, tls: TlsFiles, timeout_s: float) -> str:
    try:
        context = ssl.create_default_context(cafile=str(tls.ca))
        if tls.cert is not None and tls.key is not None:
            context.load_cert_chain(tls.cert, tls.key)
    except (ssl.SSLError, OSError) as error:
        return f"the TLS files cannot be used: {error.strerror or error}"
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(plain, server_hostname=endpoint.host) as secure:
            answer = _greet(secure)
    except ssl.SSLCertVerificationError as error:
        return _certificate_problem(error, endpoint, tls)
    except ssl.SSLError as error:
        return _handshake_problem(error)
    except ConnectionResetError:
        return "closed the connection in the TLS handshake: the server speaks plaintext; give no TLS files"
    except TimeoutError:
        return f"connected, but no TLS handshake within {timeout_s:g} s: is the server frozen?"
    if answer is None:
        return f"connected, but no answer within {timeout_s:g} s: is the server frozen?"
    return "" if _is_settings(answer) else "something answers over TLS, but not etcd: check the port"


def _certificate_problem(error: ssl.SSLCertVerificationError, endpoint: Endpoint, tls: TlsFiles) -> str:
    text = error.verify_message
    if "mismatch" in text:
        return f"the server's certificate is for another name than {endpoint.host!r}: {text}"
    if "expired" in text or "not yet valid" in text:
        return f"the server's certificate is out of date ({text}): renew it, or check this machine's clock"
    return f"the server's certificate does not come from the CA in {str(tls.ca)!r}: {text}"


def _handshake_problem(error: ssl.SSLError) -> str:
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if "wrong version number" in reason or "record layer failure" in reason or "eof" in reason:
        return "does not answer in TLS: the server speaks plaintext; give no TLS files"
    if "certificate required" in reason or "bad certificate" in reason or "handshake failure" in reason:
        return f"the server wants another client certificate ({reason}): give certificate and key of its CA"
    if "unknown ca" in reason:
        return f"the server does not know the CA of our client certificate ({reason}): give one of its CA"
    return f"TLS handshake failed: {reason}"


def _greet(connection: socket.socket) -> bytes | None:
    """Send an HTTP/2 preface; return the answer's beginning, b"" if closed, None if there is none in time."""
    answer = b""
    try:
        connection.sendall(_PREFACE)
        while len(answer) < _FRAME_HEADER and (piece := connection.recv(_FRAME_HEADER - len(answer))):
            answer += piece
    except TimeoutError:
        return None
    except (ConnectionResetError, BrokenPipeError):
        return b""
    return answer


def _is_settings(answer: bytes) -> bool:
    return len(answer) == _FRAME_HEADER and answer[3] == _SETTINGS
