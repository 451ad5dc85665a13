"""The findings of `falconet data check` as a table, a full list, JSON, and the content of a page."""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

from PIL import Image, ImageFile, ImageOps

from falconet.data.exclusion import line_of
from falconet.data.findings import Copies, Finding, Findings, Limits, Photo, Photos
from falconet.data.image_files import DAMAGE, UnreadableImageError, to_rgb, use_image
from falconet.data.storage import PhotoSource
from falconet.errors import printable
from falconet.report.console import counted
from falconet.report.pages.data_page import Page, Picture, Section, Tile

FIRST_LINE = "# falconet data check: kind, path and detail of every finding, separated by tabs"
MOST_EXAMPLES = 2  # per line
MOST_LINES = 5  # class names per line
MOST_SHOWN, MOST_GROUPS, MOST_OF_GROUP = 18, 12, 6  # pictures per kind, groups, and pictures per group
MOST_NAMES = 100  # classes
MOST_BYTES = 2_000_000  # for all pictures: as text in the page they take a third more
THUMBNAIL_SIDE = 168  # pixels on the longer side: 84 points on a screen with two pixels per point
THUMBNAIL_QUALITY = 62


@dataclass(frozen=True)
class Checked:
    """What was checked, for the first lines of every report."""

    name: str  # as the user gave it
    findings: Findings
    layout: str
    split: str  # how the photos are divided, in words
    seconds: float
    passed_over: tuple[str, ...]
    limits: Limits

    @property
    def is_partial(self) -> bool:
        return self.findings.checked < self.findings.photos


@dataclass(frozen=True)
class Kind:
    """A kind of copies."""

    name: str  # its name in the list and in the JSON
    title: str
    meaning: str
    has: Callable[[Copies], bool]
    differs: Callable[[Photo], str] = attrgetter("path")  # what differs between the two copies that serve as an example


KINDS = (
    Kind(
        "leak",
        "same file in train and val",
        "Validation includes photos that were trained on: the accuracy comes out too high.",
        lambda copies: copies.is_exact and copies.crosses,
        attrgetter("side"),
    ),
    Kind(
        "near-leak",
        "nearly the same photo in train and val",
        "Resized, compressed or slightly cropped copies make the accuracy too high as well.",
        lambda copies: not copies.is_exact and copies.crosses,
        attrgetter("side"),
    ),
    Kind(
        "conflict",
        "same file under several classes",
        "At most one of its labels can be right.",
        lambda copies: copies.is_exact and copies.conflicts,
        attrgetter("label"),
    ),
    Kind(
        "near-conflict",
        "nearly the same photo under several classes",
        "One of the labels is probably wrong.",
        lambda copies: not copies.is_exact and copies.conflicts,
        attrgetter("label"),
    ),
    Kind(
        "duplicate",
        "same file several times",
        "It counts once for each copy.",
        lambda copies: copies.is_exact and not copies.crosses and not copies.conflicts,
    ),
    Kind(
        "near-duplicate",
        "nearly the same photo several times",
        "Frames of a video or copies of a photo: each of them counts.",
        lambda copies: not copies.is_exact and not copies.crosses and not copies.conflicts,
    ),
)


def _by_kind(findings: Findings) -> list[tuple[Kind, list[Copies]]]:
    found = ((kind, [copies for copies in findings.copies if kind.has(copies)]) for kind in KINDS)
    return [(kind, own) for kind, own in found if own]


def lines(checked: Checked) -> list[str]:
    """The table on the terminal."""
    findings = checked.findings
    rows: list[tuple[str, str, str]] = []  # what, how many, examples
    for finding in (*findings.broken, *findings.remarks):
        rows.append((_title(finding), f"{len(finding.photos):,}", _examples(finding)))
    for kind, own in _by_kind(findings):
        examples = " = ".join(photo.path for photo in _pair(own[0], kind))
        more = f" and {counted(len(own) - 1, 'more group')}" if len(own) > 1 else ""
        rows.append((kind.title, f"{len(own):,}", f"{examples}{more}"))
    for each in _class_findings(findings):
        rows.append((_title(each), f"{len(each.names):,}", _some(each.names)))
    first = [_head(checked), _pace(checked)]
    if not rows:
        fine = "" if checked.is_partial else ": every photo is complete, ordinary and present only once"
        return [*first, f"nothing found{fine}", *_remaining(checked)]
    wide, narrow = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    return [
        *first,
        *(f"  {what:<{wide}}  {count:>{narrow}}  {words}" for what, count, words in rows),
        *_remaining(checked),
    ]


def _pair(copies: Copies, kind: Kind) -> tuple[Photo, Photo]:
    """Two copies that show what the kind means, such as one that trains and one that validates."""
    first, *others = copies.photos
    return first, next((photo for photo in others if kind.differs(photo) != kind.differs(first)), others[0])


def _head(checked: Checked) -> str:
    found = checked.findings
    sizes = f", {' to '.join(found.extremes)} pixels" if found.extremes else ""
    classes = counted(len(found.classes), "class")
    return f"{checked.name}: {counted(found.photos, 'photo')} of {classes}{sizes}, {checked.layout}; {checked.split}"


def _pace(checked: Checked) -> str:
    found = checked.findings
    rate = found.checked / max(checked.seconds, 1e-3)
    if checked.is_partial:
        return f"stopped after {found.checked:,} of {counted(found.photos, 'photo')}; the following is about those"
    return f"decoded all of them in {checked.seconds:.1f} s, {rate:,.0f} per second"


def _remaining(checked: Checked) -> list[str]:
    found = checked.findings
    notes = [*checked.passed_over, *found.notes]
    return [*([balance(checked)] if is_unbalanced(checked) else []), *(f"note: {note}" for note in notes)]


def is_unbalanced(checked: Checked) -> bool:
    return checked.findings.imbalance >= checked.limits.imbalance


def balance(checked: Checked) -> str:
    """A line on how much the classes differ in size, and what training can do about it."""
    trained = [each for each in checked.findings.classes if each.train]
    if not trained:
        return "There are no photos to train on."
    largest, smallest = max(trained, key=lambda each: each.train), min(trained, key=lambda each: each.train)
    if largest.train == smallest.train:
        return "Every class has the same number of photos to train on."
    text = (
        f"classes differ in size: {largest.train:,} photos of '{largest.name}' to train on, {smallest.train:,} of"
        f" '{smallest.name}', {checked.findings.imbalance:.1f} times as many"
    )
    if not is_unbalanced(checked):
        return text
    return (
        f"{text}; `--sampler balanced` draws every class equally often, `--class-weights balanced` weights the loss"
        " instead"
    )


@dataclass(frozen=True)
class ClassFinding:
    """Classes or folders with a problem."""

    kind: str
    title: str
    meaning: str
    unit: str
    names: Sequence[str]
    is_broken: bool = False


def _class_findings(findings: Findings) -> list[ClassFinding]:
    found = (
        ClassFinding(
            "broken-class-only-in-val",
            "class only in val",
            "Training refuses it, because there is nothing to learn it from.",
            "class",
            findings.untrained,
            is_broken=True,
        ),
        ClassFinding(
            "class-not-in-val",
            "class without a photo in val",
            "It is trained, but its accuracy is not measured.",
            "class",
            findings.unvalidated,
        ),
        ClassFinding("empty-folder", "folder without a photo", "It is not a class.", "folder", findings.empty),
    )
    return [each for each in found if each.names]


def _title(finding: Finding | ClassFinding) -> str:
    return f"broken: {finding.title}" if finding.is_broken else finding.title


def _examples(finding: Finding) -> str:
    photos = finding.photos
    shown = ", ".join(photo.path + _detail(photo, finding) for photo in photos[:MOST_EXAMPLES])
    return shown + (f" and {len(photos) - MOST_EXAMPLES:,} more" if len(photos) > MOST_EXAMPLES else "")


def _detail(photo: Photo, finding: Finding) -> str:
    """What is noted about a photo beyond the title of the finding."""
    return f" ({photo.detail})" if photo.detail not in ("", finding.title) else ""


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_LINES]) + (f" and {len(names) - MOST_LINES:,} more" if len(names) > MOST_LINES else "")


def listing(checked: Checked) -> str:
    """Every finding, one per line; copies have the number of their group."""
    found = checked.findings
    rows = [FIRST_LINE, f"# {printable(_head(checked))}", f"# {_pace(checked)}"]
    for finding in (*found.broken, *found.remarks):
        name = f"broken-{finding.kind}" if finding.is_broken else finding.kind
        rows += [_row(name, photo.path, photo.detail) for photo in finding.photos]
    for kind, own in _by_kind(found):
        for number, copies in enumerate(own, start=1):
            rows += [
                _row(f"{kind.name}-{number}", photo.path, f"{photo.side}, {photo.label}") for photo in copies.photos
            ]
    rows += [_row(each.kind, name, "") for each in _class_findings(found) for name in each.names]
    return "\n".join(rows) + "\n"


def _row(kind: str, path: str, detail: str) -> str:
    return "\t".join((kind, line_of(path), printable(detail))).rstrip("\t")


def as_json(checked: Checked) -> dict[str, Any]:
    found = checked.findings

    def finding(each: Finding) -> dict[str, Any]:
        return {"count": len(each.photos), "photos": [_as_json(photo) for photo in each.photos]}

    return {
        "format": "falconet data check 1",
        "source": checked.name,
        "layout": checked.layout,
        "split": checked.split,
        "photos": found.photos,
        "checked": found.checked,
        "complete": not checked.is_partial,
        "seconds": round(checked.seconds, 3),
        "limits": asdict(checked.limits),
        "broken": {each.kind: finding(each) for each in found.broken},
        "remarks": {each.kind: finding(each) for each in found.remarks},
        "copies": {
            kind.name: [[_as_json(photo) for photo in copies.photos] for copies in own] for kind, own in _by_kind(found)
        },
        "classes": {each.name: {"train": each.train, "val": each.validation} for each in found.classes},
        "only_in_val": list(found.untrained),
        "not_in_val": list(found.unvalidated),
        "empty_folders": list(found.empty),
        "imbalance": round(found.imbalance, 3),
        "passed_over": list(checked.passed_over),
        "notes": list(found.notes),
    }


def _as_json(photo: Photo) -> dict[str, str]:
    detail = {"detail": photo.detail} if photo.detail else {}
    return {"path": photo.path, "part": photo.side, "class": photo.label, **detail}


class Gallery:
    """Pictures for a page, until their bytes are used up."""

    def __init__(self, photos: Photos) -> None:
        self._photos, self._left = photos, MOST_BYTES

    def picture(self, photo: Photo, *, also_upright: bool = False) -> Picture:
        source, number = self._photos.place(photo.number)
        jpegs = tuple(
            jpeg
            for make in (_thumbnail, *([_upright] if also_upright else []))
            if self._left > 0 and (jpeg := make(source, number)) is not None
        )
        self._left -= sum(map(len, jpegs))
        return Picture(photo.path, photo.side, photo.label, photo.detail, jpegs)


def _thumbnail(source: PhotoSource, number: int) -> bytes | None:
    """A photo as training sees it, as a JPEG: what can be decoded of a broken one; None if that is nothing."""
    try:
        with _broken_allowed():
            return use_image(source.opened(number), lambda image: _encoded(_shrunk(image)))
    except (UnreadableImageError, OSError):
        return None


def _upright(source: PhotoSource, number: int) -> bytes | None:
    """A photo as viewers show it, turned by its EXIF tag."""
    try:
        return use_image(source.opened(number), lambda image: _encoded(ImageOps.exif_transpose(_shrunk(image))))
    except (UnreadableImageError, OSError, *DAMAGE):
        return None


def _shrunk(image: Image.Image) -> Image.Image:
    exif = image.getexif()
    image.draft("RGB", (2 * THUMBNAIL_SIDE, 2 * THUMBNAIL_SIDE))
    small = to_rgb(image)
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE), reducing_gap=2.0)
    small.info["exif"] = exif.tobytes() if exif else b""
    return small


def _encoded(image: Image.Image) -> bytes:
    image.info.clear()
    file = io.BytesIO()
    image.save(file, "JPEG", quality=THUMBNAIL_QUALITY)
    return file.getvalue()


@contextmanager
def _broken_allowed() -> Iterator[None]:
    """Let Pillow return what it has of a truncated file. The setting is global, so only one thread may use it."""
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = True
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


def page(checked: Checked, photos: Photos) -> Page:
    """The content of the page, with pictures of the first photos of each kind."""
    found, gallery = checked.findings, Gallery(photos)
    sections = [_section(finding, gallery) for finding in found.broken]
    class_findings = _class_findings(found)
    sections += [_class_section(each) for each in class_findings if each.is_broken]
    for kind, own in _by_kind(found):
        rows = [[gallery.picture(photo) for photo in _spread(copies)] for copies in own[:MOST_GROUPS]]
        sections.append(Section(kind.title, kind.meaning, len(own), "group", False, rows))
    sections += [_section(finding, gallery) for finding in found.remarks]
    sections += [_class_section(each) for each in class_findings if not each.is_broken]
    return Page(
        title=f"Check of {checked.name}",
        subtitle=_head(checked),
        warning=_pace(checked) if checked.is_partial else "",
        tiles=_tiles(checked),
        sections=sections,
        classes=found.classes,
        balance=balance(checked),
        notes=[*checked.passed_over, *found.notes],
        footer="" if checked.is_partial else _pace(checked),
    )


def _spread(copies: Copies) -> list[Photo]:
    """The first copies to show: one of each part and class, then the others."""
    firsts = {(photo.side, photo.label): photo for photo in reversed(copies.photos)}
    shown = sorted(firsts.values()) + [photo for photo in copies.photos if photo not in firsts.values()]
    return shown[:MOST_OF_GROUP]


def _section(finding: Finding, gallery: Gallery) -> Section:
    is_rotated = finding.kind == "exif-rotated"
    first = [photo if _detail(photo, finding) else photo._replace(detail="") for photo in finding.photos[:MOST_SHOWN]]
    shown = [[gallery.picture(photo, also_upright=is_rotated)] for photo in first]
    meaning = f"{finding.meaning} Left: as training sees it." if is_rotated else finding.meaning
    return Section(_title(finding), meaning, len(finding.photos), "photo", finding.is_broken, shown)


def _class_section(finding: ClassFinding) -> Section:
    names = finding.names[:MOST_NAMES]
    return Section(_title(finding), finding.meaning, len(finding.names), finding.unit, finding.is_broken, names=names)


def _tiles(checked: Checked) -> list[Tile]:
    found = checked.findings
    broken = sum(len(finding.photos) for finding in found.broken)
    remarked = len({photo.number for finding in found.remarks for photo in finding.photos})
    crossing = sum(copies.crosses for copies in found.copies)
    return [
        Tile(f"{found.photos:,}", "photos"),
        Tile(f"{len(found.classes):,}", "classes"),
        Tile(f"{broken:,}", "broken photos", "bad" if broken else "fine"),
        Tile(f"{crossing:,}", "groups of copies in train and val", "bad" if crossing else "fine"),
        Tile(f"{len(found.copies):,}", "groups of copies", "note" if found.copies else "fine"),
        Tile(f"{remarked:,}", "photos with remarks", "note" if remarked else "fine"),
    ]
