"""Hostile bytes: a few always, a minute of them under sanitizers among the slow tests."""

import platform
import subprocess

import numpy as np
import pytest
from PIL import Image

from falconet.data.native import build
from falconet.data.native.binding import Status, Workspace

FLAGS = ("-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="session")
def fuzzer(tmp_path_factory):
    """The harness and the decoder, compiled with sanitizers."""
    folder = tmp_path_factory.mktemp("fuzzer")
    here = build.Path(__file__).parent
    try:
        compiler = build.compiler()
    except build.CannotBuildError as error:
        pytest.skip(str(error))
    own = [(path, ()) for path in (here / "fuzz.cpp", here / "fuzz_driver.cpp")]
    # The C interface and the reading of files are not fuzzed.
    sources = [(s, f) for s, f in build.compilations(platform.machine()) if s.stem not in ("c_api", "files")] + own
    objects = []
    running = []
    for number, (source, flags) in enumerate(sources):
        objects.append(str(folder / f"{number}.o"))
        command = [compiler, *FLAGS, *flags, f"-I{build.SOURCES}", "-c", str(source), "-o", objects[-1]]
        running.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    for process in running:
        _, errors = process.communicate()
        if "sanitize" in errors:
            pytest.skip("the compiler has no sanitizers")
        assert process.returncode == 0, errors
    linked = subprocess.run([compiler, *FLAGS, *objects, "-o", folder / "fuzzer"], capture_output=True, check=False)
    if linked.returncode != 0:
        pytest.skip("the sanitizers' libraries are not installed")
    return folder / "fuzzer"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory, photo, jpeg, odd_jpeg):
    """Small images of every kind; ten bytes behind each choose the crop."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    images = []
    for seed, (width, height) in enumerate([(1, 1), (8, 8), (17, 9), (40, 33), (64, 48), (90, 7), (5, 70)]):
        picture = photo(width, height, seed)
        for sampling in (0, 1, 2):
            images.append(jpeg(picture, quality=(30, 90, 100)[sampling], subsampling=sampling))
        images.append(jpeg(picture, restart_marker_blocks=1 + seed, optimize=True))
        images.append(jpeg(picture.convert("L"), quality=80))
        images.append(jpeg(picture, progressive=True))
    for sampling in (
        ((4, 1), (1, 1), (1, 1)),
        ((1, 2), (1, 1), (1, 1)),
        ((3, 1), (1, 1), (1, 1)),
        ((2, 2), (2, 1), (1, 2)),
    ):
        images.append(odd_jpeg(photo(50, 40, 1), sampling, restart=2))
    images.append(jpeg(Image.new("RGB", (400, 300))))
    for number, data in enumerate(images):
        (folder / f"{number}.jpg").write_bytes(data + rng.integers(0, 256, 10, dtype=np.uint8).tobytes())
    return folder


@pytest.mark.slow
def test_a_minute_of_hostile_bytes_does_no_harm(fuzzer, corpus):
    done = subprocess.run([fuzzer, corpus, "60", "1"], capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[0]) > 1000


def test_changed_bytes_are_decoded_alike_or_refused_alike(library, corpus, tmp_path):
    """By the library itself: both kinds of inner loops answer the same, and neither ends the process."""
    rng = np.random.default_rng(0)
    images = [path.read_bytes() for path in sorted(corpus.iterdir())]
    workspaces = [Workspace(library, portable=portable, most_bytes=2**26) for portable in (False, True)]
    statuses = set()
    for number in range(600):
        data = bytearray(images[number % len(images)])
        for _ in range(rng.integers(1, 5)):
            data[rng.integers(2, len(data))] = rng.integers(0, 256)
        path = tmp_path / "image.jpg"
        path.write_bytes(data[: len(data) - int(rng.integers(0, 40))])
        answers = []
        for workspace in workspaces:
            sizes, _ = workspace.open([bytes(path)])
            out = np.zeros((1, 33, 33, 3), np.uint8)
            box = np.concatenate((sizes[0] / 3, sizes[0]))[None]
            answers.append((workspace.decode(box, np.array([False]), out)[0], out))
        assert answers[0][0] == answers[1][0]
        if answers[0][0] == Status.OK:
            np.testing.assert_array_equal(answers[0][1], answers[1][1])
        statuses.add(Status(answers[0][0]))
    assert statuses >= {Status.OK, Status.DAMAGED, Status.UNSUPPORTED}
