"""The Python API: the runs, scores and mistakes of the command line, and nothing left behind in the process."""

import io
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import falconet as fn
from falconet.checkpoint import format
from falconet.cli import main
from falconet.data.image_files import BadImages
from falconet.data.readers import reader_for
from falconet.data.storage import FileSource
from falconet.infer.model import Transform
from falconet.models import zoo
from runs import assert_bitwise, stop_at

TINY = {
    **{"data": "generated", "image_size": 16, "iterations": 4, "micro_batch_size": 8, "epoch": 2, "warmup_epoch": 0},
    **{"threads": 1, "dataloader_workers": 1, "device": "cpu"},
}
LINE = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in TINY.items())


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATA_DIR", raising=False)


@pytest.fixture
def photos(image_folder):
    """A run on two classes of photos, in r, and its folder."""
    line = "train photos --model resnet8-cifar --image-size 16 --micro-batch-size 8 --epoch 1 --threads 1 --run-dir r"
    assert main([*line.split(), "--device", "cpu", "--warmup-epoch", "0"]) == 0
    return image_folder


def test_import_takes_no_torch():
    code = "import sys, falconet as fn; assert callable(fn.train) and 'load' in dir(fn); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_every_public_name_is_there_after_anything_was_imported():
    assert all(getattr(fn, name) for name in fn.__all__)
    assert callable(fn.train)
    with pytest.raises(AttributeError, match="no attribute 'trane'"):
        _ = fn.trane


def test_a_run_is_that_of_the_command_line_and_can_be_repeated():
    assert main(f"train {LINE} --run-dir line".split()) == 0
    for name in ("first", "second"):
        run = fn.train(**TINY, run_dir=name)
        assert run.folder == Path(name)
        assert_bitwise(Path("line"), Path(name))


def test_a_run_without_a_folder_gets_one_and_has_its_metrics():
    run = fn.train(**TINY, ema_half_life=1, tensorboard=False)
    assert run.folder.parent == Path("runs")
    assert [row["epoch"] for row in run.metrics] == [1, 2]
    assert {"update", "train/loss", "validation/accuracy", "validation_ema/accuracy"} <= run.metrics[0].keys()
    measured = ("validation", "validation_ema")
    ranks = [max((row[f"{each}/accuracy"], -row[f"{each}/loss"]) for each in measured) for row in run.metrics]
    assert run.best.accuracy == max(ranks)[0]
    assert run.best.epoch == 1 + ranks.index(max(ranks))
    assert run.best.checkpoint == format.choose(run.folder, "best", lambda _: None).folder
    assert repr(run) == repr(fn.Run(str(run.folder)))
    assert f"best {run.best.accuracy:.2f} %" in repr(run)


def test_half_a_line_of_a_killed_run_is_no_metric(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r/metrics.jsonl").write_text('{"update": 1, "train/loss": 2.0}\n{"update": 2, "tra')
    assert fn.Run("r").metrics == [{"update": 1, "train/loss": 2.0}]


def test_metrics_become_a_table_if_pandas_is_there(monkeypatch):
    run = fn.train(**TINY)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(fn.UserError, match="pip install pandas"):
        run.metrics.to_pandas()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modell": "resnet18"}, "unknown option --modell; did you mean '--model'?"),
        ({"epoch": "many"}, "--epoch: got 'many', expected a number, more than 0"),
        ({"epoch": True}, "--epoch: got no value"),
        ({"tensorboard": "yes"}, "--tensorboard: got 'yes', expected no value: it is a switch"),
        ({"photos": "nowhere"}, "nowhere: no such folder"),
        ({"plan": True}, "--plan: would leave no run to return"),
        ({"temporary": True}, "--temporary: would leave no run to return"),
        ({"pixel_mean": [0.5]}, "--pixel-mean: got 1 numbers, expected 3"),
    ],
)
def test_a_mistake_raises_the_line_of_the_command_line(options, message):
    with pytest.raises(fn.UserError) as caught:
        fn.train(**options)
    assert message in str(caught.value)
    assert not Path("runs").exists()


def left_behind():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    flags = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark, torch.get_num_threads()
    rest = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), sys.unraisablehook, dict(os.environ)
    return handlers, flags, torch.get_rng_state().tolist(), rest


def new_threads(before):
    """Names; threads of other tests may end meanwhile."""
    return [thread.name for thread in threading.enumerate() if thread not in before]


def test_nothing_is_left_behind(photos):
    fn.load("r")  # rich and torch start what they keep
    torch.set_num_threads(2)
    before, threads = left_behind(), threading.enumerate()
    run = fn.train(**TINY)
    model = fn.load(run)
    model.predict([np.zeros((9, 9), np.uint8)])
    fn.load("r").predict(["photos/val"])
    fn.evaluate(run)
    assert (left_behind(), new_threads(threads)) == (before, [])
    assert not torch.distributed.is_initialized()


def test_an_interruption_saves_and_leaves_python_usable(monkeypatch, capfd):
    before, threads = left_behind(), threading.enumerate()
    with monkeypatch.context() as patched:
        stop_at(patched, 5, act=lambda: bool(os.kill(os.getpid(), signal.SIGINT)))
        with pytest.raises(KeyboardInterrupt):
            fn.train(**TINY, run_dir="r")
    assert "to continue: falconet restore " in capfd.readouterr().out
    assert (left_behind(), new_threads(threads)) == (before, [])
    stopped = fn.Run("r")
    assert stopped.metrics[0]["epoch"] == 1
    whole = fn.train(**TINY, run_dir="whole")
    assert fn.train(**TINY, run_dir="r", resume=True).metrics[-1]["train/loss"] == whole.metrics[-1]["train/loss"]
    assert_bitwise(Path("r"), Path("whole"))


def test_training_works_in_another_thread():
    runs = []
    thread = threading.Thread(target=lambda: runs.append(fn.train(**TINY)))
    thread.start()
    thread.join()
    assert runs[0].best.epoch in (1, 2)


def test_pictures_of_every_kind_get_the_class_of_the_file(photos):
    model = fn.load("r", precision="32.32")  # that of the module alone, below
    path = photos / "val/light/1.png"
    picture = Image.open(path)
    array = np.asarray(picture)
    tensor = torch.from_numpy(array.copy()).permute(2, 0, 1)
    found = model.predict([str(path), path, picture, array, tensor, model.transform(picture)], top=2, batch_size=1)
    for each in found:
        assert (each.label, len(each.top)) == (found[0].label, 2)
        assert each.probability == pytest.approx(found[0].probability, abs=1e-6)
        assert each.probabilities.sum() == pytest.approx(1)
    one = model.predict(path)
    assert (one.label, one.name) == (found[0].label, str(path))
    assert repr(one).startswith(f"<{path}: {one.label} {100 * one.probability:.1f} %, ")
    assert model.class_names == ("dark", "light")
    with torch.no_grad():
        logits = model.module(model.transform(path)[None])
    np.testing.assert_allclose(logits.softmax(1)[0].numpy(), one.probabilities, atol=1e-6)


def test_transform_is_the_preprocessing_of_validation_bit_for_bit(photos):
    from falconet.data.crops import Crops

    model = fn.load("r")
    names = [f"{number}.png" for number in range(4)]
    source = FileSource.of(photos / "val", names=names, labels=[0] * 4, class_names=("dark",))
    made = model.transform.preprocessing
    reader = reader_for(source, crops=Crops(preprocessing=made), bad=BadImages(0, note=print))
    expected = np.empty((4, 16, 16, 3), np.uint8)
    reader.read(np.arange(4), epoch=0, out=expected)
    for name, pixels in zip(names, expected, strict=True):
        assert np.array_equal(model.transform.pixels(Image.open(photos / "val/dark" / name)).permute(1, 2, 0), pixels)
    assert model.transform == Transform(made)


def test_a_folder_in_a_list_stands_for_its_photos(photos):
    model = fn.load("r")
    (photos / "val/dark/bad.png").touch()
    with pytest.warns(UserWarning, match=r"bad\.png: empty file; left out"):
        found = model.predict([photos / "val", photos / "train/dark/0.png"])
    assert len(found) == 9
    assert model.embeddings([photos / "val/light"]).shape == (4, 64)


@pytest.mark.parametrize("several", [False, True])
def test_what_may_not_be_looked_at_is_refused_in_one_line(photos, monkeypatch, several):
    plain = os.stat

    def looked(path, *args, **named):
        if str(path).endswith("closed.png"):
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path, *args, **named)

    monkeypatch.setattr(os, "stat", looked)
    model = fn.load("r", device="cpu")
    for name, why in (("closed.png", "Permission denied"), ("x" * 300, "File name too long")):
        with pytest.raises(fn.UserError, match=f"^{name}: {why}$"):
            model.predict([name] if several else name)


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        ("nowhere.jpg", "nowhere.jpg: No such file or directory"),
        ("photos/val/dark/0.png\0x", r"'photos/val/dark/0.png\x00x': no file can have this name"),
        (["\ud800.jpg"], r"'\ud800.jpg': no file can have this name"),
        ("photos", "photos: is a folder; expected a photo, or a list with the folder in it"),
        (np.zeros((4, 4)), "got float64 of 4 x 4, expected a path"),
        (np.zeros((4, 4, 7), np.uint8), "got uint8 of 4 x 4 x 7, expected a path"),
        (torch.zeros(3, 4, 4), "got a float tensor of 3 x 4 x 4, expected 3 x 16 x 16"),
        ([3], "got int, expected a path"),
        (3, "got int, expected a path"),
        (None, "got NoneType, expected a path"),
        (b"\xff\xd8\xff", "got bytes, expected a path"),
        (io.BytesIO(b"\xff\xd8\xff"), "got BytesIO, expected a path"),
    ],
)
def test_what_is_no_picture_is_refused_in_one_line(photos, picture, message):
    with pytest.raises(fn.UserError) as caught:
        fn.load("r").predict(picture)
    assert message in str(caught.value)


@pytest.mark.parametrize("pictures", ["photos/val/dark/0.png", np.zeros((4, 4, 3), np.uint8), b"\xff", 3])
def test_embeddings_are_those_of_a_list(photos, pictures):
    """A path would otherwise be taken for a list of letters, an array for one of rows."""
    with pytest.raises(fn.UserError, match=f"^got {type(pictures).__name__}, expected a list of pictures$"):
        fn.load("r").embeddings(pictures)


@pytest.mark.parametrize(("named", "message"), [({"top": 0}, "top: got 0"), ({"batch_size": 0}, "batch_size: got 0")])
def test_sizes_of_nothing_are_refused(photos, named, message):
    with pytest.raises(fn.UserError, match=f"{message}, expected a whole number, at least 1"):
        fn.load("r").predict([photos / "val/dark/0.png"], **named)


def test_none_removes_what_a_config_sets(image_folder):
    line = {**TINY, "data": "folder", "epoch": 1}
    fn.train("photos", model="resnet8-cifar", **line, ema_half_life=None, run_dir="r")
    assert "ema" not in format.read_manifest(fn.Run("r").best.checkpoint).stems
    with pytest.raises(fn.UserError, match="--micro-batch-size: got None, expected"):
        fn.train("photos", **{**line, "micro_batch_size": None})


def test_accuracy_is_that_of_the_run(photos):
    run = fn.Run("r")
    expected = run.metrics[-1]
    for found in (
        fn.evaluate(run),
        fn.evaluate("r"),
        fn.evaluate(fn.load("r"), photos),
        fn.evaluate(fn.load("r"), str(photos / "val")),
    ):
        assert found.images == 8
        assert found.accuracy == expected["validation/accuracy"]
        assert found.loss == pytest.approx(expected["validation/loss"], rel=1e-6)
    assert repr(fn.evaluate("r")) == f"<accuracy {found.accuracy:.2f} % of 8 images, loss {found.loss:.4f}>"
    (photos / "val/dark").rename(photos / "val/drak")
    with pytest.raises(fn.UserError, match="drak"):
        fn.evaluate("r", photos)


def test_a_folder_with_training_photos_is_split_as_validate_splits_it(image_folder):
    shutil.copytree(image_folder / "train", "mine")
    shutil.copytree(image_folder / "train", "kept/test")
    line = "--model resnet8-cifar --image-size 16 --micro-batch-size 4 --epoch 1 --threads 1 --device cpu --seed 3"
    assert main(f"train mine {line} --warmup-epoch 0 --run-dir r".split()) == 0
    model = fn.load("r")
    for found in (fn.evaluate(model), fn.evaluate(model, "mine")):
        assert found.images == 6
        assert found.loss == pytest.approx(fn.Run("r").metrics[-1]["validation/loss"], rel=1e-6)
    assert fn.evaluate(model, "kept/test").images == 24
    shutil.copy(fn.Run("r").best.checkpoint / "model.safetensors", "w.safetensors")
    weights = fn.load("w.safetensors", model="resnet8-cifar", image_size=16)
    with pytest.raises(fn.UserError, match="was trained on 2 classes"):
        fn.evaluate(weights, "mine")


def test_models_come_from_checkpoints_weights_and_names(photos):
    best = fn.Run("r").best.checkpoint
    picture = photos / "val/dark/0.png"
    expected = fn.load("r").predict(picture).probabilities
    assert np.array_equal(fn.load(best).predict(picture).probabilities, expected)
    assert np.array_equal(fn.load("r", checkpoint="last").predict(picture).probabilities, expected)
    shutil.copy(best / "model.safetensors", "weights.safetensors")
    assert fn.load("weights.safetensors", model="resnet8-cifar").class_names == ("0", "1")
    for source, message in {
        "resnet50": "are not in the Hugging Face cache",
        "nowhere": "nowhere: no such file or folder",
        "runs/resnet5": "runs/resnet5: no such file or folder",
        "resnet5": r"resnet5: no such file, folder or model; did you mean 'resnet50'\?",
        "timm:resnet10t": r"timm/resnet10t\.\w+ are not in the Hugging Face cache",
        7: "got int, expected a run, a path or the name of a model",
    }.items():
        with pytest.raises(fn.UserError, match=message):
            fn.load(source)
    with pytest.raises(fn.UserError, match="not from a run"):
        fn.evaluate(fn.load("weights.safetensors", model="resnet8-cifar"))


def test_what_is_no_run_is_refused():
    with pytest.raises(fn.UserError, match=r"nowhere: is not a run folder; expected one that contains metrics\.jsonl"):
        fn.Run("nowhere")


def test_weights_of_a_model_of_timms_are_measured_on_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(timm.create_model("resnet10t", num_classes=2).state_dict(), "weights.pth")
    for name, shade in (("0", 40), ("1", 200)):
        Path(f"photos/val/{name}").mkdir(parents=True)
        Image.new("RGB", (40, 40), (shade, shade, shade)).save(f"photos/val/{name}/a.png")
    model = fn.load("weights.pth", model="timm:resnet10t", image_size=32, device="cpu")
    assert model.name == "timm:resnet10t"
    assert fn.evaluate(model, "photos/val").images == 2


def test_folders_of_imagenet_may_have_numbers_or_descriptions(capfd):
    torch.save(zoo.build("resnet18", classes=1000, seed=1).state_dict(), "weights.pth")
    folders = {
        "by number": ("n02012849", "n03126707"),
        "in words": ("goldfish, Carassius auratus", "tench, Tinca tinca"),
    }
    for kind, names in folders.items():
        for name, shade in zip(names, (40, 200), strict=True):
            Path(f"{kind}/val/{name}").mkdir(parents=True)
            Image.new("RGB", (40, 40), (shade, 255 - shade, shade)).save(f"{kind}/val/{name}/a.png")
    model = fn.load("weights.pth", model="resnet18", image_size=32, device="cpu")
    line = "--model resnet18 --pretrained weights.pth --image-size 32 --device cpu --threads 1"
    for kind, numbers in {"by number": (134, 517), "in words": (1, 0)}.items():  # both of the first are cranes
        found = fn.evaluate(model, f"{kind}/val")
        logits = [np.log(model.predict(path).probabilities) for path in sorted(Path(f"{kind}/val").glob("*/a.png"))]
        expected = -np.mean([each[number] for each, number in zip(logits, numbers, strict=True)])
        assert (found.images, found.loss) == (2, pytest.approx(expected, rel=1e-4))
        capfd.readouterr()
        assert main(["validate", f"{kind}/val", *line.split()]) == 0
        assert f"  {found.loss:.4f}  2\n" in capfd.readouterr().out


def test_the_api_prints_nothing_that_was_not_asked_for(photos, capfd):
    capfd.readouterr()
    fn.evaluate(fn.load("r"), photos)
    assert capfd.readouterr() == ("", "")


def test_what_was_passed_over_is_a_warning(photos):
    assert main(["restore", "r", "--epoch", "2"]) == 0
    best = fn.Run("r").best.checkpoint
    (best / "model.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match=best.name):
        assert fn.load("r").classifier.checkpoint != best
    (photos / "val/dark/1.png").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"1\.png: cannot be decoded \(empty file\); left out"):
        assert fn.evaluate(fn.load("r", checkpoint="last" if best.name.endswith("1") else 1), photos).images == 7
