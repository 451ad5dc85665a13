"""The page at `/` in headless Chromium: every way to send photos, what it shows, and what it does in trouble."""

import asyncio
import csv
import json
import re
import urllib.error
import urllib.request
from datetime import datetime, timedelta
from typing import NamedTuple

import numpy as np
import pytest
from aiohttp import web
from PIL import Image
from playwright.sync_api import expect

from browsing import card, percent, photo, send, shown, transferred
from falconet.cli import main
from falconet.legacy.conventions import CONVENTIONS
from pretended_server import CLASSES, INDEX, SCENES, SHARES, Pretended, predicted
from served import LIMIT, served
from tiny import TINY

pytestmark = pytest.mark.dist


@pytest.fixture
def pretended():
    with Pretended() as server:
        yield server


class Real(NamedTuple):
    """A process of `falconet serve` with a model of two classes."""

    port: int

    @property
    def address(self):
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    for label, level in (("dark", 40), ("light", 200)):
        (folder / "photos" / label).mkdir(parents=True)
        for number in range(8):
            pixels = np.random.default_rng(number).integers(level, level + 50, (24, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / label / f"{number}.png")
    options = TINY.replace("--data generated --image-size 16 --iterations 4", "--image-size 16")
    line = f"train {folder}/photos {options} --model resnet8-cifar --run-dir {folder}/run"
    assert main(line.split(), CONVENTIONS["falconet"]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def real(run):
    with served(f"{run} --port 0 --threads 1 --device cpu") as (_, port, _):
        yield Real(port)


def asked_directly(server, file, query="top=20"):
    """The server's answer to the same file, without the page."""
    head = 'Content-Disposition: form-data; name="photo"; filename="photo"'
    body = f"--limit\r\n{head}\r\n\r\n".encode() + file["buffer"] + b"\r\n--limit--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=limit"}
    request = urllib.request.Request(f"{server.address}/predict?{query}", data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=LIMIT) as answer:
        return json.load(answer)


def by_chooser(page, *files):
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Choose photos").click()
    assert chooser.value.is_multiple()
    chooser.value.set_files(list(files))


def by_drop(page, *files):
    transfer = transferred(page, files)
    page.dispatch_event("footer", "dragenter", {"dataTransfer": transfer})  # anywhere, not only in the box
    expect(page.get_by_text("Drop the photos")).to_be_visible()
    page.dispatch_event("footer", "drop", {"dataTransfer": transfer})
    expect(page.get_by_text("Drop the photos")).to_be_hidden()


def by_paste(page, *files):
    page.evaluate(
        """clipboardData => document.body.dispatchEvent(
            new ClipboardEvent("paste", { clipboardData, bubbles: true }))""",
        transferred(page, files),
    )


def by_camera(page, *files):
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Take a photo").click()
    chooser.value.set_files(files[0])


WAYS = {"file chooser": by_chooser, "drop": by_drop, "clipboard": by_paste, "camera": by_camera}


@pytest.mark.parametrize("way", WAYS)
def test_a_photo_is_shown_with_the_classes_that_the_server_gives(visit, real, way):
    page = visit(real, **({"has_touch": True, "is_mobile": True} if way == "camera" else {}))
    file = photo("robin.jpg", kind="JPEG")
    WAYS[way](page, file)
    found = card(page, "robin.jpg")
    rows = shown(found)
    top = asked_directly(real, file)["predictions"][0]["top"]
    assert {one["label"] for one in top} == {"dark", "light"}
    assert [row[:2] for row in rows] == [[one["label"], percent(one["probability"])] for one in top]
    for (_, _, value, width), one in zip(rows, top, strict=True):
        assert value == pytest.approx(100 * one["probability"])
        assert float(width.removesuffix("%")) == pytest.approx(100 * one["probability"], rel=1e-3)
    widths = found.locator(".track").first.evaluate("track => [track.offsetWidth, track.firstChild.offsetWidth]")
    assert widths[1] / widths[0] == pytest.approx(top[0]["probability"], abs=0.02)
    expect(found.get_by_role("img", name="Photo robin.jpg")).to_be_visible()
    assert found.locator("img").evaluate("async image => (await image.decode(), image.naturalWidth)") == 40
    assert re.fullmatch(r"[\d.]+\u202fms", found.locator(".server").inner_text())
    assert re.fullmatch(r"[\d.]+\u202fms", found.locator(".round-trip").inner_text())
    assert re.fullmatch(r"decode\s[\d.]+, queue\s[\d.]+, compute\s[\d.]+", found.locator(".parts").inner_text())


def test_every_format_is_shown_and_a_broken_file_has_the_servers_reason(visit, real):
    page = visit(real)
    expect(page.locator("#about")).to_contain_text("2 classes")
    files = [photo(f"a.{kind}", kind=kind) for kind in ("JPEG", "PNG", "WebP")]
    torn = {**files[0], "name": "torn.jpg", "buffer": files[0]["buffer"][:200]}
    text = {"name": "b.json", "mimeType": "application/json", "buffer": b'{"images": []}'}
    send(page, *files, torn, text)
    expect(page.locator("[data-state=done]")).to_have_count(3)
    for file in files:
        top = asked_directly(real, file)["predictions"][0]["top"]
        assert shown(card(page, file["name"]))[0][:2] == [top[0]["label"], percent(top[0]["probability"])]
    for file in (torn, text):
        with pytest.raises(urllib.error.HTTPError, match="400") as refused:
            asked_directly(real, file)
        reason = json.load(refused.value)["error"].removeprefix("photo: ")
        refused.value.close()
        found = card(page, file["name"]).locator(".state")
        expect(found).to_have_text(re.compile(f"^{re.escape(reason)}\\.?$", re.IGNORECASE))


def test_files_that_are_no_photos_have_their_reason_and_do_not_fail_the_others(visit, pretended):
    def answer(request):
        if pretended.has_photo(request):
            return web.json_response(predicted())
        return web.json_response({"error": "not an image: expected JPEG, PNG or WebP"}, status=400)

    pretended.answer = answer
    page = visit(pretended)
    send(page, photo("a.png"), {"name": "b.json", "mimeType": "application/json", "buffer": b'{"images": []}'})
    expect(card(page, "b.json").locator(".state")).to_have_text("Not an image: expected JPEG, PNG or WebP.")
    expect(card(page, "b.json").get_by_text("No preview")).to_be_visible()
    expect(card(page, "b.json").get_by_role("button", name="Try again")).to_be_hidden()  # it would not help
    assert len(shown(card(page, "a.png"))) == 5


def test_an_error_inside_an_answer_is_shown_too(visit, pretended):
    wrong = {"predictions": [{"name": "a.png", "error": "60 megapixels, expected at most 50"}]}
    pretended.answer = lambda _: web.json_response(wrong)
    page = visit(pretended)
    send(page, photo())
    expect(card(page, "a.png").locator(".state")).to_have_text("60 megapixels, expected at most 50.")


def test_more_classes_are_shown_on_demand(visit, pretended):
    page = visit(pretended)
    expect(page.locator("#about")).to_have_text(
        "birds \u00b7 version 7 \u00b7 7 classes \u00b7 224\u00a0\u00d7\u00a0224\u00a0px"
    )
    send(page, photo())
    found = card(page, "a.png")
    assert len(shown(found)) == 5
    found.get_by_role("button", name="Show 2 more").click()
    assert [row[0] for row in shown(found)] == list(CLASSES)
    assert pretended.asked[0][0].query["top"] == "7"  # all of them, if there are few
    found.get_by_role("button", name="Show fewer").click()
    assert len(shown(found)) == 5


def test_several_photos_are_sent_three_at_a_time_and_shown_in_their_order(visit, pretended):
    running, most, go = 0, 0, asyncio.Event()

    async def answer(_):
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await go.wait()
        running -= 1
        return web.json_response(predicted())

    pretended.answer = answer
    page = visit(pretended)
    names = [f"{number}.png" for number in range(8)]
    send(page, *(photo(name) for name in names))
    expect(page.get_by_role("progressbar", name="Photos done")).to_be_visible()
    expect(page.locator("#count")).to_have_text("0 of 8")
    expect(page.locator("[data-state=sending]")).to_have_count(3)
    pretended.call(go.set)
    expect(page.locator("[data-state=done]")).to_have_count(8)
    expect(page.locator("#count")).to_have_text("8 photos")
    expect(page.get_by_role("progressbar")).to_be_hidden()
    assert page.locator("#cards .name").all_inner_texts() == names
    assert most == 3
    expect(page.get_by_role("status")).to_have_text("8 photos done.")


def stop_the_clock(page):
    """Stop the page's clock, so that what it shows for a while stays until a test lets time pass."""
    page.clock.install()
    page.clock.pause_at(datetime.now() + timedelta(days=1))


def test_an_overloaded_server_is_asked_again_after_the_time_it_names(visit, pretended):
    def answer(_):
        if len(pretended.asked) > 1:
            return web.json_response(predicted())
        return web.json_response({"error": "try again later"}, status=429, headers={"Retry-After": "1"})

    pretended.answer = answer
    page = visit(pretended)
    stop_the_clock(page)
    send(page, photo())
    expect(card(page, "a.png").locator(".state")).to_have_text("The server is busy. Trying again in 1 second.")
    assert len(pretended.asked) == 1
    page.clock.run_for(1000)
    assert shown(card(page, "a.png"))[0][0] == "robin"
    assert len(pretended.asked) == 2


@pytest.mark.parametrize("by", ["button", "Escape"])
def test_sending_is_cancelled_and_tried_again(visit, pretended, by):
    async def never(_):
        await asyncio.sleep(LIMIT)

    pretended.answer = never
    page = visit(pretended)
    send(page, *(photo(f"{number}.png") for number in range(5)))
    page.get_by_role("button", name="Cancel").wait_for()
    if by == "button":
        page.get_by_role("button", name="Cancel").click()
    else:
        page.keyboard.press("Escape")
    expect(page.locator("[data-state=cancelled]")).to_have_count(5)
    pretended.answer = lambda _: web.json_response(predicted())
    card(page, "3.png").get_by_role("button", name="Try again").click()
    expect(page.locator("[data-state=done]")).to_have_count(1)
    page.get_by_role("button", name="Try 4 again").click()
    expect(page.locator("[data-state=done]")).to_have_count(5)
    assert page.locator(".bar .tools button:visible").all_inner_texts() == ["Copy JSON", "Download CSV", "Clear"]


def test_photos_are_removed_one_by_one_or_all(visit, pretended):
    page = visit(pretended)
    send(page, *(photo(f"{number}.png") for number in range(3)))
    expect(page.locator("[data-state=done]")).to_have_count(3)
    page.get_by_role("button", name="Remove 1.png").click()
    assert page.locator("#cards .name").all_inner_texts() == ["0.png", "2.png"]
    expect(page.get_by_role("button", name="Remove 2.png")).to_be_focused()
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("#results")).to_be_hidden()
    expect(page.get_by_role("button", name="Choose photos")).to_be_focused()


def come_back(page):
    """Return to the tab as a user does: the page then checks the server, as it does every few seconds."""
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def test_a_stopped_server_is_named_and_its_return_noticed(visit, pretended):
    page = visit(pretended)
    expect(page.locator("#about")).not_to_be_empty()
    port = pretended.port
    pretended.stop()
    come_back(page)
    expect(page.get_by_role("alert")).to_contain_text("The server does not answer.")
    send(page, photo())
    expect(card(page, "a.png").locator(".state")).to_have_text("The server does not answer.")
    pretended.start(port)
    come_back(page)
    expect(page.get_by_role("alert")).to_be_hidden()
    card(page, "a.png").get_by_role("button", name="Try again").click()
    assert len(shown(card(page, "a.png"))) == 5


def test_a_model_that_is_loaded_later_is_noticed(visit, pretended):
    pretended.index = [{**INDEX[0], "state": "UNAVAILABLE", "reason": "unloaded", "version": ""}]
    page = visit(pretended)
    expect(page.get_by_role("alert")).to_contain_text("No model is loaded.")
    pretended.index = INDEX
    come_back(page)
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(page.locator("#about")).to_contain_text("birds")


def test_a_model_is_chosen_if_there_are_several(visit, pretended):
    old = {**INDEX[0], "version": "6"}
    gone = {**SCENES, "name": "plants", "state": "UNAVAILABLE", "reason": "unloaded"}
    pretended.index = [*INDEX, old, SCENES, gone]
    page = visit(pretended)
    choice = page.get_by_label("Model")
    labels = ["birds, version 7", "birds, version 6", "scenes", "plants (unloaded)"]
    expect(choice.locator("option")).to_have_text(labels)
    assert choice.locator("option").last.is_disabled()
    for label, query in (
        ("birds, version 6", {"model": "birds", "version": "6", "top": "7"}),
        ("scenes", {"model": "scenes", "top": "7"}),
    ):
        choice.select_option(label=label)
        expect(page.locator("#about")).not_to_be_empty()
        send(page, photo(f"{label}.png"))
        card(page, f"{label}.png").locator(".by").wait_for()
        assert dict(pretended.asked[-1][0].query) == query
    assert "/predict?top=5&model=scenes'" in page.locator("#curl").inner_text()


def test_a_version_that_was_swapped_in_is_noticed(visit, pretended):
    page = visit(pretended)
    expect(page.locator("#about")).to_contain_text("version 7")
    pretended.index = [{**INDEX[0], "version": "8"}]
    pretended.answer = lambda _: web.json_response({**predicted(), "version": "8"})
    send(page, photo())
    expect(page.locator("#about")).to_contain_text("version 8")
    assert "version" not in pretended.asked[0][0].query


@pytest.mark.parametrize("labels", [("beach", "sunset"), ()])
def test_several_labels_per_photo_are_marked(visit, pretended, labels):
    shares = (0.97, 0.81, 0.2) if labels else (0.4, 0.3, 0.2)
    answer = predicted(("beach", "sunset", "harbour"), shares, labels=list(labels))
    pretended.answer = lambda _: web.json_response(answer)
    page = visit(pretended)
    send(page, photo())
    found = card(page, "a.png")
    assert len(shown(found)) == 3
    assert found.locator(".found .label").all_inner_texts() == list(labels)
    assert found.get_by_text("No class reaches 50\u202f%.").is_visible() == (not labels)


def test_the_key_is_asked_for_and_kept_in_the_tab_alone(visit):
    with Pretended(key="right") as server:
        page = visit(server)
        field = page.get_by_label("Key", exact=True)
        expect(field).to_be_focused()
        page.keyboard.press("Escape")
        expect(page.get_by_role("alert")).to_contain_text("This server requires its API key.")
        send(page, photo())
        field.fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_text("The server does not accept this key.")).to_be_visible()
        field.fill("right")
        page.get_by_role("button", name="Continue").click()
        assert len(shown(card(page, "a.png"))) == 5
        expect(page.get_by_role("alert")).to_be_hidden()
        assert page.evaluate("[Object.values(sessionStorage), localStorage.length, document.cookie]") == [
            ["right"],
            0,
            "",
        ]
        assert "right" not in page.content()
        page.get_by_role("button", name="Forget the API key").click()
        expect(page.get_by_role("alert")).to_contain_text("This server requires its API key.")
        assert page.evaluate("sessionStorage.length") == 0
        again = visit(server)  # another tab
        expect(again.get_by_label("Key", exact=True)).to_be_focused()


def test_results_are_copied_as_json_and_downloaded_as_csv(visit, pretended):
    def answer(request):
        if pretended.has_photo(request):
            return web.json_response(predicted(('robin, "red"', *CLASSES[1:])))
        return web.json_response({"error": "not an image"}, status=400)

    pretended.answer = answer
    page = visit(pretended, permissions=["clipboard-read", "clipboard-write"])
    send(page, photo("=1+1.png"), {"name": "b.txt", "mimeType": "text/plain", "buffer": b"x"})
    expect(page.locator("[data-state=done]")).to_have_count(1)
    expect(page.locator("[data-state=failed]")).to_have_count(1)
    with page.expect_download() as download:
        page.get_by_role("button", name="Download CSV").click()
    assert download.value.suggested_filename == "predictions.csv"
    with download.value.path().open(encoding="utf-8", newline="") as file:
        good, bad = csv.DictReader(file)
    assert list(good)[:5] == ["path", "label", "probability", "label_2", "probability_2"]  # as `falconet predict` has
    assert (good["path"], good["label"], float(good["probability_5"])) == ("'=1+1.png", 'robin, "red"', SHARES[4])
    assert (good["model"], good["version"], good["server_ms"], good["error"]) == ("birds", "7", "12.5", "")
    assert (bad["path"], bad["label"], bad["error"]) == ("b.txt", "", "not an image")
    stop_the_clock(page)
    for button in (page.locator(".bar"), card(page, "=1+1.png")):
        button.get_by_role("button", name="Copy JSON").click()
        expect(button.get_by_role("button", name="Copied")).to_be_visible()
        copied = json.loads(page.evaluate("navigator.clipboard.readText()"))
        first = copied[0] if isinstance(copied, list) else copied
        assert (first["name"], first["model"], first["top"][1]["label"]) == ("=1+1.png", "birds", "wren")
        assert first["milliseconds"]["compute"] == 8.2
        assert first["milliseconds"]["round_trip"] > 0
    page.locator(".command").get_by_role("button").click()
    expect(page.locator(".command").get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == page.locator("#curl").inner_text()
    assert page.locator("#curl").inner_text() == f"curl --data-binary @photo.jpg '{pretended.address}/predict?top=5'"


def test_a_folder_is_searched_for_files(visit, pretended):
    page = visit(pretended)
    page.evaluate(
        """async ([transfer]) => {
            const entry = (file) => ({ isFile: true, name: file.name, file: (done) => done(file) });
            const folder = (name, inside) => {
                const parts = [inside, []];
                const createReader = () => ({ readEntries: (done) => done(parts.shift()) });
                return { isDirectory: true, name, createReader };
            };
            const [a, b, hidden] = [...transfer.files].map(entry);
            const dropped = folder("photos", [a, folder("more", [b]), hidden]);
            const items = [{ webkitGetAsEntry: () => dropped }];
            const event = new Event("drop", { bubbles: true });
            Object.defineProperty(event, "dataTransfer", { value: { types: ["Files"], items, files: [] } });
            document.body.dispatchEvent(event);
        }""",
        [transferred(page, [photo("a.png"), photo("b.png"), photo(".hidden.png")])],
    )
    expect(page.locator("[data-state=done]")).to_have_count(2)
    assert page.locator("#cards .name").all_inner_texts() == ["a.png", "b.png"]
