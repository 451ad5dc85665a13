"""Photos with several labels each: trained, validated, restored, predicted; what is not defined for them is refused."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from falconet import api
from falconet.checkpoint import format
from falconet.config.commands import ServeOptions
from falconet.config.settings import LINE, Setting
from falconet.data import mixing
from falconet.data.mixing import Mix
from falconet.evaluation.loss import MultiLabelLoss, presence_weights
from falconet.infer.classifier import open_classifier
from falconet.serve.protocol import Served, metadata
from runs import assert_bitwise, stop_at

PHOTOS = 48
SMALL = (
    "--model resnet8-cifar --image-size 16 --micro-batch-size 8 --epoch 4 --threads 1 --dataloader-workers 1"
    " --device cpu --optimizer adamw --lr 0.003 --warmup-epoch 0 --pretrained none --augment none"
)
EXTRAS = "--mixup-alpha 0.2 --cutmix-lambda-low 0.3 --cutmix-lambda-high 0.7 --label-smoothing 0.1 --ema-half-life 1"


@pytest.fixture
def photos(tmp_path):
    """Red, blue, both or neither; a quarter of the photos each."""
    folder = tmp_path / "photos"
    folder.mkdir()
    rows = []
    for number in range(PHOTOS):
        red, blue = number % 2, number // 2 % 2
        Image.new("RGB", (18, 16), (220 * red, 4 * number, 220 * blue)).save(folder / f"{number:02}.png")
        split = "val" if number >= 3 * PHOTOS // 4 else "train"
        rows.append(f"{number:02}.png,{'|'.join(['red'] * red + ['blue'] * blue)},{split}")
    (folder / "labels.csv").write_text("\n".join(["photo,labels,split", *rows]) + "\n")
    return folder


@pytest.fixture
def trained(falconet, photos):
    answer = falconet(f"train photos {SMALL} --ema-half-life 1 --run-dir run")
    assert answer.code == 0, answer.err
    return answer


def metrics(run="run"):
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


SETS = torch.tensor([[False, False, False], [True, False, True], [False, True, False]])


def test_loss_is_the_mean_binary_cross_entropy_of_an_image():
    torch.manual_seed(0)
    logits, labels = torch.randn(5, 3) * 4, torch.tensor([0, 1, 2, -1, 1])
    loss = MultiLabelLoss(3, sets=SETS)
    found = loss(logits, loss.targets(labels))
    plain = F.binary_cross_entropy_with_logits(logits, SETS[labels].float(), reduction="none").mean(1)
    plain[3] = 0  # labelled -1
    torch.testing.assert_close(found, plain)


def test_smoothing_moves_both_targets_by_half():
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 3), torch.arange(3)
    loss = MultiLabelLoss(3, 0.2, sets=SETS)
    plain = F.binary_cross_entropy_with_logits(logits, SETS.float() * 0.8 + 0.1, reduction="none").mean(1)
    torch.testing.assert_close(loss(logits, loss.targets(labels)), plain)


def test_weights_are_those_of_torch():
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 3), torch.tensor([0, 1, 2, 1, 0, 1])
    weights = torch.tensor(presence_weights(labels.numpy(), SETS.numpy()))
    assert weights.tolist() == [1.0, 5.0, 1.0]
    loss = MultiLabelLoss(3, sets=SETS, weights=weights)
    plain = F.binary_cross_entropy_with_logits(logits, SETS[labels].float(), pos_weight=weights, reduction="none")
    torch.testing.assert_close(loss(logits, loss.targets(labels)), plain.mean(1))


def test_mixed_labels_are_targets_in_between():
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    loss, own = MultiLabelLoss(3, sets=SETS), torch.tensor([0.5, 0.75, 1.0, 0.6])
    mix = Mix(own, torch.zeros(4, dtype=torch.int64))
    targets = mixing.mixed_targets(labels, mix, targets=loss.targets, side=2)
    rows = SETS[labels].float()
    between = own[:, None] * rows + (1 - own[:, None]) * rows.roll(1, 0)
    plain = F.binary_cross_entropy_with_logits(logits, between, reduction="none").mean(1)
    torch.testing.assert_close(loss(logits, targets), plain)


def test_training_finds_several_labels(trained):
    assert "photos: 2 classes (blue, red), 48 photos (24 per class), any number of labels each" in trained.out
    assert "exact" in trained.out
    assert "val mAP" in trained.out
    assert "ema mAP" in trained.out
    assert "best mAP" in trained.out
    found = [row["validation/mAP"] for row in metrics() if "validation/mAP" in row]
    assert max(found) > 95
    assert not any("accuracy" in name for row in metrics() for name in row)
    assert json.loads(Path("run/summary.json").read_text())["best"]["validation_mAP"] > 95


def test_the_best_checkpoint_has_the_highest_map(trained):
    manifests = [format.read_manifest(folder) for folder in format.checkpoints_in(Path("run"))]
    assert all(each.several_labels for each in manifests)
    scores = [max(each.metrics["validation_mAP"], each.metrics["validation_ema_mAP"]) for each in manifests]
    best = format.choose(Path("run"), "best", lambda _: None).manifest
    assert best.score == max(scores)
    better = best.metrics["validation_ema_mAP"] > best.metrics["validation_mAP"]
    assert best.better_stem == ("ema" if better else "model")


def test_validate_gives_average_precision_by_class_and_predictions(falconet, trained):
    answer = falconet("validate run --predictions p.csv --device cpu")
    assert answer.code == 0, answer.err
    assert "average precision by class:" in answer.out
    (model, *_) = json.loads(Path("run/validation.json").read_text())["models"]
    assert model["several_labels"]
    assert "accuracy" not in model
    assert [each["class"] for each in model["per_class"]] == ["blue", "red"]
    assert model["mAP"] == pytest.approx(np.mean([each["average_precision"] for each in model["per_class"]]))
    with Path("run/validation.csv").open() as file:
        assert {"mAP", "exact"} < {*next(csv.reader(file))}
    with Path("p.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == PHOTOS // 4
    assert {row["labels"] for row in rows} == {"", "red", "blue", "blue|red"}
    for row in rows:
        chosen = "|".join(name for name in ("blue", "red") if float(row[name]) >= 0.5)
        assert row["predicted"] == chosen


@pytest.mark.parametrize("target", [2, 5, 9])
def test_restore_continues_bit_for_bit(falconet, photos, monkeypatch, target):
    line = f"train photos {SMALL} {EXTRAS} --epoch 3"
    assert falconet(f"{line} --run-dir straight").code == 0
    with monkeypatch.context() as patched:
        stop_at(patched, target)
        assert falconet(f"{line} --run-dir other").code == 130
    again = falconet("restore --checkpoint-input-path other")
    assert again.code == 0, again.err
    assert_bitwise(Path("straight"), Path("other"))
    measured = [{name: row[name] for name in row if name.endswith(("mAP", "loss"))} for row in metrics("straight")]
    assert measured[-1] == {name: row for name, row in metrics("other")[-1].items() if name.endswith(("mAP", "loss"))}


DIVIDED = {
    "replicas": "--micro-batch-size 4 --replicas 2",
    "stages": "--micro-batch-size 8 --pipeline-splits layer2/0 --strict-devices",
}


@pytest.mark.dist
@pytest.mark.parametrize("division", ["replicas", pytest.param("stages", marks=pytest.mark.slow)])
def test_several_processes_measure_what_one_measures(falconet, photos, division):
    line = f"train photos {SMALL} --epoch 2 --norm-type group --norm-num-groups 4 --precision 32.32"
    one = falconet(f"{line} --run-dir one")
    assert one.code == 0, one.err
    two = falconet(f"{line} {DIVIDED[division]} --run-dir two")
    assert two.code == 0, two.err
    names = ("validation/mAP", "validation/loss", "validation/images", "train/loss")
    for own, other in zip(metrics("one"), metrics("two"), strict=True):
        assert {name: own[name] for name in names if name in own} == pytest.approx(
            {name: other[name] for name in names if name in other}, rel=1e-4
        )


@pytest.mark.parametrize("extra", ["--precision bf16.32", "--precision 16.16", "--class-weights balanced"])
def test_other_formats_and_weights_train_too(falconet, photos, extra):
    answer = falconet(f"train photos {SMALL} {extra} --epoch 6 --run-dir run")
    assert answer.code == 0, answer.err
    assert max(row["validation/mAP"] for row in metrics() if "validation/mAP" in row) > 90


REFUSED = {
    "--sampler balanced": "--sampler: got 'balanced', but photos with several labels have no one class to draw by",
}


@pytest.mark.parametrize(("extra", "message"), REFUSED.items())
def test_what_is_not_defined_for_several_labels_is_refused(falconet, photos, extra, message):
    answer = falconet(f"train photos {SMALL} {extra} --run-dir run")
    assert answer.code == 2
    assert message in answer.err
    assert answer.err.count("\n") == 1


def test_original_programs_refuse_several_labels(falconet, photos):
    answer = falconet(f"train {SMALL} --data folder --data-dir photos --run-dir run", "pytorch")
    assert answer.code == 2
    assert "photos with several labels" in answer.err
    assert answer.err.count("\n") == 1


def test_original_programs_do_not_call_map_an_accuracy(falconet, trained):
    answer = falconet("validate --checkpoint-input-path run --device cpu", "pytorch")
    assert answer.code == 2
    assert "for which this program has no accuracy; expected `falconet validate`" in answer.err


def test_server_states_the_sigmoid(falconet, trained):
    classifier, _ = open_classifier(ServeOptions, [Setting("checkpoint-input-path", ("run",), LINE)], lambda _: None)
    served = Served(
        name=classifier.name,
        preprocessing=classifier.preprocessing,
        class_names=classifier.class_names,
        output="float32",
        max_batch=1,
        activation=classifier.activation,
    )
    assert metadata(served)["parameters"]["probabilities"] == "sigmoid"


def test_data_with_one_label_each_does_not_validate_such_a_model(falconet, trained, photos):
    table = photos / "labels.csv"
    table.write_text(table.read_text().replace("|blue", "").replace(",,", ",red,"))
    answer = falconet("validate run --device cpu")
    assert answer.code == 2
    assert "was trained on photos with several labels per photo, the data has one label per photo" in answer.err


def test_photos_with_some_of_the_labels_are_validated(falconet, trained, photos):
    table = photos / "labels.csv"
    table.write_text(table.read_text().replace("red|blue", "red").replace(",blue,", ",red,"))
    assert falconet("validate run --device cpu").code == 0
    (model, *_) = json.loads(Path("run/validation.json").read_text())["models"]
    assert [(each["class"], each["images"]) for each in model["per_class"]] == [("blue", 0), ("red", 9)]
    assert model["mAP"] == model["per_class"][1]["average_precision"]


def test_validation_photos_without_any_label_are_refused(falconet, trained, photos):
    table = photos / "labels.csv"
    rows = [row.split(",") for row in table.read_text().splitlines()]
    table.write_text("\n".join(",".join([row[0], "" if row[2] == "val" else row[1], row[2]]) for row in rows))
    answer = falconet(f"train photos {SMALL} --run-dir other")
    assert answer.code == 2
    assert "none of the photos to validate on has a label" in answer.err
    answer = falconet("validate run --device cpu")
    assert answer.code == 2
    assert "none of the images has a label, so there is no mean average precision" in answer.err


def test_predict_shows_every_label_of_a_photo(falconet, trained):
    names = " ".join(f"photos/{number}.png" for number in (36, 37, 39))  # neither, red, both
    answer = falconet(f"predict {names} --checkpoint-input-path run --device cpu")
    assert answer.code == 0, answer.err
    rows = [line.split() for line in answer.out.splitlines()]
    assert [row[0] for row in rows] == ["photos/36.png", "photos/37.png", "photos/39.png", rows[3][0]]
    assert rows[1][1] == "red"
    assert {rows[2][1], rows[3][0]} == {"red", "blue"}
    assert float(rows[0][2]) < 50 <= float(rows[1][2])


def test_predict_lists_labels_in_json_and_csv_and_sorts_by_each(falconet, trained):
    names, checkpoint = "photos/36.png photos/39.png", "--checkpoint-input-path run --device cpu"
    answer = falconet(f"predict {names} {checkpoint} --json --top 2 --save-dir sorted")
    neither, both = json.loads(answer.out)
    assert neither["labels"] == []
    assert sorted(both["labels"]) == ["blue", "red"]
    assert len(neither["top"]) == 2
    assert sorted(path.as_posix() for path in Path("sorted").glob("*/*")) == ["sorted/blue/39.png", "sorted/red/39.png"]
    rows = list(csv.DictReader(falconet(f"predict {names} {checkpoint} --csv").out.splitlines()))
    assert [sorted(filter(None, row["labels"].split("|"))) for row in rows] == [[], ["blue", "red"]]


def test_the_python_api_gives_labels_and_measures_map(falconet, trained, photos):
    run = api.Run("run")
    model = api.load(run, device="cpu")
    prediction = model.predict(photos / "39.png")
    assert sorted(prediction.labels) == ["blue", "red"]
    assert prediction.probabilities.sum() > 1
    found = api.evaluate(model)
    assert found.metric.name == "mAP"
    assert found.score == pytest.approx(run.best.accuracy)
    assert api.evaluate(model, photos).score == pytest.approx(found.score)


def test_export_states_the_sigmoid(falconet, trained):
    answer = falconet("export run --format pt2 --device cpu")
    assert answer.code == 0, answer.err
    assert "before the sigmoid" in answer.out
    assert json.loads(Path("run/export/pt2/export.json").read_text())["probabilities"] == "sigmoid"


def test_search_ranks_trials_by_map(falconet, photos):
    answer = falconet(f"search photos {SMALL} --epoch 1 --weight-decay 0.01,0.05 --budget 1 --study s")
    assert answer.code == 0, answer.err
    with Path("s/trials.csv").open() as file:
        (row,) = csv.DictReader(file)
    scores = [line["validation/mAP"] for line in metrics("s/trial-0") if "validation/mAP" in line]
    assert float(row["mAP"]) == pytest.approx(max(scores), abs=0.01)
