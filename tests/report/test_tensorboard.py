"""TensorBoard's own reader finds everything that was written."""

import io
import time

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import nn

from falconet.report.trackers.histograms import Histogram
from falconet.report.trackers.tensorboard import TensorBoard, graph_of
from falconet.report.trackers.tracker import Confusion, Guarded, Picture


def read(folder):
    events = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0, "histograms": 0})
    events.Reload()
    return events


def png(level, side=8):
    file = io.BytesIO()
    Image.fromarray(np.full((side, side, 3), level, np.uint8)).save(file, "PNG")
    return file.getvalue()


def shown(event):
    return np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))


def test_every_metric_is_there_at_its_update_as_soon_as_it_is_written(tmp_path):
    sink = TensorBoard(tmp_path)
    sink.write(5, {"train/loss": 0.5, "train/lr": 0.1})
    sink.write(9, {"train/loss": 0.25})
    events = read(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(5, 0.5), (9, 0.25)]
    assert [event.step for event in events.Scalars("train/lr")] == [5]
    sink.close()


@pytest.mark.parametrize("nanoseconds", [99_999_999, 100_000_001])
def test_a_continued_run_hides_what_an_earlier_start_wrote_beyond_its_checkpoint(tmp_path, monkeypatch, nanoseconds):
    times = iter([5 * 10**9 + nanoseconds, 5 * 10**9 + 100_000_002])
    monkeypatch.setattr(time, "time_ns", lambda: next(times))
    first = TensorBoard(tmp_path)
    for update in (1, 2, 3):
        first.write(update, {"train/loss": 1.0})
    first.close()
    second = TensorBoard(tmp_path, after=1)
    second.write(2, {"train/loss": 0.5})
    second.close()
    assert [(event.step, event.value) for event in read(tmp_path).Scalars("train/loss")] == [(1, 1.0), (2, 0.5)]


def test_histograms_of_weights(tmp_path):
    sink = TensorBoard(tmp_path)
    sink.write_weights(7, {"fc.bias": Histogram(0.0, 2.0, 3, 3.0, 5.0, [1, 2])})
    sink.close()
    (event,) = read(tmp_path).Histograms("weights/fc.bias")
    found = event.histogram_value
    assert (event.step, found.min, found.max, found.num, found.sum, found.sum_squares) == (7, 0.0, 2.0, 3.0, 3.0, 5.0)
    assert (found.bucket_limit, found.bucket) == ([1.0, 2.0], [1.0, 2.0])


def test_pictures_are_one_sheet_and_small_ones_stay_exact(tmp_path):
    sink = TensorBoard(tmp_path)
    sink.write_pictures(
        3, "mistakes", [Picture(f"{number} taken for 9, 90 %", png(10 * number)) for number in range(9)]
    )
    sink.write_pictures(4, "mistakes", [])
    sink.close()
    (event,) = read(tmp_path).Images("pictures/mistakes")
    sheet = shown(event)
    assert event.step == 3
    for number in range(9):
        y, x = 6 + number // 8 * 146, 6 + number % 8 * 118
        assert (sheet[y : y + 112, x : x + 112] == 10 * number).all()


@pytest.mark.parametrize(("classes", "side"), [(10, 40), (40, 25), (500, 2), (1000, 1)])
def test_the_matrix_shows_the_share_of_each_labels_images(tmp_path, classes, side):
    sink = TensorBoard(tmp_path)
    diagonal = [(label, label, 3) for label in range(classes)]
    sink.write_confusion(6, Confusion([str(label) for label in range(classes)], [*diagonal, (0, 1, 1)]))
    sink.close()
    (event,) = read(tmp_path).Images("validation/confusion")
    drawn = shown(event)[-classes * side :, -classes * side :].astype(int)
    corners = drawn[::side, ::side]
    assert (corners[2, 3] == 255).all(), "no images"
    assert (corners[1, 1] == (8, 48, 107)).all(), "all of them"
    by_root = 255 + (np.array([8, 48, 107]) - 255) * np.sqrt([[0.75], [0.25]])
    assert np.abs(corners[0, :2] - by_root).max() <= 1


def test_more_classes_than_pixels_share_cells(tmp_path):
    sink = TensorBoard(tmp_path)
    cells = [(0, 0, 1), (1, 4, 1), (2, 1, 2), (2499, 2499, 5)]
    sink.write_confusion(6, Confusion([str(label) for label in range(2500)], cells))
    sink.close()
    (event,) = read(tmp_path).Images("validation/confusion")
    drawn = shown(event).astype(int)
    assert drawn.shape == (834, 834, 3), "three classes in a cell"
    by_root = 255 + (np.array([8, 48, 107]) - 255) * np.sqrt([[0.75], [0.25]])
    assert np.abs(drawn[0, :2] - by_root).max() <= 1
    assert drawn[833, 833].tolist() == [8, 48, 107]


def test_options_and_the_result_are_hyperparameters(tmp_path):
    sink = TensorBoard(tmp_path, options={"lr": 0.1, "model": "resnet18", "lr-epoch-decay": [1, 2]})
    sink.write_result(66, {"best/validation_accuracy": 94.5, "final/validation_loss": 0.25})
    sink.close()
    events = read(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("best/validation_accuracy")] == [(66, 94.5)]
    parts = {
        tag: HParamsPluginData.FromString(stored.plugin_data.content)
        for tag, stored in events.summary_metadata.items()
        if tag.startswith("_hparams_/")
    }
    started = parts["_hparams_/session_start_info"].session_start_info.hparams
    assert started["lr"].number_value == 0.1
    assert started["model"].string_value == "resnet18"
    assert started["lr-epoch-decay"].string_value == "1 2"
    metrics = parts["_hparams_/experiment"].experiment.metric_infos
    assert {each.name.tag for each in metrics} == {"best/validation_accuracy", "final/validation_loss"}


class Small(nn.Module):
    """A frozen layer inside a model that trains."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2).eval()

    def forward(self, images):
        return self.norm(self.conv(images)).mean((2, 3))


def test_the_graph_names_the_layers_and_the_model_stays_as_it_is(tmp_path):
    model = Small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    sink = TensorBoard(tmp_path)
    sink.write_graph(graph_of(model, image_size=8, say=pytest.fail))
    sink.close()
    assert any("Conv2d[conv]" in node.name for node in read(tmp_path).Graph().node)
    assert [module.training for module in (model, model.conv, model.norm)] == [True, True, False]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_cannot_be_traced_takes_a_line(capfd):
    class Odd(nn.Module):
        def forward(self, images):
            return {"a": images, "b": [images]}[str(images.sum().item())]

    said = []
    assert graph_of(Odd(), image_size=8, say=said.append) is None
    assert said == ["note: TensorBoard: no graph of the model, which cannot be traced: '0.0'"]
    assert capfd.readouterr() == ("", "")


def test_a_full_disk_takes_one_line(tmp_path, capfd, file_limit):
    said = []
    board = Guarded("TensorBoard", lambda: TensorBoard(tmp_path), say=said.append)
    file_limit(2000)
    for update in range(200):
        board.write(update, {"train/loss": 0.5})
    board.close()
    file_limit(None)
    assert said == ["note: TensorBoard: File too large; nothing more is sent to it"]
    assert capfd.readouterr() == ("", "")
    assert read(tmp_path).Scalars("train/loss")[0].value == 0.5
