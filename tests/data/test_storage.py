"""Sources as values."""

from pathlib import Path

from falconet.data.storage import FileSource


def test_a_file_source_gives_back_each_path():
    names = ["7.jpg", "b/8.png", "\u00fc.jpeg", "odd \udcff.jpg"]
    source = FileSource.of(Path("root"), names=names, labels=[0, 0, 1, 1], class_names=("cat", "dog"))
    assert len(source) == 4
    assert [source.path(index) for index in range(4)] == [
        Path("root/cat/7.jpg"),
        Path("root/cat/b/8.png"),
        Path("root/dog/\u00fc.jpeg"),
        Path("root/dog/odd \udcff.jpg"),
    ]
