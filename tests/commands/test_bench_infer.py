"""`falconet bench infer`: the lines, the file, a checkpoint's model, several processes."""

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from falconet import inputs
from falconet.bench import model_speed
from falconet.bench.timing import Series, Trial
from falconet.commands import bench_infer
from falconet.commands.bench_infer import folding
from falconet.config.commands import InferOptions
from falconet.config.load import read_line
from falconet.data.buffers import Batch
from falconet.parallel.environment import OURS, Place
from falconet.parallel.world import ALONE, open_machine
from falconet.report.styles import FALCONET
from layouts import encoded, photo
from tiny import TINY

SMALL = "bench infer --data generated --micro-batch-size 4 --iterations 12 --image-size 16 --threads 1 --device cpu"


def test_output_has_one_throughput_and_no_lines_of_the_originals(falconet):
    answer = falconet(SMALL)
    assert answer.code == 0, answer.err
    heading, rate, latency, dropped, memory = answer.out.splitlines()
    assert heading == "resnet8-cifar, batches of 4, data generated, torch.float32"
    assert re.fullmatch(r"on the device: \S+ images/s \(95 % \S+ to \S+\)", rate)
    assert re.fullmatch(r"on the device: latency of a batch in ms: p50 \S+  p90 \S+  p99 .*", latency)
    assert "batches dropped as warm-up" in dropped
    assert memory.startswith("peak memory")


def test_one_batch_has_no_interval(falconet):
    answer = falconet(
        "bench infer --model resnet8-cifar --data generated --micro-batch-size 2 --iterations 1 --threads 1"
    )
    assert answer.code == 0, answer.err
    assert re.search(r"on the device: \S+ images/s\n", answer.out)
    assert "nan" not in answer.out


def test_the_lines_that_tools_of_the_originals_read(falconet):
    answer = falconet(SMALL, "pytorch")
    assert answer.code == 0, answer.err
    (rate,) = re.findall(r"throughput: *(.*?) samples\/sec", answer.out)
    (latency,) = re.findall(r"latency avg: *(.*?) ms", answer.out)
    assert float(rate) > 0
    assert float(latency) > 0
    assert re.search(r"throughput: \S+ samples/sec \(mean\) \(min: \S+, max: \S+, std: \S+\)", answer.out)
    assert re.search(r"latency avg: \S+ ms \(mean\) \(min: \S+, max: \S+\)", answer.out)
    for words in ("resnet8-cifar results:", "micro_batch_size: 4", "data_mode: generated", "num_ipus: 1"):
        assert words in answer.out
    assert "p50" in answer.out
    assert "batches dropped as warm-up" in answer.out


def test_output_file_has_every_batch(falconet):
    assert falconet(f"{SMALL} --output deep/latencies.json").code == 0
    content = json.loads(Path("deep/latencies.json").read_text())
    assert len(content["latency_seconds"]) == len(content["throughput_seconds"]) == 12
    assert content["images_per_batch"] == 4


def test_several_batches_per_call_of_the_host(falconet):
    answer = falconet(f"{SMALL} --device-iterations 5 --output o.json")
    assert answer.code == 0, answer.err
    assert re.search(r"^on the device: latency of 5 batches in ms: p50 ", answer.out, re.M)
    assert "calls of 5 batches dropped as warm-up" in answer.out
    content = json.loads(Path("o.json").read_text())
    assert (len(content["latency_seconds"]), content["images_per_batch"]) == (3, 20)  # 12 batches, rounded up


def test_joined_batches_keep_their_order_and_memory():
    batches = [
        Batch(
            torch.full((2, 3, 4, 4), number, dtype=torch.uint8).contiguous(memory_format=torch.channels_last),
            torch.full((2,), number),
            None,
        )
        for number in range(3)
    ]
    first, second = model_speed.joined(batches, 2)
    assert first.labels.tolist() == [0, 0, 1, 1]
    assert second.labels.tolist() == [2, 2, 0, 0]
    for one, expected in zip(second.images.unbind(), (2, 0), strict=True):
        assert one.is_contiguous(memory_format=torch.channels_last)
        assert one.unique().tolist() == [expected]


def test_device_iterations_that_are_none_are_one_line(falconet):
    answer = falconet(f"{SMALL} --device-iterations 0")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "--device-iterations: got '0', expected a whole number, at least 1" in answer.err


def test_the_pytorch_style_has_a_line_for_every_batch(falconet):
    answer = falconet(SMALL, "pytorch")
    found = re.findall(r"Throughput: \S+ imgs/sec; Latency range: \S+\.\.\S+ ms", answer.out)
    assert len(found) == 12


def test_checkpoint_supplies_model_and_data(falconet):
    assert falconet(f"train {TINY} --model resnet14-cifar --run-dir r").code == 0
    answer = falconet("bench infer --checkpoint-input-path r --iterations 8 --threads 1 --output speed.json")
    assert answer.code == 0, answer.err
    assert "resnet14-cifar, batches of 8, data generated" in answer.out
    assert json.loads(Path("speed.json").read_text())


@pytest.mark.parametrize("data", ["digits", "synthetic"])
def test_other_data(falconet, data):
    answer = falconet(f"bench infer --data {data} --micro-batch-size 4 --iterations 7 --threads 1", "pytorch")
    assert answer.code == 0, answer.err
    assert ("NOTE: synthetic data" in answer.out) == (data == "synthetic")


@pytest.mark.usefixtures("image_folder")
def test_model_sees_the_same_images_however_they_are_copied(falconet, monkeypatch):
    seen = []

    def resident(predict, batches, *, count, world):
        images = batches[0].images
        seen.append((images.dtype, images.clone(), predict(images)))
        return Series(latency=[0.001] * count, throughput=[0.001] * count)

    monkeypatch.setattr(model_speed, "measure_resident", resident)
    line = "bench infer --data folder --data-dir photos --image-size 32 --micro-batch-size 4 --iterations 6"
    for options in ("", "--no-eight-bit-io", "--no-eight-bit-io --normalization-location host"):
        answer = falconet(f"{line} {options} --threads 1 --device cpu")
        assert answer.code == 0, answer.err
    pixels, values, normalised = seen
    assert [kind for kind, _, _ in seen] == [torch.uint8, torch.float32, torch.float32]
    assert torch.equal(values[1], pixels[1].float())
    assert normalised[1].min() < 0
    assert torch.equal(values[2], pixels[2])
    assert torch.equal(normalised[2], pixels[2])


def test_half_precision_reports_its_compute_format(falconet):
    assert "data generated, torch.bfloat16" in falconet(f"{SMALL} --precision bf16.bf16").out


@pytest.mark.dist
@pytest.mark.usefixtures("forked_workers")
def test_parallel_processes_are_counted_together(falconet):
    answer = falconet(f"{SMALL} --replicas 2 --output o.json")
    assert answer.code == 0, answer.err
    assert answer.out.count("resnet8-cifar, batches of 4 in each of 2 processes") == 1
    assert json.loads(Path("o.json").read_text())["images_per_batch"] == 8


def test_fewer_devices_than_replicas_are_noted(falconet, monkeypatch):
    monkeypatch.setattr(bench_infer, "devices_here", lambda machine: 1)
    answer = falconet(f"{SMALL} --replicas 4")
    assert answer.code == 0
    assert "note: 4 replicas requested, 1 device is available: 1 runs, with a batch each" in answer.out


def test_launched_processes_are_not_called_devices():
    started = Place(rank=0, size=4, local_rank=0, local_size=4, launcher="torchrun")
    assert folding(16, place=started, here=2) == (
        "16 replicas requested, 4 processes of torchrun: 4 run, with a batch each"
    )
    assert folding(16, place=replace(started, launcher=OURS), here=2) == (
        "16 replicas requested, 4 processes: 4 run, with a batch each"
    )


MISTAKES = {
    "bench infer --model resnet5": "--model: 'resnet5' is not a model; did you mean 'resnet50'?",
    "bench infer --checkpoint-input-path none": "none: no such file or folder",
    "bench infer --data folder": "--data folder: needs --data-dir",
    f"{SMALL} --output /proc/x/y": "--output: cannot write /proc/x/y",
}


@pytest.mark.parametrize(("line", "message"), MISTAKES.items())
def test_mistake_is_one_line(falconet, line, message):
    answer = falconet(line)
    assert answer.code == 2
    assert answer.err.startswith(f"falconet bench infer: {message}")
    assert answer.err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bench infre", "'bench infre' is not a command; did you mean 'bench infer'?"),
        ("bnch", "'bnch' is not a command"),
    ],
)
def test_typo_in_a_command_of_two_words_is_answered(falconet, line, message):
    answer = falconet(line)
    assert answer.code == 2
    assert message in answer.err
    assert falconet("bench infer --help").out.count("--micro-batch-size") >= 1


def test_too_many_batches_are_cut_and_noted(falconet, monkeypatch):
    monkeypatch.setattr(model_speed, "MOST", 6)
    answer = falconet(SMALL, "tensorflow")
    assert "note: 6 of 12 batches are measured" in answer.out
    assert re.search(r"^Validation top-1 accuracy \[resnet8-cifar\] .* img/sec: ", answer.out, re.M)


REPEATED = (
    "bench infer --data synthetic --model resnet8-cifar --micro-batch-size 4 --image-size 16 --threads 1 --device cpu"
)


def test_every_repetition_has_a_line(falconet):
    answer = falconet(f"{REPEATED} --iterations 3 --repeat 4 --output found.json")
    assert answer.code == 0, answer.err
    found = re.findall(r"^repetition (\d) of 4: \S+ images/s, latency of a batch \S+ ms$", answer.out, re.M)
    assert found == ["1", "2", "3", "4"]
    assert len(json.loads(Path("found.json").read_text())["throughput_seconds"]) == 12


def test_the_tensorflow_program_has_a_validation_line_with_a_number_for_every_repetition(falconet):
    answer = falconet(f"{REPEATED} --iterations 3 --repeat 10", "tensorflow")
    assert answer.code == 0, answer.err
    line = r"^Validation top-1 accuracy \[resnet8-cifar\] .* img/sec: +([\d.]+), .*: +([\d.]+)%$"
    found = re.findall(line, answer.out, re.M)
    assert len(found) == 10
    assert all(float(rate) > 0 and float(accuracy) in (0.0, 25.0, 50.0, 75.0, 100.0) for rate, accuracy in found)
    assert answer.out.count("Latencies - avg:") == 10


def test_a_repetition_ends_after_about_the_seconds_asked_for(falconet, monkeypatch):
    monkeypatch.setattr(model_speed, "try_out", lambda *_, **__: Trial(seconds=0.25, accuracy=0.0))
    answer = falconet(f"{REPEATED} --iterations 1000 --repeat 2 --seconds 1 --output found.json")
    assert answer.code == 0, answer.err
    assert answer.out.startswith("note: 4 of 1,000 batches are measured per repetition, in about 1 s (--seconds)\n")
    assert len(json.loads(Path("found.json").read_text())["throughput_seconds"]) == 8


def test_the_plan_of_repetitions(falconet):
    answer = falconet(f"{REPEATED} --iterations 9 --repeat 2 --seconds 1.5 --plan")
    assert "2 x 9 batches of 4, at most about 1.5 s each, --data synthetic" in answer.out


def test_profile_traces_instead_of_measuring(falconet):
    answer = falconet(f"{SMALL} --profile")
    assert answer.code == 0, answer.err
    assert "traced 2 batches into profile: profile.json.gz, profile.txt, profile_summary.json;" in answer.out
    assert "\na batch takes " in answer.out
    assert "throughput" not in answer.out
    events = json.loads(gzip.decompress(Path("profile/profile.json.gz").read_bytes()))["traceEvents"]
    assert any("conv" in event.get("name", "") for event in events)
    assert "conv" in Path("profile/profile.txt").read_text()
    summary = json.loads(Path("profile/profile_summary.json").read_text())
    assert summary["what"] == "batch"
    assert "convolution, forward" in [each["kind"] for each in summary["kinds"]]


def test_plan_reports_what_would_be_measured(falconet):
    answer = falconet(f"{SMALL} --plan --half-partial --available-memory-proportion 0.1")
    assert answer.code == 0, answer.err
    assert answer.out.splitlines() == [
        "half partials: no effect on cpu, which sums in fp32",
        "workspace limit: no effect on cpu",
        "would measure resnet8-cifar in 32.32 on cpu: 12 batches of 4, --data generated",
    ]


def test_stages_on_one_device_are_noted_and_checked(falconet):
    answer = falconet(f"{SMALL} --pipeline-splits layer2/0 layer3/0")
    assert answer.code == 0, answer.err
    assert "note: 3 stages requested, a CPU is one device: the whole model predicts on one\n" in answer.out
    answer = falconet(f"{SMALL} --pipeline-splits layer9/0")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "--pipeline-splits: 'layer9/0' is not a layer; the nearest are " in answer.err
    answer = falconet(f"{SMALL} --pipeline-splits auto:1")
    assert "--pipeline-splits: got 'auto:1', expected layers, such as layer2/0 layer3/0, or auto:N" in answer.err


def test_each_process_has_neighbouring_devices_for_its_stages():
    second = Place(rank=5, size=8, local_rank=1, local_size=4, launcher="torchrun")
    assert bench_infer.stage_devices(2, second, ALONE) == [torch.device("cuda:2"), torch.device("cuda:3")]
    assert bench_infer.stage_devices(2, None, ALONE) == [torch.device("cuda:0"), torch.device("cuda:1")]
    assert bench_infer.stage_devices(1, second, ALONE) == [ALONE.device]


@pytest.mark.parametrize("splits", ["layer2/0/conv2 layer3/0", "auto:3"])
@pytest.mark.parametrize("of", ["random weights", "a checkpoint"])
def test_stages_on_several_devices_predict_what_the_model_does(falconet, capfd, splits, of):
    """The devices are all this CPU, whose stages are the same modules."""
    words = SMALL.split()[2:]
    if of == "a checkpoint":
        assert falconet(f"train {TINY} --run-dir r").code == 0
        words = ["--checkpoint-input-path", "r", "--iterations", "12", "--micro-batch-size", "4", "--device", "cpu"]
    seen, images = [], torch.linspace(0, 1, 4 * 3 * 16 * 16).view(4, 3, 16, 16)
    for devices, more in ((1, []), (3, ["--pipeline-splits", *splits.split()])):
        loaded = inputs.load(InferOptions, read_line(InferOptions, [*words, *more]))
        with open_machine(loaded.options.machine) as world:
            subject = bench_infer.opened(loaded.options, loaded.line, world, devices=[world.device] * devices)
            seen.append((type(subject.model).__name__, subject.model(images)))
            model_speed.measure(subject, world, FALCONET)
            assert re.search("^on the device: .* images/s", capfd.readouterr().out, re.M)
    (whole, expected), (staged, found) = seen
    assert (whole != staged, staged) == (True, "OverDevices")
    assert torch.equal(found, expected)


def test_photos_of_which_none_validates_are_reported(falconet, tmp_path):
    photos = tmp_path / "photos"
    for name in ("cat", "dog"):
        (photos / name).mkdir(parents=True)
        (photos / name / "1.jpg").write_bytes(encoded(photo(1, width=40, height=40)))
    line = "bench infer --model resnet8-cifar --image-size 32 --micro-batch-size 1 --threads 1 --device cpu"
    answer = falconet(f"{line} --data folder --data-dir {photos}")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "no photo is left for validation; expected more photos, or --val-fraction 1" in answer.err
