"""TLS: the server's certificate and key, for HTTP and for gRPC."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from falconet.errors import ConfigError
from falconet.serve.access import private


@dataclass(frozen=True, kw_only=True)
class Identity:
    """A certificate and its key, which fit each other."""

    certificate: bytes  # PEM, with the certificates of its issuers
    key: bytes = field(repr=False)  # PEM, not encrypted
    context: ssl.SSLContext = field(repr=False)  # for HTTP


def read_identity(certificate: Path | None, key: Path | None) -> Identity | None:
    """Read the certificate and the key; None if neither is named; ConfigError if they cannot be used."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        given, missing = (
            ("--tls-key", "--tls-certificate") if certificate is None else ("--tls-certificate", "--tls-key")
        )
        raise ConfigError(f"{given}: needs {missing} as well")
    try:
        chain = certificate.read_bytes()
    except OSError as error:
        raise ConfigError(f"--tls-certificate: {certificate}: {error.strerror or error}") from error
    secret = private(key, "--tls-key")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])

    def refuse() -> str:  # otherwise OpenSSL would ask for a passphrase on the terminal
        raise ConfigError(
            f"--tls-key: {key}: is encrypted; expected a key without a passphrase, as"
            " `openssl pkey -in KEY -out PLAIN` writes"
        )

    try:
        context.load_cert_chain(certificate, key, password=refuse)
    except ssl.SSLError as error:
        raise ConfigError(_problem(error, certificate, chain, key, secret)) from error
    except OSError as error:
        raise ConfigError(f"--tls-key: {key}: {error.strerror or error}") from error
    return Identity(certificate=chain, key=secret, context=context)


def _problem(error: ssl.SSLError, certificate: Path, chain: bytes, key: Path, secret: bytes) -> str:
    """The problem in one line; for most problems, OpenSSL only says `PEM lib`."""
    if error.reason == "KEY_VALUES_MISMATCH":
        return f"--tls-key: {key}: is not the key of {certificate}"
    if b"-----BEGIN CERTIFICATE-----" not in chain:
        return f"--tls-certificate: {certificate}: has no certificate in PEM format"
    if b"PRIVATE KEY-----" not in secret:
        return f"--tls-key: {key}: has no private key in PEM format"
    return f"--tls-certificate: {certificate} with --tls-key: {key}: {(error.reason or str(error)).lower()}"
