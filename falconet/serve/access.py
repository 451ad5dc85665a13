"""Who may send requests: API keys, the names that the server may be called by, and web pages of other origins."""

import hashlib
import hmac
import ipaddress
import os
import re
import stat
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Middleware

from falconet.config.tool_options import Access as AccessOptions
from falconet.errors import ConfigError
from falconet.serve.protocol import HEADER
from falconet.serve.refusals import ForbiddenError, UnauthorizedError

KEY = "FALCONET_API_KEY"  # the environment variable
SHORTEST = 16  # characters of a key
MOST = 1 << 20  # bytes in a file of keys or in a certificate
HEALTH = frozenset({"/v2/health/live", "/v2/health/ready"})  # for probes, which know neither a key nor a name
# What a browser needs before a person can type a key: the page, its documentation, and their files.
PAGES = re.compile(r"/|/(page|docs)(/.*)?|/openapi\.json")  # matches routes, because paths have several spellings
METHODS = "GET, POST"
SENT = f"Authorization, Content-Type, {HEADER}, traceparent, tracestate, X-API-Key, X-Request-Id"  # by pages
SHOWN = f"{HEADER}, Retry-After, X-Request-Id"  # to pages, besides the answer
FOR_SECONDS = "600"  # for which a browser remembers what is allowed
_KEY = re.compile(r"[\x21-\x7e]+")  # what a header can carry
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._-]+(:\d{1,5})?|[a-z][a-z0-9+.-]*://\[[0-9a-f:.]+\](:\d{1,5})?")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Keys:
    """API keys; only their digests are kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]
        assert self._digests

    def require(self, sent: Mapping[str, str]) -> None:
        """Raise UnauthorizedError unless the headers, or a gRPC call's metadata, have a key."""
        scheme, _, bearer = sent.get("authorization", "").partition(" ")
        given = [bearer.strip()] if scheme.lower() == "bearer" else []
        if "x-api-key" in sent:
            given.append(sent["x-api-key"])
        # All are compared, whichever is right, so that the time taken reveals nothing.
        fitting = [hmac.compare_digest(_digest(key), each) for key in given for each in self._digests]
        if not any(fitting):
            what = "not one of the server's" if given else "required"
            raise UnauthorizedError(f"API key: {what}; send Authorization: Bearer KEY, or X-API-Key: KEY")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(file: Path | None, environment: Mapping[str, str] = os.environ) -> Keys | None:
    """Read the keys in a file and in the environment; None if neither is given."""
    keys = _keys_in(file) if file is not None else []
    if KEY in environment:
        keys.append(_checked(environment[KEY], KEY))
    return Keys(keys) if keys else None


def _keys_in(file: Path) -> list[str]:
    lines = private(file, "--api-key-file").decode("utf-8", "surrogateescape").splitlines()
    stripped = [line.strip() for line in lines]
    found = [
        _checked(line, f"--api-key-file: {file}, line {number}")
        for number, line in enumerate(stripped, 1)
        if line and not line.startswith("#")
    ]
    if not found:
        raise ConfigError(
            f"--api-key-file: {file}: has no key; expected one per line, as `openssl rand -hex 32` prints"
        )
    return found


def _checked(key: str, where: str) -> str:
    """Return a key unless it is a bad one; no message shows it."""
    if len(key) < SHORTEST:
        raise ConfigError(f"{where}: a key of {len(key)} characters; expected at least {SHORTEST}")
    if not _KEY.fullmatch(key):
        raise ConfigError(f"{where}: a key with spaces, or characters that are not ASCII, which no header can carry")
    return key


def private(file: Path, option: str) -> bytes:
    """Read a file that only its owner and group may read, as Kubernetes mounts a Secret."""
    try:
        with file.open("rb") as opened:
            if stat.S_IMODE(os.fstat(opened.fileno()).st_mode) & stat.S_IRWXO:
                raise ConfigError(f"{option}: {file}: may be read by every user of this machine; run chmod o= {file}")
            content = opened.read(MOST + 1)
    except OSError as error:
        raise ConfigError(f"{option}: {file}: {error.strerror or error}") from error
    if len(content) > MOST:
        raise ConfigError(f"{option}: {file}: is longer than {MOST:,} bytes")
    return content


@dataclass(frozen=True, kw_only=True)
class Access:
    """The requirements that a request must meet to be answered."""

    keys: Keys | None = None  # None: no key is required
    hosts: frozenset[str] | None = None  # names in lower case, without a port; None: any
    origins: frozenset[str] = frozenset()  # web pages elsewhere; "*": any

    def guard(self, app: web.Application) -> None:
        """Guard an application's requests, inside the middlewares that it has so far."""
        app.middlewares.append(self._guarded())
        if self.origins:
            app.on_response_prepare.append(self._shown_to_pages)

    def _guarded(self) -> Middleware:
        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            route = route_of(request)
            if route in HEALTH:
                return await handler(request)
            self._require_host(request.headers.get("Host"))
            origin = request.headers.get("Origin")
            if origin is not None:
                self._require_origin(request, origin)
                if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
                    return _permission()
            if self.keys is not None and not PAGES.fullmatch(route):
                self.keys.require(request.headers)
            return await handler(request)

        return guarded

    def require(self, headers: Mapping[str, str]) -> None:
        """Raise a refusal unless a request that does not come from a web page may be answered."""
        self._require_host(headers.get("Host"))
        if self.keys is not None:
            self.keys.require(headers)

    def _require_host(self, host: str | None) -> None:
        """Refuse a name that is not the server's.

        A web page can point its own name to 127.0.0.1 after it was loaded (DNS rebinding). For the browser, a server
        there is then part of that page, but the browser still sends the page's name.
        """
        if self.hosts is None or host is None:  # browsers always send one
            return
        name = host_name(host)
        if name not in self.hosts and not (is_loopback(name) and "localhost" in self.hosts):
            raise ForbiddenError(f"Host: this server is not '{host[:80]}'; --allowed-host names further ones")

    def _require_origin(self, request: web.Request, origin: str) -> None:
        """Refuse requests that change or compute something for a page from elsewhere.

        A browser sends them without asking first, and only hides the answer.
        """
        is_own = origin.partition("://")[2] == request.headers.get("Host")
        is_harmless = request.method in ("GET", "HEAD")
        if not (is_own or is_harmless or self._allows(origin)):
            raise ForbiddenError(f"Origin: web pages of '{origin[:80]}' may not send requests; --cors-origin allows it")

    def _allows(self, origin: str) -> bool:
        return "*" in self.origins or origin in self.origins

    async def _shown_to_pages(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let web pages of allowed origins read an answer; their requests carry no cookies or certificates."""
        origin = request.headers.get("Origin")
        if "*" not in self.origins:
            response.headers.add("Vary", "Origin")
        if origin is not None and self._allows(origin):
            response.headers["Access-Control-Allow-Origin"] = "*" if "*" in self.origins else origin
            response.headers["Access-Control-Expose-Headers"] = SHOWN


OPEN = Access()


def route_of(request: web.Request) -> str:
    """The pattern of a request's address, such as /v2/models/{model}; empty for an unknown address or method."""
    resource = request.match_info.route.resource
    return "" if resource is None else resource.canonical


def _permission() -> web.Response:
    """The answer to a browser that asks whether a page may send a request."""
    allowed = {"Methods": METHODS, "Headers": SENT}
    headers = {f"Access-Control-Allow-{name}": value for name, value in allowed.items()}
    return web.Response(status=204, headers={**headers, "Access-Control-Max-Age": FOR_SECONDS})


def host_name(host: str) -> str:
    """A Host header without its port, in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().removesuffix(".")


def is_loopback(name: str) -> bool:
    """Whether a name means this machine in every browser: it needs no name server, so that no page can claim it."""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def from_options(options: AccessOptions, *, host: str) -> Access:
    """The requirements that the options set for a server that listens on `host`; ConfigError for a mistake in them."""
    for origin in options.cors_origin:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--cors-origin: got '{origin}', expected * or a scheme, a name and perhaps a port, in lower case,"
                " as in https://example.org:8443"
            )
    names = {host_name(name) for name in options.allowed_host}
    own = {"localhost", host.lower()} if is_loopback(host.lower()) else set()
    return Access(
        keys=read_keys(options.api_key_file),
        hosts=frozenset(names | own) or None,
        origins=frozenset(options.cors_origin),
    )
