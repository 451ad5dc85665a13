"""A server's models are found by name and version, swapped without losing a request, and closed when unused."""

import asyncio
import contextlib
import errno
import http.client
import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from falconet.config.commands import ServeOptions
from falconet.config.load import load_options, read_line
from falconet.data.encoded import PhotoDecoder
from falconet.errors import CheckpointError, ConfigError, DeviceError
from falconet.infer.predictor import Lanes
from falconet.serve import app, connections, served_runs
from falconet.serve import repository as repositories
from falconet.serve.batching import Policy
from falconet.serve.bodies import Memory
from falconet.serve.refusals import RequestError, UnavailableError, UnknownModelError
from falconet.serve.repository import Opened, Repository, Source
from served import LIMIT, SIDE, about, decoded, pixels, until


class Weights:
    """A model whose scores are the number of its version."""

    def __init__(self, name, version=1):
        self.name, self.version, self.error, self.opened = name, version, None, 0
        self.go = threading.Event()  # before a batch is computed
        self.go.set()

    def open(self):
        if self.error:
            raise CheckpointError(self.error)
        self.opened += 1
        version = self.version

        def lane(portions):
            assert self.go.wait(LIMIT)
            return [np.full((len(portion), 5), version, np.float32) for portion in portions]

        served = about(max_batch=8, name=self.name, version=str(version))
        return Opened(served, Lanes(each=(lane,)), decoded, stamp=version, about="")

    @property
    def source(self):
        return Source(open=self.open, stamp=lambda: self.version)


def repository(*models, preferred=None):
    found = Repository(
        sources=lambda: {each.name: each.source for each in models},
        policy=lambda served: Policy(max_batch=served.max_batch, max_delay=0.0, max_queue=100),
        preferred=preferred,
    )
    for each in models:
        found.adopt(each.name, each.open())
    return found


def in_loop(scenario):
    return asyncio.run(asyncio.wait_for(scenario, LIMIT))


async def answered(found, name=""):
    """The version that answers now."""
    with (await found.find(name)).used() as model:
        return int((await model.computed(pixels(1))).scores[0, 0])


def find(found, name="", version=""):
    return in_loop(found.find(name, version))


def test_a_model_is_found_by_name_and_version():
    found = repository(Weights("birds", 7), Weights("cats", 2))
    assert find(found, "birds").served.version == "7"
    assert find(found, "cats", "2").served.name == "cats"
    assert found.present("birds") is found.present("birds", "7") is find(found, "birds")
    assert found.present("birds", "6") is found.present("bird") is None
    with pytest.raises(
        UnknownModelError, match=r"^there is no model 'bird'; this server has 'birds', 'cats'; did you mean 'birds'\?$"
    ):
        find(found, "bird")
    with pytest.raises(UnknownModelError, match=r"^birds has no version '6'; its version is 7$"):
        find(found, "birds", "6")


def test_a_request_without_a_name_gets_the_preferred_model_or_the_only_one():
    assert find(repository(Weights("birds"))).served.name == "birds"
    assert find(repository(Weights("birds"), Weights("cats"), preferred="cats")).served.name == "cats"
    with pytest.raises(RequestError, match=r"^expected the name of a model, \?model=NAME, one of birds, cats$"):
        find(repository(Weights("birds"), Weights("cats")))
    with pytest.raises(UnavailableError, match=r"^no model is loaded$"):
        find(repository())


def test_requests_in_progress_end_with_the_version_that_they_began_with():
    birds = Weights("birds", 1)

    async def scenario():
        found = repository(birds)
        birds.go.clear()
        begun = asyncio.create_task(answered(found))
        await asyncio.sleep(0.01)
        older, birds.version = await found.find(), 2
        await found.load("birds")
        assert (await found.find()).served.version == "2"
        assert not begun.done()
        birds.go.set()
        assert (await begun, await answered(found)) == (1, 2)
        await older.retire()
        return found.counts

    counts = in_loop(scenario())
    assert (counts.requests, counts.images, counts.dropped) == (2, 2, 0)  # the retired model's are counted, too


def test_a_long_name_is_refused_without_a_search_for_similar_ones(monkeypatch):
    searched = []
    monkeypatch.setattr(repositories, "did_you_mean", lambda name, _: searched.append(name) or "")
    with pytest.raises(UnknownModelError, match=r"^there is no model 'b{80}'; this server has 'birds'$"):
        find(repository(Weights("birds")), "b" * 4_000_000)
    assert [len(name) for name in searched] == [80]  # characters; a search in 4,000,000 takes half a second


def test_a_model_without_room_in_memory_is_named_and_the_older_one_stays(monkeypatch):
    birds = Weights("birds")

    async def scenario():
        found = repository(birds)
        birds.version = 2
        monkeypatch.setattr(birds, "open", lambda: bytearray(1 << 60))
        with pytest.raises(DeviceError, match=r"^out of memory on the host; fewer models, "):
            await found.load("birds")
        return await answered(found), found.index()[0].reason

    assert in_loop(scenario()) == (1, "out of memory on the host; fewer models, or a smaller --max-batch, need less")


def test_loads_go_on_when_their_client_leaves_one_at_a_time():
    birds, go, opening, most = Weights("birds"), threading.Event(), [], []

    def slowly(opened=birds.open):
        opening.append(1)
        most.append(len(opening))
        assert go.wait(LIMIT)
        opening.pop()
        return opened()

    async def scenario():
        found = repository(birds)
        birds.version, birds.open = 2, slowly
        for _ in range(5):
            leaving = asyncio.create_task(found.load("birds"))
            await asyncio.sleep(0.01)
            leaving.cancel()
        go.set()
        while await answered(found) != 2:
            await asyncio.sleep(0.001)

    in_loop(scenario())
    assert set(most) == {1}


def test_a_run_that_vanishes_as_it_is_opened_does_not_end_the_watching():
    birds, said, gone = Weights("birds", 1), [], []

    async def scenario():
        found = repository(birds)
        known = found.sources
        found.sources = lambda: {} if gone and gone.pop() else known()
        watching = asyncio.create_task(found.watch(seconds=0.001, say=said.append))
        gone[:] = [True, False]  # it is there for the first look, and not for the second
        birds.version = 2
        while not said:
            await asyncio.sleep(0.001)
        birds.version = 3
        while await answered(found) != 3:
            await asyncio.sleep(0.001)
        watching.cancel()

    in_loop(scenario())
    assert said[0] == "birds: stays at version 1: is gone"


def test_a_model_that_is_used_is_not_closed():
    birds = Weights("birds")

    async def scenario():
        found = repository(birds)
        with (await found.find()).used() as model:
            await found.unload("birds")
            await asyncio.sleep(0.05)
            assert (await model.computed(pixels(1))).scores[0, 0] == 1
        with pytest.raises(UnavailableError, match=r"^birds is not loaded$"):
            await found.find("birds")

    in_loop(scenario())


def test_the_index_lists_what_is_loaded_and_what_could_be():
    birds, cats = Weights("birds", 3), Weights("cats")

    async def scenario():
        found = repository(birds, cats)
        await found.unload("cats")
        assert found.index() == [("birds", "3", "READY", ""), ("cats", "", "UNAVAILABLE", "unloaded")]
        cats.error = "cats/model.safetensors: 3 bytes short of 10 (truncated)"
        with pytest.raises(CheckpointError):
            await found.load("cats")
        assert found.index()[1] == ("cats", "", "UNAVAILABLE", cats.error)
        with pytest.raises(UnavailableError, match=rf"^cats is not loaded: {cats.error[:10]}"):
            await found.find("cats")
        cats.error = None
        await found.load("cats")
        assert [each.state for each in found.index()] == ["READY", "READY"]
        with pytest.raises(UnknownModelError, match=r"^there is no model 'dogs'$"):
            await found.load("dogs")
        with pytest.raises(UnknownModelError, match=r"^'dogs' is not loaded$"):
            await found.unload("dogs")

    in_loop(scenario())


def test_the_model_of_requests_without_a_name_is_listed_first_also_after_it_was_loaded_anew():
    async def scenario():
        found = repository(Weights("birds"), Weights("cats"), preferred="birds")
        await found.unload("birds")
        await found.load("birds")
        return [each.name for each in found.index()]

    assert in_loop(scenario()) == ["birds", "cats"]


def test_weights_that_cannot_be_opened_are_tried_again_and_the_reason_is_reported_once(monkeypatch):
    """The shortage is temporary: nothing about the weights changes."""
    monkeypatch.setattr(repositories, "AGAIN_SECONDS", 0.001)
    birds, said, tries = Weights("birds", 1), [], []

    def opened(open=birds.open):
        tries.append(1)
        if len(tries) < 4:
            raise RuntimeError("out of memory: tried to allocate 1 GiB" if len(tries) < 3 else "device lost\nand more")
        return open()

    async def scenario():
        found = repository(birds)
        birds.version, birds.open = 2, opened
        watching = asyncio.create_task(found.watch(seconds=0.001, say=said.append))
        while await answered(found) != 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)  # nothing is opened again
        watching.cancel()

    in_loop(scenario())
    assert len(tries) == 4
    assert said[0].startswith("birds: stays at version 1: out of memory on the host")
    assert said[1:] == [
        "birds: stays at version 1: RuntimeError: device lost",
        "birds: version 2 takes the place of 1",
    ]


def test_the_time_between_two_tries_doubles_up_to_an_hour():
    tried, now, waits = repositories.Tried("a stamp", wait=repositories.AGAIN_SECONDS), 0.0, []
    for _ in range(10):
        tried = tried.once_more(now)
        waits.append(tried.again - now)
        now = tried.again
    assert waits == [30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0, 3600.0]


def test_runs_of_a_repository_have_their_own_names_also_if_they_are_links(tmp_path):
    for name in ("run-17", "run-18", "the best"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    link = tmp_path / "current"
    link.symlink_to("run-17")
    loaded = load_options(ServeOptions, read_line(ServeOptions, ["--repository", str(tmp_path)]))
    runs = served_runs.ServedRuns(loaded, PhotoDecoder(most_bytes=1), pytest.fail)
    before = runs.known()
    assert before.keys() == {"current", "run-17", "run-18", "the-best"}
    link.unlink()
    link.symlink_to("run-18")
    assert runs.known() == before


def test_a_link_on_the_line_has_its_own_name_beside_the_run_that_it_leads_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint, export = (tmp_path / "runs/one" / inner for inner in ("checkpoints/net_3", "export/onnx"))
    for folder, record in ((checkpoint, "manifest.json"), (export, "export.json")):
        folder.mkdir(parents=True)
        (folder / record).touch()
    (tmp_path / "weights.v2.pth").touch()
    names = {"current": "runs/one", "newest": checkpoint, "fast": export, "best.pth": "weights.v2.pth"}
    for name, target in names.items():
        (tmp_path / name).symlink_to(target)
        assert served_runs.served_name(Path(name)) == name.removesuffix(".pth")
    named = {
        "runs/one": "one",
        "current/export/onnx": "current-onnx",
        "weights.v2.pth": "weights",
        "runs/../runs/one/": "one",
    }
    for path in (checkpoint, checkpoint.parent, "current/checkpoints/net_3"):
        named[path] = "current" if str(path).startswith("current") else "one"
    assert {path: served_runs.served_name(Path(path)) for path in named} == named
    loaded = load_options(ServeOptions, read_line(ServeOptions, ["current", "--repository", "runs"]))
    assert served_runs.ServedRuns(loaded, PhotoDecoder(most_bytes=1), pytest.fail).known().keys() == {"current", "one"}


def test_what_is_left_out_of_a_repository_is_reported_once(tmp_path, monkeypatch):
    for name in ("a b", "a-b", "closed", "given", "other/given", "open"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "given too").symlink_to("given")
    closed, plain, said = tmp_path / "closed", os.stat, []

    def looked(path, *args, **named):
        if isinstance(path, os.PathLike) and closed in Path(path).parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return plain(path, *args, **named)

    monkeypatch.setattr(os, "stat", looked)
    line = [str(tmp_path / "other/given"), str(tmp_path / "open"), "--repository", str(tmp_path)]
    runs = served_runs.ServedRuns(
        load_options(ServeOptions, read_line(ServeOptions, line)), PhotoDecoder(most_bytes=1), said.append
    )
    for _ in range(2):
        assert runs.known().keys() == {"a-b", "given", "given-too", "open"}
    shutil.rmtree(tmp_path / "other/given")  # the run that has the name is gone; the other one is not to blame
    runs.known()
    assert said == [
        f"{closed}: left out: Permission denied",
        f"{tmp_path}/given: left out: would be served as 'given', which is taken; rename its folder",
        f"{tmp_path}/a b: left out: would be served as 'a-b', which is taken; rename its folder",
    ]


def test_a_checkpoint_that_was_skipped_is_looked_at_again_and_named_once(monkeypatch, tmp_path):
    """A disk fails once: no file changes."""
    looks, said = [], []
    manifest = SimpleNamespace(files={"model.safetensors": SimpleNamespace(sha256="ab")})

    def choose(path, which, note):
        looks.append(which)
        if len(looks) == 1:
            raise CheckpointError("best: Input/output error")
        if len(looks) < 4:
            note("skipped best: Input/output error")
            return tmp_path / "second", manifest
        return tmp_path / "best", manifest

    monkeypatch.setattr(served_runs.format, "choose", choose)
    monkeypatch.setattr(served_runs, "AGAIN_SECONDS", 0.0)
    stamps = served_runs.Stamps(tmp_path, "best")
    with pytest.raises(CheckpointError, match=r"^best: Input/output error$"):
        stamps.newest(said.append)
    names = [stamps.newest(said.append)[0].name for _ in range(5)]
    assert names == ["second", "second", "best", "best", "best"]
    assert len(looks) == 4  # and no more, once nothing is skipped
    assert said == ["skipped best: Input/output error"]


def test_a_watched_model_is_swapped_and_what_cannot_be_opened_is_reported_once():
    birds, said = Weights("birds", 1), []

    async def scenario():
        found = repository(birds)
        watching = asyncio.create_task(found.watch(seconds=0.001, say=said.append))
        await asyncio.sleep(0.05)
        assert birds.opened == 1
        birds.version = 2
        while await answered(found) != 2:
            await asyncio.sleep(0.001)
        birds.error, birds.version = "torn", 3  # in this order: a thread opens them once the version changes
        while len(said) < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert await answered(found) == 2
        birds.error, birds.version = None, 4
        while await answered(found) != 4:
            await asyncio.sleep(0.001)
        watching.cancel()

    in_loop(scenario())
    assert said == [
        "birds: version 2 takes the place of 1",
        "birds: stays at version 2: torn",
        "birds: version 4 takes the place of 2",
    ]


@contextlib.contextmanager
def answering(found, *, may_load):
    """Run a server with these models in another thread; yield a function that asks it."""
    front = app.FrontEnd(found, memory=Memory(1 << 30), most_body=1 << 20, seconds=LIMIT, may_load=may_load)
    listening = connections.Address(host="127.0.0.1", port=0).open()
    port, loop, stop = listening.getsockname()[1], asyncio.new_event_loop(), asyncio.Event()

    async def serve():
        async with connections.answering(front, listening, drain_seconds=LIMIT):
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()

    def ask(method, path, body=b""):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)) as connection:
            connection.request(method, path, body=body if method == "POST" else None)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    try:
        yield ask
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(LIMIT)
        found.close()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def test_clients_load_and_unload_models_where_the_server_allows_it():
    with answering(repository(Weights("birds"), Weights("cats")), may_load=True) as ask:
        assert ask("POST", "/v2/repository/models/cats/unload") == (200, {})
        assert ask("GET", "/v2/models/cats") == (503, {"error": "cats is not loaded"})
        assert ask("GET", "/v2/models/birds/ready") == (200, {"ready": True})
        assert ask("POST", "/v2/repository/models/cats/load") == (200, {})
        assert ask("GET", "/v2/models/cats/versions/1/ready") == (200, {"ready": True})
        assert ask("POST", "/v2/repository/models/dog/load") == (404, {"error": "there is no model 'dog'"})


def test_clients_may_not_change_models_where_the_server_does_not_allow_it():
    with answering(repository(Weights("birds")), may_load=False) as ask:
        for what in ("load", "unload"):
            status, content = ask("POST", f"/v2/repository/models/birds/{what}")
            assert (status, "--repository" in content["error"]) == (403, True)
        assert ask("POST", "/v2/repository/index")[1][0]["state"] == "READY"


def lanes():
    return {thread for thread in threading.enumerate() if thread.name.startswith("lane")}


def test_no_request_is_lost_while_models_are_swapped():
    birds, answers, wrong, done = Weights("birds", 1), [], [], threading.Event()
    before = lanes()  # of other tests' models
    found = repository(birds)
    with answering(found, may_load=True) as ask:

        def client():
            tensor = {"name": "input_0", "shape": [1, 3, SIDE, SIDE], "datatype": "UINT8", "data": [0] * 3 * SIDE**2}
            body = json.dumps({"inputs": [tensor]})
            while not done.is_set():
                status, content = ask("POST", "/v2/models/birds/infer", body)
                answers.append(status)
                if status != 200 or content["outputs"][0]["data"] != [int(content["model_version"])] * 5:
                    wrong.append(content)

        clients = [threading.Thread(target=client) for _ in range(4)]
        for each in clients:
            each.start()
        for version in range(2, 12):
            birds.version = version
            seen = len(answers)
            assert ask("POST", "/v2/repository/models/birds/load") == (200, {})
            until(lambda seen=seen: len(answers) > seen + 4)
        done.set()
        for each in clients:
            each.join(LIMIT)
    assert birds.opened == 11
    assert wrong == []
    until(lambda: not lanes() - before)


def test_the_folder_of_models_is_read_in_a_thread_and_once_for_all_that_are_watched():
    readers, stamped = [], []

    def known():
        readers.append(threading.current_thread())
        return {
            name: Source(open=Weights(name).open, stamp=lambda: stamped.append(1) or 1)
            for name in ("birds", "cats", "dogs")
        }

    async def scenario():
        found = repository(Weights("birds"), Weights("cats"))
        found.sources = known
        with pytest.raises(UnavailableError, match=r"^dogs is not loaded$"):
            await found.find("dogs")
        with pytest.raises(UnknownModelError, match=r"^there is no model 'x'; "):
            await found.find("x")
        assert [each.name for each in await found.indexed()] == ["birds", "cats", "dogs"]
        await found.load("birds")
        before = len(readers)
        watching = asyncio.create_task(found.watch(seconds=0.001, say=pytest.fail))
        while len(stamped) < 20:
            await asyncio.sleep(0.001)
        watching.cancel()
        return before, len(readers) - before - 1

    before, whole_looks = in_loop(scenario())
    assert (before, 2 * whole_looks <= len(stamped)) == (4, True)
    assert threading.main_thread() not in readers


def test_a_folder_of_models_that_is_gone_is_the_servers_fault():
    def gone():
        raise ConfigError("--repository: runs: No such file or directory; expected a folder of runs")

    repository = Repository(sources=gone, policy=lambda _: None)
    for ask in (repository.indexed, lambda: repository.find("birds")):
        with pytest.raises(UnavailableError, match=r"^--repository: runs: No such file") as refused:
            in_loop(ask())
        assert refused.value.status == 503
