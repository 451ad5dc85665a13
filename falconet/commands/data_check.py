"""`falconet data check`: decode every photo of a dataset and report what is wrong or unusual about it."""

import json
import shlex
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from falconet import writing
from falconet.config.commands import DataCheckOptions
from falconet.config.fields import value_or
from falconet.config.load import Loaded
from falconet.config.options import Data
from falconet.config.tool_options import DataCheck
from falconet.data import check_report, exclusion, layout
from falconet.data.check_report import Checked
from falconet.data.dataset import home_of, open_dataset
from falconet.data.findings import Findings, Limits, Photo, Photos, find, superfluous
from falconet.data.inspection import Inspection, inspect
from falconet.data.layout import Division
from falconet.data.sources import tfrecord
from falconet.data.storage import ArraySource, FileSource, Splits
from falconet.data.unlisted import unlisted
from falconet.errors import DataError, Interrupted, LinkError, printable
from falconet.exits import BROKEN, DONE
from falconet.parallel import world
from falconet.report.console import Counting, Screen, counted
from falconet.report.pages import data_page


def run(loaded: Loaded[DataCheckOptions]) -> int:
    options = loaded.options.check
    assert options.source is not None
    for option, path in _places(options, _output(options)):
        writing.require_replaceable(path, option)
    photos = _photos(options)
    limits = Limits(
        least_side=options.smallest_side,
        most_pixels=round(options.largest_megapixels * 1e6),
        most_ratio=options.largest_ratio,
        most_bits=options.near_bits,
    )
    seen, seconds = _inspected(photos, name=str(options.source), workers=value_or(options.workers, world.cores()))
    findings = find(photos, seen, limits)
    checked = Checked(
        name=str(options.source),
        findings=findings,
        layout=photos.splits.layout,
        split=_split(photos.splits),
        seconds=seconds,
        passed_over=_passed_over(options.source, photos),
        limits=limits,
    )
    say = Screen().line
    for line in check_report.lines(checked):
        say(printable(line))
    for line in _written(options, checked, photos):
        say(printable(line))
    if checked.is_partial:
        raise Interrupted
    return BROKEN if findings.is_broken else DONE


def _photos(options: DataCheck) -> Photos:
    assert options.source is not None
    division = Division(options.val_fraction, options.seed)
    if options.source.is_dir() and layout.is_flat(options.source):  # without classes, photos can be checked as well
        splits = layout.unlabelled(options.source, classes=1)
        none = np.zeros(0, np.int64)
        train = replace(splits.train, labels=np.zeros(len(splits.train), np.int64), class_names=("no class",))
        splits = replace(splits, train=train, validation=train.subset(none))
    else:
        splits = layout.survey(options.source, division, tfrecord.USUAL)
    assert not isinstance(splits.train, ArraySource)
    assert not isinstance(splits.validation, ArraySource)
    return Photos(splits, splits.train, splits.validation)


def _inspected(photos: Photos, *, name: str, workers: int) -> tuple[Inspection, float]:
    """Inspect the photos to the end, or until Ctrl-C; returns what was seen, and the seconds that it took."""
    began, seen = time.monotonic(), Inspection.of(len(photos))
    try:
        with Counting(f"checking {name}", total=len(photos)) as counting:
            for found, count in inspect([photos.train, photos.validation], workers=workers):
                seen = found
                counting.add(count)
    except KeyboardInterrupt:
        pass  # the report says how far it came
    return seen, time.monotonic() - began


def _split(splits: Splits) -> str:
    parts = f"{len(splits.train):,} to train, {len(splits.validation):,} to validate"
    return parts if splits.held_out is None else f"{parts} (split by file name, --val-fraction {splits.held_out:g})"


def _passed_over(source: Path, photos: Photos) -> tuple[str, ...]:
    if not source.is_dir() or not isinstance(photos.train, FileSource):
        return ()
    roots = {part.root for part in (photos.train, photos.validation) if isinstance(part, FileSource)}
    return tuple(unlisted(source, classes_in=roots).lines())


def _output(options: DataCheck) -> Path:
    assert options.source is not None
    if options.output != "auto":
        return options.output
    path = Path(f"{options.source.resolve().stem}-check.txt")
    if path.exists() and not _is_ours(path):
        raise DataError(f"{path}: exists, and is not from `falconet data check`; expected --output with another name")
    return path


def _is_ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(check_report.FIRST_LINE)) == check_report.FIRST_LINE.encode()
    except OSError:
        return False


def _places(options: DataCheck, output: Path) -> list[tuple[str, Path]]:
    places = {
        "--output": output,
        "--json": options.json,
        "--html": options.html,
        "--exclude-list": options.exclude_list,
    }
    return [(option, path) for option, path in places.items() if path is not None]


def _written(options: DataCheck, checked: Checked, photos: Photos) -> list[str]:
    """Write the files that were asked for; returns a line about each."""
    said, findings = [], checked.findings
    output = _output(options)
    if findings.broken or findings.remarks or findings.copies or findings.untrained or output.exists():
        _write("--output", output, check_report.listing(checked))
        said.append(f"{output} lists every finding")
    if options.json is not None:
        _write("--json", options.json, json.dumps(check_report.as_json(checked), indent=1) + "\n")
        said.append(f"{options.json} has all of it as JSON")
    if options.html is not None:
        _write("--html", options.html, data_page.rendered(check_report.page(checked, photos)))
        said.append(f"{options.html} shows it in a browser")
    if options.exclude_list is not None:
        said.append(_write_exclusion(options, checked, photos))
    return said


def _write_exclusion(options: DataCheck, checked: Checked, photos: Photos) -> str:
    assert options.source is not None
    assert options.exclude_list is not None
    path, findings = options.exclude_list, checked.findings
    if not isinstance(photos.train, FileSource):
        return f"{path}: not written, because {checked.layout} have no files of their own to leave out"
    left_out = {photo.number: photo for photo in findings.broken_photos()}
    broken = len(left_out)
    left_out |= {photo.number: photo for photo in _copies(options, findings)}
    words = ["falconet", "train", str(options.source), "--exclude-list", str(path), *_as_checked(options)]
    trains = f"`{shlex.join(words)}`"
    remarks = [
        f"photos that {trains} leaves out",
        *(["incomplete: the check was stopped"] if checked.is_partial else []),
    ]
    files = (_file(photos, left_out[number]) for number in sorted(left_out))
    _write("--exclude-list", path, exclusion.text_of(files, home=home_of(options.source), remarks=remarks))
    copies = f" and {len(left_out) - broken:,} copies" if options.exclude_duplicates != "none" else ""
    them = "it" if len(left_out) == 1 else "them"
    listed, refusal = f"{path} lists {counted(broken, 'broken photo')}{copies}", _refusal(options)
    once = f" once this is fixed: {refusal}" if refusal else ""
    return f"{listed}; {trains} leaves {them} out{once}"


def _as_checked(options: DataCheck) -> list[str]:
    """The options with which training makes the split that was checked, if they are not the defaults."""
    default, words = DataCheck(), list[str]()
    if options.val_fraction != default.val_fraction:
        words += ["--val-fraction", f"{options.val_fraction:g}"]
    if options.seed != default.seed:
        words += ["--seed", str(options.seed)]
    return words


def _refusal(options: DataCheck) -> str:
    """The reason why training would refuse the photos that the list leaves; empty: it would not."""
    data = Data(
        data="folder",
        data_dir=options.source,
        exclude_list=options.exclude_list,
        val_fraction=options.val_fraction,
        check_images="no",  # the list has the broken ones
    )
    try:
        open_dataset(data, model="resnet18", global_batch=1, seed=options.seed, to_train=True)
    except DataError as error:
        return str(error)
    return ""


def _copies(options: DataCheck, findings: Findings) -> list[Photo]:
    kind = options.exclude_duplicates
    return [] if kind == "none" else superfluous(findings, near=kind == "near")


def _file(photos: Photos, photo: Photo) -> Path:
    source, number = photos.place(photo.number)
    assert isinstance(source, FileSource)
    return source.path(number)


def _write(option: str, path: Path, content: str) -> None:
    try:
        writing.replace(path.parent, path.name, content.encode("utf-8", "surrogateescape"))
    except LinkError:
        raise LinkError(path, option) from None
