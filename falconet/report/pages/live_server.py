"""An HTTP server on loopback for pages that follow runs; it serves no files, only the paths that a site lists."""

import contextlib
import errno
import ipaddress
import sys
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, NamedTuple, Protocol
from urllib.parse import unquote

from falconet.errors import ConfigError

HOST, PORT, TRIED = "127.0.0.1", 8600, 20  # ports that are tried in turn
IDLE_SECONDS = 60.0  # for a client to send a request, or to take an answer
HEADERS = {
    "Cache-Control": "no-store",
    "Connection": "close",  # else every open page would hold a thread
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Answer(NamedTuple):
    """A response; a `body` of None means that nothing is new."""

    kind: Literal["text/html", "application/json"]
    body: str | None


class Pages(Protocol):
    """Answers paths."""

    def answer(self, path: tuple[str, ...], since: str) -> Answer | None: ...  # None: there is no such page


@contextlib.contextmanager
def listening(pages: Pages, port: int | Literal["auto"]) -> Iterator[ThreadingHTTPServer]:
    """A server at a port, 0 for any free one, or `auto` for the first free one from 8600 on."""

    class Handler(PageHandler):
        site = pages

    server = None
    for tried in range(PORT, PORT + TRIED) if port == "auto" else (port,):
        try:
            server = Server((HOST, tried), Handler)
            break
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                why = f"port {tried} is in use; choose another port, or 0 for any free one"
            elif error.errno == errno.EACCES:
                why = f"port {tried} needs privileges; choose a port from 1024 up"
            else:
                why = error.strerror or str(error)
            if port != "auto" or error.errno != errno.EADDRINUSE:
                raise ConfigError(f"--port: cannot listen on '{HOST}': {why}") from error
    if server is None:
        raise ConfigError(f"--port: ports {PORT} to {PORT + TRIED - 1} are in use; expected another one, or 0")
    try:
        yield server
    finally:
        server.server_close()


class Server(ThreadingHTTPServer):
    """A server with a thread per connection; no thread delays shutdown."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Print an error of ours; a client that disconnects is not an error."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class PageHandler(BaseHTTPRequestHandler):
    """Answers GET and HEAD."""

    protocol_version = "HTTP/1.1"
    timeout = IDLE_SECONDS
    site: Pages

    def do_GET(self) -> None:
        # A web page can lead its own name to 127.0.0.1 after it was loaded (DNS rebinding), but still sends that name.
        if not is_own(self.headers.get("Host", "localhost")):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", "this server answers to 127.0.0.1 and localhost only\n")
            return
        asked, _, query = self.path.partition("?")
        path = tuple(unquote(part, errors="surrogateescape") for part in asked.split("/") if part)
        answer = self.site.answer(path, query.removeprefix("since="))
        if answer is None:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", "there is no such page\n")
        elif answer.body is None:
            self._send(HTTPStatus.NO_CONTENT, answer.kind, "")
        else:
            self._send(HTTPStatus.OK, answer.kind, answer.body)

    do_HEAD = do_GET  # noqa: N815

    def _send(self, status: HTTPStatus, kind: str, body: str) -> None:
        data = body.encode("utf-8", "backslashreplace")
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def version_string(self) -> str:
        return "falconet"

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the terminal shows where the page is."""


def is_own(host: str) -> bool:
    """Whether a Host header names this machine, with any port: the page may come through a tunnel."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower().removesuffix(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
