"""Tables of photos and labels: which files, columns and cells are understood, and how mistakes are named."""

import json
from pathlib import Path

import pytest
from PIL import Image

from falconet.data import layout
from falconet.data.layout import Division
from falconet.errors import DataError

HALF = Division(0.5)


@pytest.fixture
def root(tmp_path):
    """Eight photos in images/."""
    for number in range(8):
        photo(tmp_path, f"images/{number}.jpg")
    return tmp_path


def photo(root, name):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4)).save(path)


def write(root, name, *lines):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root / name


def labelled(splits):
    """Labels by file name, both parts together."""
    found = {}
    for source in (splits.train, splits.validation):
        for index, label in enumerate(source.labels.tolist()):
            if splits.label_sets is None:
                own = splits.class_names[label]
            else:
                pairs = zip(splits.class_names, splits.label_sets[label].tolist(), strict=True)
                own = "+".join(name for name, has in pairs if has)
            found[source.path(index).name] = own
    return found


@pytest.mark.parametrize("target", ["notes.json", "x" * 300])
def test_a_link_that_cannot_be_followed_is_no_table(root, target):
    (root / "notes.json").symlink_to(target)
    (root / "gone.jpg").symlink_to(target)
    write(root, "labels.csv", *(f"images/{name},{label}" for name, label in ROWS))
    assert labelled(layout.load_photos(root)) == ALL
    (root / "labels.csv").unlink()
    for name in ("cat", "dog"):
        photo(root, f"{name}/a.jpg")
    assert layout.load_photos(root).class_names == ("cat", "dog", "images")
    assert not layout.is_flat(root)


ALL = {f"{number}.jpg": "cat" if number % 2 else "dog" for number in range(8)}
ROWS = list(ALL.items())

ONE_HOT = {"cat": "1,0", "dog": "0,1"}
SPELLINGS = {
    "a header": ("labels.csv", ["path,label", *(f"images/{name},{label}" for name, label in ROWS)]),
    "no header": ("labels.csv", [f"images/{name},{label}" for name, label in ROWS]),
    "label first, no header": ("labels.csv", [f"{label},images/{name}" for name, label in ROWS]),
    "names without a folder": ("labels.csv", ["filename,class", *(f"{name},{label}" for name, label in ROWS)]),
    "no extension": ("train.csv", ["image_id,breed", *(f"{Path(name).stem},{label}" for name, label in ROWS)]),
    "Windows' paths": ("labels.csv", ["File Name,Label", *(f".\\images\\{name},{label}" for name, label in ROWS)]),
    "semicolons": ("labels.csv", ["image;category", *(f"{name};{label}" for name, label in ROWS)]),
    "tabs": ("annotations.tsv", ["image\ttarget", *(f"{name}\t{label}" for name, label in ROWS)]),
    "any single name": ("my photos.csv", ["image,animal", *(f"{name},{label}" for name, label in ROWS)]),
    "unknown column names": ("labels.csv", ["Bild,Tier", *(f"{name},{label}" for name, label in ROWS)]),
    "further columns": ("labels.csv", ["id,image,label", *(f"7,{name},{label}" for name, label in ROWS)]),
    "names of classes called name": (
        "labels.csv",
        ["id,name", *(f"{Path(name).stem},{label}" for name, label in ROWS)],
    ),
    "a byte order mark": ("labels.csv", ["\ufeffimage,label", *(f"{name},{label}" for name, label in ROWS)]),
    "Hugging Face's CSV": ("metadata.csv", ["file_name,label", *(f"images/{n},{label}" for n, label in ROWS)]),
    "Hugging Face's JSON lines": (
        "metadata.jsonl",
        [json.dumps({"file_name": f"images/{name}", "label": label}) for name, label in ROWS],
    ),
    "a JSON mapping": ("labels.json", [json.dumps(ALL)]),
    "another person's folder": ("labels.csv", ["path,label", *(f"/home/bob/p/images/{n},{lab}" for n, lab in ROWS)]),
    "one-hot columns": ("labels.csv", ["image,cat,dog", *(f"{name},{ONE_HOT[label]}" for name, label in ROWS)]),
}


@pytest.mark.parametrize(("name", "lines"), SPELLINGS.values(), ids=SPELLINGS.keys())
def test_tables_of_other_makers_are_understood(root, name, lines):
    write(root, name, *lines)
    splits = layout.load_photos(root, HALF)
    assert labelled(splits) == ALL
    assert (splits.class_names, splits.label_sets, splits.held_out) == (("cat", "dog"), None, 0.5)
    assert splits.layout == f"photos listed in {name}"
    assert len(splits.train) > 0
    assert len(splits.validation) > 0


def test_the_table_itself_may_be_given(root):
    write(root, "a.csv", "image,label", "0.jpg,x", "1.jpg,y")
    chosen = write(root, "b.csv", "image,label", "0.jpg,cat", "1.jpg,dog", "2.jpg,cat", "3.jpg,dog")
    assert labelled(layout.load_photos(chosen)) == {"0.jpg": "cat", "1.jpg": "dog", "2.jpg": "cat", "3.jpg": "dog"}


def test_photos_elsewhere_are_found_by_their_paths(tmp_path):
    for number in range(2):
        photo(tmp_path, f"a/{number}.png")
        photo(tmp_path, f"b/{number}.png")
    rows = [f"../b/{number}.png,cat" for number in range(2)] + [f"{tmp_path}/a/{n}.png,dog" for n in range(2)]
    splits = layout.load_photos(write(tmp_path, "tables/labels.csv", "path,label", *rows))
    sources = (splits.train, splits.validation)
    paths = {source.path(index) for source in sources for index in range(len(source))}
    assert paths == {tmp_path / f"{folder}/{number}.png" for folder in "ab" for number in range(2)}
    assert all(path.exists() for path in paths)


def test_a_row_for_a_photo_elsewhere_moves_no_other_photo(tmp_path):
    for number in range(40):
        photo(tmp_path, f"here/{number}.png")
    photo(tmp_path, "elsewhere/new.png")
    rows = ["path,label", *(f"{number}.png,{'cat' if number % 2 else 'dog'}" for number in range(40))]

    def validated():
        splits = layout.load_photos(tmp_path / "here", HALF)
        return {splits.validation.path(index) for index in range(len(splits.validation))}

    write(tmp_path, "here/labels.csv", *rows)
    before = validated()
    write(tmp_path, "here/labels.csv", *rows, "../elsewhere/new.png,cat")
    assert validated() - {tmp_path / "elsewhere/new.png"} == before


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("split", ("train", "val")),
        ("set", ("Training", "valid")),
        ("is_valid", ("False", "True")),
        ("3", ("train", "test")),
    ],
)
def test_a_column_may_divide_the_photos(root, column, values):
    rows = [f"{name},{label},{values[name > '5.jpg']}" for name, label in ROWS]
    write(root, "labels.csv", *([] if column == "3" else [f"image,label,{column}"]), *rows)
    splits = layout.load_photos(root)
    assert [Path(splits.validation.name(index)).name for index in range(2)] == ["6.jpg", "7.jpg"]
    assert (len(splits.train), splits.held_out) == (6, None)


def test_photos_marked_as_test_are_left_out_beside_validation(root):
    parts = ["train"] * 6 + ["val", "test"]
    write(
        root, "labels.csv", "image,label,split", *(f"{row[0]},{row[1]},{p}" for row, p in zip(ROWS, parts, strict=True))
    )
    splits = layout.load_photos(root)
    assert (len(splits.train), len(splits.validation)) == (6, 1)
    assert "1 photo is marked as test, and unused" in splits.notes


def test_two_tables_divide_the_photos(root):
    write(root, "train.csv", "image,label", *(f"{name},{label}" for name, label in ROWS[:6]))
    write(root, "valid.csv", "image,label", *(f"{name},{label}" for name, label in ROWS[6:]))
    splits = layout.load_photos(root)
    assert (len(splits.train), len(splits.validation), splits.held_out) == (6, 2, None)
    assert splits.layout == "photos listed in train.csv and valid.csv"


def test_a_test_table_without_labels_is_unused(tmp_path):
    for number in range(6):
        photo(tmp_path, f"train/{number}.jpg")
        photo(tmp_path, f"test/{number}.jpg")  # the same names, as Kaggle has them
    write(tmp_path, "train.csv", "id,breed", *(f"{number},{'ab'[number % 2]}" for number in range(6)))
    write(tmp_path, "test.csv", "id", *map(str, range(6)))
    splits = layout.load_photos(tmp_path, HALF)
    assert len(splits.train) + len(splits.validation) == 6
    assert all(splits.train.name(index).startswith("train/") for index in range(len(splits.train)))
    assert f"{tmp_path}/test.csv: unused, because it has no labels" in splits.notes


def test_metadata_may_be_in_train_and_test(tmp_path):
    for part, count in (("train", 4), ("test", 2)):
        for number in range(count):
            photo(tmp_path, f"{part}/{number}.png")
        rows = (f"{number}.png,{'ab'[number % 2]}" for number in range(count))
        write(tmp_path, f"{part}/metadata.csv", "file_name,label", *rows)
    splits = layout.load_photos(tmp_path)
    assert (len(splits.train), len(splits.validation), splits.class_names) == (4, 2, ("a", "b"))
    assert splits.validation.name(0) == "test/0.png"


SEVERAL = {"0.jpg": "cat+outdoor", "1.jpg": "dog", "2.jpg": "outdoor"}
MULTIPLE = {
    "bars": ("labels.csv", ["image,label", "0.jpg,cat|outdoor", "1.jpg,dog", "2.jpg,outdoor"]),
    "semicolons": ("labels.csv", ["image,label", "0.jpg,cat; outdoor", "1.jpg,dog", "2.jpg,outdoor"]),
    "commas": ("labels.csv", ["image,labels", '0.jpg,"outdoor,cat"', "1.jpg,dog", "2.jpg,outdoor"]),
    "spaces in tags": ("labels.csv", ["image,tags", "0.jpg,cat outdoor", "1.jpg,dog", "2.jpg,outdoor"]),
    "lists": ("labels.csv", ["image,labels", "0.jpg,\"['cat', 'outdoor']\"", "1.jpg,['dog']", "2.jpg,['outdoor']"]),
    "columns": ("labels.csv", ["image,cat,dog,outdoor", "0.jpg,1,0,1", "1.jpg,0,1,0", "2.jpg,0,0,1"]),
    "JSON lists": (
        "metadata.jsonl",
        [
            '{"file_name": "images/0.jpg", "labels": ["cat", "outdoor"]}',
            '{"file_name": "1", "labels": ["dog"]}',
            '{"file_name": "2.jpg", "labels": ["outdoor"]}',
        ],
    ),
    "COCO": (
        "annotations.json",
        [
            json.dumps(
                {
                    "images": [{"id": 7 + number, "file_name": f"{number}.jpg"} for number in range(3)],
                    "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}, {"id": 5, "name": "outdoor"}],
                    "annotations": [
                        {"image_id": i, "category_id": c} for i, c in ((7, 1), (7, 5), (7, 5), (8, 2), (9, 5))
                    ],
                }
            )
        ],
    ),
}


@pytest.mark.parametrize(("name", "lines"), MULTIPLE.values(), ids=MULTIPLE.keys())
def test_several_labels_per_photo_become_label_sets(root, name, lines):
    write(root, name, *lines)
    splits = layout.load_photos(root, HALF)
    assert labelled(splits) == SEVERAL
    assert splits.class_names == ("cat", "dog", "outdoor")
    assert splits.label_sets.shape == (3, 3)


def test_labels_with_spaces_and_commas_stay_whole(root):
    write(root, "labels.csv", "image,label", '0.jpg,"tench, Tinca tinca"', "1.jpg,golden retriever")
    assert layout.load_photos(root, HALF).class_names == ("golden retriever", "tench, Tinca tinca")


def test_numbers_are_ordered_as_numbers_and_named_by_a_file(root):
    rows = [f"{number}.jpg,{label}" for number, label in enumerate([0, 10, 2, 1, 3, 4, 5, 6])]
    write(root, "labels.csv", "image,label", *rows)
    assert layout.load_photos(root).class_names == ("0", "1", "2", "3", "4", "5", "6", "10")
    write(root, "labels.csv", "image,label", "0.jpg,0", "1.jpg,1", "2.jpg,0", "3.jpg,1")
    write(root, "classes.txt", "tench", "goldfish")
    assert layout.load_photos(root).class_names == ("tench", "goldfish")


def test_labels_of_equal_value_are_ordered_by_their_digits(root):
    """The order of a set would be right by chance in one of 576 processes."""
    labels = ["01", "2", "1", "0002", "0001", "002", "001", "02"]
    write(root, "labels.csv", "image,label", *(f"{number}.jpg,{label}" for number, label in enumerate(labels)))
    assert layout.load_photos(root).class_names == ("0001", "001", "01", "1", "0002", "002", "02", "2")


SEPARATORS = "\u2028\u2029\x85\x0b\x0c\x1c"  # at which Python's splitlines ends a line, too


@pytest.mark.parametrize("separator", SEPARATORS[:3])
def test_only_a_line_feed_ends_a_row_of_json_lines(root, separator):
    label = f"a{separator}b"
    rows = [{"file_name": "0.jpg", "label": label}, {"file_name": "1.jpg", "label": "c"}]
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (root / "metadata.jsonl").write_text(text, encoding="utf-8", newline="")
    assert labelled(layout.load_photos(root, HALF)) == {"0.jpg": label, "1.jpg": "c"}


@pytest.mark.parametrize("separator", SEPARATORS)
def test_only_a_line_feed_ends_a_name_of_a_class(root, separator):
    write(root, "labels.csv", "image,label", "0.jpg,0", "1.jpg,1", "2.jpg,0", "3.jpg,1")
    (root / "classes.txt").write_bytes(f"a{separator}b\r\ngoldfish\r\n".encode())
    assert layout.load_photos(root).class_names == (f"a{separator}b", "goldfish")


def test_photos_that_are_not_listed_are_counted(root):
    write(root, "labels.csv", "image,label", *(f"{name},{label}" for name, label in ROWS[:5]))
    assert layout.load_photos(root).notes == (f"3 photos are not in {root}/labels.csv, and left out",)


def test_class_folders_win_over_a_table_of_another_name(tmp_path):
    for name in ("cat/1.png", "cat/2.png", "dog/3.png", "dog/4.png"):
        photo(tmp_path, name)
    write(tmp_path, "noisy.csv", "path,label", "cat/1.png,dog", "cat/2.png,dog")
    splits = layout.load_photos(tmp_path)
    assert splits.layout == "class folders"
    assert splits.notes == (f"{tmp_path}/noisy.csv: unused, because the photos are in class folders",)
    (tmp_path / "noisy.csv").rename(tmp_path / "labels.csv")
    assert layout.load_photos(tmp_path).layout == "photos listed in labels.csv"


MISTAKES = {
    "an empty table": ([], "labels.csv: empty, expected rows of photo and label"),
    "no column of photos": (
        ["when,who", "now,me"],
        "labels.csv: got the columns 'when', 'who', expected a header with a column called path, file_name or image,"
        " and one called label",
    ),
    "no photo there": (
        ["image,label", "x.jpg,cat", "y.jpg,dog"],
        "labels.csv, line 3: none of the first 2 photos is in {root}, such as 'y.jpg'",
    ),
    "one column": (["image", "0.jpg"], "labels.csv: one column, expected photo and label, separated by a comma"),
    "a short row": (
        ["image,label", "0.jpg,cat", "1.jpg"],
        "labels.csv, line 3: 1 column, expected 2 as in the first row",
    ),
    "no label": (["image,label", "0.jpg,cat", "1.jpg,"], "labels.csv, line 3: no label"),
    "no name": (["image,label", "0.jpg,cat", ",dog"], "labels.csv, line 3: no photo named"),
    "a photo twice": (
        ["image,label", "0.jpg,cat", "", "images/0.jpg,dog"],
        "labels.csv, line 4: 'images/0.jpg' is already listed in {root}/labels.csv, line 2, with the labels 'cat';"
        " expected one row for each photo, with several labels in one cell as in cat|outdoor",
    ),
    "an unknown part": (
        ["image,label,split", "0.jpg,cat,training", "1.jpg,dog,holdout"],
        "labels.csv, line 3: got 'holdout' in the column split, expected train, val or test",
    ),
    "no column of labels": (
        ["image,width,height", "0.jpg,30,40"],
        "labels.csv: which column is the label? got 'image', 'width', 'height'; expected one called label",
    ),
    "too many columns without a header": (
        ["0.jpg,1,2,3"],
        "labels.csv, line 1: 4 columns and no header; expected photo and label, or a header that names the columns",
    ),
}


@pytest.mark.parametrize(("lines", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_named_with_its_line(root, lines, message):
    write(root, "labels.csv", *lines)
    with pytest.raises(DataError) as caught:
        layout.load_photos(root)
    assert str(caught.value) == f"{root}/{message.format(root=root)}"


@pytest.mark.parametrize(("name", "shown"), [("\ud800.jpg", "\\ud800.jpg"), ("a\0b.jpg", "a\\x00b.jpg")])
def test_a_name_that_no_file_can_have_is_refused_with_its_line(root, name, shown):
    rows = [{"file_name": "0.jpg", "label": "cat"}, {"file_name": name, "label": "dog"}]
    write(root, "metadata.jsonl", *map(json.dumps, rows))
    with pytest.raises(DataError) as caught:
        layout.load_photos(root)
    message = f"a photo is called '{shown}'; expected text that a file name may have"
    assert str(caught.value) == f"{root}/metadata.jsonl, line 2: {message}"


def test_photos_of_the_same_name_must_be_told_apart(root):
    photo(root, "more/0.jpg")
    write(root, "labels.csv", "image,label", "1.jpg,cat", "0.jpg,dog")
    with pytest.raises(DataError) as caught:
        layout.load_photos(root)
    assert str(caught.value) == f"{root}: '0.jpg' may be images/0.jpg or more/0.jpg; expected paths that differ"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "labels.csv",
            b"image,label\n0.jpg,\xff\n",
            "not text in UTF-8; expected a table of photos and labels; spreadsheet programs save one as CSV UTF-8",
        ),
        ("labels.json", b"{", "not JSON; expected a table of photos and labels"),
        ("labels.json", b"7", "not a table; expected rows of photo and label, a mapping, or COCO's annotations"),
        ("metadata.jsonl", b"[1]\n", 'not a row, expected {"file_name": "a.jpg", "label": "cat"}'),
        (
            "labels.json",
            b'{"images": [{"id": 1}], "annotations": [{}], "categories": []}',
            "damaged COCO annotations (KeyError: 'image_id')",
        ),
    ],
)
def test_other_files_are_refused_in_one_line(root, name, data, message):
    (root / name).write_bytes(data)
    with pytest.raises(DataError) as caught:
        layout.load_photos(root)
    line = ", line 1" if name.endswith(".jsonl") else ""
    assert str(caught.value) == f"{root}/{name}{line}: {message}"
