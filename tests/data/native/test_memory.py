"""Photos opened from memory: the same as from files, of any kind of buffer, within the limits."""

import numpy as np
import pytest

from falconet.data.native.binding import Status, Workspace


def decoded(workspace, sizes):
    boxes = np.array([(0, 0, width, height) for width, height in sizes.tolist()], np.float64)
    out = np.zeros((len(sizes), 24, 24, 3), np.uint8)
    return out, workspace.decode(boxes, np.zeros(len(sizes), np.bool_), out)


def test_photos_in_memory_are_decoded_like_files(library, photo, jpeg, tmp_path):
    contents = [jpeg(photo(50 + 7 * number, 40, number), quality=90) for number in range(4)]
    contents += [b"", b"\xff\xd8\xff", contents[0][:300], jpeg(photo(30, 30, 1), progressive=True)]
    for number, content in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content)
    workspace = Workspace(library)
    by_path = workspace.open([bytes(tmp_path / str(number)) for number in range(len(contents))])
    expected = decoded(workspace, np.maximum(by_path[0], 1))
    assert expected[1].tolist()[:4] == [Status.OK] * 4
    assert Status.OK not in expected[1].tolist()[4:]
    by_memory = workspace.open_memory(
        [memoryview(contents[0]), bytearray(contents[1]), np.frombuffer(contents[2], np.uint8).data, *contents[3:]]
    )
    found = decoded(workspace, np.maximum(by_memory[0], 1))
    assert by_memory[1].tolist() == by_path[1].tolist()
    assert found[1].tolist() == expected[1].tolist()
    assert by_memory[0][:4].tolist() == by_path[0][:4].tolist()
    assert np.array_equal(found[0][:4], expected[0][:4])


def test_the_memory_may_be_given_back_before_decoding(library, photo, jpeg):
    content = bytearray(jpeg(photo(64, 48, 3)))
    workspace = Workspace(library)
    sizes, _ = workspace.open_memory([bytes(content)])
    expected, _ = decoded(workspace, sizes)
    sizes, _ = workspace.open_memory([content])
    content[:] = bytes(len(content))
    assert np.array_equal(decoded(workspace, sizes)[0], expected)


def test_limits_hold_in_memory_too(library, photo, jpeg):
    content = jpeg(photo(64, 48, 3))
    assert Workspace(library, most_pixels=64 * 48).open_memory([content])[1].tolist() == [Status.OK]
    assert Workspace(library, most_pixels=64 * 48 - 1).open_memory([content])[1].tolist() == [Status.TOO_LARGE]
    assert Workspace(library, most_bytes=len(content) - 1).open_memory([content])[1].tolist() == [Status.TOO_LARGE]
    with pytest.raises(BufferError):
        Workspace(library).open_memory([memoryview(content)[::2]])
