"""Annotated objects from ImageNet's CSV and XML files."""

import numpy as np
import pytest

import layouts
from falconet.data.sources import photos
from falconet.data.sources.photos import with_objects
from falconet.errors import DataError

CSV = "imagenet_2012_bounding_boxes.csv"
FIRST, SECOND = "n01440764_0", "n01443537_2"


@pytest.fixture
def root(tmp_path):
    return layouts.class_folders(tmp_path / "photos")


def found(root):
    """Boxes by image name, those of images that have some."""
    train = with_objects(photos.load_photos(root), root).train
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


def test_a_name_with_its_class_folder_is_of_that_one_alone(tmp_path):
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


@pytest.mark.parametrize("folder", photos.XML_FOLDERS)
def test_xml_files_give_shares_of_their_own_size(root, folder):
    place = root / folder / "n01440764"
    place.mkdir(parents=True)
    (place / f"{FIRST}.xml").write_text(xml(200, 100, (50, 25, 100, 100), (0, 0, 400, 50)))
    assert found(root) == {f"n01440764/{FIRST}.JPEG": [[0.25, 0.25, 0.5, 1.0], [0.0, 0.0, 1.0, 0.5]]}
    assert found(root) == found(root)  # the second time from what was kept


def test_boxes_are_clipped_and_empty_ones_left_out():
    proper = photos.proper(np.array([[-0.5, 0, 2, 1], [0.5, 0.2, 0.5, 0.9], [0.9, 0.1, 0.2, 0.8], [np.nan, 0, 1, 1]]))
    assert proper.tolist() == [[0, 0, 1, 1]]


def test_archives_and_packed_shards_are_matched_by_name_too(root, tmp_path):
    archives = layouts.tar_archives(root, tmp_path / "tar")
    (archives / CSV).write_text(f"{SECOND}.JPEG,0,0,1,1\n")
    assert list(found(archives)) == [f"{SECOND}.jpg"]


def test_records_bring_their_own(root, tmp_path):
    records = layouts.tfrecords(root, tmp_path / "records", boxes=((0.0, 0.0, 0.5, 0.5),))
    assert with_objects(photos.load_photos(records), records).train.objects.annotated == 18
    assert photos.without_objects(photos.load_photos(records)).train.objects is None


def test_where_there_are_none_crops_are_plain_if_they_were_only_wanted_if_there(root, tmp_path):
    assert photos.with_objects_if_there(photos.load_photos(root), root).train.objects is None
    (root / CSV).write_text("b.JPEG,0,0,1,1\n")  # of no image here
    assert photos.with_objects_if_there(photos.load_photos(root), root).train.objects is None
    (root / CSV).write_text(f"{FIRST}.JPEG,0,0,1,1\n")
    assert photos.with_objects_if_there(photos.load_photos(root), root).train.objects.annotated == 1

    empty = layouts.tfrecords(root, tmp_path / "empty", boxes=())
    assert photos.with_objects_if_there(photos.load_photos(empty), empty).train.objects is None
    records = layouts.tfrecords(root, tmp_path / "records", boxes=((0.0, 0.0, 0.5, 0.5),))
    assert photos.with_objects_if_there(photos.load_photos(records), records).train.objects.annotated == 18


def bomb():
    return '<!DOCTYPE x [<!ENTITY a "aaaa">]><annotation>&a;</annotation>'


MISTAKES = {
    "{root}: --use-bbox-info: no bounding boxes there; wanted *bounding_boxes.csv or a folder bounding_boxes,"
    " Annotation, Annotations, bbox of XML files": {},
    "{root}/{csv}, line 2: got 'a.JPEG,0,0,1', wanted name,x0,y0,x1,y1": {CSV: "b.JPEG,0,0,1,1\na.JPEG,0,0,1"},
    "{root}/{csv}, line 1: got 'name,xmin,ymin,xmax,ymax', wanted name,x0,y0,x1,y1": {CSV: "name,xmin,ymin,xmax,ymax"},
    "{root}/{csv}: --use-bbox-info: no box in it is of a training image, such as n01440764/n01440764_0.JPEG": {
        CSV: "b.JPEG,0,0,1,1\n"
    },
    "{root}/bbox/x.xml: not an annotation: wanted size/width, size/height and object/bndbox": {"bbox/x.xml": "<a>"},
    "{root}/bbox/x.xml: not an annotation: wanted size/width, size/height and object/bndbox ": {
        "bbox/x.xml": '<?xml version="1.0" encoding="nonsense"?><a/>'
    },
    "{root}/bbox/x.xml: not an annotation: too large, or it has a document type": {"bbox/x.xml": bomb()},
    "{root}/bbox/x.xml: says that the image is 0 x 5 pixels": {"bbox/x.xml": xml(0, 5, (0, 0, 1, 1))},
}


@pytest.mark.parametrize(("message", "files"), MISTAKES.items())
def test_a_mistake_is_named_in_one_line(root, message, files):
    for name, text in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    with pytest.raises(DataError) as caught:
        found(root)
    assert str(caught.value) == message.strip().format(root=root, csv=CSV)


def test_a_csv_that_is_no_text_is_refused(root):
    (root / CSV).write_bytes(b"\xff\xfe\0\1")
    with pytest.raises(DataError, match="is not a text file of name,x0,y0,x1,y1"):
        found(root)


def test_a_csv_file_that_cannot_be_read_is_told_in_one_line(root):
    (root / CSV).mkdir()
    with pytest.raises(DataError) as caught:
        with_objects(photos.load_photos(root), root)
    assert str(caught.value) == f"{root / CSV}: cannot be read (a folder, not a file)"


def test_a_csv_file_that_leads_nowhere_is_told_in_one_line(root):
    (root / CSV).symlink_to("nowhere")
    with pytest.raises(DataError) as caught:
        with_objects(photos.load_photos(root), root)
    assert str(caught.value) == f"{root / CSV}: cannot be read (No such file or directory)"
