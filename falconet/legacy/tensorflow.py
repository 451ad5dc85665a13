"""The TensorFlow original's programs, and which of their options leave others unused."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import ceil

from falconet.errors import ConfigError
from falconet.legacy import tensorflow_facts
from falconet.legacy.pytorch_training import MEMORY
from falconet.legacy.table import (
    Effect,
    Note,
    OfModel,
    Old,
    Program,
    To,
    Values,
    becomes,
    nothing,
    part_of,
    same,
    short,
    unused,
)
from falconet.legacy.tensorflow_machine import MACHINE
from falconet.legacy.tensorflow_model import DATA, MODEL, own
from falconet.legacy.tensorflow_output import OUTPUT
from falconet.legacy.tensorflow_recipe import LENGTH, RATE, SCHEDULE, UPDATE, resume

OF_FAMILY = {  # options that only one family of models had
    "efficientnet": (
        *("--dropout-rate", "--block-survival-prob", "--no-se", "--depth-divisor", "--top-width", "--use-relu"),
        *("--expand-ratio", "--norm-epsilon", "--proxy-norm", "--proxy-epsilon", "--no-proxy-recompute"),
        *("--width-coefficient", "--depth-coefficient"),
    ),
    "resnext": ("--convolution-groups", "--widenet"),
    "squeezenet": ("--use-bypass",),
}
_NOT_STORED = ("--no-hostside-norm", "--stochastic-rounding", "--valid-batch-size")  # others say the same
PASS_SECONDS = "3"  # of a pass that measures speed: as steady as the minutes that 50,000 images take
VALIDATION_IMAGES = {"imagenet": 50_000, "cifar-10": 10_000, "cifar-100": 10_000}
_Holds = Callable[[Values], bool]


def training(old: Values) -> Iterable[Effect]:
    """The effects that a training run always has, and notes on unused options."""
    refuse_other_families(old)
    yield from own(old)
    # As many as the original; a short run on random images, by --iterations alone, validates a tenth of its own.
    if old.flag("--generated-data") and not _by_updates_alone(old):
        yield To("validation-images", (str(VALIDATION_IMAGES[tensorflow_facts.dataset(old)]),))
    yield from without_effect(old)


def predicting(old: Values) -> Iterable[Effect]:
    """The effects that predictions always have."""
    refuse_other_families(old)
    yield from own(old)


def of_other_families(old: Values) -> dict[str, str]:
    """The options of other models than the chosen one, which the original refused, each with its model's family."""
    chosen = tensorflow_facts.family(old)
    return {name: family for family, names in OF_FAMILY.items() if family != chosen for name in names}


def refuse_other_families(old: Values) -> None:
    for name, family in of_other_families(old).items():
        if old.given(name):
            raise ConfigError(f"{name}: is for --model {family}, not {tensorflow_facts.family(old)}")


def of_model(old: Values) -> OfModel:
    """The options of the chosen model; several models have --group-dim and --groups."""
    kind = tensorflow_facts.family(old)
    shared = () if kind in ("resnet", "squeezenet") else ("--group-dim",)
    return OfModel(
        title=f"{kind} {tensorflow_facts.size(old)} on {tensorflow_facts.dataset(old)}",
        options=("--model-size", *shared, *OF_FAMILY.get(kind, ())),
        hidden=tuple(name for other, names in OF_FAMILY.items() if other != kind for name in names),
        defaults=tensorflow_facts.defaults(old),
    )


def without_effect(old: Values) -> Iterable[Effect]:
    """One note for each group of options that other options leave unused."""
    for names, holds, why in _NEEDS:
        given = [name for name in names if old.given(name)]
        if given and not holds(old):
            yield Note(f"{', '.join(given)}: no effect {why}")


def _rule(name: str) -> _Holds:
    return lambda old: tensorflow_facts.optimiser(old) == name


def _schedule(name: str) -> _Holds:
    return lambda old: old.text("--lr-schedule") == name


def _by_updates_alone(old: Values) -> bool:
    return old.has("--iterations") and not old.has("--epochs")


def _has_norm(old: Values, *, batch: bool) -> bool:
    """Whether the model has the norm, or has none, which is noted elsewhere."""
    return tensorflow_facts.family(old) == "squeezenet" or tensorflow_facts.uses_batch_norm(old) is batch


_NEEDS: Sequence[tuple[tuple[str, ...], _Holds, str]] = (
    (
        ("--momentum",),
        lambda old: tensorflow_facts.optimiser(old) != "SGD",
        "with --optimiser SGD; --optimiser momentum has momentum",
    ),
    (
        ("--rmsprop-decay", "--rmsprop-base-decay-exp", "--rmsprop-epsilon"),
        _rule("RMSprop"),
        "without --optimiser RMSprop",
    ),
    (
        ("--lars-epsilon", "--lars-skip-list", "--lars-weight-decay", "--lars-eeta"),
        _rule("LARS"),
        "without --optimiser LARS",
    ),
    (
        ("--weight-decay",),
        lambda old: tensorflow_facts.optimiser(old) != "LARS" or not old.given("--lars-weight-decay"),
        "with --lars-weight-decay",
    ),
    (("--learning-rate-decay", "--learning-rate-schedule"), _schedule("stepped"), "without --lr-schedule stepped"),
    (("--lr-decay-rate", "--lr-drops"), _schedule("exponential"), "without --lr-schedule exponential"),
    (
        ("--poly-lr-decay-power", "--poly-lr-end-ratio", "--abs-end-learning-rate"),
        _schedule("polynomial_decay_lr"),
        "without --lr-schedule polynomial_decay_lr",
    ),
    (
        ("--warmup-epochs",),
        lambda old: not _by_updates_alone(old) or old.text("--lr-schedule") == "polynomial_decay_lr",
        "with --iterations alone; it needs --epochs",
    ),
    (("--log-freq",), _by_updates_alone, "without --iterations alone; --logs-per-epoch applies"),
    (("--logs-per-epoch",), lambda old: not _by_updates_alone(old), "with --iterations alone; --log-freq applies"),
    (("--wandb-project",), lambda old: old.flag("--wandb"), "without --wandb"),
    (("--config-path",), lambda old: old.given("--config"), "without --config"),
    (("--max-cross-replica-buffer-size",), lambda old: tensorflow_facts.replicas(old) > 1, "with one replica"),
    (("--pipeline-schedule",), lambda old: old.flag("--pipeline"), "without --pipeline"),
    (("--BN-decay",), lambda old: _has_norm(old, batch=True), "without --batch-norm"),
    (("--groups",), lambda old: _has_norm(old, batch=False), "without --group-norm"),
    (("--cutmix-version",), lambda old: old.number("--cutmix-lambda") < 1, "without a --cutmix-lambda below 1"),
    (
        ("--ckpt-epochs-offset",),
        lambda old: bool(old.whole("--epochs-per-ckpt") or old.whole("--ckpts-per-epoch")),
        "with --ckpts-per-epoch 0",
    ),
)


def train_command(old: Values) -> str:
    if old.flag("--dataset-benchmark"):
        return "data bench"
    return "restore" if old.has("--restore-path") else "train"


def validation_command(old: Values) -> str:
    """The canonical command: without a checkpoint, the program measured a model with random weights."""
    if old.flag("--dataset-benchmark"):
        return "data bench"
    return "validate" if old.has("--restore-path") else "bench infer"


def restored_checkpoints(old: Values) -> Iterable[Effect]:
    if old.has("--restore-path"):
        yield To("checkpoint-input-path", (old.text("--restore-path"),))
        yield To("checkpoint", ("all",))


def embedded_command(old: Values) -> str:
    """Several concurrent threads are clients of a server."""
    return "bench serve" if _threads(old) > 1 else "bench infer"


def _threads(old: Values) -> int:
    return old.whole("--num-inference-thread")


def clients(old: Values) -> Iterable[Effect]:
    if _threads(old) > 1:
        yield To("clients", (str(_threads(old)),))
        yield Note(f"--num-inference-thread {_threads(old)}: as many clients of a local HTTP server")


def repeats(old: Values) -> Iterable[Effect]:
    """The passes of a validation without a checkpoint, which measures speed."""
    if not old.has("--restore-path"):
        yield from passes(old)
    elif old.whole("--repeat") > 1:
        yield Note("--repeat: accuracy is exact, so it is measured once; `falconet bench infer` measures speed")


def copies(old: Values) -> int:
    """The number of predicting devices: each shard was another whole replica. A launcher's number takes precedence."""
    return tensorflow_facts.replicas(old) * (1 if old.place.replicas else old.whole("--shards"))


def predictors(old: Values) -> Iterable[Effect]:
    if copies(old) > 1:
        yield To("replicas", (str(copies(old)),))


def memory_share(old: Values) -> Iterable[Effect]:
    """The share for a whole model: the largest that convolutions had in any stage."""
    if old.has("--available-memory-proportion"):
        share = max(old.numbers("--available-memory-proportion")[::2])
        yield To("available-memory-proportion", (short(share),))


def passes(old: Values) -> Iterable[Effect]:
    """The given number of passes over the validation images, each of which ends after a few seconds."""
    yield To("iterations", (str(_batches(old)),))
    yield To("repeat", (old.text("--repeat"),))
    yield To("seconds", (PASS_SECONDS,))


def _batches(old: Values) -> int:
    """The batches of one pass over the validation images."""
    return ceil(VALIDATION_IMAGES[tensorflow_facts.dataset(old)] / (tensorflow_facts.micro_batch(old) * copies(old)))


def shared_passes(old: Values) -> Iterable[Effect]:
    """The same passes; several threads divide their batches."""
    if _threads(old) == 1:
        yield from passes(old)
    else:
        yield To("iterations", (str(ceil(old.whole("--repeat") * _batches(old) / _threads(old))),))


def valid_batch(old: Values) -> Iterable[Effect]:
    """The batch of a checkpoint's validation, or of predictions that are measured without one."""
    if old.has("--valid-batch-size"):
        option = "validation-batch-size" if old.has("--restore-path") else "micro-batch-size"
        yield To(option, (old.text("--valid-batch-size"),))


def validation_input(old: Values) -> Iterable[Effect]:
    if old.flag("--dataset-benchmark"):
        yield To("split", ("validation",))
        yield To("passes", ("1",))


def discard(old: Values) -> Iterable[Effect]:
    if old.whole("--discard-last"):
        yield To("weight-avg-discard", (old.text("--discard-last"),))


_VALIDATING: tuple[Old, ...] = (
    becomes(
        "--repeat",
        "whole",
        "1",
        "repeat iterations seconds",
        repeats,
        "without --restore-path: passes over the validation images, each with its line and cut after 3 seconds",
        least=1,
    ),
    nothing("--inference", "text", "results are always printed"),
    nothing("--total-batch-size", "whole", "the checkpoint holds its epoch"),
)
_LENGTH = tuple(replace(option, rule=resume) if option.name == "--restore-path" else option for option in LENGTH)
_SHARED = (*_LENGTH, *RATE, *UPDATE, *OUTPUT, *MACHINE, *MODEL, *DATA)
_TRAINING = "is for training"
_BESIDE = "validation.csv and log.txt go to the run folder of --restore-path; without it, nothing is written"
_NOT_HERE = {  # why predictions do not use an option, if not because they train nothing
    **dict.fromkeys(("--log-dir", "--logs-path", "--name-suffix", "--no-logs"), _BESIDE),
    **dict.fromkeys(("--wandb", "--wandb-project"), "`falconet upload RUN` sends validation.csv"),
    "--log-all-instances": "all processes measure, the first one logs",
}
_WHOLE = "a model that predicts is whole; --shards are further replicas of it"
_MEASURED = (
    "--restore-path",
    "--help",
    "--config",
    "--config-path",
    "--batch-size",
)  # the options of LENGTH that predictions use
_MACHINE = {option.name: option for option in (*MACHINE, *MODEL, *DATA)}
_OTHERWISE = {  # options whose effect differs from training
    **{name: unused(_MACHINE[name], _WHOLE) for name in ("--pipeline", "--pipeline-splits", "--pipeline-schedule")},
    **{
        name: unused(_MACHINE[name], _TRAINING)
        for name in (
            *("--mixup-alpha", "--cutmix-lambda", "--cutmix-version", "--BN-decay", "--block-survival-prob"),
            *("--max-cross-replica-buffer-size", "--enable-recomputation", "--identical-replica-seeding", "--BN-span"),
            *("--no-stochastic-rounding", "--stochastic-rounding", "--offload-fp32-weight-copy"),
            *("--dataset-percentage-to-use", "--train-with-valid-preprocessing", "--batches-per-step"),
        )
    },
    "--seed": unused(_MACHINE["--seed"], "random numbers do not affect what is measured"),
    "--replicas": becomes(
        "--replicas",
        "whole",
        "1",
        "replicas",
        predictors,
        "times the workers and --shards; a launcher's number takes precedence",
        least=1,
    ),
    "--shards": part_of(
        "--shards", "whole", "1", "replicas", "more replicas, as in the original: each has the whole model", least=1
    ),
    "--available-memory-proportion": replace(
        _MACHINE["--available-memory-proportion"],
        rule=memory_share,
        effect=f"{MEMORY}; of several, the largest of the convolutions'",
    ),
    "--valid-batch-size": becomes(
        "--valid-batch-size",
        "whole",
        None,
        "validation-batch-size micro-batch-size",
        valid_batch,
        "the same, under another name; without --restore-path, the batch of the predictions",
        least=1,
    ),
    "--dataset-benchmark": becomes(
        "--dataset-benchmark",
        "flag",
        None,
        "split passes",
        validation_input,
        "`falconet data bench --split validation` with one pass over the images",
    ),
}
_RESTORED = becomes(
    "--restore-path",
    "text",
    None,
    "checkpoint-input-path checkpoint",
    restored_checkpoints,
    "the checkpoints to validate, with --checkpoint all: each one in a folder; without it, random weights",
)
_PREDICTING: tuple[Old, ...] = (
    *(
        option if option.name in _MEASURED else unused(option, _TRAINING)
        for option in (_RESTORED, *(option for option in LENGTH if option.name != _RESTORED.name))
    ),
    *(unused(option, _NOT_HERE.get(option.name, _TRAINING)) for option in (*RATE, *SCHEDULE, *UPDATE, *OUTPUT)),
    *(_OTHERWISE.get(option.name, option) for option in (*MACHINE, *MODEL, *DATA)),
)
PROGRAMS = (
    Program(
        name="tf1:train.py",
        options=(*_SHARED, *SCHEDULE),
        command=train_command,
        about="trains from scratch, or continues with --restore-path",
        conventions="tensorflow",
        settled=tensorflow_facts.settled,
        lacks=lambda old: {*of_other_families(old), *_NOT_STORED},
        rule=training,
        of_model=of_model,
    ),
    Program(
        name="tf1:validation.py",
        options=(*_PREDICTING, *_VALIDATING),
        command=validation_command,
        about="the accuracy of checkpoints; without --restore-path, how fast the model predicts",
        conventions="tensorflow",
        rule=predicting,
        of_model=of_model,
    ),
    Program(
        name="tf1:restore.py",
        options=(
            same("--restore-path", "text", new="checkpoint-input-path", required=True),
            part_of("--help", "flag", None, "help", "prints the options and what each becomes", aliases=("-h",)),
        ),
        command="restore",
        about="continues a run",
        whole=False,
        conventions="tensorflow",
    ),
    Program(
        name="tf1:weight_avg.py",
        options=(
            same("--restore-path", "text", new="checkpoint-input-path", required=True),
            same("--filename", "text", new="checkpoint-output-path", required=True),
            same("-N", "whole", new="weight-avg-N"),
            same("--mode", "text", new="weight-avg-strategy", required=True, choices=("mean", "exponential")),
            same("--decay", "number", "0.99", new="weight-avg-exp-decay"),
            becomes("--discard-last", "whole", "0", "weight-avg-discard", discard, "the same"),
        ),
        command="average",
        about="averages checkpoints",
        whole=False,
    ),
    Program(
        name="tf1:upload_run.py",
        options=(
            same("--base-folder", "text", new="source", required=True),
            same("--name", "text", required=True),
            same("--project", "text", "large-scale-cnn", new="wandb-project"),
        ),
        command="upload",
        about="sends the metrics of a finished run to Weights & Biases",
    ),
    Program(
        name="tf1:inference_embedded.py",
        options=(
            *(
                unused(option, "`validation.py --dataset-benchmark` measures the input")
                if option.name == "--dataset-benchmark"
                else option
                for option in _PREDICTING
            ),
            *(
                replace(option, rule=shared_passes, effect="passes over the validation images")
                if option.name == "--repeat"
                else option
                for option in _VALIDATING
            ),
            becomes(
                "--num-inference-thread",
                "whole",
                "1",
                "clients iterations",
                clients,
                "more than one: `falconet bench serve --clients N`, with concurrent clients",
                least=1,
            ),
            nothing("--force-recompile", "flag", "there is no compiled program"),
            nothing("--tmp-execs", "flag", "there is no compiled program"),
        ),
        command=embedded_command,
        about="how fast the model predicts: `falconet bench infer`, or `bench serve` with --num-inference-thread",
        conventions="tensorflow",
        rule=predicting,
        of_model=of_model,
    ),
)
