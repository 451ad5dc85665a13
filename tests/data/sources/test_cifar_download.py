"""Downloading: complete and checked, or one line and no files."""

import hashlib
import io
import tarfile
from functools import partial
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from falconet.data.sources.cifar import Archive, download
from falconet.errors import DataError


def packed(name, content):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


class Server(BaseHTTPRequestHandler):
    def __init__(self, *arguments, content, promised):
        self.content, self.promised = content, promised
        super().__init__(*arguments)

    def do_GET(self):
        self.send_response(200 if self.path == "/set.tar.gz" else 404)
        self.send_header("Content-Length", str(self.promised))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    servers = []

    def start(content, promised=None):
        promised = len(content) if promised is None else promised
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, content=content, promised=promised))
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


def archive_of(address, content):
    return Archive(address=f"{address}/set.tar.gz", md5=hashlib.md5(content).hexdigest())


GOOD = packed("set/train.bin", b"records" * 1000)


def test_the_folder_is_unpacked_and_nothing_else_remains(tmp_path, serve):
    download(archive_of(serve(GOOD), GOOD), into=tmp_path / "new", folder="set", missing="set: not found")
    assert (tmp_path / "new/set/train.bin").read_bytes() == b"records" * 1000
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["set"]


def refused(tmp_path, archive):
    with pytest.raises(DataError) as caught:
        download(archive, into=tmp_path, folder="set", missing="set: not found")
    assert list(tmp_path.iterdir()) == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_wrong_checksum_is_refused(tmp_path, serve):
    archive = Archive(address=f"{serve(GOOD)}/set.tar.gz", md5="0" * 32)
    expected = (
        f"set: not found; {archive.address} has md5 {hashlib.md5(GOOD).hexdigest()}, expected {'0' * 32}; "
        "put set.tar.gz, unpacked, there"
    )
    assert refused(tmp_path, archive) == expected


def test_a_download_that_ends_early_is_refused(tmp_path, serve):
    archive = archive_of(serve(GOOD[:100], promised=len(GOOD)), GOOD)
    assert refused(tmp_path, archive).startswith(f"set: not found; {archive.address}")


def test_a_missing_address_is_named(tmp_path, serve):
    archive = Archive(address=f"{serve(GOOD)}/gone.tar.gz", md5="")
    assert refused(tmp_path, archive) == (
        f"set: not found and {archive.address} cannot be reached (Not Found); put gone.tar.gz, unpacked, there"
    )


def test_a_connection_refused_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    message = refused(tmp_path, Archive(address="http://127.0.0.1:9/set.tar.gz", md5=""))
    assert "cannot be reached ([Errno 111] Connection refused)" in message


def test_an_archive_with_paths_outside_is_refused(tmp_path, serve):
    hostile = packed("../outside", b"x")
    message = refused(tmp_path, archive_of(serve(hostile), hostile))
    assert "download failed" in message
    assert not (tmp_path.parent / "outside").exists()


def test_an_archive_without_the_folder_is_refused(tmp_path, serve):
    other = packed("other/train.bin", b"x")
    assert "No such file or directory" in refused(tmp_path, archive_of(serve(other), other))


def test_a_connection_that_breaks_is_named(tmp_path, monkeypatch):
    def broken(address, timeout):
        raise HTTPException("garbled answer")

    monkeypatch.setattr("urllib.request.urlopen", broken)
    archive = Archive(address="https://example.org/set.tar.gz", md5="")
    assert "cannot be reached (garbled answer)" in refused(tmp_path, archive)


def test_a_target_that_is_not_a_folder_is_named_and_the_response_closed(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    answer = io.BytesIO(GOOD)
    monkeypatch.setattr("urllib.request.urlopen", lambda address, timeout: answer)
    with pytest.raises(DataError, match="download failed"):
        download(archive_of("http://x", GOOD), into=tmp_path / "file", folder="set", missing="set: not found")
    assert answer.closed


def test_a_folder_created_meanwhile_is_kept(tmp_path, serve):
    (tmp_path / "set").mkdir()
    (tmp_path / "set/train.bin").write_bytes(b"of another process")
    download(archive_of(serve(GOOD), GOOD), into=tmp_path, folder="set", missing="set: not found")
    assert (tmp_path / "set/train.bin").read_bytes() == b"of another process"
