"""The report in headless Chromium: charts and matrix drawn, tables sorted, dark, narrow, printed, and attacks inert."""

import json
import random

import pytest
from playwright.sync_api import expect

from falconet.report.pages import run_page
from falconet.report.run_files import read_run
from report_runs import answers, lines, profile, write_run

pytestmark = pytest.mark.dist

ATTACK = "<img src=x onerror=\"document.title='attacked'\"><script>document.title='attacked'</script>'\"></script>"
PAINTED = """element => {
    const canvas = element.querySelector("canvas"), paint = canvas.getContext("2d");
    const pixels = paint.getImageData(0, 0, canvas.width, canvas.height).data, found = {};
    for (let at = 0; at < pixels.length; at += 4) {
        if (pixels[at + 3] < 200) continue;
        const colour = `${pixels[at]},${pixels[at + 1]},${pixels[at + 2]}`;
        found[colour] = (found[colour] || 0) + 1;
    }
    return found;
}"""


@pytest.fixture
def visit(open_file):
    """Opens the page of runs."""

    def opened(*folders, width=1200, **options):
        target = folders[0].parent / "page.html"
        target.write_text(run_page.page([read_run(folder) for folder in folders]))
        page = open_file(target, viewport={"width": width, "height": 800}, **options)
        page.wait_for_selector("html[data-ready=true]")
        return page

    return opened


def colours(page, selector):
    return set(page.locator(selector).evaluate(PAINTED))


def test_every_chart_and_the_matrix_are_drawn(visit, tmp_path):
    page = visit(write_run(tmp_path / "run", epochs=6))
    for key in ("loss", "accuracy"):
        assert {"0,114,178", "213,94,0"} <= colours(page, f"#chart-{key}")  # validation and training
    for key in ("lr", "throughput", "memory"):
        assert "0,114,178" in colours(page, f"#chart-{key}")
    assert page.locator("#r0-matrix").get_attribute("data-marks") == "4"
    assert "0,114,178" in colours(page, "#r0-matrix")
    assert page.locator(".reliability .bin").count() == 2
    assert all(page.locator("img").evaluate_all("all => all.map((each) => each.naturalWidth > 0)"))


@pytest.mark.parametrize("pixels", [1, 2, 3])  # per point
def test_dashes_are_as_long_on_a_fine_screen(visit, tmp_path, pixels):
    spy = """
        window.dashed = [];
        const own = CanvasRenderingContext2D.prototype.setLineDash;
        CanvasRenderingContext2D.prototype.setLineDash = function (lengths) {
            window.dashed.push(lengths.join()); own.call(this, lengths);
        };
    """
    page = visit(write_run(tmp_path / "run"), script=spy, device_scale_factor=pixels)
    assert f"{5 * pixels},{4 * pixels}" in page.evaluate("window.dashed")


def test_a_scale_becomes_logarithmic_and_back(visit, tmp_path):
    page = visit(write_run(tmp_path / "run"))
    button = page.get_by_role("button", name="log scale")
    button.press("Enter")
    assert button.get_attribute("aria-pressed") == "true"
    assert "0,114,178" in colours(page, "#chart-loss")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"


def column(page, table, number):
    cells = page.get_by_role("region", name=table).locator(f"tbody tr td:nth-child({number})")
    return cells.all_inner_texts()


def test_tables_sort_by_click_and_by_keyboard(visit, tmp_path):
    page = visit(write_run(tmp_path / "run", names=("b10", "b9", "a")))
    name = "Accuracy by class"
    assert column(page, name, 1) == ["b10", "a", "b9"]  # the worst first
    head = page.get_by_role("region", name=name).get_by_role("button", name="class")
    head.click()
    assert column(page, name, 1) == ["a", "b9", "b10"]
    head.press("Enter")
    assert column(page, name, 1) == ["b10", "b9", "a"]
    page.get_by_role("region", name=name).get_by_role("button", name="right").press(" ")
    assert column(page, name, 3) == ["10", "10", "9"]
    sorted_by = (
        page.get_by_role("region", name=name)
        .locator("th")
        .evaluate_all("all => all.map((each) => each.getAttribute('aria-sort'))")
    )
    assert sorted_by == ["none", "none", "descending", "none"]


def test_the_matrix_names_the_cell_under_the_pointer_and_zooms_by_keys(visit, tmp_path):
    page = visit(write_run(tmp_path / "run", names=[f"class {number}" for number in range(30)]))
    matrix, told = page.locator("#r0-matrix"), page.locator(".matrix output")
    matrix.focus()
    page.keyboard.press("ArrowRight")
    assert told.inner_text() == "class 0 taken for class 1: 1 of 10 (10.0 %)"
    page.keyboard.press("ArrowDown")
    assert told.inner_text() == "class 1 recognised: 10 of 10 (100.0 %)"
    assert matrix.get_attribute("data-marks") == "31"
    for _ in range(4):
        page.keyboard.press("+")
    assert int(matrix.get_attribute("data-marks")) < 12
    page.get_by_role("button", name="all", exact=True).click()
    assert matrix.get_attribute("data-marks") == "31"
    matrix.hover(position={"x": matrix.bounding_box()["width"] - 8, "y": 8})
    expect(told).to_have_text("class 0 taken for class 29: 0 of 10 (0.0 %)")


def test_buttons_zoom_the_matrix_and_say_when_they_cannot(visit, tmp_path):
    page = visit(write_run(tmp_path / "run", names=[f"class {number}" for number in range(30)]), width=390)
    matrix, buttons = page.locator("#r0-matrix"), page.locator(".matrix .tools button")

    def idle():
        return buttons.evaluate_all("all => all.map((each) => each.getAttribute('aria-disabled'))")

    assert idle() == ["false", "true", "true"]
    for _ in range(3):
        page.get_by_role("button", name="Zoom in").press("Enter")
    assert int(matrix.get_attribute("data-marks")) < 12
    assert idle() == ["true", "false", "false"]
    page.get_by_role("button", name="Zoom out").press(" ")
    assert idle() == ["false", "false", "false"]


def test_two_fingers_zoom_the_matrix_and_one_moves_it(visit, tmp_path):
    folder = write_run(tmp_path / "run", names=[f"class {number}" for number in range(30)])
    page = visit(folder, width=390, has_touch=True)
    matrix = page.locator("#r0-matrix")
    matrix.scroll_into_view_if_needed()
    assert matrix.evaluate("each => each.style.touchAction") == "pan-x pan-y", "one finger scrolls the page"
    box, touches = matrix.bounding_box(), page.context.new_cdp_session(page)

    def touch(kind, *points):
        places = [{"x": box["x"] + x, "y": box["y"] + y, "id": at} for at, (x, y) in enumerate(points)]
        touches.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": places})

    touch("touchStart", (140, 140), (160, 160))
    for far in (20, 40, 60):
        touch("touchMove", (140 - far, 140 - far), (160 + far, 160 + far))
    touch("touchEnd")
    expect(matrix).not_to_have_attribute("data-marks", "31")
    assert matrix.evaluate("each => each.style.touchAction") == "none"
    before = page.locator(".matrix canvas").evaluate("canvas => canvas.toDataURL()")
    touch("touchStart", (200, 150))
    touch("touchMove", (120, 100))
    touch("touchEnd")
    assert page.locator(".matrix canvas").evaluate("canvas => canvas.toDataURL()") != before


def test_a_matrix_of_a_thousand_classes_is_drawn(visit, tmp_path):
    folder, draw = write_run(tmp_path / "run"), random.Random(0)
    content = answers([f"n{number:08d}" for number in range(1000)], images=50)
    wrong = {(draw.randrange(1000), draw.randrange(1000)) for _ in range(12_000)}
    content["confusion"]["cells"] = [
        *([each, each, 38] for each in range(1000)),
        *([a, b, 1] for a, b in wrong if a != b),
    ]
    (folder / "report/answers.json").write_text(json.dumps(content))
    page = visit(folder)
    assert int(page.locator("#r0-matrix").get_attribute("data-marks")) > 10_000
    page.locator("#r0-matrix").hover(position={"x": 200, "y": 100})
    expect(page.locator(".matrix output")).to_contain_text(" of 50 (")


@pytest.mark.parametrize("width", [360, 768, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_screen_in_any_colours(visit, tmp_path, width, scheme):
    names = ("a-class-with-a-very-long-name-that-has-no-blank", "b", "c")
    page = visit(write_run(tmp_path / "run", names=names), width=width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
    assert {"light": "0,114,178", "dark": "86,180,233"}[scheme] in colours(page, "#chart-loss")


def test_it_prints_in_light_colours(visit, tmp_path):
    page = visit(write_run(tmp_path / "run"), color_scheme="dark")
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert "0,114,178" in colours(page, "#chart-loss")
    assert not page.locator("nav").is_visible()
    assert page.pdf().startswith(b"%PDF")
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert "86,180,233" in colours(page, "#chart-loss")


PAPER = 718  # CSS pixels between the margins of a letter


def on_paper(page):
    """The page as Chromium lays it out on paper: after `beforeprint`, which a wide window answers, and narrower."""
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    page.evaluate("width => { document.documentElement.style.width = `${width}px`; }", PAPER)


def test_charts_and_the_matrix_stay_within_their_frames_on_paper(visit, tmp_path):
    page = visit(write_run(tmp_path / "run", epochs=6), width=1280)
    on_paper(page)
    frames = page.locator(".chart, .matrix").all()
    assert len(frames) == 6
    for frame in frames:
        outer, inner = frame.bounding_box(), frame.locator("canvas").bounding_box()
        assert outer["x"] + outer["width"] <= PAPER
        assert outer["x"] <= inner["x"]
        assert inner["x"] + inner["width"] <= outer["x"] + outer["width"]
        shape = frame.locator("canvas").evaluate("canvas => canvas.width / canvas.height")
        assert inner["width"] / inner["height"] == pytest.approx(shape, rel=0.02), "not distorted"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert "0,114,178" in colours(page, "#chart-loss")


def test_no_table_runs_into_what_follows_it_on_paper(visit, tmp_path):
    folder = write_run(tmp_path / "run", names=[f"class {number}" for number in range(40)])
    page = visit(folder)
    on_paper(page)
    for table in page.locator(".scrolls:visible").all():
        assert table.evaluate("element => element.scrollHeight - element.clientHeight") <= 1


@pytest.mark.parametrize("rows", [300, 301])
def test_rows_that_are_not_printed_are_counted(visit, tmp_path, rows):
    page = visit(write_run(tmp_path / "run", names=[f"class {number}" for number in range(rows)]))
    words = page.get_by_text("Printed: the first 300 of 301 rows.")
    assert not words.is_visible()
    on_paper(page)
    classes = page.get_by_role("region", name="Accuracy by class").locator("tbody tr")
    assert sum(row.is_visible() for row in classes.all()) == 300
    assert words.is_visible() == (rows > 300)


BELOW = """
    globalThis.below = [];  // the texts below charts, with the chart of each
    const paint = CanvasRenderingContext2D.prototype, before = paint.fillText;
    paint.fillText = function (text, ...place) {
        if (this.textBaseline === "top") below.push([this.canvas.closest(".plot").id, text]);
        before.call(this, text, ...place);
    };
"""


@pytest.mark.parametrize(("epochs", "ticks"), [(1, {"0", "1", "2"}), (2, {"1", "2"}), (3, {"1", "2", "3"})])
def test_a_short_run_has_ticks_at_whole_epochs(visit, tmp_path, epochs, ticks):
    page = visit(write_run(tmp_path / "run", epochs=epochs), script=BELOW)
    assert {text for place, text in page.evaluate("below") if place == "chart-loss"} == ticks


@pytest.mark.parametrize("width", [390, 1200])
def test_long_numbers_beside_an_axis_are_not_cut(visit, tmp_path, width):
    folder = write_run(tmp_path / "run")
    points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    small = [point | {"train/lr": 0.000125 * point["epoch"]} if "train/lr" in point else point for point in points]
    (folder / "metrics.jsonl").write_text(lines(small))
    page = visit(folder, width=width)
    edge = """element => {
        const canvas = element.querySelector("canvas");
        return canvas.getContext("2d").getImageData(0, 0, 1, canvas.height).data.some((value) => value > 0);
    }"""
    assert not page.locator("#chart-lr").evaluate(edge), "a number touches the edge"


def test_a_part_of_an_epoch_has_ticks_within_it(visit, tmp_path):
    folder = write_run(tmp_path / "run", epochs=1, points=5)
    page = visit(folder, script=BELOW)
    assert {"0.4", "0.6"} <= {text for place, text in page.evaluate("below") if place == "chart-lr"}


def test_several_runs_have_a_colour_each(visit, tmp_path):
    first, second = write_run(tmp_path / "a", epochs=4), write_run(tmp_path / "b", epochs=7)
    lines = [json.loads(line) for line in (second / "metrics.jsonl").read_text().splitlines()]
    faster = [json.dumps(line | ({"train/lr": 0.2} if "train/lr" in line else {})) for line in lines]
    (second / "metrics.jsonl").write_text("\n".join(faster) + "\n")
    page = visit(first, second)
    assert {"0,114,178", "213,94,0"} <= colours(page, "#chart-lr")
    page.locator(".run > details > summary").last.click()
    expect(page.locator("#r1-matrix")).to_have_attribute("data-marks", "4")  # drawn when it is opened


def test_what_a_hostile_run_states_stays_text(visit, tmp_path):
    folder = write_run(tmp_path / "run", names=(ATTACK, f"{ATTACK}2"), options=[("lr", ATTACK, ATTACK)])
    (folder / "plan.txt").write_text(ATTACK)
    (folder / "report/environment.json").write_text(json.dumps({ATTACK: ATTACK, "device": ATTACK}))
    page = visit(folder)
    assert page.title() == "run - Falconet"
    assert page.locator("script").count() == 3
    assert page.locator("[onerror]").count() == 0
    assert ATTACK in page.locator("pre.plan").inner_text()
    page.locator("#r0-matrix").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".matrix output").inner_text().startswith(ATTACK)
    assert page.title() == "run - Falconet"


def test_every_figure_has_a_name_for_those_who_cannot_see_it(visit, tmp_path):
    page = visit(write_run(tmp_path / "run"))
    for place in page.locator("[role=img]").all():
        assert len(place.get_attribute("aria-label")) > 15
    for picture in page.locator("img").all():
        assert picture.get_attribute("alt")
    assert page.locator("html").get_attribute("lang") == "en"
    loss = page.locator("#chart-loss").get_attribute("aria-label")
    assert "0.6667 after epoch 3" in loss


def test_a_profile_is_drawn_sorts_and_fits_a_phone(visit, tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "profile_summary.json").write_text(json.dumps(profile()))
    page = visit(folder)
    bars = [box["width"] for box in (each.bounding_box() for each in page.locator(".share i").all())]
    assert bars[0] == pytest.approx(3 * bars[1], rel=0.01)  # 6 ms and 2 ms
    area, peak = page.locator(".memory .area").bounding_box(), page.locator(".memory .peak").bounding_box()
    assert peak["x"] + peak["width"] / 2 == pytest.approx(area["x"] + area["width"] / 2, abs=1)  # 4 of 8 ms
    assert peak["y"] + peak["height"] / 2 == pytest.approx(area["y"] + area["height"] * (1 - 1 / 1.08), abs=1)
    names = page.locator(".memory .legend span")
    assert names.all_inner_texts() == ["forward, 4 ms", "backward, 3 ms", "optimizer, 1 ms"]
    assert all(names.evaluate_all("all => all.map((each) => each.scrollWidth <= each.clientWidth)"))
    table = page.locator("[aria-label='Time and memory by layer'] table")
    table.get_by_role("button", name="forward, ms").click()
    table.get_by_role("button", name="forward, ms").click()  # the least first
    expect(table.locator("tbody tr").first).to_contain_text("bn1 + act1")
    narrow = visit(folder, width=390)
    assert narrow.evaluate("document.documentElement.scrollWidth") <= 390
