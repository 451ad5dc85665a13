"""The same photos in every layout that can be read, written by third-party code where it exists."""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from PIL import Image

from falconet.data import layout
from falconet.data.packing import Packer, Recipe, made, plan

CLASSES = ("n01440764", "n01443537", "n02102040")


def photo(seed: int, *, width: int = 80, height: int = 60) -> Image.Image:
    """Soft blobs and some noise, as in photos."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    soft = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int64)
    return Image.fromarray(np.clip(soft + rng.integers(-9, 10, soft.shape), 0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def class_folders(root: Path, *, train: int = 6, validation: int = 2, ending: str = ".JPEG") -> Path:
    """Three classes of JPEG photos of several sizes; one class has a PNG file under a JPEG's name."""
    for split, count in (("train", train), ("val", validation)):
        for label, name in enumerate(CLASSES):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                seed = 100 * label + number + 10_000 * (split == "val")
                image = photo(seed, width=60 + 7 * number, height=50 + 5 * label)
                kind = "PNG" if (label, number) == (1, 1) else "JPEG"
                options = {} if kind == "PNG" else {"quality": 85 + number, "subsampling": number % 3}
                (root / split / name / f"{name}_{number}{ending}").write_bytes(encoded(image, kind, **options))
    return root


def photos_of(root: Path, split: str) -> Iterator[tuple[Path, int]]:
    """Files and labels, in the order of class folders."""
    for label, name in enumerate(CLASSES):
        for path in sorted((root / split / name).iterdir()):
            yield path, label


def parts(root: Path, split: str, shards: int) -> list[list[tuple[Path, int]]]:
    every = list(photos_of(root, split))
    size = -(-len(every) // shards)
    return [every[begin : begin + size] for begin in range(0, len(every), size)]


def example_class():
    """tf.train.Example, from a description of its fields: protobuf itself writes the bytes."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")

    def message(name, *fields, parent=file.message_type):
        made = parent.add(name=name)
        for number, (field, kind, repeated, type_name) in enumerate(fields, start=1):
            label = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED if repeated else 1
            made.field.add(name=field, number=number, type=kind, label=label, type_name=type_name)
        return made

    kinds = descriptor_pb2.FieldDescriptorProto
    message("BytesList", ("value", kinds.TYPE_BYTES, True, None))
    message("FloatList", ("value", kinds.TYPE_FLOAT, True, None))
    message("Int64List", ("value", kinds.TYPE_INT64, True, None))
    message(
        "Feature",
        ("bytes_list", kinds.TYPE_MESSAGE, False, ".t.BytesList"),
        ("float_list", kinds.TYPE_MESSAGE, False, ".t.FloatList"),
        ("int64_list", kinds.TYPE_MESSAGE, False, ".t.Int64List"),
    )
    features = message("Features", ("feature", kinds.TYPE_MESSAGE, True, ".t.Features.FeatureEntry"))
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=1)
    entry.field.add(name="value", number=2, type=kinds.TYPE_MESSAGE, label=1, type_name=".t.Feature")
    message("Example", ("features", kinds.TYPE_MESSAGE, False, ".t.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


Example = example_class()


def example(image: bytes, label: int, *, synset: str = "", boxes: tuple[tuple[float, ...], ...] = ()) -> bytes:
    """One record as TensorFlow's ImageNet scripts write it; labels start at 1."""
    made = Example()
    feature = made.features.feature
    feature["image/encoded"].bytes_list.value.append(image)
    feature["image/class/label"].int64_list.value.append(label)
    feature["image/height"].int64_list.value.append(50)
    feature["image/colorspace"].bytes_list.value.append(b"RGB")
    feature["image/filename"].bytes_list.value.append(b"x" * 30)
    if synset:
        feature["image/class/synset"].bytes_list.value.append(synset.encode())
        feature["image/class/text"].bytes_list.value.append(b"some fish, or a dog")
    for side, values in zip(("xmin", "ymin", "xmax", "ymax"), zip(*boxes, strict=True), strict=False):
        feature[f"image/object/bbox/{side}"].float_list.value.extend(values)
    return made.SerializeToString()


def write_records(path: Path, records: list[bytes]) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter  # a machine with a GPU may not have it

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        writer = RecordWriter(file)
        for record in records:
            writer.write(record)


def tfrecords(root: Path, target: Path, *, shards: int = 3, boxes: tuple[tuple[float, ...], ...] = ()) -> Path:
    for split, name, count in (("train", "train", shards), ("val", "validation", 1)):
        for number, part in enumerate(parts(root, split, count)):
            records = [
                example(path.read_bytes(), label + 1, synset=CLASSES[label], boxes=boxes) for path, label in part
            ]
            write_records(target / f"{name}-{number:05}-of-{count:05}", records)
    return target


def tar_archives(root: Path, target: Path, *, shards: int = 2, label: str = "cls") -> Path:
    target.mkdir()
    for split in ("train", "val"):
        for number, part in enumerate(parts(root, split, shards)):
            with tarfile.open(target / f"photos-{split}-{number:04}.tar", "w") as archive:
                for path, own in part:
                    texts = {"cls": str(own), "json": json.dumps({"label": own, "x": 1}), "txt": CLASSES[own]}
                    add_member(archive, f"{path.stem}.jpg", path.read_bytes())
                    add_member(archive, f"{path.stem}.{label}", texts[label].encode())
    return target


def add_member(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))


def pack(root: Path, target: Path, *, shard_size: int = 5, workers: int = 2, **recipe) -> Path:
    """The class folders of `root` as packed shards in `target`, as `falconet data pack` writes them."""
    target.mkdir(exist_ok=True)
    splits = layout.load_photos(root)
    packer = Packer(target, recipe=Recipe(**recipe), workers=workers)
    for shard in plan({"train": splits.train, "validation": splits.validation}, shard_size=shard_size):
        if not made(shard, target, Recipe(**recipe)):
            packer.pack(shard, done=lambda: None)
    return target


LAYOUTS = {
    "class folders": lambda root, target: root,
    "TFRecords": tfrecords,
    "tar archives": tar_archives,
    "packed shards": pack,
}
