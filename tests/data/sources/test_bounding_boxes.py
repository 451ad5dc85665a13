"""Annotated objects from ImageNet's CSV and XML files."""

import pytest

import layouts
from falconet.data import layout
from falconet.data.sources import bounding_boxes
from falconet.data.sources.bounding_boxes import with_objects, with_objects_if_there, without_objects
from falconet.errors import DataError

CSV = "imagenet_2012_bounding_boxes.csv"
FIRST, SECOND = "n01440764_0", "n01443537_2"


@pytest.fixture
def root(tmp_path):
    return layouts.class_folders(tmp_path / "photos")


def found(root):
    """Boxes by image name, for images that have some."""
    train = with_objects(layout.load_photos(root), root).train
    every = {train.name(index): train.objects[index] for index in range(len(train))}
    return {name: own.tolist() for name, own in every.items() if len(own)}


def test_rows_of_the_csv_belong_to_the_file_of_that_name(root):
    rows = (
        f"{FIRST}.JPEG,0.25,0.5,0.75,1.0",
        f"{SECOND}.JPEG,0,0,1,1",
        f"{FIRST}.JPEG,0,0,0.5,0.5",
        "n9_1.JPEG,0,0,1,1",
    )
    (root / CSV).write_text("\n".join(rows) + "\n")
    assert found(root) == {
        f"n01440764/{FIRST}.JPEG": [[0.25, 0.5, 0.75, 1.0], [0.0, 0.0, 0.5, 0.5]],
        f"n01443537/{SECOND}.JPEG": [[0.0, 0.0, 1.0, 1.0]],
    }


def test_a_name_with_a_class_folder_matches_only_that_file(tmp_path):
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "1.jpg").write_bytes(b"")
    (tmp_path / CSV).write_text("dog/1.jpg,0,0,1,0.5\n")
    assert list(found(tmp_path)) == ["dog/1.jpg"]


def xml(width, height, *objects):
    places = "".join(
        f"<object><name>n1</name><bndbox><xmin>{a}</xmin><ymin>{b}</ymin><xmax>{c}</xmax><ymax>{d}</ymax></bndbox></object>"
        for a, b, c, d in objects
    )
    size = f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"
    return f"<annotation><folder>n1</folder><filename>%s</filename>{size}<segmented>0</segmented>{places}</annotation>"


@pytest.mark.parametrize("folder", bounding_boxes.XML_FOLDERS)
def test_xml_boxes_are_shares_of_the_size_in_their_file(root, folder):
    place = root / folder / "n01440764"
    place.mkdir(parents=True)
    (place / f"{FIRST}.xml").write_text(xml(200, 100, (50, 25, 100, 100), (0, 0, 400, 50)))
    assert found(root) == {f"n01440764/{FIRST}.JPEG": [[0.25, 0.25, 0.5, 1.0], [0.0, 0.0, 1.0, 0.5]]}
    assert found(root) == found(root)  # the second time from what was kept


def test_archives_and_packed_shards_are_matched_by_name_too(root, tmp_path):
    archives = layouts.tar_archives(root, tmp_path / "tar")
    (archives / CSV).write_text(f"{SECOND}.JPEG,0,0,1,1\n")
    assert list(found(archives)) == [f"{SECOND}.jpg"]


def test_records_have_their_own_boxes(root, tmp_path):
    records = layouts.tfrecords(root, tmp_path / "records", boxes=((0.0, 0.0, 0.5, 0.5),))
    assert with_objects(layout.load_photos(records), records).train.objects.annotated == 18
    assert without_objects(layout.load_photos(records)).train.objects is None


def test_optional_boxes_that_do_not_exist_leave_crops_plain(root, tmp_path):
    assert with_objects_if_there(layout.load_photos(root), root).train.objects is None
    (root / CSV).write_text("b.JPEG,0,0,1,1\n")  # of no image here
    assert with_objects_if_there(layout.load_photos(root), root).train.objects is None
    (root / CSV).write_text(f"{FIRST}.JPEG,0,0,1,1\n")
    assert with_objects_if_there(layout.load_photos(root), root).train.objects.annotated == 1

    empty = layouts.tfrecords(root, tmp_path / "empty", boxes=())
    assert with_objects_if_there(layout.load_photos(empty), empty).train.objects is None
    records = layouts.tfrecords(root, tmp_path / "records", boxes=((0.0, 0.0, 0.5, 0.5),))
    assert with_objects_if_there(layout.load_photos(records), records).train.objects.annotated == 18


def bomb():
    return '<!DOCTYPE x [<!ENTITY a "aaaa">]><annotation>&a;</annotation>'


MISTAKES = {
    "{root}: no bounding boxes there; expected *bounding_boxes.csv, or XML files in a folder bounding_boxes or"
    " Annotation or Annotations or bbox": {},
    "{root}/{csv}, line 2: got 'a.JPEG,0,0,1', expected name,x0,y0,x1,y1": {CSV: "b.JPEG,0,0,1,1\na.JPEG,0,0,1"},
    "{root}/{csv}, line 1: got 'name,xmin,ymin,xmax,ymax', expected name,x0,y0,x1,y1": {
        CSV: "name,xmin,ymin,xmax,ymax"
    },
    "{root}/{csv}: has no bounding box of a training image, such as n01440764/n01440764_0.JPEG": {
        CSV: "b.JPEG,0,0,1,1\n"
    },
    "{root}/bbox/x.xml: not an annotation: expected size/width, size/height and object/bndbox": {"bbox/x.xml": "<a>"},
    "{root}/bbox/x.xml: not an annotation: expected size/width, size/height and object/bndbox ": {
        "bbox/x.xml": '<?xml version="1.0" encoding="nonsense"?><a/>'
    },
    "{root}/bbox/x.xml: not an annotation: too large, or with a document type": {"bbox/x.xml": bomb()},
    "{root}/bbox/x.xml: gives the image a size of 0 x 5 pixels": {"bbox/x.xml": xml(0, 5, (0, 0, 1, 1))},
}


@pytest.mark.parametrize(("message", "files"), MISTAKES.items())
def test_a_mistake_is_named_in_one_line(root, message, files):
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    with pytest.raises(DataError) as caught:
        found(root)
    assert str(caught.value) == message.strip().format(root=root, csv=CSV)


def test_a_binary_csv_is_refused(root):
    (root / CSV).write_bytes(b"\xff\xfe\0\1")
    with pytest.raises(DataError, match="not a text file of name,x0,y0,x1,y1"):
        found(root)


def test_an_unreadable_csv_is_reported_in_one_line(root):
    (root / CSV).mkdir()
    with pytest.raises(DataError) as caught:
        with_objects(layout.load_photos(root), root)
    assert str(caught.value) == f"{root / CSV}: cannot be read (a folder, not a file)"


def test_a_broken_link_to_a_csv_is_reported_in_one_line(root):
    (root / CSV).symlink_to("nowhere")
    with pytest.raises(DataError) as caught:
        with_objects(layout.load_photos(root), root)
    assert str(caught.value) == f"{root / CSV}: cannot be read (No such file or directory)"
