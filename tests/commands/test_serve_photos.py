"""Photos sent to `falconet serve` get the answers of `falconet predict` and of a validation, to the last photo."""

import base64
import contextlib
import csv
import http.client
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from PIL import Image
from urllib3 import encode_multipart_formdata

from served import LIMIT, served

pytestmark = pytest.mark.dist
RUN = (
    "train photos --model resnet8-cifar --pretrained none --image-size 32 --epoch 1 --micro-batch-size 8 --threads 1"
    " --dataloader-workers 1 --device cpu --precision 32.32 --run-dir r"
)
SERVER = "r --port 0 --threads 1 --device cpu --model-cache-path cache"
NOISE = 2e-6  # of a probability: kernels differ with the size of a batch


@pytest.fixture
def photos(falconet, image_folder):
    """A run, and photos of its validation: PNG, and JPEG of the kinds that cameras and phones make."""
    noise = np.random.default_rng(1)
    for number, (size, how) in enumerate(
        [
            ((90, 60), {}),
            ((61, 83), {"progressive": True}),
            ((200, 40), {"quality": 30}),
            ((50, 50), {"subsampling": 0}),
        ]
    ):
        level = 60 + 130 * (number % 2)
        pixels = noise.integers(level - 50, level + 50, (size[1], size[0], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(image_folder / "val" / ("dark", "light")[number % 2] / f"j{number}.jpg", **how)
    assert falconet(RUN).code == 0
    return sorted(image_folder.glob("val/*/*"))


def post(port, body, headers=None, *, query=""):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)) as connection:
        connection.request("POST", f"/predict{query}", body=body, headers=headers or {})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


@pytest.mark.parametrize("engine", ["torch", "auto"])  # auto: ONNX Runtime
def test_answers_equal_those_of_predict_and_of_the_validation(falconet, photos, engine):
    told = falconet(f"predict r {' '.join(map(str, photos))} --json --top 2")
    expected = json.loads(told.out)
    assert falconet("validate r --predictions all.csv").code == 0
    with Path("all.csv").open() as file:
        validated = {Path(row["path"]).name + Path(row["path"]).parent.name: row for row in csv.DictReader(file)}
    form, kind = encode_multipart_formdata([("photo", (photo.name, photo.read_bytes())) for photo in photos])
    coded = [{"name": photo.name, "data": base64.b64encode(photo.read_bytes()).decode()} for photo in photos]
    with served(f"{SERVER} --engine {engine}") as (_, port, lines):
        assert any(line.startswith("engine: ONNX Runtime") for line in lines) == (engine == "auto")
        one_by_one = [post(port, photo.read_bytes(), query="?top=2")[1]["predictions"][0] for photo in photos]
        together = post(port, form, {"Content-Type": kind}, query="?top=2")[1]["predictions"]
        as_json = post(port, json.dumps({"images": coded, "top": 2}))[1]["predictions"]
    assert [each["name"] for each in together] == [each["name"] for each in as_json] == [each.name for each in photos]
    for answers in (one_by_one, together, as_json):
        for photo, answer, row in zip(photos, answers, expected, strict=True):
            assert answer["label"] == row["label"]
            assert [guess["label"] for guess in answer["top"]] == [guess["label"] for guess in row["top"]]
            assert answer["probability"] == pytest.approx(row["probability"], abs=NOISE)
            told = validated[photo.name + photo.parent.name]
            assert answer["label"] == told["predicted"]
            assert answer["probability"] == pytest.approx(float(told["probability"]), abs=1e-4)


def test_a_broken_photo_among_others_is_named_and_the_others_are_answered(photos):
    cut = photos[0].read_bytes()[:-40]
    files = [("a", ("whole.png", photos[1].read_bytes())), ("b", ("cut.png", cut)), ("c", ("notes.txt", b"hello"))]
    form, kind = encode_multipart_formdata(files)
    with served(f"{SERVER} --engine torch") as (process, port, _):
        status, content = post(port, form, {"Content-Type": kind})
        whole, truncated, text = content["predictions"]
        assert (status, whole["name"], "label" in whole) == (200, "whole.png", True)
        assert set(truncated) == {"name", "error"}
        assert text == {"name": "notes.txt", "error": "not a JPEG, PNG, WebP, GIF, BMP or TIFF file"}
        assert post(port, cut) == (400, {"error": truncated["error"]})
        assert post(port, b"hello")[0] == 400
        assert post(port, photos[0].read_bytes(), query="?top=0") == (
            400,
            {"error": "top: got '0', expected a whole number, at least 1"},
        )
        process.terminate()
        assert process.wait(LIMIT) == 0
        assert process.stderr.read() == ""


def test_a_class_whose_folder_has_no_utf_8_name_is_served_to_every_client(falconet, image_folder):
    """Also by ONNX Runtime, for which the run is exported."""
    names = [r"caf\udce9", "light"]
    for split in ("train", "val"):
        (image_folder / split / "dark").rename(image_folder / split / os.fsdecode(b"caf\xe9"))
    assert falconet(RUN).code == 0
    images = np.zeros((1, 3, 32, 32), np.uint8)
    with served(SERVER) as (_, port, lines):
        assert any(line.startswith("engine: ONNX Runtime") for line in lines)
        (photo, *_) = image_folder.glob("val/light/*")
        _, content = post(port, photo.read_bytes())
        assert sorted(guess["label"] for guess in content["predictions"][0]["top"]) == names
        address = re.search(r" and grpc://(127\.0\.0\.1:\d+): ", "".join(lines))[1]
        for library, url in ((tritonclient.http, f"127.0.0.1:{port}"), (tritonclient.grpc, address)):
            for is_binary in (True, False) if library is tritonclient.http else (None,):
                how = {} if is_binary is None else {"binary_data": is_binary}
                with contextlib.closing(library.InferenceServerClient(url)) as asking:
                    tensor = library.InferInput("input_0", list(images.shape), "UINT8")
                    tensor.set_data_from_numpy(images)
                    wished = [library.InferRequestedOutput("output_0", class_count=2, **how)]
                    found = asking.infer("r", [tensor], outputs=wished).as_numpy("output_0")
                texts = [text if isinstance(text, str) else text.decode() for text in found.ravel()]
                assert sorted(text.rpartition(":")[2] for text in texts) == names
        with contextlib.closing(tritonclient.http.InferenceServerClient(f"127.0.0.1:{port}")) as asking:
            assert asking.get_model_metadata("r")["parameters"]["class_names"] == names
