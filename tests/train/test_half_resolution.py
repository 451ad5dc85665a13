"""Half-resolution training: two phases of one run, restorable in either and between them."""

import json
from pathlib import Path

import pytest
import torch

from falconet.checkpoint import format
from falconet.checkpoint.manifest import Position
from falconet.errors import CheckpointError
from falconet.parallel import world
from half_resolution import EARLY, HALF, NAME, logged, metrics, tensors
from runs import stop_at
from tiny import TINY

RUNS = {
    "momentum, mixing, moving average": "--mixup-alpha 0.3 --ema-half-life 1 --augment shift-flip",
    "16.16, stochastic rounding, automatic scale": "--precision 16.16 --enable-stochastic-rounding --auto-loss-scaling",
    "16.32, stepped scale, recompute, adamw": (
        "--precision 16.32 --loss-scaling 128 --initial-loss-scaling 64 --enable-recompute --optimizer adamw --lr 0.001"
    ),
}


def assert_equal_runs(straight, other):
    left, right = (tensors(f"{run}/checkpoints/{NAME}_4") for run in (straight, other))
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
    assert logged(straight) == logged(other)


def stopped_at(monkeypatch, falconet, line, update):
    with monkeypatch.context() as patched:
        stop_at(patched, update)
        assert falconet(line).code == 130


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("extra", RUNS.values(), ids=RUNS.keys())
def test_a_run_stopped_in_each_phase_continues_bit_for_bit(falconet, monkeypatch, extra, device):
    line = f"train {HALF} {extra} --logs-per-epoch 2 --device {device}"
    assert falconet(f"{line} --run-dir straight").code == 0
    stopped_at(monkeypatch, falconet, f"{line} --run-dir other", 3)
    stopped_at(monkeypatch, falconet, "restore --checkpoint-input-path other", 11)
    manifest = format.read_manifest(format.newest_whole(Path("other"), note=print))
    assert manifest.progress == Position(epoch=2, images=24, update=11, phase=2, epoch_images=32)
    again = falconet("restore --checkpoint-input-path other")
    assert again.code == 0, again.err
    assert f"restored other/checkpoints/{NAME}_2+00003, update 11 of 16" in again.out
    assert "averaged 2 checkpoints" not in again.out
    assert_equal_runs("straight", "other")


def test_a_run_that_died_between_phases_averages_and_continues(falconet, monkeypatch):
    from falconet.checkpoint import weight_average

    line = f"train {HALF}"
    assert falconet(f"{line} --run-dir straight").code == 0

    def dies(*_, **__):
        raise CheckpointError("died")

    with monkeypatch.context() as patched:
        patched.setattr(weight_average, "write", dies)
        assert falconet(f"{line} --run-dir other").code == 2
    assert sorted(path.name for path in Path("other/checkpoints").iterdir()) == [f"{NAME}_1", f"{NAME}_2"]
    again = falconet("restore --checkpoint-input-path other")
    assert again.code == 0, again.err
    assert f"averaged 2 checkpoints (mean) into other/checkpoints/{NAME}_2_averaged" in again.out
    assert_equal_runs("straight", "other")


@pytest.fixture
def done(falconet):
    """A complete run."""
    answer = falconet(f"train {HALF} --momentum 0.9 --run-dir r")
    assert answer.code == 0, answer.err
    return answer


def test_the_second_phase_starts_with_the_average_and_trains_only_later_layers(done):
    first, second, averaged, last = (tensors(f"r/checkpoints/{NAME}_{end}") for end in ("1", "2", "2_averaged", "4"))
    weights = [name for name in averaged if name.startswith("model:") and averaged[name].is_floating_point()]
    for name in weights:
        mean = (first[name].double() + second[name].double()) / 2
        assert torch.equal(averaged[name], mean.float()), name
    frozen = {name for name in averaged if name.removeprefix("model:").startswith(EARLY)}
    assert {
        name for name in averaged if name.startswith("model:") and torch.equal(averaged[name], last[name])
    } == frozen
    assert any(name.endswith("running_var") for name in frozen)
    assert not [name for name in last if name.startswith("optimizer:") and last[name].numel() > 1]  # no momentum


def test_epochs_updates_and_rates_are_counted_across_phases(done):
    lines = [line for line in metrics("r") if "train/lr" in line]
    assert [(line["update"], line["epoch"]) for line in lines] == [(4, 1.0), (8, 2.0), (12, 3.0), (16, 4.0)]
    # cos(3 pi / 8) and cos(7 pi / 8), of the last update of each epoch: by hand.
    rates = [0.2 * (1 + cosine) / 2 for cosine in (0.3826834, -0.9238795)]
    assert [line["train/lr"] for line in lines[2:]] == pytest.approx(rates, rel=1e-5)
    assert [path.name for path in format.checkpoints_in(Path("r")) if "averaged" not in path.name][-2:] == [
        f"{NAME}_3",
        f"{NAME}_4",
    ]
    assert " 4/4 " in done.out
    stored = format.read_manifest(Path(f"r/checkpoints/{NAME}_2"))
    assert stored.preprocessing["image_size"] == 16  # what validation and prediction use
    summary = json.loads(Path("r/summary.json").read_text())
    assert (summary["updates"], summary["epochs"], summary["phase"]) == (16, 4, 2)


PLANNED = (
    "phase 1 of 2: epochs 1 to 2 at 12 x 12",
    "16 x 16 and 12 x 12 in training",
    "global batch 8 = micro-batch 8 x accumulation 1 x replicas 1",
    "phase 2 of 2: epochs 3 to 4 at 16 x 16, starting with the average of phase 1's checkpoints",
    "trains 56,202 parameters, from layer3/0; the layers before it are frozen",
    "global batch 8 = micro-batch 4 x accumulation 2 x replicas 1",
    "8 updates = 2 epochs x 4 updates; 32 images",
    "learning rate cosine from 0.2 to 0 over 2 epochs",
    "optimizer sgd, no momentum; augment none, no mixing",
)


def test_both_phases_are_planned(falconet):
    answer = falconet(f"train {HALF} --plan")
    assert answer.code == 0, answer.err
    first, middle, second = answer.out.partition(PLANNED[3])
    assert middle
    assert [line for line in PLANNED[:3] if line not in first] == []
    assert [line for line in PLANNED[4:] if line not in second] == []


def test_the_layers_of_fine_tuning_are_planned_beside_those_of_the_first_phase(falconet):
    answer = falconet(f"train {HALF} --trainable fc --plan")
    assert answer.code == 0, answer.err
    first, _, second = answer.out.partition(PLANNED[3])
    assert "parameters: those that match fc\n" in first
    assert f"{PLANNED[4]}, whatever --trainable names\n" in second


def test_each_phase_trains_at_its_image_size_and_validates_at_full_size(falconet, monkeypatch, image_folder):
    from falconet.evaluation import evaluate
    from falconet.train.step import LocalStep

    trained, validated = [], []
    backward, count = LocalStep._backward, evaluate.evaluate

    def seen(step, batch, images):
        trained.append((len(batch.labels), batch.images.shape[-1], batch.mix is not None))
        return backward(step, batch, images)

    monkeypatch.setattr(LocalStep, "_backward", seen)
    monkeypatch.setattr(
        "falconet.evaluation.evaluate.evaluate",
        lambda model, batches, **more: count(
            model, (validated.append(batch.images.shape[-1]) or batch for batch in batches), **more
        ),
    )
    line = HALF.replace("--data generated --image-size 16 --iterations 4", f"--data folder --data-dir {image_folder}")
    answer = falconet(f"train {line} --image-size 28 --mixup-alpha 0.2 --epoch 1 --fine-tune-epoch 1")
    assert answer.code == 0, answer.err
    # 24 photos: 3 updates of 8 at 20 x 20, then 3 updates of 2 x 4 at 28 x 28.
    assert trained == [(8, 20, True)] * 3 + [(4, 28, False)] * 6
    assert set(validated) == {28}
    assert "augment crop-flip" in answer.out


def test_replicas_are_folded_into_accumulation_in_both_phases(falconet, monkeypatch):

    monkeypatch.setattr(world, "cores", lambda processes=1: 1)  # 2 processes
    answer = falconet(f"train {HALF} --replicas 4 --gradient-accumulation 3 --plan")
    assert "global batch 96 = micro-batch 8 x accumulation 6 x replicas 2" in answer.out
    assert "global batch 32 = micro-batch 4 x accumulation 4 x replicas 2" in answer.out


def test_an_interruption_changes_neither_averages_nor_kept_checkpoints(falconet, monkeypatch):
    # Four of the last epochs are averaged and as many kept; the run is interrupted among them.
    line = f"train {TINY} --epoch 6 --weight-avg-strategy mean --weight-avg-N 4 --validation-mode none"
    assert falconet(f"{line} --run-dir straight").code == 0
    stopped_at(monkeypatch, falconet, f"{line} --run-dir other", 19)
    assert falconet("restore --checkpoint-input-path other").code == 0
    kept = [sorted(path.name for path in Path(f"{run}/checkpoints").iterdir()) for run in ("straight", "other")]
    assert kept[0] == kept[1]
    left, right = (tensors(f"{run}/checkpoints/{NAME}_6_averaged") for run in ("straight", "other"))
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_damaged_checkpoint_is_left_out_of_the_average_after_training(falconet):
    line = f"train {TINY} --epoch 3 --checkpoints-kept all --validation-mode none --run-dir r"
    assert falconet(line).code == 0
    manifest = Path(f"r/checkpoints/{NAME}_1/manifest.json")
    manifest.write_text(manifest.read_text()[:40])
    answer = falconet("restore r --epoch 4 --weight-avg-strategy mean")
    assert answer.code == 0, answer.err
    assert f"passed over {manifest}" in answer.out
    assert "averaged 3 checkpoints (mean)" in answer.out


@pytest.fixture
def torn(monkeypatch):
    """Names of checkpoints that lose their last bytes before the average after training; a list to fill."""
    from falconet.train import conclusion

    names, make = [], conclusion.average_after_training

    def tear_and_make(saving, *args, **more):
        for name in names:
            path = saving.folder / name / "model.safetensors"
            path.write_bytes(path.read_bytes()[:-3])
        return make(saving, *args, **more)

    monkeypatch.setattr(conclusion, "average_after_training", tear_and_make)
    return names


def test_a_run_whose_checkpoints_are_all_damaged_ends_with_one_line(falconet, torn):
    torn += [f"{NAME}_1", f"{NAME}_2"]
    answer = falconet(f"train {TINY} --weight-avg-strategy mean --validation-mode none --run-dir r")
    assert answer.code == 2
    assert answer.err == "falconet train: r/checkpoints: contains no undamaged checkpoint to average\n"


def test_each_checkpoint_that_an_average_takes_is_looked_at_once(falconet, torn):
    torn += [f"{NAME}_1", f"{NAME}_3"]
    averages = "--weight-avg-strategy mean --weight-avg-N 2 --weight-avg-also epochs:2"
    answer = falconet(f"train {TINY} --epoch 4 {averages} --validation-mode none --run-dir r")
    assert answer.code == 0, answer.err
    passed = [line for line in answer.out.splitlines() if line.startswith("passed over")]
    assert [line.partition(": ")[0] for line in passed] == [f"passed over r/checkpoints/{NAME}_3/model.safetensors"]
    made = [format.read_manifest(path).content["averaged"]["of"] for path in Path("r/checkpoints").glob("*averaged*")]
    assert made == [[f"{NAME}_2", f"{NAME}_4"]] * 2


def test_stages_share_a_process_with_a_note(falconet):
    answer = falconet(f"train {HALF} --pipeline-splits layer2/0 --replicas 2 --plan")
    assert answer.code == 0, answer.err
    assert "global batch 16 = micro-batch 4 x accumulation 2 x replicas 2" in answer.out
    assert "note: the 2 stages of a replica run in one process, because --half-res-training" in answer.out
    assert "pipeline of 2 stages" not in answer.out


def test_average_uses_checkpoints_of_one_phase(done, falconet):
    answer = falconet("average --checkpoint-input-path r --checkpoint-output-path other_averaged")
    assert f"averaged 2 checkpoints (mean): {NAME}_3, {NAME}_4" in answer.out


def test_updates_of_a_fine_tuning_with_another_global_batch_are_counted_on(done, falconet):
    answer = falconet("restore r --fine-tune-epoch 3 --fine-tune-gradient-accumulation 1")
    assert answer.code == 0, answer.err
    lines = [line for line in metrics("r") if "train/lr" in line]
    assert [(line["update"], line["epoch"]) for line in lines] == [(4, 1), (8, 2), (12, 3), (16, 4), (24, 5)]


def test_a_complete_run_has_nothing_left_and_can_be_fine_tuned_longer(done, falconet):
    said = falconet("restore --checkpoint-input-path r").out
    assert "nothing left to train: all 4 epochs are done; a larger --fine-tune-epoch continues the run" in said
    answer = falconet("restore --checkpoint-input-path r --fine-tune-epoch 3")
    assert answer.code == 0, answer.err
    assert " 5/5 " in answer.out


RESTORED = {
    "--fine-tune-first-trainable-layer layer3/9": "'layer3/9' is not a layer; the nearest are 'layer3/0'",
    "--epoch 3": "--epoch: got 3, expected 2: r/checkpoints/resnet8-cifar_generated_4 is from the fine-tuning",
    "--no-half-res-training": "--no-half-res-training: r/checkpoints/resnet8-cifar_generated_4 is from the fine-tuning",
}


def test_restoring_fine_tuning_with_incompatible_options_is_refused(done, falconet):
    for extra, message in RESTORED.items():
        answer = falconet(f"restore --checkpoint-input-path r {extra}")
        assert answer.code == 2, extra
        assert message in answer.err
        assert answer.err.count("\n") == 1


REFUSED = {
    "--fine-tune-first-trainable-layer layer33": "'layer33' is not a layer; the nearest are 'layer3'",
    "--pipeline-splits layer2/0 --strict-devices": "--half-res-training: not with 2 stages in separate processes",
    "--fine-tune-micro-batch-size 64": "a global batch of 128 is more than the 32 training images",
}


@pytest.mark.parametrize(("extra", "message"), REFUSED.items())
def test_a_mistake_in_the_second_phase_is_refused_before_the_first(falconet, extra, message):
    answer = falconet(f"train {HALF} {extra}")
    assert answer.code == 2
    assert message in answer.err
    assert answer.err.count("\n") == 1


def test_a_fine_tuning_option_alone_has_no_effect_and_a_note(falconet):
    answer = falconet(f"train {TINY} --fine-tune-lr 0.1 --plan")
    assert "note: --fine-tune-lr has no effect without --half-res-training" in answer.out


def test_several_averages_in_an_original_style_are_kept_and_the_first_is_fine_tuned(falconet):
    """An exponential average of a part had the name of the one of all, which took its place."""
    averages = "--weight-avg-strategy exponential --weight-avg-exp-decay 0.5 --weight-avg-N 1"
    line = f"train {HALF} --fine-tune-epoch 1 {averages} --weight-avg-also exponential:0.5 mean:2 --run-dir r"
    answer = falconet(line, "tensorflow")
    assert answer.code == 0, answer.err
    assert "phase 2 of 2 starts with r/checkpoints/weight_avg_exp_0.5_N_1" in answer.out
    made = {
        path.name: format.read_manifest(path).content["averaged"]["of"] for path in Path("r/checkpoints").glob("w*")
    }
    assert made == {
        "weight_avg_exp_0.5_N_1": ["ckpt-8"],
        "weight_avg_exp_0.5": ["ckpt-4", "ckpt-8"],
        "weight_avg_N_2": ["ckpt-4", "ckpt-8"],
    }


def test_the_summary_counts_both_phases(falconet):
    assert falconet(f"train {HALF} --run-dir run").code == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["seconds"]["training"] == pytest.approx(summary["training_seconds"], abs=0.06)
    assert summary["whole_seconds"] >= summary["training_seconds"]
    images = summary["images_per_second"] * summary["seconds"]["training"]
    assert images == pytest.approx(summary["updates"] * 8, rel=0.01)
