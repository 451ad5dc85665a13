"""TLS: certificates and keys that fit, clients that do not speak it, and a stop that loses no request."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import threading
import time

import pytest
import trustme

from falconet.errors import ConfigError
from falconet.serve import connections
from falconet.serve.tls import read_identity
from served import LIMIT, PATH, Held, answers, binary, connected, infer, nothing_logged, pixels, running, served, until


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


def write(folder, name, content, mode=0o600):
    file = folder / name
    file.write_bytes(content)
    file.chmod(mode)
    return file


@pytest.fixture(scope="module")
def files(authority, tmp_path_factory):
    folder, leaf = tmp_path_factory.mktemp("tls"), authority.issue_cert("127.0.0.1", "localhost")
    chain = b"".join(blob.bytes() for blob in leaf.cert_chain_pems)
    return write(folder, "certificate.pem", chain, 0o644), write(folder, "key.pem", leaf.private_key_pem.bytes())


@pytest.fixture(scope="module")
def client(authority):
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.fixture
def secure(files):
    with running(identity=read_identity(*files)) as found:
        yield found


def ask(found, client, *, port=None):
    body, headers = binary(pixels(1))
    connection = http.client.HTTPSConnection("127.0.0.1", port or found.port, timeout=LIMIT, context=client)
    with contextlib.closing(connection):
        connection.request("POST", PATH, body, headers)
        return connection.getresponse().status


def wrapped(found, client):
    return client.wrap_socket(connected(found.port), server_hostname="127.0.0.1")


def test_requests_are_answered_over_tls(secure, client):
    with nothing_logged():
        assert ask(secure, client) == 200
        with wrapped(secure, client) as connection:
            assert connection.version() in ("TLSv1.2", "TLSv1.3")


def test_many_requests_at_once_are_answered_over_tls(secure, client):
    with nothing_logged(), concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert set(threads.map(lambda _: ask(secure, client), range(64))) == {200}


def test_old_versions_of_tls_are_refused(files):
    assert read_identity(*files).context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_client_that_does_not_speak_tls_is_dropped_and_not_logged(secure, client):
    with nothing_logged():
        for sent in (b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\xff\xff", b"\x00" * 1000):
            with connected(secure.port) as plain, contextlib.suppress(ConnectionResetError):
                plain.sendall(sent)
                plain.shutdown(socket.SHUT_WR)
                while plain.recv(1000):  # perhaps an alert of TLS
                    pass
        for _ in range(20):
            connected(secure.port).close()
        assert ask(secure, client) == 200


def test_a_client_that_does_not_trust_the_certificate_is_not_logged(secure, client):
    with nothing_logged():
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(secure, ssl.create_default_context())
        assert ask(secure, client) == 200


def test_a_handshake_that_does_not_end_is_cut(monkeypatch, files, client):
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 0.3)
    identity = read_identity(*files)
    limits = connections._encryption(identity.context)
    monkeypatch.setattr(connections, "_encryption", lambda _: limits)
    with nothing_logged(), running(identity=identity) as found:
        with connected(found.port) as silent, connected(found.port) as half:
            half.sendall(b"\x16\x03\x01")
            for stuck in (silent, half):
                with contextlib.suppress(ConnectionResetError):
                    assert stuck.recv(1) == b""
        limits["ssl_handshake_timeout"] = LIMIT  # which a good client may need on a busy machine
        assert ask(found, client) == 200


def test_a_stop_waits_for_requests_and_not_for_handshakes_or_idle_clients(files, client):
    lane = Held()
    with nothing_logged(), running(lane, identity=read_identity(*files)) as found:
        head, body = infer(pixels(1))
        with connected(found.port), wrapped(found, client) as idle, wrapped(found, client) as asking:
            idle.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert idle.recv(1000).startswith(b"HTTP/1.1 200")
            asking.sendall(head + body)
            assert lane.begun.acquire(timeout=LIMIT)
            found.ask_to_stop()
            until(found.refuses_connections)
            threading.Timer(0.1, lane.go.set).start()
            ((status, headers, _),) = answers(_whole(asking))
            assert (status, headers["connection"]) == (200, "close")
    assert found.cut == 0


def _whole(connection):
    """Everything until the server ends TLS."""
    answer = b""
    while more := connection.recv(1 << 16):
        answer += more
    return answer


def test_an_answer_that_is_not_taken_is_cut(monkeypatch, files, client):
    """The answer is larger than what the system and TLS buffer."""
    monkeypatch.setattr(connections, "ANSWER_SECONDS", 0.3)
    asked = b"GET /v2/models/stats HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000
    with nothing_logged(), running(identity=read_identity(*files)) as found:
        with wrapped(found, client) as lazy:
            lazy.settimeout(LIMIT)
            with contextlib.suppress(OSError):
                for _ in range(1000):
                    lazy.sendall(asked)
            with contextlib.suppress(OSError):
                while lazy.recv(1 << 16):
                    pass
        assert ask(found, client) == 200


def test_a_file_that_is_missing_is_named(files, tmp_path):
    certificate, key = files
    with pytest.raises(ConfigError, match=r"--tls-certificate: .*missing: No such file"):
        read_identity(tmp_path / "missing", key)
    with pytest.raises(ConfigError, match=r"--tls-key: .*missing: No such file"):
        read_identity(certificate, tmp_path / "missing")


def test_one_file_without_the_other_is_refused(files):
    with pytest.raises(ConfigError, match="--tls-certificate: needs --tls-key as well"):
        read_identity(files[0], None)
    with pytest.raises(ConfigError, match="--tls-key: needs --tls-certificate as well"):
        read_identity(None, files[1])
    assert read_identity(None, None) is None


def test_a_key_that_does_not_fit_is_refused(authority, files, tmp_path):
    other = write(tmp_path, "other.pem", authority.issue_cert("127.0.0.1").private_key_pem.bytes())
    with pytest.raises(ConfigError, match=f"--tls-key: {re.escape(str(other))}: is not the key of"):
        read_identity(files[0], other)


def test_an_encrypted_key_is_refused_without_asking_for_its_passphrase(files, tmp_path):
    locked = tmp_path / "locked.pem"
    line = ["openssl", "pkey", "-in", str(files[1]), "-aes256", "-passout", "pass:x", "-out", str(locked)]
    subprocess.run(line, check=True, timeout=LIMIT, capture_output=True)
    locked.chmod(0o600)
    with pytest.raises(ConfigError, match="is encrypted; expected a key without a passphrase"):
        read_identity(files[0], locked)


def test_files_of_another_kind_are_refused(files, tmp_path):
    text = write(tmp_path, "text", b"hello")
    with pytest.raises(ConfigError, match=r"--tls-certificate: .*has no certificate in PEM format"):
        read_identity(text, files[1])
    with pytest.raises(ConfigError, match=r"--tls-key: .*has no private key in PEM format"):
        read_identity(files[0], text)
    with pytest.raises(ConfigError, match=r"--tls-certificate: .*has no certificate"):
        read_identity(files[1], files[0].parent / "key.pem")


def test_a_key_that_every_user_can_read_is_refused(files, tmp_path):
    shown = write(tmp_path, "shown.pem", files[1].read_bytes(), 0o644)
    with pytest.raises(ConfigError, match=r"--tls-key: .*may be read by every user"):
        read_identity(files[0], shown)


def test_the_identity_has_what_grpc_takes_and_does_not_show_its_key(files):
    found = read_identity(*files)
    assert (found.certificate, found.key) == (files[0].read_bytes(), files[1].read_bytes())
    assert "PRIVATE" not in repr(found)


@pytest.mark.dist
def test_the_command_serves_https_with_a_key_and_a_log(files, client, tmp_path):
    keys = write(tmp_path, "keys", b"0123456789abcdef\n")
    log = tmp_path / "access.log"
    line = (
        "--model resnet8-cifar --image-size 8 --classes 5 --port 0 --threads 1 --device cpu --max-batch 4"
        f" --tls-certificate {files[0]} --tls-key {files[1]} --api-key-file {keys} --access-log {log}"
    )
    with served(line) as (process, port, lines):
        assert f" at https://127.0.0.1:{port}" in lines[-2]
        assert f'curl -H "X-API-Key: $KEY" --data-binary @photo.jpg https://127.0.0.1:{port}/predict' in lines[-1]
        body, headers = binary(pixels(1))
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=LIMIT, context=client)
        for key, status in (("0123456789abcdef", 200), ("x" * 16, 401)):
            connection.request("POST", PATH, body, {**headers, "X-API-Key": key})
            response = connection.getresponse()
            response.read()
            assert response.status == status
        begun = time.monotonic()
        os.kill(process.pid, signal.SIGTERM)  # with an idle client
        assert process.wait(LIMIT) == 0
        assert time.monotonic() - begun < LIMIT / 2
        assert process.stderr.read() == ""
        assert process.stdout.read().startswith("stopped: 1 request, 1 image in 1 batch")
        connection.close()
    rows = [json.loads(text) for text in log.read_text().splitlines()]
    assert [row["status"] for row in rows] == [200, 401]
    assert "0123456789abcdef" not in log.read_text()
