"""The live page in a browser: it grows while it is read, and what the reader did to it stays."""

import json
import threading
from types import SimpleNamespace

import pytest
from playwright.sync_api import expect

from falconet.report.pages import live_server
from falconet.report.pages.live_site import Site
from gloo import free_port
from growing_runs import growing
from report_runs import answers, write_run
from runs import wait_for

EVIL = "<img src=x onerror=\"document.title='owned'\">"
SHOWN = """(() => {
    const { x } = uPlot.sync("falconet").plots.find((each) => each.root.parentElement.id === "chart-loss").scales;
    return [x.min, x.max];
})()"""
POINTS = "report.data.charts[0].data[0].length"


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setattr("falconet.report.pages.live_site.LEAST_SECONDS", 0.0)
    ended = []

    def served(folder, port=0):
        held = live_server.listening(Site(folder), port)
        server = held.__enter__()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()

        def end():
            server.shutdown()
            thread.join()
            held.__exit__(None, None, None)

        ended.append(end)
        number = server.server_address[1]
        return SimpleNamespace(port=number, address=f"http://127.0.0.1:{number}", end=ended.pop)

    yield served
    for end in ended:
        end()


def test_marks_grow_while_the_page_is_open(tmp_path, serve, visit):
    with growing(tmp_path / "run", 3) as run:
        page = visit(serve(run.folder))
        assert page.evaluate(POINTS) == 3
        assert "epoch 3 of 20" in page.locator(".progress").inner_text()
        run.grow(2)
        wait_for(lambda: page.evaluate(POINTS) == 5, "5 points")
        expect(page.locator(".card.main dd")).to_have_text("88.00 %")  # 100 - 60 / 5
        expect(page.locator("#chart-loss + figcaption")).to_contain_text("after epoch 5")
        run.end()
        expect(page.locator(".badge")).to_have_text("finished")
        expect(page.locator(".progress")).to_have_count(0)
        assert page.locator("#live").inner_text() == "Following"


def test_a_page_that_was_opened_before_the_first_log_point_gets_its_charts(tmp_path, serve, visit):
    with growing(tmp_path / "run") as run:
        page = visit(serve(run.folder))
        expect(page.locator("#curves")).to_contain_text("There are no log points yet.")
        run.grow(2)
        expect(page.locator("#chart-loss canvas")).to_have_count(1)
        page.locator("button.log").click()
        expect(page.locator("button.log")).to_have_attribute("aria-pressed", "true")
        run.grow(3)
        wait_for(lambda: page.evaluate(POINTS) == 5, "5 points")
        expect(page.locator("#chart-loss canvas")).to_have_count(1)
        expect(page.locator("button.log")).to_have_attribute("aria-pressed", "true")


def test_zoom_sort_folds_and_scroll_stay(tmp_path, serve, visit):
    with growing(tmp_path / "run", 15) as run:
        page = visit(serve(run.folder), viewport={"width": 900, "height": 600})
        page.locator("#chart-loss").scroll_into_view_if_needed()
        box = page.locator("#chart-loss .u-over").bounding_box()
        page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 60, steps=4)
        page.mouse.up()
        zoom = page.evaluate(SHOWN)
        assert 1 < zoom[0] < zoom[1] < 15
        page.get_by_text("Every epoch in numbers").click()
        table = page.locator("table", has_text="Epochs of run")
        table.get_by_role("button", name="train loss").click()
        first = table.locator("tbody tr").first.locator("td").first
        expect(first).to_have_text("1")  # the highest loss first
        page.get_by_role("region", name="Epochs of run").evaluate("region => { region.scrollTop = 40; }")
        page.locator("#r0-layers").scroll_into_view_if_needed()
        where = page.locator("#r0-layers").bounding_box()["y"]
        run.grow(2)
        wait_for(lambda: page.evaluate(POINTS) == 17, "17 points")
        assert page.evaluate(SHOWN) == zoom
        expect(table.locator("tbody tr")).to_have_count(17)
        expect(first).to_have_text("1")
        expect(table.locator("th[aria-sort=descending]")).to_have_text("train loss")
        assert page.get_by_role("region", name="Epochs of run").evaluate("region => region.scrollTop") == 40
        assert abs(page.locator("#r0-layers").bounding_box()["y"] - where) <= 2


def test_the_matrix_keeps_its_enlarged_part_when_a_better_validation_comes(tmp_path, serve, visit):
    names = [f"class {number}" for number in range(30)]
    with growing(tmp_path / "run", 2) as run:
        writing = run.folder / "report/answers.json"
        writing.write_text(json.dumps(answers(names)))
        page = visit(serve(run.folder))
        page.locator("[data-zoom=in]").click()
        marks = page.locator("#r0-matrix").get_attribute("data-marks")
        assert int(marks) < 31
        writing.write_text(json.dumps(answers(names, images=20, update=40)))
        expect(page.locator("#r0-wrong")).to_contain_text("of 600 images")
        assert page.locator("#r0-matrix").get_attribute("data-marks") == marks


def test_a_server_that_ends_is_said_and_one_that_comes_back_is_followed(tmp_path, serve, visit):
    with growing(tmp_path / "run", 2) as run:
        server = serve(run.folder, free_port())  # which nothing else takes while there is no server
        page = visit(server)
        server.end()()
        expect(page.locator("#live")).to_contain_text("is lost")
        assert page.evaluate(POINTS) == 2
        run.grow()
        serve(run.folder, server.port)
        expect(page.locator("#chart-loss + figcaption")).to_contain_text("after epoch 3")
        expect(page.locator("#live")).to_have_text("Following")


def test_the_page_of_runs_gets_new_ones_and_leads_to_each(tmp_path, serve, visit):
    write_run(tmp_path / "runs/old")
    page = visit(serve(tmp_path / "runs"))
    expect(page.locator("tbody tr")).to_have_count(1)
    with growing(tmp_path / "runs/new", 1) as run:
        expect(page.locator("tbody tr")).to_have_count(2)
        run.grow(3)
        expect(page.locator("tbody tr").first).to_contain_text("4/20")
        page.get_by_role("link", name="new").click()
        expect(page.locator("h1")).to_contain_text("new under way")
        run.grow()
        wait_for(lambda: page.evaluate(POINTS) == 5, "5 points")
        page.get_by_role("link", name="All runs").click()
        expect(page.locator("tbody tr")).to_have_count(2)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it_without_scrolling_sideways(tmp_path, serve, visit, scheme):
    with growing(tmp_path / "runs" / ("long-" * 20), 3) as run:
        server = serve(tmp_path / "runs")
        for path in ("/", f"/run/{run.folder.name}/"):
            page = visit(server, path, viewport={"width": 390, "height": 800}, color_scheme=scheme)
            assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_sections_stay_in_reach_while_scrolling(tmp_path, serve, visit):
    with growing(tmp_path / "run", 3) as run:
        page = visit(serve(run.folder))
        page.evaluate("scrollTo({ top: 1500, behavior: 'instant' })")
        assert page.locator("nav").bounding_box()["y"] == 0


def test_hostile_text_stays_text_when_it_comes_later(tmp_path, serve, visit):
    with growing(tmp_path / "run", 2) as run:
        page = visit(serve(run.folder))
        title = page.title()
        (run.folder / "config.yaml").write_text(f"model: {EVIL}  # {EVIL}\n")
        run.end_early(kind="failed", reason=EVIL)
        expect(page.locator(".badge")).to_contain_text(EVIL)
        expect(page.locator("#r0-options")).to_contain_text(EVIL)
        assert page.title() == title
        assert page.locator("img[src=x]").count() == 0
