"""Certificates of one attempt: an authority that signs twice and is forgotten.

The authority's key never leaves this process, so nobody can sign a third certificate. Keys lie in the
run's directory on the encrypted file system, readable by its owner alone; user data, tags and command
lines hold their paths only.
"""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from elastic_core.store.endpoint import TlsFiles

CA: Final = "ca.pem"
SERVER: Final = "server"
CLIENT: Final = "client"
CLOCK_SKEW: Final = timedelta(hours=1)


def issue(directory: Path, *, address: str, lifetime: timedelta) -> None:
    """Write the files by which a server at `address` and its clients know each other.

    The server's certificate is written last: whoever waits for it finds everything there.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    authority = _Authority(lifetime)
    _write(directory / CA, authority.pem)
    host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    for stem, usage, names in (
        (CLIENT, ExtendedKeyUsageOID.CLIENT_AUTH, None),
        (SERVER, ExtendedKeyUsageOID.SERVER_AUTH, host),
    ):
        key = ec.generate_private_key(ec.SECP256R1())
        _write(directory / f"{stem}.key", _private(key))
        _write(directory / f"{stem}.pem", authority.sign(stem, key, usage, names))


def client_files(directory: Path) -> TlsFiles:
    """Return what a client needs.

    Raises:
        RefusedInput: A file is not there.
    """
    return TlsFiles(ca=directory / CA, cert=directory / f"{CLIENT}.pem", key=directory / f"{CLIENT}.key")


class _Authority:
    """Signs, as long as it lives."""

    def __init__(self, lifetime: timedelta) -> None:
        self._lifetime = lifetime
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named("elastic-train run authority")
        builder = self._builder(self._name, self._key)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.pem = _pem(builder.sign(self._key, hashes.SHA256()))

    def sign(
        self,
        name: str,
        key: ec.EllipticCurvePrivateKey,
        usage: x509.ObjectIdentifier,
        names: x509.SubjectAlternativeName | None,
    ) -> bytes:
        builder = self._builder(_named(name), key)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        # etcd's gateway is a client of its own server, with the server's certificate.
        usages = [usage, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(list(dict.fromkeys(usages))), critical=False)
        if names is not None:
            builder = builder.add_extension(names, critical=False)
        return _pem(builder.sign(self._key, hashes.SHA256()))

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(now + self._lifetime)
        )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}.draft")
    draft.touch(mode=0o600)
    draft.write_bytes(content)
    draft.replace(path)
