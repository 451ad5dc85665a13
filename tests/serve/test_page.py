"""The page at `/` in headless Chromium: photos in by every way, what is shown, and who can use it."""

import asyncio
import base64
import csv
import io
import json
import os
import re
import shutil
import urllib.error
import urllib.request

import numpy as np
import pytest
from aiohttp import web
from PIL import Image
from playwright.sync_api import Error, expect, sync_playwright

from pretended_server import CLASSES, INDEX, SHARES, Pretended, predicted
from served import LIMIT

ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update"
    " --disable-sync"
)
INSTALL = "apt-get install --no-install-recommends chromium"
SCENES = {"name": "scenes", "version": "1", "state": "READY", "reason": ""}
MARKUP = '<img src=x onerror="window.broken=1"><script>window.broken=1</script>'
expect.set_options(timeout=1000 * LIMIT)


@pytest.fixture(scope="module")
def browser():
    """One for all tests: to start it takes longer than most of them."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        missing = f"there is no Chromium; {INSTALL}"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=ARGUMENTS.split(), timeout=1000 * LIMIT)
        yield started
        started.close()


@pytest.fixture
def visit(browser):
    """Open the page of a server; at the end nothing may have failed in it, or been asked of another server."""
    contexts, wrong, hosts, ports = [], [], set(), set()

    def opened(server, path="/", **options):
        context = browser.new_context(**{"viewport": {"width": 1100, "height": 800}, **options})
        context.set_default_timeout(1000 * LIMIT)
        contexts.append(context)
        ports.add(server.port)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: message.type == "error" and wrong.append(message.text))
        page.on("request", lambda request: hosts.add(re.match(r"blob:|\w+://[^/]+", request.url)[0]))
        page.goto(server.address + path)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert hosts <= {"blob:", *(f"http://127.0.0.1:{port}" for port in ports)}
    # What was refused, or not answered, is an error to Chromium, however it is dealt with.
    assert not [text for text in wrong if not text.startswith("Failed to load resource")]


@pytest.fixture
def pretended():
    with Pretended() as server:
        yield server


def photo(name="a.png", *, kind="PNG", seed=0, size=(40, 30)):
    """A file as a file chooser gives it."""
    content = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(content, kind)
    return {"name": name, "mimeType": f"image/{kind.lower()}", "buffer": content.getvalue()}


def send(page, *files):
    page.set_input_files("#files", list(files))


def card(page, name):
    return page.locator("#cards > li").filter(has=page.get_by_role("heading", name=name, exact=True))


def percent(share):
    if 0 < share < 0.0005:
        return "< 0.1\u202f%"
    return "> 99.9\u202f%" if 0.9995 <= share < 1 else f"{100 * share:.1f}\u202f%"


def shown(found):
    """The classes of a card: label, text of the percentage, value of the bar, and its width as a share."""
    found.locator(".track").first.wait_for()
    return found.locator(".classes").evaluate(
        """list => [...list.querySelectorAll("li:not([hidden])")].map((row) => {
            const [track, fill] = [row.querySelector(".track"), row.querySelector(".fill")];
            const value = track.getAttribute("aria-valuenow");
            return [row.querySelector(".label").textContent, row.querySelector(".percent").textContent,
                Number(value), fill.style.width];
        })"""
    )


def asked_directly(server, file, query="top=20"):
    """What the server answers to the same photo without the page."""
    request = urllib.request.Request(
        f"{server.address}/predict?{query}", data=file["buffer"], headers={"Content-Type": file["mimeType"]}
    )
    with urllib.request.urlopen(request, timeout=LIMIT) as answer:
        return json.load(answer)


def by_chooser(page, *files):
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Choose photos").click()
    assert chooser.value.is_multiple()
    chooser.value.set_files(list(files))


TRANSFER = """files => {
    const transfer = new DataTransfer();
    for (const { name, type, content } of files) {
        const bytes = Uint8Array.from(atob(content), (character) => character.charCodeAt(0));
        transfer.items.add(new File([bytes], name, { type }));
    }
    return transfer;
}"""


def transferred(page, files):
    contents = [
        {"name": one["name"], "type": one["mimeType"], "content": base64.b64encode(one["buffer"]).decode()}
        for one in files
    ]
    return page.evaluate_handle(TRANSFER, contents)


def by_drop(page, *files):
    transfer = transferred(page, files)
    page.dispatch_event("footer", "dragenter", {"dataTransfer": transfer})  # anywhere, not only in the box
    expect(page.get_by_text("Drop the photos")).to_be_visible()
    page.dispatch_event("footer", "drop", {"dataTransfer": transfer})
    expect(page.get_by_text("Drop the photos")).to_be_hidden()


def by_paste(page, *files):
    page.evaluate(
        "transfer => document.body.dispatchEvent(new ClipboardEvent('paste', {clipboardData: transfer, bubbles: true}))",
        transferred(page, files),
    )


def by_camera(page, *files):
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Take a photo").click()
    chooser.value.set_files(files[0])


WAYS = {"file chooser": by_chooser, "drop": by_drop, "clipboard": by_paste, "camera": by_camera}


@pytest.mark.parametrize("way", WAYS)
def test_a_photo_is_shown_with_the_classes_that_the_server_gives(visit, pretended, way):
    pretended.answer = lambda _: web.json_response(predicted())
    page = visit(pretended, **({"has_touch": True, "is_mobile": True} if way == "camera" else {}))
    file = photo("robin.jpg", kind="JPEG")
    WAYS[way](page, file)
    found = card(page, "robin.jpg")
    top = asked_directly(pretended, file)["predictions"][0]["top"]
    rows = shown(found)
    assert [row[:2] for row in rows] == [[one["label"], percent(one["probability"])] for one in top[:5]]
    for (_, _, value, width), one in zip(rows, top, strict=False):
        assert value == pytest.approx(100 * one["probability"])
        assert float(width.removesuffix("%")) == pytest.approx(100 * one["probability"], rel=1e-3)
    widths = found.locator(".track").first.evaluate("track => [track.offsetWidth, track.firstChild.offsetWidth]")
    assert widths[1] / widths[0] == pytest.approx(top[0]["probability"], abs=0.01)
    expect(found.get_by_role("img", name="Photo robin.jpg")).to_be_visible()
    assert found.locator("img").evaluate("async image => (await image.decode(), image.naturalWidth)") == 40
    assert re.fullmatch(r"[\d.]+\u202fms", found.locator(".server").inner_text())
    assert re.fullmatch(r"[\d.]+\u202fms", found.locator(".round-trip").inner_text())
    assert pretended.asked[0][1] == file["buffer"]


def test_files_that_are_no_photos_have_their_reason_and_do_not_fail_the_others(visit, pretended):
    def answer(request):
        if request.headers["Content-Type"].startswith("image/"):
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
    expect(page.locator("#about")).to_have_text("birds \u00b7 version 7 \u00b7 7 classes \u00b7 224\u00a0\u00d7\u00a0224\u00a0px")
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


def test_an_overloaded_server_is_asked_again_after_the_time_it_names(visit, pretended):
    def answer(_):
        if len(pretended.asked) > 1:
            return web.json_response(predicted())
        return web.json_response({"error": "try again later"}, status=429, headers={"Retry-After": "1"})

    pretended.answer = answer
    page = visit(pretended)
    send(page, photo())
    expect(card(page, "a.png").locator(".state")).to_have_text("The server is busy. Trying again in 1 second.")
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


def test_a_stopped_server_is_named_and_its_return_noticed(visit, pretended):
    page = visit(pretended)
    expect(page.locator("#about")).not_to_be_empty()
    port = pretended.port
    pretended.stop()
    send(page, photo())
    expect(page.get_by_role("alert")).to_contain_text("The server does not answer.")
    expect(card(page, "a.png").locator(".state")).to_have_text("The server does not answer.")
    pretended.start(port)
    expect(page.get_by_role("alert")).to_be_hidden()
    card(page, "a.png").get_by_role("button", name="Try again").click()
    assert len(shown(card(page, "a.png"))) == 5


def test_a_model_is_chosen_if_there_are_several(visit, pretended):
    old = {**INDEX[0], "version": "6"}
    gone = {**SCENES, "name": "plants", "state": "UNAVAILABLE", "reason": "unloaded"}
    pretended.index = [*INDEX, old, SCENES, gone]
    page = visit(pretended)
    choice = page.get_by_label("Model")
    assert choice.locator("option").all_inner_texts() == [
        "birds, version 7",
        "birds, version 6",
        "scenes",
        "plants (unloaded)",
    ]
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
        expect(page.get_by_role("alert")).to_contain_text("This server answers only with its API key.")
        send(page, photo())
        field.fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_text("The server does not accept this key.")).to_be_visible()
        field.fill("right")
        page.get_by_role("button", name="Continue").click()
        assert len(shown(card(page, "a.png"))) == 5
        expect(page.get_by_role("alert")).to_be_hidden()
        assert page.evaluate("[Object.values(sessionStorage), localStorage.length, document.cookie]") == [["right"], 0, ""]
        assert "right" not in page.content()
        page.get_by_role("button", name="Forget the API key").click()
        expect(page.get_by_role("alert")).to_contain_text("This server answers only with its API key.")
        assert page.evaluate("sessionStorage.length") == 0
        again = visit(server)  # another tab
        expect(again.get_by_label("Key", exact=True)).to_be_focused()


def test_markup_in_names_labels_and_errors_is_text(visit, pretended):
    pretended.index = [{**INDEX[0], "name": MARKUP}, {**SCENES, "state": "UNAVAILABLE", "reason": MARKUP}]
    answers = [
        web.json_response({**predicted((MARKUP, *CLASSES[1:])), "model": MARKUP}),
        web.json_response({"error": MARKUP}, status=400),
    ]
    pretended.answer = lambda _: answers[len(pretended.asked) - 1]
    page = visit(pretended)
    send(page, photo(f"{MARKUP}.png"))
    assert shown(card(page, f"{MARKUP}.png"))[0][0] == MARKUP
    expect(page.get_by_role("status")).to_have_text(f"{MARKUP}.png: {MARKUP}, 87.3\u202f%.")
    send(page, photo("b.png"))
    expect(card(page, "b.png").locator(".state")).to_have_text(f"{MARKUP}.")
    assert MARKUP in page.get_by_label("Model").locator("option").first.inner_text()
    assert page.evaluate("window.broken") is None
    assert page.locator("img[src=x], body script").count() == 0


def test_text_cannot_become_markup_at_all(browser, pretended):
    page = browser.new_page()
    page.goto(pretended.address)
    with pytest.raises(Error, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<b>x</b>'")
    assert page.evaluate("document.querySelectorAll('[onclick], [style], script:not([src])').length") == 0
    page.close()


def test_results_are_copied_as_json_and_downloaded_as_csv(visit, pretended):
    def answer(request):
        if request.headers["Content-Type"].startswith("image/"):
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
    with open(download.value.path(), encoding="utf-8", newline="") as file:
        good, bad = csv.DictReader(file)
    assert list(good)[:5] == ["path", "label", "probability", "label_2", "probability_2"]  # as `falconet predict` has
    assert (good["path"], good["label"], float(good["probability_5"])) == ("'=1+1.png", 'robin, "red"', SHARES[4])
    assert (good["model"], good["version"], good["server_ms"], good["error"]) == ("birds", "7", "12.5", "")
    assert (bad["path"], bad["label"], bad["error"]) == ("b.txt", "", "not an image")
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
    assert page.locator("#curl").inner_text() == f"curl -F photo=@photo.jpg '{pretended.address}/predict?top=5'"


def test_a_folder_is_searched_for_files(visit, pretended):
    page = visit(pretended)
    page.evaluate(
        """async ([transfer]) => {
            const entry = (file) => ({ isFile: true, name: file.name, file: (done) => done(file) });
            const folder = (name, inside) => {
                const parts = [inside, []];
                return { isDirectory: true, name, createReader: () => ({ readEntries: (done) => done(parts.shift()) }) };
            };
            const [a, b, hidden] = [...transfer.files].map(entry);
            const items = [folder("photos", [a, folder("more", [b]), hidden])].map((one) => ({ webkitGetAsEntry: () => one }));
            const event = new Event("drop", { bubbles: true });
            Object.defineProperty(event, "dataTransfer", { value: { types: ["Files"], items, files: [] } });
            document.body.dispatchEvent(event);
        }""",
        [transferred(page, [photo("a.png"), photo("b.png"), photo(".hidden.png")])],
    )
    expect(page.locator("[data-state=done]")).to_have_count(2)
    assert page.locator("#cards .name").all_inner_texts() == ["a.png", "b.png"]


def test_the_page_is_used_by_keyboard_alone(visit, pretended):
    page = visit(pretended)
    expect(page.locator("#about")).not_to_be_empty()
    page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Choose photos")).to_be_focused()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    for pressed, name in (("Enter", "a.png"), ("Space", "b.png")):
        with page.expect_file_chooser() as chooser:
            page.keyboard.press(pressed)
        chooser.value.set_files(photo(name))
        shown(card(page, name))
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.innerText"))
        if reached[-1] == "OpenAPI":
            break
        assert page.evaluate("getComputedStyle(document.activeElement).outlineWidth") == "3px"
    in_a_card = ["Show 2 more", "Copy JSON"]
    tools = ["Copy JSON", "Download CSV", "Clear"]
    cards = ["Remove b.png", *in_a_card, "Remove a.png", *in_a_card]
    assert reached == [*tools, *cards, "Command", "Copy", "API", "OpenAPI"]


def test_a_screen_reader_hears_what_is_shown(visit, pretended):
    page = visit(pretended)
    expect(page.get_by_role("main")).to_be_visible()
    send(page, photo())
    found = card(page, "a.png")
    shown(found)
    expect(page.get_by_role("article", name="a.png")).to_have_attribute("aria-busy", "false")
    for label, share in list(zip(CLASSES, SHARES, strict=True))[:5]:
        meter = found.get_by_role("meter", name=label)
        expect(meter).to_have_attribute("aria-valuetext", percent(share))
        assert float(meter.get_attribute("aria-valuenow")) == pytest.approx(100 * share)
        assert (meter.get_attribute("aria-valuemin"), meter.get_attribute("aria-valuemax")) == ("0", "100")
    expect(page.get_by_role("status")).to_have_text("a.png: robin, 87.3\u202f%.")
    assert page.get_by_role("status").get_attribute("aria-live") == "polite"
    unnamed = "all => all.filter(one => !one.hidden && !(one.innerText || one.getAttribute('aria-label') || one.labels?.length)).length"
    assert page.locator("button, a, select, input").evaluate_all(unnamed) == 0
    assert page.evaluate("document.documentElement.lang") == "en"
    headings = page.locator("h1, h2, h3").filter(visible=True).evaluate_all("all => all.map(one => one.tagName)")
    assert headings == ["H1", "H2", "H3", "H2"]


CONTRASTS = """() => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const over = (colour, below) => {
        canvas.fillStyle = `rgb(${below.join(" ")})`;
        canvas.fillRect(0, 0, 1, 1);
        canvas.fillStyle = colour;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const behind = (element) => {
        const above = [];
        for (let one = element; one; one = one.parentElement) above.unshift(getComputedStyle(one).backgroundColor);
        return above.reduce((below, colour) => over(colour, below), [255, 255, 255]);
    };
    const visible = [...document.querySelectorAll("body *")].filter((one) => one.checkVisibility({ visibilityProperty: true }));
    const own = (one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const texts = visible.filter((one) => own(one) && !one.closest(".unseen, template"));
    const bars = visible.filter((one) => one.matches(".fill"));
    return [
        ...texts.map((one) => [one.className || one.tagName, over(getComputedStyle(one).color, behind(one)), behind(one), 4.5]),
        ...bars.map((one) => ["bar", behind(one), behind(one.parentElement), 3]),
    ];
}"""


def contrast(one, other):
    """The ratio of WCAG 2.2 between two colours of sRGB."""

    def luminance(colour):
        linear = [(share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4) for share in np.divide(colour, 255)]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("width", [340, 1100])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_is_readable_in_light_and_dark_and_at_every_width(visit, pretended, scheme, width):
    pretended.answer = lambda request: (
        web.json_response(predicted())
        if request.headers["Content-Type"].startswith("image/")
        else web.json_response({"error": "not an image"}, status=400)
    )
    pretended.index = [*INDEX, SCENES]
    page = visit(pretended, color_scheme=scheme, viewport={"width": width, "height": 700}, reduced_motion="reduce")
    long = "a-very-long-name-" * 8
    send(page, photo(f"{long}.png"), photo("b.png"), {"name": "c.txt", "mimeType": "text/plain", "buffer": b"x"})
    expect(page.locator("[data-state=done]")).to_have_count(2)
    expect(page.locator("[data-state=failed]")).to_have_count(1)
    page.evaluate("document.getElementById('notice').hidden = false, document.getElementById('notice-text').textContent = 'x'")
    found = page.evaluate(CONTRASTS)
    assert {"name", "percent", "label", "state", "bar", "hint"} <= {name for name, *_ in found} | {"hint"}
    assert not [(name, round(contrast(text, below), 2)) for name, text, below, least in found if contrast(text, below) < least]
    is_dark = sum(page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")) < 384
    assert is_dark == (scheme == "dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = "all => all.filter(one => one.getBoundingClientRect().right > innerWidth).length"
    assert page.locator("button:visible, .percent:visible, .card").evaluate_all(outside) == 0
    assert page.evaluate("document.getAnimations().filter(one => one.effect.getTiming().duration > 1).length") == 0


def test_a_printed_page_has_the_results_without_the_controls(visit, pretended):
    page = visit(pretended, color_scheme="dark")
    send(page, photo("a.png"), photo("b.png"))
    expect(page.locator("[data-state=done]")).to_have_count(2)
    page.emulate_media(media="print")
    expect(page.locator(".percent").first).to_be_visible()
    assert page.locator("button:visible, select:visible, footer:visible").count() == 0
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_docs_shows_every_operation_and_sends_a_photo(visit, pretended):
    page = visit(pretended, "/docs")
    page.locator(".opblock").first.wait_for()
    description = json.load(urllib.request.urlopen(f"{pretended.address}/openapi.json", timeout=LIMIT))
    methods = [(method.upper(), path) for path, item in description["paths"].items() for method in item if method != "parameters"]
    texts = page.locator(".opblock-summary").evaluate_all(
        """all => all.map(one => [one.querySelector(".opblock-summary-method").textContent,
            one.querySelector(".opblock-summary-path").dataset.path])"""
    )
    assert sorted(map(tuple, texts)) == sorted(methods)
    page.locator("#operations-Photos-predict .opblock-summary-control").click()
    page.get_by_role("button", name="Try it out").click()
    page.get_by_role("button", name="Add string item").click()
    page.set_input_files("input[type=file]", photo("a.png"))
    page.get_by_role("button", name="Execute").click()
    expect(page.locator(".live-responses-table .response-col_status").last).to_contain_text("200")
    (request, body), *_ = pretended.asked
    assert request.path == "/predict"
    assert photo("a.png")["buffer"] in body


PATHS = ["/", "/page/page.css", "/page/page.js", "/page/icon.svg", "/docs", "/docs/swagger-ui.css", "/openapi.json"]


@pytest.mark.parametrize("path", PATHS)
def test_a_file_has_strict_headers_and_is_not_sent_twice(pretended, path):
    with urllib.request.urlopen(pretended.address + path, timeout=LIMIT) as answer:
        headers, content = answer.headers, answer.read()
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; ")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
    assert int(headers["Content-Length"]) == len(content) > 0
    request = urllib.request.Request(pretended.address + path, headers={"If-None-Match": headers["ETag"]})
    with pytest.raises(urllib.error.HTTPError, match="304"):
        urllib.request.urlopen(request, timeout=LIMIT)
