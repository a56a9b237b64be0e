"""Certificates for tests: an authority, and what it signs."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from elastic_core.store.endpoint import TlsFiles


class Authority:
    """A certificate authority whose files lie in a directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, directory.name)])
        builder = _builder(self._name, self._name, self._key, days=1)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.certificate = directory / "ca.pem"
        self.certificate.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))

    def issue(self, name: str, *, days: int = 1) -> TlsFiles:
        """Return the files of a certificate for a DNS name or an address; expired if `days` is negative."""
        key = ec.generate_private_key(ec.SECP256R1())
        # etcd takes a common name for a user's, and its gateway serves nobody who has one
        subject = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, name)])
        try:
            names: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(name))
        except ValueError:
            names = x509.DNSName(name)
        builder = _builder(subject, self._name, key, days=days)
        builder = builder.add_extension(x509.SubjectAlternativeName([names]), critical=False)
        stem = f"{name}{days}"
        cert, key_file = self._directory / f"{stem}.pem", self._directory / f"{stem}.key"
        cert.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return TlsFiles(ca=self.certificate, cert=cert, key=key_file)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, *, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=10))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
