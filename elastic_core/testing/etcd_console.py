"""What an operator does to etcd beside reading and writing keys: over its JSON gateway, without a client.

For tests and measurements: look at a member, move the leadership, compact, and set up users.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_core.errors import StoreRefused, StoreUnavailable
from elastic_core.store.endpoint import Endpoint, TlsFiles, parse_endpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """How one member sees itself.

    Attributes:
        member: Its id.
        leader: Id of the leader that it knows, 0 for none.
        database_bytes: Size of its database's file.
        used_bytes: The part of it that is in use.
    """

    member: int
    leader: int
    revision: int
    database_bytes: int
    used_bytes: int


class EtcdConsole:
    """Requests to one member; with `user` and `password` as that user."""

    def __init__(
        self, endpoint: str, *, tls: TlsFiles | None = None, user: str = "", password: str = ""
    ) -> None:
        self._endpoint = parse_endpoints(endpoint)[0]
        self._tls = tls
        self._user = user
        self._password = password

    def status(self) -> MemberStatus:
        """Look at the member."""
        answer = self._ask("maintenance/status", {})
        header = answer["header"]
        return MemberStatus(
            member=int(header["member_id"]),
            leader=int(answer.get("leader", 0)),
            revision=int(header["revision"]),
            database_bytes=int(answer["dbSize"]),
            used_bytes=int(answer["dbSizeInUse"]),
        )

    def move_leader(self, member: int) -> None:
        """Hand the leadership over; only the leader can."""
        self._ask("maintenance/transfer-leadership", {"targetID": str(member)})

    def compact(self, revision: int) -> None:
        """Forget all that is older."""
        self._ask("kv/compaction", {"revision": str(revision), "physical": True})

    def set_up_users(self, prefixes: Mapping[str, Sequence[str]], passwords: Mapping[str, str]) -> None:
        """Switch users on: root, and others who may read and write what is theirs.

        Args:
            prefixes: Each user's prefixes.
            passwords: Of these users and of root.
        """
        self._ask("auth/role/add", {"name": "root"})
        for user, password in passwords.items():
            self._ask("auth/user/add", {"name": user, "password": password})
        self._ask("auth/user/grant", {"user": "root", "role": "root"})
        for user, owned in prefixes.items():
            self._ask("auth/role/add", {"name": user})
            for prefix in owned:
                end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
                permission = {"permType": "READWRITE", "key": _coded(prefix), "range_end": _coded(end)}
                self._ask("auth/role/grant", {"name": user, "perm": permission})
            self._ask("auth/user/grant", {"user": user, "role": user})
        self._ask("auth/enable", {})

    def _ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._user and path != "auth/authenticate":
            headers["Authorization"] = self._token()
        connection = _connect(self._endpoint, self._tls)
        try:
            connection.request("POST", f"/v3/{path}", json.dumps(body), headers)
            response = connection.getresponse()
            answer: dict[str, Any] = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise StoreUnavailable(f"etcd at {self._endpoint}: no answer to {path}: {error}") from error
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            raise StoreRefused(f"etcd at {self._endpoint} refused {path}: {answer.get('error')}")
        return answer

    def _token(self) -> str:
        answer = self._ask("auth/authenticate", {"name": self._user, "password": self._password})
        return str(answer["token"])


def _connect(endpoint: Endpoint, tls: TlsFiles | None) -> http.client.HTTPConnection:
    if tls is None:
        return http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=5)
    context = ssl.create_default_context(cafile=str(tls.ca))
    if tls.cert is not None and tls.key is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=5, context=context)


def _coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
