"""The page of `falconet data check` in a browser: no errors, no requests, names are text, all of it fits a phone."""

import pytest

import layouts
import odd_photos
from falconet.report.pages.data_page import Page, Picture, Section, Tile, rendered

EVIL = "\"'><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&amp;.jpg"


@pytest.fixture
def visit(open_file, tmp_path):
    """Opens a page from a file."""

    def opened(html, **options):
        file = tmp_path / "page.html"
        file.write_text(html)
        return open_file(file, **options)

    return opened


def picture(path="train/cat/1.jpg", **more):
    return Picture(
        path, "train", more.pop("label", "cat"), more.pop("detail", ""), (layouts.encoded(layouts.photo(1)),)
    )


def made(**changes):
    content = {
        "title": "Check of photos",
        "subtitle": "photos: 3 photos",
        "warning": "",
        "tiles": [Tile("3", "photos"), Tile("1", "broken photos", "bad")],
        "sections": [
            Section("broken: truncated", "The file ends too early.", 30, "photo", True, [[picture()]] * 18),
            Section(
                "same file in train and val", "Too high.", 1, "group", False, [[picture(), picture("val/cat/2.jpg")]]
            ),
            Section("class only in val", "Refused.", 1, "class", True, names=["fish"]),
        ],
        "classes": [(f"class {number}", 100 - number, number) for number in range(60)],
        "balance": "balanced",
        "notes": ["a note"],
        "footer": "decoded",
    }
    return rendered(Page(**(content | changes)))


def test_a_page_shows_findings_groups_and_classes(visit):
    page = visit(made(), viewport={"width": 1100, "height": 800})
    assert page.title() == "Check of photos"
    assert page.locator("nav a").all_inner_texts() == [
        "Broken: truncated",
        "Same file in train and val",
        "Class only in val",
    ]
    assert page.locator("#finding-0 figure").count() == 18
    assert "and 12 more photos, in the list" in page.locator("#finding-0").inner_text()
    group = page.locator("#finding-1 .groups > li")
    assert group.count() == 1
    boxes = [figure.bounding_box() for figure in group.locator("figure").all()]
    assert len({box["y"] for box in boxes}) == 1, "copies are side by side"
    assert all(page.evaluate("[...document.images].map(image => image.naturalWidth > 0)"))
    assert page.locator("#classes details").count() == 1
    widths = [bar.bounding_box()["width"] for bar in page.locator("#classes > table tr:first-child .bar").all()]
    assert widths[0] > 100
    assert widths[1] == 0
    page.locator("summary").focus()
    page.keyboard.press("Enter")
    assert page.locator("#classes details tr").count() == 20
    assert page.locator("#classes details tr").last.is_visible()


def test_names_are_text_wherever_they_appear(visit):
    html = made(
        title=EVIL,
        subtitle=EVIL,
        warning=EVIL,
        tiles=[Tile(EVIL, EVIL)],
        sections=[
            Section(EVIL, EVIL, 1, "photo", True, [[picture(EVIL, label=EVIL, detail=EVIL)]]),
            Section(EVIL, EVIL, 1, "class", True, names=[EVIL]),
        ],
        classes=[(EVIL, 1, 1)],
        balance=EVIL,
        notes=[EVIL],
        footer=EVIL,
    )
    page = visit(html)
    assert page.title() == EVIL
    assert page.locator("img").count() == 1
    assert page.locator("script").count() == 0
    assert EVIL in page.locator("figcaption").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_of_it_without_scrolling_sideways(visit, scheme):
    long = "train/" + "x" * 120 + "/" + "y" * 120 + ".jpg"
    sections = [Section("truncated", "Words. " * 30, 2, "photo", True, [[picture(long, label="z" * 90)]] * 2)]
    page = visit(
        made(sections=sections, classes=[("c" * 100, 5, 1)], notes=["n" * 300]),
        viewport={"width": 360, "height": 700},
        color_scheme=scheme,
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    ink, paper = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
    luminance = [sum(map(int, colour[4:-1].split(","))) for colour in (ink, paper)]
    assert (luminance[0] < luminance[1]) == (scheme == "light")


def test_the_page_of_a_real_check_is_small_and_shows_turned_photos_both_ways(falconet, visit, tmp_path):
    root = odd_photos.build(tmp_path / "odd")
    for number in range(60):
        data = odd_photos.turned(layouts.photo(number, width=900, height=600), 6)
        (root / "train/cat" / f"turned-{number}.jpg").write_bytes(data)
    answer = falconet("data check odd --html check.html")
    assert answer.code == 1, answer.err
    html = (tmp_path / "check.html").read_text()
    assert len(html) < 3_000_000
    page = visit(html)
    section = page.locator("section", has_text="Rotated by EXIF")
    assert section.locator("figure").count() == 18
    sizes = section.locator("figure").first.evaluate(
        "figure => [...figure.querySelectorAll('img')].map(image => [image.naturalWidth, image.naturalHeight])"
    )
    assert [width > height for width, height in sizes] == [True, False]
    assert "no picture" in page.locator("section", has_text="Empty file").inner_text()
