"""Access to the page at `/`, and its safety: keyboard, screen reader, contrast, markup, headers."""

import json
import urllib.error
import urllib.request

import numpy as np
import pytest
from aiohttp import web
from playwright.sync_api import Error, expect

from browsing import card, percent, photo, send, shown
from pretended_server import CLASSES, INDEX, SCENES, SHARES, Pretended, predicted
from served import LIMIT

pytestmark = pytest.mark.dist


MARKUP = '<img src=x onerror="window.broken=1"><script>window.broken=1</script>'


@pytest.fixture
def pretended():
    with Pretended() as server:
        yield server


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
    expect(page.get_by_label("Model").locator("option").first).to_have_text(MARKUP)
    assert page.evaluate("window.broken") is None
    assert page.locator("img[src=x], body script").count() == 0


def test_text_cannot_become_markup_at_all(browser, pretended):
    page = browser.new_page()
    page.goto(pretended.address)
    with pytest.raises(Error, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<b>x</b>'")
    assert page.evaluate("document.querySelectorAll('[onclick], [style], script:not([src])').length") == 0
    page.close()


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
        reached.append(
            page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.innerText")
        )
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
    unnamed = page.locator("button, a, select, input").evaluate_all(
        """all => all.filter((one) => !one.hidden &&
            !(one.innerText || one.getAttribute("aria-label") || one.labels?.length)).length"""
    )
    assert unnamed == 0
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
    const seen = (one) => one.checkVisibility({ visibilityProperty: true });
    const visible = [...document.querySelectorAll("body *")].filter(seen);
    const own = (one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const texts = visible.filter((one) => own(one) && !one.closest(".unseen, template"));
    const bars = visible.filter((one) => one.matches(".fill"));
    return [
        ...texts.map((one) => {
            const below = behind(one);
            return [one.className || one.tagName, over(getComputedStyle(one).color, below), below, 4.5];
        }),
        ...bars.map((one) => ["bar", behind(one), behind(one.parentElement), 3]),
    ];
}"""


def contrast(one, other):
    """WCAG 2.2's contrast ratio of two sRGB colours."""

    def luminance(colour):
        linear = [
            (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4)
            for share in np.divide(colour, 255)
        ]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("width", [340, 1100])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_is_readable_in_light_and_dark_and_at_every_width(visit, pretended, scheme, width):
    pretended.answer = lambda request: (
        web.json_response(predicted())
        if pretended.has_photo(request)
        else web.json_response({"error": "not an image"}, status=400)
    )
    pretended.index = [*INDEX, SCENES]
    page = visit(pretended, color_scheme=scheme, viewport={"width": width, "height": 700}, reduced_motion="reduce")
    long = "a-very-long-name-" * 8
    send(page, photo(f"{long}.png"), photo("b.png"), {"name": "c.txt", "mimeType": "text/plain", "buffer": b"x"})
    expect(page.locator("[data-state=done]")).to_have_count(2)
    expect(page.locator("[data-state=failed]")).to_have_count(1)
    page.evaluate(
        "document.getElementById('notice').hidden = false, document.getElementById('notice-text').textContent = 'x'"
    )
    found = page.evaluate(CONTRASTS)
    assert {"name", "percent", "label", "state", "server", "bar"} <= {name for name, *_ in found}
    assert not [
        (name, round(contrast(text, below), 2)) for name, text, below, least in found if contrast(text, below) < least
    ]
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
    methods = [
        (method.upper(), path)
        for path, item in description["paths"].items()
        for method in item
        if method != "parameters"
    ]
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
