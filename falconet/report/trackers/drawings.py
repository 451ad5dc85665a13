"""Pictures for trackers that show one image at a time: a sheet of captioned photos, and a confusion matrix."""

import io
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from falconet.report.trackers.tracker import Confusion, Picture

Pixels = npt.NDArray[np.uint8]  # H x W x 3

ACROSS, SIDE, GAP = 8, 112, 6  # pictures in a row; pixels
LETTERS, LINE = 11, 14  # pixels of a caption's letters, and of its line
LARGEST = 1000  # pixels of a matrix's side without its names; classes beyond are drawn together
NAMED, COUNTED = 12, 24  # smallest cells, in pixels, with room for names beside them, and for numbers in them
WIDEST = 130  # pixels of a name
TITLE = "rows: labels, columns: predictions"
PAPER, INK, DEEP = (255, 255, 255), (30, 30, 30), (8, 48, 107)


def sheet(pictures: Sequence[Picture]) -> Pixels:
    """The pictures side by side, each above its caption in at most two lines."""
    rows = -(-len(pictures) // ACROSS)
    wide, high = SIDE + GAP, SIDE + 2 * LINE + GAP
    drawn = Image.new("RGB", (min(len(pictures), ACROSS) * wide + GAP, rows * high + GAP), PAPER)
    pen, font = ImageDraw.Draw(drawn), ImageFont.load_default(LETTERS)
    for number, picture in enumerate(pictures):
        x, y = GAP + number % ACROSS * wide, GAP + number // ACROSS * high
        image = Image.open(io.BytesIO(picture.content)).convert("RGB")
        scale = SIDE / max(image.size)
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        drawn.paste(image.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BILINEAR), (x, y))
        for line, text in enumerate(_lines(picture.caption, pen, font)):
            pen.text((x, y + SIDE + 2 + line * LINE), text, INK, font)
    return np.asarray(drawn)


def _lines(caption: str, pen: ImageDraw.ImageDraw, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> list[str]:
    """The caption in at most two lines, broken at a space and ending with dots if it is too long."""
    lines = [""]
    for word in caption.split():
        longer = f"{lines[-1]} {word}".strip()
        if pen.textlength(longer, font) <= SIDE or not lines[-1]:
            lines[-1] = longer
        elif len(lines) < 2:
            lines.append(word)
        else:
            lines[-1] = longer
    return [_shortened(line, SIDE, pen, font) for line in lines]


def _shortened(
    text: str, width: float, pen: ImageDraw.ImageDraw, font: ImageFont.ImageFont | ImageFont.FreeTypeFont
) -> str:
    if pen.textlength(text, font) <= width:
        return text
    while text and pen.textlength(f"{text}..", font) > width:
        text = text[:-1]
    return f"{text}.."


def matrix(confusion: Confusion) -> Pixels:
    """Rows are labels, columns predictions; the darker a cell, the larger its share of the label's images.

    Shares are drawn by their square root, so that a hundredth is visible. With more classes than pixels, several share
    a cell.
    """
    classes = len(confusion.class_names)
    together = -(-classes // LARGEST)  # classes per cell
    cells = -(-classes // together)
    counts = np.zeros((cells, cells), np.int64)
    found = np.asarray(confusion.cells, np.int64).reshape(-1, 3)
    np.add.at(counts, (found[:, 0] // together, found[:, 1] // together), found[:, 2])
    shares = np.sqrt(counts / np.maximum(1, counts.sum(axis=1, keepdims=True)))[..., None]
    colours = np.rint((1 - shares) * np.array(PAPER) + shares * np.array(DEEP)).astype(np.uint8)
    side = min(40, max(1, LARGEST // cells))  # pixels of a cell
    drawn = np.kron(colours, np.ones((side, side, 1), np.uint8))
    return _labelled(drawn, confusion.class_names, counts, side) if side >= NAMED else drawn


def _labelled(drawn: Pixels, names: Sequence[str], counts: npt.NDArray[np.int64], side: int) -> Pixels:
    """The matrix with class names beside rows and above columns, and counts in cells that have room."""
    font, ruler = ImageFont.load_default(LETTERS), ImageDraw.Draw(Image.new("RGB", (1, 1)))
    shown = [_shortened(name, WIDEST, ruler, font) for name in names]
    left, extent = 8 + round(max(ruler.textlength(name, font) for name in shown)), len(drawn)
    top = left + LINE
    wide = max(left + extent, 8 + round(ruler.textlength(TITLE, font)))
    whole = Image.new("RGB", (wide, top + extent), PAPER)
    whole.paste(Image.fromarray(drawn), (left, top))
    pen, upright = ImageDraw.Draw(whole), Image.new("RGB", (left, extent), PAPER)  # turned, to be read upwards
    pen.text((4, 1), TITLE, INK, font)
    for number, name in enumerate(shown):
        middle = number * side + side // 2
        pen.text((left - 4, top + middle), name, INK, font, anchor="rm")
        ImageDraw.Draw(upright).text((4, middle), name, INK, font, anchor="lm")
    whole.paste(upright.transpose(Image.Transpose.ROTATE_90), (left, LINE))
    if side >= COUNTED:
        for (row, column), count in np.ndenumerate(counts):
            if count:
                colour = PAPER if count > 0.3 * counts[row].sum() else INK
                at = left + column * side + side // 2, top + row * side + side // 2
                pen.text(at, str(count), colour, font, anchor="mm")
    return np.asarray(whole)
