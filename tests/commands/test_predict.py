"""`falconet predict`: the scores of a validation, for any photos; each form of output; and what is refused."""

import contextlib
import csv
import io
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from falconet import inputs
from falconet.checkpoint import format
from falconet.cli import main
from falconet.commands import predict
from falconet.commands.predict import folder_name
from falconet.config.commands import PredictOptions
from falconet.config.load import read_line
from falconet.evaluation import saved_model
from falconet.infer import photos
from falconet.infer.classifier import Classifier, open_classifier
from falconet.infer.photos import Photo

TRAIN = (
    "train --model resnet8-cifar --image-size 16 --micro-batch-size 8 --epoch 2 --warmup-epoch 0 --threads 1"
    " --dataloader-workers 2 --device cpu"
)


def paint(folder, *, counts, size=(48, 40)):
    """Photos of two classes, dark and light, of several formats and shapes."""
    noise = np.random.default_rng(0)
    for label, level in (("dark", 60), ("light", 190)):
        for number in range(counts):
            place = folder / label / ("more" if number % 5 == 4 else ".") / f"{number}.{'jpg' if number % 2 else 'png'}"
            place.parent.mkdir(parents=True, exist_ok=True)
            width, height = size[0] + number, size[1]
            pixels = noise.integers(level - 50, level + 50, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on such photos, beside its data in photos/."""
    home = tmp_path_factory.mktemp("trained")
    paint(home / "photos/train", counts=12)
    paint(home / "photos/val", counts=9)
    assert main(f"{TRAIN} --data-dir {home}/photos --run-dir {home}/r".split()) == 0
    return home


@pytest.fixture
def home(falconet, trained):
    """The same in the current folder."""
    shutil.copytree(trained / "photos", "photos")
    shutil.copytree(trained / "r", "r")
    return Path.cwd()


def logits_of(line, words, **asked):
    """name -> scores, of the model that a line names."""
    classifier, _ = open_classifier(PredictOptions, read_line(PredictOptions, line.split()), lambda _: None)
    found = [Photo(word, word) for word in words]
    rows = [row for batch in photos.scored(classifier, found, **asked) for row in batch]
    return classifier, rows


def paths_of(answer):
    return [row["path"] for row in csv.DictReader(io.StringIO(answer.out, newline=""))]


@pytest.mark.parametrize("reading", ["", "--normalization-location host --no-eight-bit-io", "--normalization image"])
def test_scores_equal_those_of_the_validation_bit_for_bit(falconet, home, reading):
    run = "r"
    if reading:
        run = "other"
        assert falconet(f"{TRAIN} --epoch 1 --data-dir photos --run-dir other {reading}").code == 0
    chosen = format.choose(Path(run), "best", lambda _: None)
    line = read_line(PredictOptions, ["--threads", "1"])
    opened = next(each for each in saved_model.open_checkpoint(chosen.folder, line) if each.is_better)
    outputs = []
    measured = saved_model.measure(opened, lambda _: None, lambda logits, _: outputs.append(logits))
    expected = torch.cat(outputs)[: measured.images]

    answer = falconet(f"predict {run} photos/val --csv --threads 1 --batch-size 8")
    assert answer.code == 0, answer.err
    names = [row["path"] for row in csv.DictReader(io.StringIO(answer.out))]
    assert len(names) == measured.images == 18
    classifier, rows = logits_of(f"{run} --threads 1 --photos x", names, batch=8)
    found = torch.stack([row.logits for row in rows])
    assert torch.equal(found, expected)
    right = [classifier.class_names[row.logits.argmax()] == Path(row.photo.name).parts[2] for row in rows]
    assert sum(right) == measured.top1


def test_the_class_of_every_photo_is_the_same_for_any_batch_size(falconet, home):
    answers = [falconet(f"predict r photos --csv --batch-size {size}") for size in (1, 5, 64)]
    labels = [[(row["path"], row["label"]) for row in csv.DictReader(io.StringIO(each.out))] for each in answers]
    assert labels[0] == labels[1] == labels[2]
    assert len(labels[0]) == 42
    assert answers[0].code == 0


def test_photos_are_answered_in_pieces_of_bounded_size(falconet, home, monkeypatch):
    whole = falconet("predict r photos --csv --batch-size 4").out
    sizes = []
    plain = Classifier.images
    monkeypatch.setattr(photos, "AT_ONCE", 9)
    monkeypatch.setattr(Classifier, "images", lambda self, some: sizes.append(len(some)) or plain(self, some))
    assert falconet("predict r photos --csv --batch-size 4").out == whole
    assert sizes == [8, 8, 8, 8, 8, 2]


def test_table_has_a_row_per_photo_and_class(falconet, home):
    answer = falconet("predict r photos/val/dark/0.png photos/val/light/1.jpg --top 2")
    assert answer.code == 0, answer.err
    lines = [line.split() for line in answer.out.splitlines()]
    assert [line[0] for line in lines[::2]] == ["photos/val/dark/0.png", "photos/val/light/1.jpg"]
    for first, second in zip(lines[::2], lines[1::2], strict=True):
        assert {first[1], second[0]} == {"dark", "light"}
        assert float(first[2]) >= float(second[1])
        assert float(first[2]) + float(second[1]) == pytest.approx(100, abs=0.02)
    assert "loaded r/checkpoints/" in answer.err


def test_columns_of_the_table_hold_where_characters_are_wide(falconet, home):
    for name in ("橙子.png", "orange.png"):
        shutil.copy("photos/val/dark/0.png", name)
    first, second = falconet("predict r 橙子.png orange.png").out.splitlines()
    assert first.index("%") == second.index("%") - 2  # two characters, but four columns


def test_json_is_an_array_of_a_line_per_photo(falconet, home):
    answer = falconet("predict r --json photos/val/dark --top 5")
    rows = json.loads(answer.out)
    assert len(rows) == 9
    assert len(answer.out.splitlines()) == 11
    assert [row["path"] for row in rows] == sorted(row["path"] for row in rows)
    for row in rows:
        assert (row["label"], row["probability"]) == tuple(row["top"][0].values())
        assert sum(each["probability"] for each in row["top"]) == pytest.approx(1)
    assert json.loads(falconet("predict r --json nothing.jpg").out) == []


def test_csv_goes_to_a_file_which_a_failure_leaves_as_it_was(falconet, home, monkeypatch):
    answer = falconet("predict r photos/val --csv --top 2 --output out.csv")
    assert (answer.code, answer.out) == (0, "")
    assert answer.err.endswith("18 photos predicted; written: out.csv\n")
    with open("out.csv", newline="", encoding="utf-8") as file:  # noqa: PTH123
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["path", "label", "probability", "label_2", "probability_2"]
    assert len(rows) == 18
    before = Path("out.csv").read_text()
    none = falconet("predict r nothing.jpg --csv --output out.csv")
    assert none.code == 1
    assert none.err.endswith("0 photos predicted, 1 not; nothing written to out.csv\n")
    monkeypatch.setattr(photos, "scored", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    loaded = inputs.load(PredictOptions, read_line(PredictOptions, ["r", "photos/val", "--output", "out.csv"]))
    with pytest.raises(KeyboardInterrupt):
        predict.run(loaded)
    assert Path("out.csv").read_text() == before
    assert not list(Path().glob(".out.csv*"))


def test_csv_goes_to_a_pipe(falconet, home):
    """As /dev/stdout is, where standard output is one."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe:
        assert falconet(f"predict r photos/val/dark/0.png --csv --output /dev/fd/{writing}").code == 0
        os.close(writing)
        assert pipe.read().startswith(b"path,label,probability\r\nphotos/val/dark/0.png,")


def test_what_cannot_be_read_is_named_and_the_rest_answered(falconet, home):
    Path("photos/val/dark/0.png").write_bytes(Path("photos/val/dark/0.png").read_bytes()[:100])
    Path("photos/val/empty.jpg").touch()
    Path("photos/none").mkdir()
    answer = falconet("predict r photos/val missing.jpg photos/none --csv")
    assert answer.code == 1
    assert "photos/val/dark/0.png: truncated" in answer.err
    assert "photos/val/empty.jpg: empty file" in answer.err
    assert "missing.jpg: No such file or directory" in answer.err
    assert "photos/none: no photos in this folder" in answer.err
    assert len(list(csv.DictReader(io.StringIO(answer.out)))) == 17


def test_a_phones_photos_are_named_not_passed_over(falconet, home):
    for name in ("photos/val/a.HEIC", "photos/val/b.jpg"):
        Path(name).write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    answer = falconet("predict r photos/val --csv")
    assert answer.code == 1
    for name in ("photos/val/a.HEIC", "photos/val/b.jpg"):
        assert f"{name}: HEIC, which Pillow cannot read; convert it to JPEG\n" in answer.err
    assert len(list(csv.DictReader(io.StringIO(answer.out)))) == 18


def test_what_the_system_refuses_in_a_folder_is_named_and_the_rest_answered(falconet, home, monkeypatch):
    Path("photos/val/again").symlink_to("again")
    plain = os.scandir

    def scanned(path):
        if str(path) == "photos/val/dark/more":
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(os, "scandir", scanned)
    answer = falconet("predict r photos/val --csv")
    assert answer.code == 1
    assert "photos/val/again: Too many levels of symbolic links" in answer.err
    assert "photos/val/dark/more: Permission denied" in answer.err
    assert len(paths_of(answer)) == 17


def test_what_may_not_be_looked_at_is_named_and_the_rest_answered(falconet, home, monkeypatch):
    Path("out.csv").touch()
    long, plain = "x" * 300, os.stat

    def looked(path, *args, **named):
        if str(path).endswith("closed/0.png"):
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path, *args, **named)

    monkeypatch.setattr(os, "stat", looked)
    answer = falconet(f"predict r closed/0.png {long} photos/val --csv --output out.csv")
    assert answer.code == 1, answer.err
    assert "closed/0.png: Permission denied\n" in answer.err
    assert f"{long}: File name too long\n" in answer.err
    assert "18 photos predicted, 2 not; written: out.csv\n" in answer.err


def test_a_photo_behind_two_slashes_is_named(falconet, home):
    """POSIX keeps exactly two of them, and Python with it."""
    (home / "empty.jpg").touch()
    answer = falconet(f"predict r /{home}/empty.jpg photos/val/dark/0.png --csv")
    assert answer.code == 1
    assert f"/{home}/empty.jpg: empty file" in answer.err
    assert paths_of(answer) == ["photos/val/dark/0.png"]


def test_paths_on_stdin_may_end_with_nuls(falconet, home, monkeypatch):
    shutil.copy("photos/val/dark/0.png", "a\nb.png")
    found = sorted(map(str, Path("photos").rglob("*.png")))
    names = ["a\nb.png", *(found * (2 * photos.LONGEST // len("\0".join(found)))), "photos/val/dark/0.png"]
    for text in ("\0".join(names), "\0".join([*names, ""])):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        answer = falconet("predict r - --csv")
        assert answer.code == 0, answer.err
        assert paths_of(answer) == names


def test_a_nul_within_a_line_on_stdin_leads_to_no_other_photo(falconet, home, monkeypatch):
    line = b"photos/val/dark/0.png\n"
    lines = line * (photos.LONGEST // len(line) + 1)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines + line.replace(b"\n", b"\0x\n") + line)))
    answer = falconet("predict r - --csv")
    assert answer.code == 1
    assert r"photos/val/dark/0.png\x00x: no file can have this name" in answer.err
    assert len(paths_of(answer)) == lines.count(b"\n") + 1


def test_an_empty_name_is_visible():
    said = []
    with contextlib.ExitStack() as held:
        assert not list(photos.find([""], stdin=io.BytesIO(), held=held, problem=lambda *words: said.append(words)))
    assert said == [("''", "no file can have this name")]


def test_stdin_holds_paths_or_one_photo(falconet, home, monkeypatch):
    def piped(content):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        return falconet("predict r - --csv --batch-size 8")

    named = falconet("predict r photos/val/dark/0.png photos/val/light --csv --batch-size 8").out
    assert piped(b"photos/val/dark/0.png\r\n\nphotos/val/light").out == named
    content = Path("photos/val/dark/0.png").read_bytes()
    assert piped(content).out == named.splitlines(True)[0] + named.splitlines(True)[1].replace(
        "photos/val/dark/0.png", "-"
    )
    answer = piped(b"")
    assert answer.code == 1
    assert "stdin: empty" in answer.err


@pytest.mark.parametrize("kind", ["AVIF", "JPEG2000", "ICO", "TGA", "QOI", "DDS", "PPM", "XBM", "WEBP", "TIFF"])
def test_any_photo_that_is_read_by_its_name_is_read_from_stdin(falconet, home, monkeypatch, kind):
    Image.init()
    if kind not in Image.SAVE:
        pytest.skip(f"Pillow was built without {kind}")
    image = Image.new("RGB", (90, 60), "white")
    image.convert("1" if kind == "XBM" else "RGB").save("any", kind)
    with Path("any").open("ab") as file:  # folders between NULs, and on lines of their own
        file.write(b"\0.\0photos\0\n.\nphotos\n")
    named = falconet("predict r any --csv")
    assert named.code == 0, named.err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(Path("any").read_bytes())))
    piped = falconet("predict r - --csv")
    assert piped.code == 0, piped.err
    assert piped.out == named.out.replace("any", "-")


@pytest.mark.parametrize(
    "content", [b"\0.\0", b"ustar\0\0.\0", b"\x93NUMPY\1\0.\0", b"photos\n\0.\0", b"\x1b[31mphotos\n.\n"]
)
def test_a_file_on_stdin_that_is_neither_a_photo_nor_a_list_leads_to_no_folder(falconet, home, monkeypatch, content):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    answer = falconet("predict r - --csv")
    assert (answer.code, paths_of(answer)) == (1, [])
    assert "stdin: neither a photo nor a list of paths (not an image)\n" in answer.err


@pytest.mark.parametrize(
    "first", ["P6-day/a.jpg", "BUFR.jpg", "BMW.jpg", "#define.jpg", "GIF.gif", "bär.jpg", "a\tb.jpg"]
)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\0"])
def test_a_list_on_stdin_may_start_like_a_photo(falconet, home, monkeypatch, first, end):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{first}{end}photos/val/dark/0.png{end}".encode())))
    answer = falconet("predict r - --csv")
    assert answer.code == 1
    assert "No such file or directory" in answer.err
    assert paths_of(answer) == ["photos/val/dark/0.png"]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP"])
def test_a_photo_on_stdin_is_recognised(kind):
    file = io.BytesIO()
    Image.new("RGB", (9, 9), "red").save(file, kind)
    assert photos.is_photo(file.getvalue()[: photos.HEAD])
    assert not photos.is_photo(b"BMW.jpg\nGIF.")


def test_links_sort_photos_and_replace_nothing(falconet, home):
    line = "predict r photos/val/dark photos/train/dark --save-dir sorted --csv"
    labels = {row["path"]: row["label"] for row in csv.DictReader(io.StringIO(falconet(line).out))}
    links = sorted(Path("sorted").glob("*/*"))
    assert {str(link.resolve().relative_to(home)): link.parent.name for link in links} == labels
    assert any(link.name == "0-2.png" for link in links)
    assert falconet(line).code == 0
    assert sorted(Path("sorted").glob("*/*")) == links


def test_photos_are_not_sorted_through_a_link(falconet, home):
    Path("sorted").mkdir()
    for name in ("dark", "light"):
        Path("sorted", name).symlink_to(home / "r")
    answer = falconet("predict r photos/val --save-dir sorted --csv")
    assert (answer.code, answer.err.splitlines()[-1].endswith("choose another --save-dir")) == (2, True)
    assert not list(Path("r").glob("*.png"))


@pytest.mark.parametrize("name", ["../../x", ".", "..", "", "a/b", "\0", ".hidden", "y" * 300])
def test_a_class_name_leads_to_no_other_folder(name):
    safe = folder_name(name)
    assert safe not in ("", ".", "..")
    assert not {"/", "\0"} & set(safe)
    assert len(safe) <= 255


def test_embeddings_are_what_the_classifier_layer_gets(falconet, home):
    answer = falconet("predict r photos/val photos/none.jpg --embeddings e.npz --csv --threads 1 --precision 32.32")
    stored = np.load("e.npz")
    assert stored["paths"].tolist() == [row["path"] for row in csv.DictReader(io.StringIO(answer.out))]
    classifier, rows = logits_of("r --threads 1 --precision 32.32 --photos x", stored["paths"].tolist())
    weight, bias = (tensor.detach().numpy() for tensor in classifier.model.fc.parameters())
    scores = stored["embeddings"] @ weight.T + bias
    np.testing.assert_allclose(scores, torch.stack([row.logits for row in rows]).numpy(), rtol=1e-4, atol=1e-5)
    before = Path("e.npz").read_bytes()
    answer = falconet("predict r photos/none.jpg --embeddings e.npz --output o.csv --threads 1")
    assert "nothing written to o.csv or e.npz" in answer.err
    assert Path("e.npz").read_bytes() == before


def test_weights_of_imagenet_need_no_run_and_have_names(falconet, tmp_path):
    from falconet.models import zoo

    model = zoo.build("mobilenet-v3-small", classes=1000, seed=0)
    with torch.no_grad():
        model.classifier.bias[281] += 100
    torch.save(model.state_dict(), "weights.pth")
    Image.new("RGB", (60, 50), "grey").save("photo.jpg")
    answer = falconet("predict --model mobilenet-v3-small --pretrained weights.pth photo.jpg --device cpu")
    assert answer.code == 0, answer.err
    assert answer.out == "photo.jpg  tabby  100.00 %\n"
    first = falconet("predict weights.pth photo.jpg --model mobilenet-v3-small --device cpu")
    assert first.out == answer.out
    fitting = falconet("predict weights.pth photo.jpg --device cpu")
    assert fitting.out == answer.out
    assert "weights.pth: its weights fit mobilenet-v3-small" in fitting.err


@pytest.mark.parametrize(
    ("line", "message"),
    {
        "predict": "expected a run and photos, as in `falconet predict runs/my-run photo.jpg`",
        "predict photo.jpg": "photo.jpg is a photo; expected a run",
        "predict --model resnet18 --pretrained a.jpg": "--pretrained: a.jpg is a photo; expected a run",
        "predict --model resnet18 --pretrained a.pth b.jpg": "--pretrained: a.pth: no such file or folder",
        "predict --pretrained published b.jpg": "--pretrained: expected --model as well",
        "predict --checkpoint-input-path r --pretrained a.pth b.jpg": "--pretrained: contradicts r, which also gives",
        "predict r": "expected photos after the run: files, folders, or - for stdin",
        "predict nowhere photo.jpg": "nowhere: no such file or folder",
        "predict r/checkpoints/resnet8-cifar_folder_1/model.safetensors photos --model resnet8-cifar --classes 3": (
            "--classes: got 3, expected 2, as in r/checkpoints/"
        ),
        "predict r photos --json --csv": "--json: contradicts --csv; expected only one of the two",
        "predict r photos --output nowhere/out.csv": "--output: cannot write nowhere/out.csv: No such file",
        "predict r photos --embeddings nowhere/e.npz": "--embeddings: cannot write nowhere/e.npz: No such file",
        "predict r photos --save-dir r/config.yaml": "--save-dir: cannot write to r/config.yaml: File exists",
        "predict r photos/val/dark/0.png --output photos/val/dark/0.png": (
            "--output: photos/val/dark/0.png would replace a photo; expected the name of another file"
        ),
        "predict r r/config.yaml --output r/config.yaml": "--output: r/config.yaml would replace a photo",
        "predict r photos --top 0": "--top: got '0', expected a whole number, at least 1",
        "predict r photos --checkpoint 7": "r: holds no checkpoint of epoch 7; the epochs it has: 1, 2",
    }.items(),
)
def test_mistakes_are_one_line(falconet, home, line, message):
    answer = falconet(line)
    assert answer.code == 2
    assert f"falconet predict: {message}" in answer.err
    assert "Traceback" not in answer.err


def test_options_without_effect_are_noted(falconet, home):
    answer = falconet("predict r photos/val/dark/0.png --image-size 32 --zero-init last")
    assert answer.code == 0
    assert "--image-size has no effect on a checkpoint, which has its own" in answer.err
    assert "--zero-init has no effect on a model that is not being trained" in answer.err


def test_a_run_given_as_pretrained_is_the_model_that_its_own_path_gives(falconet, home):
    line = f"{TRAIN} --data-dir photos --run-dir other --shortcut-padding both --norm-eps 0.1 --normalization image"
    assert falconet(line).code == 0
    folder = format.choose(Path("other"), "best", lambda _: None).folder
    stem = format.read_manifest(folder).better_stem
    named, *others = (
        falconet(f"predict {model} --photos photos/val --csv --threads 1")
        for model in ("other", "--pretrained other", f"--pretrained {folder}", f"{folder}/{stem}.safetensors")
    )
    assert named.code == 0, named.err
    assert [each.out for each in others] == [named.out] * 3
    unused = falconet("predict --pretrained other --photos photos/val/dark --checkpoint 1 --image-size 32")
    assert "saved after epoch 1" in unused.err
    assert "--image-size has no effect on a checkpoint" in unused.err
