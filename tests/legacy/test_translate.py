"""Defaults and formulas of each original, against numbers worked out by hand."""

import shlex

import pytest

from falconet.config.commands import COMMANDS
from falconet.config.fields import options_of
from falconet.config.settings import spelled
from falconet.errors import ConfigError
from falconet.legacy.translate import translate
from translations import lacking, translated, wrong

IMAGENET = "--dataset imagenet --data-dir d"
CIFAR = "--dataset cifar-10 --data-dir d"


def meaning(program, line, replicas=None):
    """Canonical options by name, ours where a line has none; a switch that is on is ''."""
    return values(translated(program, line, replicas))


def values(translation):
    known = options_of(COMMANDS[translation.command]) if translation.command in COMMANDS else {}
    plain = {name: " ".join(spelled(each.default)) for name, each in known.items() if not each.is_flag}
    on = {name: "" for name, each in known.items() if each.is_flag and each.default}
    typed = {setting.option: " ".join(setting.values) for setting in translation.settings}
    return {**plain, **on, **typed}


TENSORFLOW = [
    # Defaults of the program, by model and data: inventory 1.9.
    (IMAGENET, {"model": "resnet18", "micro-batch-size": "4", "lr": "0.015625", "norm-type": "group"}),
    (IMAGENET, {"norm-grouping": "strided", "norm-eps": "1.53e-05", "enable-stochastic-rounding": ""}),
    (IMAGENET, {"weight-decay": "0.0001", "weight-decay-exclude": "norms", "loss-scaling": "128", "momentum": "0"}),
    (IMAGENET, {"lr-decay": "0.1", "lr-epoch-decay": "30 60 80 90", "warmup-epoch": "5", "logs-per-epoch": "16"}),
    (CIFAR, {"model": "resnet20-cifar", "micro-batch-size": "32", "lr": "0.5", "epoch": "160"}),
    (CIFAR, {"batchnorm-momentum": "0.03", "weight-decay": "1e-06", "weight-decay-exclude": "nothing"}),
    (CIFAR, {"lr-epoch-decay": "80 120"}),
    (f"{CIFAR} --group-norm", {"norm-num-groups": "16"}),
    (f"{IMAGENET} --model resnext", {"model": "resnext14", "micro-batch-size": "1"}),
    (f"{IMAGENET} --model efficientnet", {"model": "efficientnet-b0", "norm-num-groups": "4", "norm-eps": "1e-3"}),
    (f"{IMAGENET} --model efficientnet", {"epoch": "350", "weight-decay": "1e-05", "lr": "0.03125"}),  # 2**-7 x 4
    (
        f"{IMAGENET} --model squeezenet",
        {"model": "squeezenet", "micro-batch-size": "2", "lr": "0.0078125"},
    ),  # 2**-8 x 2
    (f"{IMAGENET} --model squeezenet", {"epoch": "100", "weight-decay": "0.0001", "lr-epoch-decay": "30 60 80 90"}),
    (f"{IMAGENET} --model squeezenet --optimiser momentum", {"lr": "0.0009765625", "norm-type": "batch"}),  # 2**-11 x 2
    (f"{CIFAR} --model squeezenet", {"model": "squeezenet", "image-size": "32", "lr": "0.125"}),  # 2**-10 x 128
    (f"{CIFAR} --model squeezenet", {"micro-batch-size": "128", "epoch": "160", "weight-decay": "1e-06"}),
    # As the original's own test: 400 epochs of a linear rate with bypass.
    (
        f"{CIFAR} --epochs 400 --model squeezenet --use-bypass --lr-schedule polynomial_decay_lr --label-smoothing 0.05"
        " --abs-learning-rate 0.1 --abs-end-learning-rate 0.0001 --warmup-epochs 0 --precision 16.32",
        {"squeezenet-bypass": "", "lr-schedule": "polynomial", "lr-end-ratio": "0.001", "epoch": "400"},
    ),
    # Sizes.
    (f"{IMAGENET} --model efficientnet --model-size 4", {"model": "efficientnet-b4"}),
    (f"{IMAGENET} --model efficientnet --model-size b7", {"model": "efficientnet-b7"}),
    (f"{CIFAR} --model efficientnet --model-size cifar", {"model": "efficientnet-cifar", "lr": "0.125"}),  # 2**-6 x 8
    (f"{CIFAR} --model efficientnet", {"model": "efficientnet-b0", "image-size": "32"}),
    (f"{CIFAR} --model resnext --widenet", {"model": "resnext11-cifar", "micro-batch-size": "8", "resnext-wide": ""}),
    (f"{CIFAR} --model-size 56", {"model": "resnet56b-cifar"}),  # of two, the one with bottlenecks counted
    (
        f"{CIFAR} --model-size 29 --shards 2 --pipeline --pipeline-splits b2/1/relu",
        {"model": "resnet29-cifar", "pipeline-splits": "layer2/1/relu3"},
    ),
    (f"{IMAGENET} --model resnext --model-size 101 --convolution-groups 16", {"resnext-groups": "16"}),
    # 2**x times the whole batch; an absolute rate counts more.
    (
        f"{IMAGENET} --batch-size 16 --gradient-accumulation-count 9 --replicas 16 --base-learning-rate -9.5",
        {"lr": str(round(2**-9.5 * 2304, 15))},
    ),
    (f"{IMAGENET} --base-learning-rate -11 --abs-learning-rate 4.588", {"lr": "4.588"}),
    (f"{IMAGENET} --optimiser momentum --batch-size 8", {"lr": "0.00390625"}),  # 2**-11 x 8; momentum 0.9 is ours too
    # RMSprop: the decay shrinks with the batch: 1 - 2**-14 x 768.
    (
        f"{IMAGENET} --model efficientnet --optimiser RMSprop --batch-size 3 --gradient-accumulation-count 64 --repl 4",
        {"optimizer": "rmsprop_tf", "rmsprop-decay": "0.953125", "optimizer-eps": "0.001", "lr": "0.046875"},
    ),
    (f"{IMAGENET} --optimiser RMSProp --base-learning-rate -14 --rmsprop-decay 0.9", {"rmsprop-decay": "0.9"}),
    # LARS has a separate decay, and spares vectors (our default).
    (
        f"{IMAGENET} --optimiser LARS --abs-learning-rate 10.72 --lars-weight-decay 5e-05 --weight-decay 1",
        {"optimizer": "lars", "weight-decay": "5e-05", "optimizer-eps": "0.0"},
    ),
    # Label smoothing: 0.1 x 1000 / 999; an EfficientNet defaults to 0.1; 10 classes: 0.1 x 10 / 9.
    (f"{IMAGENET} --label-smoothing 0.1", {"label-smoothing": "0.1001001001001"}),
    (f"{IMAGENET} --model efficientnet", {"label-smoothing": "0.1001001001001"}),
    (f"{CIFAR} --label-smoothing 0.1", {"label-smoothing": "0.111111111111111"}),
    # Schedules.
    (
        f"{IMAGENET} --lr-schedule polynomial_decay_lr --abs-learning-rate 4 --abs-end-learning-rate 0.0001",
        {"lr-schedule": "polynomial", "lr-end-ratio": "2.5e-05"},
    ),
    (
        f"{IMAGENET} --model efficientnet --lr-schedule exponential --epochs 365",
        {"lr-schedule": "exponential", "lr-decay": "0.97", "lr-scheduler-freq": "0.4"},
    ),
    (
        f"{IMAGENET} --learning-rate-schedule 0.5,0.75 --epochs 10 --learning-rate-decay 0.2",
        {"lr-epoch-decay": "5 7.5", "lr-decay": "0.2"},
    ),
    # Averaging: the last 3 epochs are 4 checkpoints, the first one included.
    (f"{IMAGENET} --weight-avg-exp 0.97", {"weight-avg-strategy": "exponential", "weight-avg-exp-decay": "0.97"}),
    (f"{IMAGENET} --weight-avg-N 3", {"weight-avg-strategy": "mean", "weight-avg-epochs": "3"}),
    (f"{IMAGENET} --weight-avg-N 8 --epochs-per-ckpt 4", {"weight-avg-epochs": "8", "checkpoint-save-freq": "4"}),
    # Norms.
    (
        f"{IMAGENET} --batch-norm --BN-decay 0.9 --BN-span 2 --replicas 4",
        {"batchnorm-momentum": "0.1", "batchnorm-span": "2"},
    ),
    (
        f"{IMAGENET} --model efficientnet --no-se --use-relu --dropout-rate 0.3 --block-survival-prob 0.7",
        {
            "no-efficientnet-se": "",
            "efficientnet-activation": "relu",
            "efficientnet-dropout": "0.3",
            "efficientnet-drop-path": "0.3",
        },
    ),
    (
        f"{IMAGENET} --model efficientnet --proxy-norm --proxy-epsilon 0.01 --no-proxy-recompute --groups 1",
        {"proxy-norm": "", "proxy-epsilon": "0.01", "no-proxy-recompute": "", "norm-num-groups": "1"},
    ),
    (f"{IMAGENET} --model efficientnet --proxy-norm", {"proxy-epsilon": "0.03", "proxy-recompute": ""}),
    # Cutmix of version 1: skipped with 1.55 x 0.85 - 0.96, else evenly with the mean of 1 + ln(U) / 4.
    (f"{IMAGENET} --cutmix-lambda 0.85", {"cutmix-disable-prob": "0.3575", "cutmix-lambda-high": "1"}),
    (
        f"{IMAGENET} --cutmix-lambda 0.85 --cutmix-version 2",
        {"cutmix-lambda-low": "0.85", "cutmix-lambda-high": "0.85"},
    ),
    # Machine.
    (f"{IMAGENET} --replicas 2 --max-cross-replica-buffer-size 52428800", {"bucket-size": "50"}),
    (
        f"{IMAGENET} --no-stochastic-rounding --gc-profile --rts --replicas 2",
        {"profile": "", "enable-optimizer-rts": ""},
    ),
    (f"{IMAGENET} --compile-only", {"plan": ""}),
    (f"{IMAGENET} --batches-per-step 8", {"device-iterations": "8"}),
    (IMAGENET, {"device-iterations": "1"}),
    (
        f"{IMAGENET} --shards 4 --pipeline --pipeline-splits b1/2/relu b2/3/relu b3/5/relu --model-size 50",
        {"pipeline-splits": "layer1/2/act3 layer2/3/act3 layer3/5/act3", "pipeline-schedule": "grouped"},
    ),
    (f"{IMAGENET} --shards 2", {"pipeline-splits": "auto:2", "pipeline-schedule": "sequential"}),
    (
        f"{IMAGENET} --pipeline --enable-recomputation --pipeline-splits b2/0/relu --model-size 50",
        {"recompute-mode": "manual", "recompute-checkpoints": "layer2/0/act3"},
    ),
    # Where run folders go, and what one is called.
    (f"{IMAGENET} --logs-path a/b --log-dir c", {"run-dir": "a/b"}),
    (f"{IMAGENET} --name-suffix x", {"name-suffix": "x", "run-dir": "auto"}),
    (f"{IMAGENET} --log-dir c --name-suffix x", {"name-suffix": "x", "run-dir": "auto"}),
    # Data.
    (f"{IMAGENET} --init-path runs/a --dataset-percentage-to-use 10", {"init-path": "runs/a"}),
    # 128 updates of 1,000 are an epoch of a tenth of 1,281,167 images.
    (
        f"{IMAGENET} --dataset-percentage-to-use 10 --batch-size 1000 --epochs 0.25",
        {"dataset-percentage": "10", "epoch": "0.25"},
    ),
    ("--generated-data --dataset imagenet --iterations 10", {"data": "generated", "iterations": "10", "epoch": "1"}),
    ("--generated-data --dataset imagenet --iterations 10", {"warmup-epoch": "0"}),
    ("--synthetic-data --dataset imagenet --batch-size 1000 --epochs 1 --warmup-epochs 0", {"iterations": "1281"}),
    ("--data-dir x/cifar-100-binary", {"data": "cifar100", "data-dir": "x/cifar-100-binary"}),
    ("--data-dir x/cifar-100-binary", {"dataset-cache": None}),  # which lies in memory
    (IMAGENET, {"dataset-cache": "", "dataloader-workers": "auto"}),
    (f"{IMAGENET} --no-dataset-cache --pipeline-num-parallel 3", {"dataset-cache": None, "dataloader-workers": "3"}),
    (
        f"{IMAGENET} --train-with-valid-preprocessing --fused-preprocessing",
        {"augment": "none", "input-image-padding": ""},
    ),
]


def test_lines_of_the_tensorflow_program_mean_what_is_worked_out_by_hand():
    assert lacking(TENSORFLOW, lambda line: meaning("tf1:train.py", line)) == []


@pytest.mark.parametrize("classes", [10, 100, 1000])
def test_label_smoothing_of_tensorflow_gives_the_same_targets(classes):
    """Theirs: 1 - s, and s / (C - 1) elsewhere. Ours: (1 - t) at the class, and t / C everywhere."""
    data = {10: CIFAR, 100: CIFAR.replace("-10", "-100"), 1000: IMAGENET}[classes]
    t = float(meaning("tf1:train.py", f"{data} --label-smoothing 0.2")["label-smoothing"])
    assert (1 - t) + t / classes == pytest.approx(0.8)
    assert t / classes == pytest.approx(0.2 / (classes - 1))


PYTORCH = [
    (
        "",
        {"model": "resnet18", "data": "cifar10", "precision": "16.16", "lr": "0.01", "momentum": "0.0", "epoch": "10"},
    ),
    ("", {"validation-mode": "after", "lr-schedule": "step", "warmup-epoch": "0", "micro-batch-size": "1"}),
    ("--checkpoint-output-dir a", {"checkpoint-output-path": "a"}),
    ("--checkpoint-path a", {"checkpoint-output-path": "a"}),
    ("--batch-size 8", {"micro-batch-size": "8"}),
    ("--eight-bit-io", {"normalization-location": "device"}),
    ("--normalization-location ipu", {"normalization-location": "device"}),
    ("--data generated --iterations 5 --device-iterations 4", {"iterations": "20", "device-iterations": "4"}),
    ("--data generated --device-iterations 1", {"device-iterations": "1"}),
    ("--norm-type group", {"norm-eps": "1e-05"}),
    ("--norm-type group --enable-fast-groupnorm", {"norm-grouping": "strided"}),
    ("--initial-loss-scaling 16 --loss-scaling 128", {"initial-loss-scaling": "16", "loss-scaling": "128"}),
    ("--loss-scaling 128 --auto-loss-scaling", {"auto-loss-scaling": "", "loss-scaling": "1.0"}),
    ("--wandb", {"wandb": "", "wandb-project": "pytorch-cnn"}),
    (
        "--recompute-mode manual --recompute-checkpoints add_1 avgpool",
        {"recompute-checkpoints": "layer1/1/act2 global_pool"},
    ),
    (
        "--recompute-checkpoints .*conv.* --enable-recompute",
        {"recompute-checkpoints": ".*conv.*", "enable-recompute": ""},
    ),
    ("--validation-mode during", {"validation-frequency": "4"}),
    ("--weight-avg-strategy exponential --weight-avg-exp-decay 0.97", {"weight-avg-exp-decay": "0.97"}),
    ("--lr 2 --warmup-epoch 5", {"lr": "2", "warmup-epoch": "5"}),
    # The originals' own benchmarks: 2 epochs, of a warm-up of 5: the rate gets to 2 / 5 of 2.
    ("--lr 2 --warmup-epoch 5 --epoch 2", {"lr": "0.8", "warmup-epoch": "2"}),
]


def test_lines_of_the_pytorch_program_mean_what_is_worked_out_by_hand():
    assert lacking(PYTORCH, lambda line: meaning("pytorch:train.py", line)) == []


POPART = [
    ("", {"model": "resnet20-cifar", "norm-num-groups": "16", "lr": "0.5", "momentum": "0", "weight-decay": "0"}),
    ("", {"lr-decay": "0.1", "lr-epoch-decay": "15 22.5", "warmup-epoch": "0", "enable-stochastic-rounding": ""}),
    # The rate counts the batch of all replicas, and no accumulation.
    (
        "--batch-size 32 --replication-factor 4 --num-ipus 4 --gradient-accumulation-factor 8",
        {"micro-batch-size": "8", "replicas": "4", "gradient-accumulation": "8", "lr": "0.5"},
    ),
    ("--size x50 --dataset IMAGENET", {"model": "resnext50", "bottleneck-stride": "1x1", "data": "imagenet"}),
    ("--dataset CIFAR-100", {"data": "cifar100", "model": "resnet20-cifar", "pixel-deviation": ""}),  # as documented
    ("--size 50 --dataset CIFAR-100", {"data": "cifar100", "stem": "cifar", "image-size": "32"}),
    ("--size 18 --dataset IMAGENET", {"model": "resnet18", "bottleneck-stride": "3x3"}),
    ("--num-ipus 4 --replication-factor 2 --pipeline", {"pipeline-splits": "auto:2", "pipeline-schedule": "grouped"}),
    ("--num-ipus 4", {"pipeline-splits": "auto:4", "pipeline-schedule": "sequential"}),
    ("--precision 32 --no-prng", {"precision": "32.32", "enable-stochastic-rounding": None}),
    ("--learning-rate-decay 0.5,0.25 --learning-rate-schedule 0.5", {"lr": "0.25", "lr-decay": "0.5"}),
    ("--learning-rate-decay 1,0.5,0.1", {"lr": "0.5", "lr-decay": "0.5 0.2", "lr-epoch-decay": "15 22.5"}),
    ("--recompute", {"enable-recompute": ""}),
    # 50,000 / 32 = 1,562 updates
    ("--steps-per-log 2 --batches-per-step 100", {"logs-per-epoch": "7", "device-iterations": "100"}),
    ("--steps-per-log 2", {"logs-per-epoch": "3", "device-iterations": "1"}),
]


def test_lines_of_the_popart_program_mean_what_is_worked_out_by_hand():
    assert lacking(POPART, lambda line: meaning("popart:resnet_main.py", f"--data-dir d {line}")) == []


SMALLER = [
    ("pytorch:weight_avg.py", "--checkpoint-input-path a", "average", {"checkpoint-input-path": "a"}),
    (
        "tf1:weight_avg.py",
        "--restore-path a --filename b --mode exponential --decay 0.9 -N 3 --discard-last 1",
        "average",
        {
            "checkpoint-output-path": "b",
            "weight-avg-strategy": "exponential",
            "weight-avg-exp-decay": "0.9",
            "weight-avg-N": "3",
            "weight-avg-discard": "1",
        },
    ),
    ("tf1:restore.py", "--restore-path a", "restore", {"checkpoint-input-path": "a"}),
    (
        "tf1:validation.py",
        f"{IMAGENET} --restore-path a --batch-size 8",
        "validate",
        {"checkpoint-input-path": "a", "micro-batch-size": "8", "data-dir": "d"},
    ),
    ("tf1:train.py", "--restore-path a --data-dir imagenet", "restore", {"data-dir": "imagenet"}),
    ("tf1:train.py", f"{IMAGENET} --restore-path a --epochs 3", "restore", {"epoch": "3", "updates": "None"}),
    ("tf1:train.py", f"{IMAGENET} --restore-path a --iterations 9", "restore", {"updates": "9"}),
    (
        "tf1:validation.py",
        "--model resnet --model-size 50 --dataset imagenet --batch-size 4 --synthetic-data --repeat 2",
        "bench infer",
        {"model": "resnet50", "micro-batch-size": "4", "iterations": "12500", "repeat": "2", "data": "synthetic"},
    ),
    (
        "pytorch:inference/run_benchmark.py",
        "--data generated --model resnet50 --device-iterations 8",
        "bench infer",
        {"iterations": "800", "model": "resnet50", "precision": "16.16"},
    ),
    (
        "pytorch:inference/run_benchmark_with_triton_server.py",
        "-s -k test_single_model[efficientnet-b4-efficientnet-b4-RequestType.ASYNC-8] --benchmark_only=true"
        " ../tests/tritonserver/",
        "bench serve",
        {"config": "efficientnet-b4", "request-type": "ASYNC", "clients": "8", "iterations": "200"},
    ),
    ("pytorch:datasets/host_benchmark.py", "--data cifar10 --disable-async-loading", "data bench", {"data": "cifar10"}),
    (
        "popart:resnet_synthetic_benchmark.py",
        "--size 50 --batch-size 4 --steps 2 --batches-per-step 3 --mode train",
        "train",
        {"model": "resnet50", "iterations": "6", "device-iterations": "3", "micro-batch-size": "4"},
    ),
    ("tool:examples_utils benchmark", "--spec a b --benchmark c --logdir l", "bench", {"spec": "a b", "log-dir": "l"}),
]


def test_lines_of_the_smaller_programs_mean_what_is_worked_out_by_hand():
    cases = [((program, line), {"COMMAND": command, **expected}) for program, line, command, expected in SMALLER]
    assert lacking(cases, lambda case: {**meaning(*case), "COMMAND": translated(*case).command}) == []


SERVED = "pytorch:inference/run_benchmark_with_triton_server.py"
TESTS = {
    "-k test_single_model[resnet50-resnet50-RequestType.SYNC-1]": ("resnet50", "SYNC", "1"),
    "-k test_single_model[efficientnet-b0-efficientnet-b0-RequestType.ASYNC-4]": ("efficientnet-b0", "ASYNC", "4"),
    "-k 'efficientnet-b4 and ASYNC'": ("efficientnet-b4", "ASYNC", "1"),
    "-k 'resnet50 and (SYNC or ASYNC) and 8'": ("resnet50", "ASYNC", "8"),
    "": ("resnet50", "SYNC", "1"),
}


def test_a_served_test_is_chosen_by_the_name_that_pytest_gave_it():
    def chosen(line):
        found = values(translate(SERVED, shlex.split(line)))
        assert "check-answers" in found
        return found["config"], found.get("request-type", "SYNC"), found.get("clients", "1")

    assert wrong(TESTS.items(), chosen) == []
    with pytest.raises(ConfigError, match=r"-k: got 'ASYNC-8\]', expected a test of resnet50, efficientnet-b0 or -b4"):
        translate(SERVED, ["-k", "ASYNC-8]"])


def test_every_option_of_a_served_line_is_used_or_noted():
    line = "-s -k test_single_model[resnet50-resnet50-RequestType.SYNC-8] --benchmark_only=false --grpc-port 2001"
    translation = translate(SERVED, [*line.split(), "--model-repository", "models/", "../tests/tritonserver/"])
    found = values(translation)
    assert "check-answers" not in found  # any text is true there
    assert found["checkpoint-input-path"] == "models/resnet50"
    assert found["port"] == "2001"
    assert "--grpc-port: the server uses it for HTTP, not gRPC" in translation.notes
    assert "PATH: the folder of the originals' tests; Falconet's server is measured" in translation.notes


def test_a_launchers_replicas_take_precedence():
    found = meaning("tf1:train.py", f"{IMAGENET} --replicas 2 --batch-size 8", replicas=16)
    assert (found["replicas"], found["lr"]) == ("16", "0.5")  # 2**-8 x 8 x 16
    assert meaning("pytorch:train.py", "--replicas 2", replicas=4)["replicas"] == "4"


@pytest.mark.parametrize(("program", "line"), [("tf1:train.py", IMAGENET), ("popart:resnet_main.py", "--data-dir d")])
def test_a_log_folder_holds_run_folders(program, line):
    """Not a run folder itself, which a second run of the same line would find taken."""
    translation = translate(program, [*line.split(), "--log-dir", "my logs"])
    assert translation.environment == {"FALCONET_RUNS": "my logs"}
    assert "run-dir" not in [setting.option for setting in translation.settings]


def test_an_executable_cache_becomes_the_cache_of_compiled_kernels():
    translation = translate("pytorch:train.py", ["--model-cache-path", "my cache"])
    assert "--model-cache-path 'my cache'" in translation.line()


def test_half_resolution_has_the_originals_defaults_and_our_layers():
    found = meaning(
        "pytorch:train.py",
        "--model resnet50 --half-res-training --fine-tune-epoch 2 --weight-avg-strategy mean"
        " --fine-tune-first-trainable-layer layer4/block1/conv",
    )
    assert found["half-res-training"] == ""
    tuned = [found[f"fine-tune-{name}"] for name in ("epoch", "lr", "micro-batch-size", "gradient-accumulation")]
    assert tuned == ["2", "0.25", "1", "1"]
    assert found["fine-tune-first-trainable-layer"] == "layer4/1/conv1"
    assert meaning("pytorch:train.py", "--half-res-training --fine-tune-epoch 0")["fine-tune-epoch"] == "None"
