"""The pages of `falconet watch` over HTTP: what is new, who may ask, and that nothing else is told."""

import contextlib
import http.client
import json
import os
import shutil
import socket
import threading

import pytest

from falconet.errors import ConfigError, DataError
from falconet.report.pages import live_server
from falconet.report.pages.live_site import Site
from growing_runs import growing
from report_runs import write_run


@contextlib.contextmanager
def answering(folder):
    """Requests to a server of a folder's pages, whose clock makes every request look at the files."""
    seconds = iter(range(0, 10**6, 10))
    with live_server.listening(Site(folder, clock=lambda: next(seconds)), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()

        def ask(path, method="GET", **headers):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
            try:
                connection.request(method, path, headers=headers)
                answer = connection.getresponse()
                return answer.status, answer.read().decode(), answer.headers
            finally:
                connection.close()

        try:
            yield ask
        finally:
            server.shutdown()
            thread.join()


def version_in(page):
    return json.loads(page.partition('id="data">')[2].partition("</script>")[0])["version"]


def test_only_what_has_changed_is_sent(tmp_path):
    with growing(tmp_path / "run", 2) as run, answering(run.folder) as ask:
        status, page, _ = ask("/")
        assert status == 200
        version = version_in(page)
        run.grow()
        status, news, _ = ask(f"/live.json?since={version}")
        assert status == 200
        news = json.loads(news)
        assert "<dd>85.00 %" not in news["html/headline"]
        assert "80.00 %" in news["html/headline"]  # 100 - 60 / 3
        assert news["data/charts"][0]["data"][0] == [1, 2, 3]
        assert "html/options" not in news
        assert "html/wrong" not in news
        run.end()
        version = news["version"]
        news = json.loads(ask(f"/live.json?since={version}")[1])
        assert "finished" in news["html/header"]
        assert ask(f"/live.json?since={news['version']}")[0] == 204


@pytest.mark.parametrize("since", ["", "run-deadbeef-1", "%00", "run--", "x" * 3000])
def test_a_page_of_another_start_is_told_to_load_anew(tmp_path, since):
    with growing(tmp_path / "run", 1) as run, answering(run.folder) as ask:
        assert json.loads(ask(f"/live.json?since={since}")[1]) == {"reload": True}


def test_a_folder_has_a_page_of_all_runs_and_one_of_each(tmp_path):
    write_run(tmp_path / "runs/old run")
    with growing(tmp_path / "runs/new", 1), answering(tmp_path / "runs") as ask:
        _, page, _ = ask("/")
        assert page.index('href="/run/new/"') < page.index('href="/run/old%20run/"')
        status, page, _ = ask("/run/old%20run/")
        assert (status, "<h1>old run " in page, 'href="/"' in page) == (200, True, True)
        version = version_in(ask("/")[1])
        write_run(tmp_path / "runs/third")
        assert 'href="/run/third/"' in json.loads(ask(f"/live.json?since={version}")[1])["html/runs"]


@pytest.mark.parametrize(
    "path",
    [
        "/run/..%2f..%2fetc/",
        "/run/../secret/",
        "/run/%2e%2e/",
        "/run/secret/",
        "/run/link/",
        "/run/old/config.yaml",
        "/config.yaml",
        "/run/",
        "//[",
        "/run/%00/",
        "/run/old/live.json/x",
    ],
)
def test_nothing_else_is_told(tmp_path, path):
    write_run(tmp_path / "secret")
    write_run(tmp_path / "runs/old")
    (tmp_path / "runs/link").symlink_to(tmp_path / "secret")
    with answering(tmp_path / "runs") as ask:
        status, body, _ = ask(path)
        assert (status, body) == (404, "there is no such page\n")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8600", 200),
        ("localhost", 200),
        ("LOCALHOST.:1", 200),
        ("[::1]:8600", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
def test_only_names_of_this_machine_are_answered(tmp_path, host, status):
    with answering(write_run(tmp_path / "run")) as ask:
        found, body, headers = ask("/", Host=host)
        assert found == status
        assert ("resnet8" in body) == (status == 200)
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert "Python" not in headers["Server"]


def test_nothing_but_get_and_head_is_understood(tmp_path):
    with answering(write_run(tmp_path / "run")) as ask:
        assert ask("/", method="POST")[0] == 501
        status, body, headers = ask("/", method="HEAD")
        assert (status, body, int(headers["Content-Length"]) > 1000) == (200, "", True)


def test_the_server_listens_on_loopback_only(tmp_path):
    with live_server.listening(Site(write_run(tmp_path / "run")), 0) as server:
        assert server.server_address[0] == "127.0.0.1"


def test_a_taken_port_is_one_line_and_auto_takes_the_next(tmp_path, monkeypatch):
    site = Site(write_run(tmp_path / "run"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is in use"), live_server.listening(site, port):
            pass
        monkeypatch.setattr(live_server, "PORT", port)
        with live_server.listening(site, "auto") as server:
            assert port < server.server_address[1] < port + live_server.TRIED
        monkeypatch.setattr(live_server, "TRIED", 1)
        with pytest.raises(ConfigError, match="are in use"), live_server.listening(site, "auto"):
            pass


def test_what_is_not_there_yet_is_waited_for(tmp_path):
    (tmp_path / "run").mkdir()
    with answering(tmp_path / "run") as ask:
        _, page, _ = ask("/")
        assert "there is no run in" in page
        assert ask(f"/live.json?since={version_in(page)}")[0] == 204
        (tmp_path / "run").rmdir()
        write_run(tmp_path / "run")
        assert json.loads(ask(f"/live.json?since={version_in(page)}")[1]) == {"reload": True}
        assert "resnet8-cifar" in ask("/")[1]
    (tmp_path / "file").touch()
    with pytest.raises(DataError):
        Site(tmp_path / "file")


def test_a_run_that_vanishes_stays_on_its_page_with_a_note(tmp_path):
    with growing(tmp_path / "run", 2) as run, answering(run.folder) as ask:
        version = version_in(ask("/")[1])
        shutil.rmtree(run.folder)
        news = json.loads(ask(f"/live.json?since={version}")[1])
        assert "no such folder" in news["html/notes"]
        assert "70.00 %" in ask("/")[1]


def test_the_files_are_looked_at_once_a_second_however_many_ask(tmp_path):
    seconds, looks = [100.0], []
    site = Site(write_run(tmp_path / "run"), clock=lambda: seconds[0])
    plain = site._home.look
    site._home.look = lambda: (looks.append(1), plain())
    for _ in range(5):
        site.answer((), "")
    assert len(looks) == 1
    seconds[0] += 1.0
    site.answer((), "")
    assert len(looks) == 2


def test_names_that_are_no_text_are_shown_and_found(tmp_path):
    name = os.fsdecode(b"\xff<b>")
    write_run(tmp_path / "runs" / name)
    with answering(tmp_path / "runs") as ask:
        assert 'href="/run/%FF%3Cb%3E/"' in ask("/")[1]
        status, page, _ = ask("/run/%FF%3Cb%3E/")
        assert (status, "<b>" in page.partition("<h1>")[2].partition("</h1>")[0]) == (200, False)
