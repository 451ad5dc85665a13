"""Who may send requests: keys, names of the server, and web pages of other origins."""

import json
import os
import re

import pytest

from falconet.commands.serve import exposed
from falconet.config.tool_options import Access as Options
from falconet.errors import ConfigError
from falconet.serve import access
from falconet.serve.access import Access, Keys, from_options, read_keys
from falconet.serve.refusals import UnauthorizedError
from served import NAME, PATH, binary, pixels, running

KEY, OTHER = "k" * 32, "another-key-0123456789"


def key_file(folder, text, mode=0o600):
    file = folder / "keys"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_keys_are_read_from_a_file_without_comments_and_blank_lines(tmp_path):
    keys = read_keys(key_file(tmp_path, f"# ours\n\n{KEY}\n  {OTHER}  \n"), {})
    for right in (KEY, OTHER):
        keys.require({"x-api-key": right})
    with pytest.raises(UnauthorizedError):
        keys.require({"x-api-key": "# ours"})


def test_a_key_in_the_environment_is_accepted_besides_those_in_the_file(tmp_path):
    for keys in (read_keys(None, {access.KEY: KEY}), read_keys(key_file(tmp_path, OTHER), {access.KEY: KEY})):
        keys.require({"authorization": f"Bearer {KEY}"})
    assert read_keys(None, {}) is None


BAD = {
    "no key": ("# none\n", 0o600, "has no key"),
    "readable by all": (KEY, 0o604, "may be read by every user"),
    "writable by all": (KEY, 0o602, "may be read by every user"),
    "short": (f"{KEY}\nshort\n", 0o600, "line 2: a key of 5 characters; expected at least 16"),
    "not ASCII": ("schl\u00fcssel-schl\u00fcssel", 0o600, "line 1: a key with spaces"),
    "spaces": ("one two three four", 0o600, "line 1: a key with spaces"),
    "long": ("x" * (access.MOST + 1), 0o600, "is longer than"),
}


@pytest.mark.parametrize(("text", "mode", "message"), BAD.values(), ids=BAD)
def test_a_bad_file_of_keys_is_refused_in_a_line_that_shows_no_key(tmp_path, text, mode, message):
    with pytest.raises(ConfigError) as caught:
        read_keys(key_file(tmp_path, text, mode), {})
    assert message in str(caught.value)
    assert not any(word in str(caught.value) for word in (KEY, "short\n", "two", "schl"))


def test_a_secret_that_the_servers_group_may_read_is_accepted(tmp_path):
    read_keys(key_file(tmp_path, KEY, 0o440), {}).require({"x-api-key": KEY})


def test_a_file_that_is_missing_and_an_empty_variable_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--api-key-file: .*No such file"):
        read_keys(tmp_path / "missing", {})
    with pytest.raises(ConfigError, match="FALCONET_API_KEY: a key of 0 characters"):
        read_keys(None, {access.KEY: ""})


SENT = {
    "bearer": ({"authorization": f"Bearer {KEY}"}, True),
    "bearer in lower case": ({"authorization": f"bearer  {KEY}"}, True),
    "header": ({"x-api-key": KEY}, True),
    "a wrong one beside a right one": ({"authorization": f"Bearer {OTHER}", "x-api-key": KEY}, True),
    "nothing": ({}, False),
    "another scheme": ({"authorization": f"Basic {KEY}"}, False),
    "a wrong one": ({"x-api-key": OTHER}, False),
    "the beginning": ({"x-api-key": KEY[:-1]}, False),
    "the key and more": ({"x-api-key": KEY + "k"}, False),
    "empty": ({"authorization": "Bearer ", "x-api-key": ""}, False),
    "not ASCII": ({"x-api-key": "\udcff"}, False),
}


@pytest.mark.parametrize(("sent", "is_right"), SENT.values(), ids=SENT)
def test_a_key_is_taken_from_either_header(sent, is_right):
    keys = Keys([KEY])
    if is_right:
        keys.require(sent)
        return
    with pytest.raises(UnauthorizedError) as caught:
        keys.require(sent)
    assert KEY[:8] not in str(caught.value)
    assert OTHER not in str(caught.value)


def test_keys_are_not_kept():
    assert KEY.encode() not in repr(vars(Keys([KEY]))).encode()


@pytest.fixture(scope="module")
def locked():
    with running(access=Access(keys=Keys([KEY]), origins=frozenset({"https://example.org"}))) as found:
        yield found


OPEN = ("/v2/health/live", "/v2/health/ready")
CLOSED = ("/v2", "/metrics", f"/v2/models/{NAME}", "/v2/models/stats", "/nothing", "/v2/health", "/page/../metrics")


@pytest.mark.parametrize("path", OPEN)
def test_probes_need_no_key(locked, path):
    assert locked.request(None, method="GET", path=path)[0] == 200


@pytest.mark.parametrize("path", CLOSED)
def test_everything_else_needs_a_key(locked, path):
    status, headers, answer = locked.request(None, method="GET", path=path)
    assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
    assert json.loads(answer)["error"].startswith("API key: required; send Authorization: Bearer KEY")
    status, _, _ = locked.request(None, {"X-API-Key": KEY}, method="GET", path=path)
    assert status == (404 if path in ("/nothing", "/v2/health", "/page/../metrics") else 200)


def test_requests_with_a_key_are_answered(locked):
    body, headers = binary(pixels(1))
    assert locked.request(body, headers)[0] == 401
    assert locked.request(body, {**headers, "Authorization": f"Bearer {KEY}"})[0] == 200
    status, _, answer = locked.request(body, {**headers, "Authorization": f"Bearer {OTHER}"})
    assert status == 401
    assert OTHER not in answer.decode()


def test_the_page_and_its_files_need_no_key():
    for open_to_all in ("/", "/docs", "/docs/swagger-ui.css", "/openapi.json", "/page/page.js", "/page"):
        assert access.PAGES.fullmatch(open_to_all)
    for closed in ("", "/predict", "/metrics", "/v2", "/pages", "/openapi.jsonx", "//page/x"):
        assert not access.PAGES.fullmatch(closed)


def test_without_a_key_exactly_the_page_its_files_and_the_probes_are_answered(locked):
    routes = {resource.canonical for resource in locked.front.application().router.resources()}
    plain = {route for route in routes if "{" not in route}
    is_open = {route for route in plain if locked.request(None, method="GET", path=route)[0] != 401}
    pages = {route for route in routes if route.startswith(("/page/", "/docs/"))}
    assert is_open == {"/", "/docs", "/openapi.json", *OPEN, *pages}
    assert "/page/page.js" in pages


def test_the_page_is_open_by_its_route_not_by_how_its_address_is_spelled():
    """An address that only looks like a file of the page still needs a key."""
    with running(access=Access(keys=Keys([KEY]))) as found:
        for path in ("/page/x", "/docs%2F..%2Fmetrics", "/page/%2e%2e/metrics", "//metrics"):
            assert found.request(None, method="GET", path=path)[0] == 401


# The Host header.


def test_a_loopback_server_answers_only_to_its_own_names():
    with running(access=from_options(Options(), host="127.0.0.1")) as found:
        for host in ("localhost", "localhost:1", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000", "LOCALHOST."):
            assert found.request(None, {"Host": host}, method="GET", path="/v2")[0] == 200, host
        for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", "10.0.0.1", ""):
            status, _, answer = found.request(None, {"Host": host}, method="GET", path="/v2")
            assert status == 403, host
            assert json.loads(answer)["error"].startswith(f"Host: this server is not '{host}'; --allowed-host")
        assert found.request(None, {"Host": "evil.example"}, method="GET", path="/v2/health/live")[0] == 200


def test_further_names_are_allowed_by_an_option():
    allowed = from_options(Options(allowed_host=("Photos.example.org:443",)), host="::1")
    with running(access=allowed) as found:
        for host in ("photos.example.org", "photos.example.org:8443", "localhost"):
            assert found.request(None, {"Host": host}, method="GET", path="/v2")[0] == 200
        assert found.request(None, {"Host": "x.example.org"}, method="GET", path="/v2")[0] == 403


def test_a_server_on_all_interfaces_answers_to_any_name_unless_told_otherwise():
    assert from_options(Options(), host="0.0.0.0").hosts is None
    assert from_options(Options(allowed_host=("a.example",)), host="0.0.0.0").hosts == {"a.example"}


# Web pages of other origins.

ORIGIN = {"Origin": "https://example.org", "X-API-Key": KEY}


def test_pages_of_other_origins_cannot_send_requests():
    body, headers = binary(pixels(1))
    with running() as found:
        for origin in ("https://evil.example", "null", "http://127.0.0.1:1"):
            status, sent, answer = found.request(body, {**headers, "Origin": origin})
            assert status == 403
            assert json.loads(answer)["error"].startswith(f"Origin: web pages of '{origin}' may not send requests")
            assert "Access-Control-Allow-Origin" not in sent
        assert found.batcher.counts.requests == 0
        own = f"http://127.0.0.1:{found.port}"
        status, sent, _ = found.request(body, {**headers, "Origin": own})
        assert status == 200
        assert "Access-Control-Allow-Origin" not in sent
        preflight = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
        assert found.request(None, preflight, method="OPTIONS", path=PATH)[0] == 403


def test_pages_of_allowed_origins_can_send_requests_and_read_answers(locked):
    body, headers = binary(pixels(1))
    status, sent, _ = locked.request(body, {**headers, **ORIGIN})
    assert (status, sent["Access-Control-Allow-Origin"], sent["Vary"]) == (200, "https://example.org", "Origin")
    assert "Access-Control-Allow-Credentials" not in sent
    status, sent, _ = locked.request(body, {**headers, "Origin": "https://example.org"})
    assert (status, sent["Access-Control-Allow-Origin"]) == (401, "https://example.org"), "errors are readable too"
    status, sent, _ = locked.request(None, ORIGIN, method="GET", path="/nothing")
    assert (status, sent["Access-Control-Allow-Origin"]) == (404, "https://example.org")
    status, sent, _ = locked.request(None, {"X-API-Key": KEY}, method="GET", path="/v2")
    assert (status, sent["Vary"]) == (200, "Origin")


def test_a_browser_may_ask_without_a_key_what_is_allowed(locked):
    ask = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    status, sent, answer = locked.request(None, ask, method="OPTIONS", path=PATH)
    assert (status, answer) == (204, b"")
    assert sent["Access-Control-Allow-Origin"] == "https://example.org"
    assert sent["Access-Control-Allow-Methods"] == "GET, POST"
    assert {"authorization", "x-api-key", "content-type"} <= set(
        re.split(", ", sent["Access-Control-Allow-Headers"].lower())
    )


def test_any_origin_can_be_allowed():
    with running(access=Access(origins=frozenset({"*"}))) as found:
        status, sent, _ = found.request(None, {"Origin": "null"}, method="GET", path="/v2")
        assert (status, sent["Access-Control-Allow-Origin"]) == (200, "*")
        assert "Vary" not in sent


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/", "https://Example.org", "https://a b", "**"])
def test_an_origin_that_no_browser_sends_is_refused(origin):
    with pytest.raises(ConfigError, match="--cors-origin: got"):
        from_options(Options(cors_origin=(origin,)), host="127.0.0.1")


def test_origins_that_browsers_send_are_accepted():
    origins = ("*", "https://example.org", "http://localhost:3000", "http://[::1]:80", "chrome-extension://abc")
    assert from_options(Options(cors_origin=origins), host="127.0.0.1").origins == set(origins)


def test_the_environment_is_read_for_a_key(monkeypatch):
    monkeypatch.setenv(access.KEY, KEY)
    assert os.environ[access.KEY] == KEY
    from_options(Options(), host="127.0.0.1").keys.require({"x-api-key": KEY})


def test_a_server_that_others_can_reach_reports_what_they_can_do():
    keys = Access(keys=Keys([KEY]))
    assert exposed("127.0.0.1", Access(), None) == []
    assert exposed("0.0.0.0", Access(), None) == [
        "everyone who can reach 0.0.0.0 may use this server; --api-key-file admits only holders of a key"
    ]
    assert exposed("0.0.0.0", keys, None) == ["keys and photos travel unencrypted; --tls-certificate encrypts them"]
