"""Checkpoints changed at random load or are refused in one line; runs killed while they save leave whole ones."""

import hashlib
import json
import math
import os
import random
import resource
import shutil
import signal
import struct
import time
from pathlib import Path

import pytest
import torch

from falconet.checkpoint import format, manifest
from falconet.cli import main
from runs import begin, finish, wait_for
from tiny import TINY

pytestmark = pytest.mark.slow
SECONDS = 45.0
FIRST = int(os.environ.get("MUTATION_SEED", "0"))  # another one searches elsewhere
MEGABYTE = 1024  # of ru_maxrss, which counts in kB
JUNK = (
    *(
        None,
        True,
        -1,
        0,
        1,
        2**31,
        2**63,
        10**40,
        -(10**40),
        0.5,
        math.nan,
        math.inf,
        "",
        "x",
        "\0",
        "\ud800",
        "\udcff",
    ),
    *(
        "../x",
        "/etc/passwd",
        "a" * 10_000,
        "\x1b[31m",
        [],
        {},
        [[]],
        {"": None},
        ["x"] * 100,
        {"value": 3},
        {"value": None},
    ),
)
DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "U16", "U8", "BOOL", "F8_E4M3", "C64", "X9")
NAME = "resnet8-cifar_generated_1"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    home = tmp_path_factory.mktemp("trained")
    line = f"train {TINY} --epoch 1 --precision 16.16 --ema-half-life 1 --run-dir {home / 'r'}"
    assert main(line.split()) == 0
    return home / "r/checkpoints" / NAME


def nests(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


def places(content, *, at=()):
    """Every place in a JSON document."""
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inner:
        yield (*at, key)
        yield from places(value, at=(*at, key))


def changed(content, draw):
    """A document with one to three random changes."""
    content = json.loads(json.dumps(content))
    for _ in range(draw.randint(1, 3)):
        *path, last = draw.choice(list(places(content)))
        inner = content
        for key in path:
            inner = inner[key]
        value = draw.choice((*JUNK, nests(draw.choice((5, 500)))))
        if "config" in path or last == "config":  # an option may ask for anything, as one that is typed may
            value = draw.choice([junk for junk in JUNK if not isinstance(junk, int) or junk in (0, 1)])
        value = json.loads(json.dumps(value))  # a copy: else a second change may put it into itself
        if isinstance(inner, dict) and draw.random() < 0.2:
            del inner[last]
        elif isinstance(inner, dict) and draw.random() < 0.2:
            inner[draw.choice(("", "x", "\0", "model"))] = value
        else:
            inner[last] = value
    return content


def forged(folder, content):
    """The manifest, with digests that fit."""
    files = content.get("files")
    for name, record in files.items() if isinstance(files, dict) else ():
        if isinstance(record, dict) and "\0" not in name and (folder / name).is_file() and "/" not in name:
            data = (folder / name).read_bytes()
            record |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    content["digest"] = manifest._digest(content)
    (folder / "manifest.json").write_text(json.dumps(content))


def flipped(path, draw):
    data = bytearray(path.read_bytes())
    for _ in range(draw.randint(1, 8)):
        data[draw.randrange(min(len(data), draw.choice((16, 1000, len(data)))))] = draw.randrange(256)
    path.write_bytes(bytes(data[: draw.randrange(len(data))] if draw.random() < 0.2 else data))


def mutate(folder, draw):
    content = json.loads((folder / "manifest.json").read_text())
    tensors = folder / f"{draw.choice(('model', 'optimizer', 'ema', 'scale'))}.safetensors"
    match draw.randrange(6):
        case 0:
            flipped(folder / "manifest.json", draw)
        case 1:
            flipped(tensors, draw)
        case 2:
            flipped(tensors, draw)
            forged(folder, content)
        case 3:
            data = tensors.read_bytes()
            size = struct.unpack("<Q", data[:8])[0]
            entries = json.loads(data[8 : 8 + size])
            if draw.random() < 0.7:  # the same bytes as numbers of another kind
                kinds = draw.sample(DTYPES, 2)
                for entry in entries.values():
                    entry["dtype"] = draw.choice((entry["dtype"], *kinds))
            head = json.dumps(entries if draw.random() < 0.5 else changed(entries, draw)).encode()
            tensors.write_bytes(struct.pack("<Q", len(head)) + head + data[8 + size :])
            forged(folder, content)
        case _:
            forged(folder, changed(content, draw))


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_changed_checkpoints_load_or_are_refused_in_one_line(trained, falconet):
    answers, before, end, seed = {0: 0, 2: 0}, peak(), time.monotonic() + SECONDS, FIRST
    while time.monotonic() < end:
        seed += 1
        draw = random.Random(seed)
        shutil.rmtree("dl", ignore_errors=True)
        shutil.copytree(trained, Path("dl") / NAME)
        mutate(Path("dl") / NAME, draw)
        if json_config(trained) == json_config(Path("dl") / NAME) and draw.random() < 0.5:
            shutil.rmtree("new", ignore_errors=True)
            line = f"restore --checkpoint-input-path dl/{NAME} --run-dir new --epoch 2 --validation-mode none"
        else:
            line = f"validate --checkpoint-input-path dl/{NAME}"
        begun = time.monotonic()
        try:
            answer = falconet(line)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {line}") from error
        assert answer.code in answers, f"seed {seed}: {answer}"
        assert answer.code == 0 or answer.err.count("\n") == 1, f"seed {seed}: {answer}"
        assert not set(answer.err) & {"\x1b", "\0"}, f"seed {seed}: {answer}"
        assert time.monotonic() - begun < 20, f"seed {seed}"
        assert peak() - before < 1000 * MEGABYTE, f"seed {seed}: {line}"
        answers[answer.code] += 1
    assert all(answers.values()), answers


def json_config(folder):
    try:
        return json.loads((folder / "manifest.json").read_text())["config"]
    except (ValueError, KeyError, TypeError):
        return None


def tensors(folder):
    verified = format.verify(folder)
    return {
        (stem, k): t for stem in verified.stems for k, t in format.read_tensors(folder, stem, verified=verified).items()
    }


@pytest.mark.dist
def test_killed_while_saving_the_newest_checkpoint_is_the_one_that_was_saved(tmp_path):
    # A save after every update: whatever the moment, a checkpoint is being written, renamed, amended or removed.
    line = f"train {TINY} --epoch 40 --checkpoint-save-freq 0.25"
    assert finish(begin(f"{line} --run-dir straight --checkpoints-kept all", tmp_path))[0] == 0
    draw, end, kills = random.Random(0), time.monotonic() + SECONDS, 0
    run = tmp_path / "r"
    while time.monotonic() < end:
        process = begin(f"{line} --run-dir r --checkpoints-kept 2", tmp_path)
        wait_for(lambda: any((run / "checkpoints").glob("[!.]*")), "no checkpoint")
        time.sleep(draw.random())
        process.send_signal(signal.SIGKILL)
        finish(process)
        skipped = []
        newest = format.newest_whole(run, note=skipped.append)
        assert skipped == [], "only whole checkpoints have a name"
        found, expected = tensors(newest), tensors(tmp_path / "straight/checkpoints" / newest.name)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found), newest
        shutil.rmtree(run)
        kills += 1
    assert kills > 2
