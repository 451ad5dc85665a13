"""Formats of tables: CSV, TSV, JSON lines, JSON, and COCO's annotations."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from falconet.data.image_files import open_regular
from falconet.errors import DataError
from falconet.report.console import counted

ENDINGS = (".csv", ".tsv", ".jsonl", ".json")
SPREADSHEETS = (".xlsx", ".xls", ".ods", ".numbers")

Cell = str | list[str]


class Table(NamedTuple):
    """A table as it was written."""

    path: Path
    names: tuple[str, ...] | None  # the columns' names, if the format has them
    rows: list[list[Cell]]
    lines: list[int]  # where each row was


def read(path: Path) -> Table:
    """Read all rows of a file, in the format that its ending names."""
    ending = path.suffix.lower()
    if ending in SPREADSHEETS:
        raise DataError(f"{path}: is a spreadsheet; expected a table of photos and labels; save it as CSV")
    try:
        with open_regular(path) as file:
            text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError:
        meant = "expected a table of photos and labels; spreadsheet programs save one as CSV UTF-8"
        raise DataError(f"{path}: not text in UTF-8; {meant}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None
    if ending == ".json":
        return _from_json(path, text)
    return _from_json_lines(path, text) if ending == ".jsonl" else _from_csv(path, text)


def _from_csv(path: Path, text: str) -> Table:
    first = text.partition("\n")[0]
    tab = path.suffix.lower() == ".tsv" or ("\t" in first and "," not in first)
    delimiter = "\t" if tab else ";" if ";" in first and "," not in first else ","
    rows: list[list[Cell]] = []
    lines: list[int] = []
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            if rows and len(row) != len(rows[0]):
                got, expected = counted(len(row), "column"), len(rows[0])
                raise DataError(f"{path}, line {reader.line_num}: {got}, expected {expected} as in the first row")
            rows.append([*row])
            lines.append(reader.line_num)
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not a row of a table ({error})") from None
    return Table(path, None, rows, lines)


def _from_json_lines(path: Path, text: str) -> Table:
    found: list[tuple[int, Mapping[str, Any]]] = []
    for number, line in enumerate(text.split("\n"), start=1):  # JSON allows U+2028 and the like within its strings
        if line.strip():
            found.append((number, _mapping(path, number, line)))
    return _from_mappings(path, found)


def _mapping(path: Path, number: int, line: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise DataError(f'{path}, line {number}: not a row, expected {{"file_name": "a.jpg", "label": "cat"}}')
    return row


def _from_mappings(path: Path, found: Sequence[tuple[int, Mapping[str, Any]]]) -> Table:
    names = tuple(dict.fromkeys(str(name) for _, row in found for name in row))
    rows = [[_cell(row.get(name, "")) for name in names] for _, row in found]
    return Table(path, names, rows, [number for number, _ in found])


def _cell(value: Any) -> Cell:
    if isinstance(value, list):
        return [str(each).strip() for each in value]
    return "" if value is None else str(value)


def _from_json(path: Path, text: str) -> Table:
    """Read COCO's annotations, a list of rows, or a mapping from photo to label."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise DataError(f"{path}: not JSON; expected a table of photos and labels") from None
    if isinstance(content, dict) and {"images", "annotations", "categories"} <= content.keys():
        return _from_coco(path, content)
    if isinstance(content, dict) and all(isinstance(value, str | int | list) for value in content.values()):
        content = [{"path": name, "labels" if isinstance(v, list) else "label": v} for name, v in content.items()]
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise DataError(f"{path}: not a table; expected rows of photo and label, a mapping, or COCO's annotations")
    return _from_mappings(path, list(enumerate(content, start=1)))


def _from_coco(path: Path, content: Mapping[str, Any]) -> Table:
    """Read COCO's annotations: a photo's labels are its objects' categories; without objects it has none."""
    try:
        categories = {each["id"]: str(each["name"]) for each in content["categories"]}
        labels: dict[Any, list[str]] = {each["id"]: [] for each in content["images"]}
        for each in content["annotations"]:
            labels[each["image_id"]].append(categories[each["category_id"]])
        rows: list[list[Cell]] = [[str(each["file_name"]), labels[each["id"]]] for each in content["images"]]
    except (LookupError, TypeError) as error:
        raise DataError(f"{path}: damaged COCO annotations ({type(error).__name__}: {error})") from None
    return Table(path, ("file_name", "labels"), rows, list(range(1, len(rows) + 1)))
