"""Chromium without a window, and what the tests of the server's page do with it."""

import base64
import contextlib
import io
import os
import re
import shutil

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect, sync_playwright

from served import LIMIT

ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update"
    " --disable-sync"
)
INSTALL = "apt-get install --no-install-recommends chromium"
expect.set_options(timeout=1000 * LIMIT)


@contextlib.contextmanager
def chromium():
    """A browser."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        missing = f"there is no Chromium; {INSTALL}"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=ARGUMENTS.split(), timeout=1000 * LIMIT)
        yield started
        started.close()


@contextlib.contextmanager
def pages(browser, *, asked, wrong):
    """Makes pages, each in a context of its own: they add to these lists the addresses they ask for, and errors."""
    contexts = []

    def made(*, script="", **options):
        context = browser.new_context(**{"viewport": {"width": 1100, "height": 800}, **options})
        context.set_default_timeout(1000 * LIMIT)
        context.add_init_script(script)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        return page

    yield made
    for context in contexts:
        context.close()


@contextlib.contextmanager
def visiting(browser):
    """Opens pages of servers; at the end nothing may have failed in them, or been asked of another server."""
    wrong, asked, ports = [], [], set()

    with pages(browser, asked=asked, wrong=wrong) as made:

        def opened(server, path="/", **options):
            ports.add(server.port)
            page = made(**options)
            page.on("console", lambda message: message.type == "error" and wrong.append(message.text))
            page.on("filechooser", lambda _: None)  # a key that is pressed later would overtake this wish
            page.goto(server.address + path)
            return page

        yield opened
    hosts = {re.match(r"blob:|\w+://[^/]+", address)[0] for address in asked}
    assert hosts <= {"blob:", *(f"http://127.0.0.1:{port}" for port in ports)}
    # What was refused, or not answered, is an error to Chromium, however it is dealt with.
    assert not [text for text in wrong if not text.startswith("Failed to load resource")]


@contextlib.contextmanager
def opening_files(browser):
    """Opens pages from files; at the end nothing may have failed or been printed in them, or been asked of a server."""
    wrong, asked = [], []

    with pages(browser, asked=asked, wrong=wrong) as made:

        def opened(file, **options):
            page = made(**options)
            page.on("console", lambda message: wrong.append(message.text))
            page.goto(file.as_uri())
            return page

        yield opened
    assert wrong == []
    assert {address.split(":")[0] for address in asked} <= {"file", "data"}


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
