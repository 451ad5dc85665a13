"""Hostile bytes under sanitizers, for seconds or (slow) a minute, and some against the library itself."""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from falconet.data.native import compiler
from falconet.data.native.binding import Status, Workspace

FLAGS = ("-std=c++17", "-g1", "-fno-sanitize-recover=all")
SANITIZERS = "address,undefined"
HERE = Path(__file__).parent
DURATIONS = [4, pytest.param(60, marks=pytest.mark.slow)]  # seconds


def built(folder: Path, program: str, sanitizers: str, harness: list[Path], *, seconds: int) -> Path | None:
    """Build the harness and what it tests as one program; None if the compiler lacks the sanitizers."""
    folder.mkdir()
    fuzzed = FUZZED[harness[0].stem]
    sources = [(s, f) for s, f in compiler.compilations(platform.machine()) if s.stem in fuzzed]
    optimised = "-O1" if seconds > 10 else "-O0"  # which compiles in a third of the time
    flags = [*FLAGS, optimised, f"-fsanitize={sanitizers}", f"-I{compiler.SOURCES}"]
    objects, running = [], []
    for number, (source, own) in enumerate([*sources, *((path, ()) for path in harness)]):
        objects.append(str(folder / f"{number}.o"))
        command = [program, *flags, *own, "-c", str(source), "-o", objects[-1]]
        running.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate()[1] for process in running]
    if any("sanitize" in text for text in errors):
        return None
    assert not any(process.returncode for process in running), "".join(errors)
    linked = subprocess.run([program, *flags, *objects, "-o", folder / "fuzzer"], capture_output=True, check=False)
    return folder / "fuzzer" if linked.returncode == 0 else None


FUZZED = {
    "fuzz": ("huffman", "jpeg", "axis", "region", "decode", "transcode", "target"),
    "fuzz_ranges": ("files", "crc32c"),
    "fuzz_look": ("look",),
}


def fuzzer(folder: Path, harness: Path, *, corpus: Path, seconds: int) -> list[str | Path]:
    """The command that feeds changed bytes to a harness: libFuzzer's, or our plain mutations without it."""
    clang = shutil.which("clang++")
    if clang is not None:
        guided = built(folder / "guided", clang, f"fuzzer,{SANITIZERS}", [harness], seconds=seconds)
        if guided is not None:
            options = [f"-max_total_time={seconds}", "-max_len=20000", f"-artifact_prefix={folder}/", "-seed=1"]
            # The decoder's own limit is 64 MiB. What the process holds in all is mostly the sanitizer's: freed memory
            # that it keeps in quarantine, and what is left between; once it came to libFuzzer's 2 GiB.
            options += ["-malloc_limit_mb=256", "-rss_limit_mb=6144"]
            (folder / "found").mkdir()
            return [guided, *options, folder / "found", corpus]
    try:
        program = compiler.find_compiler()
    except compiler.CannotBuildError as error:
        pytest.skip(str(error))
    plain = built(folder / "plain", program, SANITIZERS, [harness, HERE / "fuzz_driver.cpp"], seconds=seconds)
    if plain is None:
        pytest.skip("the compiler has no sanitizers")
    return [plain, corpus, str(seconds), "1"]


def inputs(command: list[str | Path], *, seconds: int) -> int:
    """The number of inputs that did no harm."""
    env = os.environ | {"ASAN_OPTIONS": "quarantine_size_mb=32"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180 + seconds, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    runs = re.search(r"Done (\d+) runs|^(\d+) inputs", done.stderr + done.stdout, re.MULTILINE)
    assert runs is not None
    return int(runs[1] or runs[2])


@pytest.fixture(scope="session")
def corpus(tmp_path_factory, photo, jpeg, odd_jpeg):
    """Small images of every kind; the ten bytes after each choose the crop."""
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


@pytest.mark.dist
@pytest.mark.parametrize("seconds", DURATIONS)
def test_hostile_bytes_are_harmless(tmp_path, corpus, seconds):
    command = fuzzer(tmp_path, HERE / "fuzz.cpp", corpus=corpus, seconds=seconds)
    assert inputs(command, seconds=seconds) > 8 * seconds


@pytest.mark.dist
def test_hostile_ranges_are_harmless(tmp_path):
    seeds = tmp_path / "seeds"
    seeds.mkdir()
    rng = np.random.default_rng(0)
    (seeds / "wild").write_bytes(rng.integers(0, 256, 800, dtype=np.uint8).tobytes())
    (seeds / "small").write_bytes((rng.integers(0, 1000, 100) << 8).astype("<i8").tobytes())
    assert inputs(fuzzer(tmp_path, HERE / "fuzz_ranges.cpp", corpus=seeds, seconds=3), seconds=3) > 500


@pytest.mark.dist
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="names an open file by /proc")
def test_hostile_headers_are_harmless(tmp_path, corpus, photo):
    seeds = shutil.copytree(corpus, tmp_path / "seeds")
    for kind in ("PNG", "GIF", "WEBP", "BMP"):
        photo(40, 33, 1).save(seeds / kind, kind)
    photo(40, 33, 1).save(seeds / "lossless", "WEBP", lossless=True)
    assert inputs(fuzzer(tmp_path, HERE / "fuzz_look.cpp", corpus=seeds, seconds=3), seconds=3) > 100


def test_both_inner_loops_agree_on_changed_bytes(library, corpus, tmp_path):
    """In the library itself, both kinds of inner loops give the same answer, and neither ends the process."""
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
