"""The TensorFlow program's options of the machine: precision, replicas, pipeline, device."""

from collections.abc import Iterable

from falconet.errors import ConfigError
from falconet.legacy import tensorflow_facts
from falconet.legacy.layer_names import legal_splits, tensorflow_layer
from falconet.legacy.pytorch import FP_EXCEPTIONS, MEMORY, OFFLINE
from falconet.legacy.table import IPU, Effect, Old, Say, To, Values, Variable, becomes, nothing, part_of, same, short

SELECT = "devices are chosen by CUDA_VISIBLE_DEVICES"
OVERFLOW = (
    "what overflows in fp16 is infinite here, no device clips it; in 16.16 and 16.32 an update with such gradients is"
    " skipped, and a loss that is not finite stops the run"
)
MEGABYTE = 2**20


def replicas(old: Values) -> Iterable[Effect]:
    if tensorflow_facts.replicas(old) > 1:
        yield To("replicas", (str(tensorflow_facts.replicas(old)),))


def pipeline(old: Values) -> Iterable[Effect]:
    """A pipeline over several devices; on one device its splits are where activations are kept."""
    shards, names = old.whole("--shards"), old.texts("--pipeline-splits")
    if shards == 1 and old.given("--shards") and old.has("--restore-path"):
        yield To("pipeline-splits")  # none, whatever the restored run had
    if not old.flag("--pipeline"):
        if shards > 1:
            yield To("pipeline-splits", (f"auto:{shards}",))
            yield To("pipeline-schedule", ("sequential",))
            yield Say(f"--shards {shards} without --pipeline: {shards} stages of equal cost, one after the other")
        elif names:
            yield Say("--pipeline-splits: has no effect without --pipeline")
        return
    layers = _layers(old, names, shards)
    if shards > 1:
        yield To("pipeline-splits", layers)
        yield To("pipeline-schedule", (old.text("--pipeline-schedule").lower(),))
    elif old.flag("--enable-recomputation"):
        yield To("recompute-mode", ("manual",))
        yield To("recompute-checkpoints", layers)
    else:
        yield Say("--pipeline: on one device it only places recomputation; it needs --enable-recomputation")


def _layers(old: Values, names: tuple[str, ...], shards: int) -> tuple[str, ...]:
    tensorflow_facts.model(old)  # says what is wrong with the size
    kind = {"family": tensorflow_facts.family(old), "size": tensorflow_facts.size(old)}
    cifar = not tensorflow_facts.is_imagenet(old) and tensorflow_facts.family(old) != "efficientnet"
    if not names or (shards > 1 and len(names) != shards - 1):
        legal = [name for name in legal_splits(**kind, cifar=cifar) if not name.startswith("stage")]
        relus = [name for name in legal if name.endswith("/relu")] or legal
        wanted = f"{shards - 1}, one less than --shards" if shards > 1 else "one or more"
        raise ConfigError(f"--pipeline-splits: got {len(names)}, wanted {wanted}, of {' '.join(relus)}")
    return tuple(tensorflow_layer(name, cifar=cifar, **kind) for name in names)


def recomputation(old: Values) -> Iterable[Effect]:
    """Stages of a pipeline recompute here unless they are told not to."""
    staged = old.whole("--shards") > 1
    if old.flag("--enable-recomputation") and not staged and not old.flag("--pipeline"):
        yield To("enable-recompute")
    elif staged and not old.flag("--enable-recomputation"):
        yield To("recompute-mode", ("none",))


def buffer_size(old: Values) -> Iterable[Effect]:
    if tensorflow_facts.replicas(old) > 1:
        yield To("bucket-size", (short(old.whole("--max-cross-replica-buffer-size") / MEGABYTE),))


def rounding(old: Values) -> Iterable[Effect]:
    off = old.flag("--no-stochastic-rounding") or old.text("--stochastic-rounding") == "OFF"
    yield To("no-enable-stochastic-rounding" if off else "enable-stochastic-rounding")


def profile(old: Values) -> Iterable[Effect]:
    if old.has("--gc-profile") and old.text("--gc-profile") != "NO_PROFILE":
        yield To("profile")


def dataset_benchmark(old: Values) -> Iterable[Effect]:
    if old.flag("--dataset-benchmark"):
        yield To("passes", ("1",))


def seed(old: Values) -> Iterable[Effect]:
    if old.has("--seed"):
        yield To("seed", (str(old.whole("--seed") % 2**32),))


def offloading(old: Values) -> Iterable[Effect]:
    """fp32 weights beside compute in fp16 are the regime 16.32; the optimizer's state goes to the host."""
    if old.flag("--offload-fp32-weight-copy"):
        yield To("precision", ("32.32" if old.text("--precision") == "32.32" else "16.32",))
        yield To("offload-optimizer")


def compile_only(old: Values) -> Iterable[Effect]:
    if old.flag("--compile-only"):
        yield To("plan")
        yield Say(f"--compile-only: {OFFLINE}")


def memory_shares(old: Values) -> Iterable[Effect]:
    """One, or two a stage, for convolutions and matrix products; one where the stages are no longer those."""
    shares = old.numbers("--available-memory-proportion")[::2]
    if shares and len(shares) not in (1, old.whole("--shards")):
        shares = [max(shares)]
    if shares:
        yield To("available-memory-proportion", tuple(short(share) for share in shares))


def half_partials(old: Values) -> Iterable[Effect]:
    """Meaningless in full precision, where the newest of theirs ignored it too."""
    if old.flag("--enable-half-partials") and old.text("--precision") != "32.32":
        yield To("half-partial")
    elif old.flag("--enable-half-partials"):
        yield Say("--enable-half-partials: has no effect with --precision 32.32")


def select(old: Values) -> Iterable[Effect]:
    """The training's device; an IPU's number for several was that of a group of them."""
    number = old.texts("--select-ipu")[0]
    devices = tensorflow_facts.replicas(old) * old.whole("--shards")
    if number.isdigit() and devices == 1:
        yield Variable("CUDA_VISIBLE_DEVICES", number)
    elif number != "AUTO":
        yield Say(f"--select-ipu {number}: {SELECT}")


def distributed(old: Values) -> Iterable[Effect]:
    if old.flag("--distributed"):
        count = tensorflow_facts.workers(old)
        yield Say(
            f"--distributed: {count} workers of TF_CONFIG"
            if count > 1
            else "--distributed: TF_CONFIG lists no other worker"
        )


MACHINE: tuple[Old, ...] = (
    becomes(
        "--replicas", "whole", "1", "replicas", replicas, "times the workers; a launcher's number counts more", least=1
    ),
    becomes("--distributed", "flag", None, "replicas", distributed, "the workers are read from TF_CONFIG"),
    becomes(
        "--max-cross-replica-buffer-size",
        "whole",
        "10485760",
        "bucket-size",
        buffer_size,
        "bytes become megabytes of 2**20",
    ),
    becomes(
        "--pipeline",
        "flag",
        None,
        "pipeline-splits pipeline-schedule recompute-mode",
        pipeline,
        "with --shards and --pipeline-splits; on one device: recomputation between the splits",
    ),
    part_of("--shards", "whole", "1", "pipeline-splits", "stages: one more than splits", least=1),
    part_of("--pipeline-splits", "text", None, "pipeline-splits", "renamed: b1/2/relu is layer1/2/act3", count="some"),
    part_of(
        "--pipeline-schedule",
        "text",
        "Grouped",
        "pipeline-schedule",
        "in small letters; Grouped if not given, as documented",
        choices=("Grouped", "Interleaved", "Sequential"),
    ),
    same("--precision", "text", "16.16", choices=("16.16", "16.32", "32.32")),
    becomes("--enable-half-partials", "flag", None, "half-partial", half_partials, "the same; not with 32.32"),
    becomes("--no-stochastic-rounding", "flag", None, "enable-stochastic-rounding", rounding, "on unless given"),
    part_of(
        "--stochastic-rounding",
        "text",
        "ON",
        "enable-stochastic-rounding",
        "OFF turns it off; the others are alike here",
        choices=("ON", "ON_prng_stable", "RI_prng_stable", "OFF"),
    ),
    nothing(
        "--batches-per-step",
        "whole",
        "the host starts every update itself",
        "1000",
        aliases=("--device-iterations",),  # its name from SDK 2.6 on
    ),
    becomes(
        "--select-ipu",
        "text",
        "AUTO",
        "CUDA_VISIBLE_DEVICES",
        select,
        "the device of that number, for a model on one device",
        aliases=("--select-ipus",),
        count="some",
    ),
    nothing("--sharding-exclude-filter", "text", "--pipeline-splits says where to cut", count="some"),
    nothing("--sharding-include-filter", "text", "--pipeline-splits says where to cut", count="some"),
    nothing("--fp-exceptions", "flag", FP_EXCEPTIONS),
    becomes(
        "--enable-recomputation",
        "flag",
        None,
        "enable-recompute recompute-mode",
        recomputation,
        "the same; stages of a pipeline recompute if it is given, as they did",
        aliases=("--xla-recompute", "--enable-recompute"),
    ),
    becomes("--seed", "text", None, "seed", seed, "the same; 0 if not given, where the original drew one"),
    becomes(
        "--gc-profile",
        "text",
        None,
        "profile",
        profile,
        "torch.profiler for a few updates; the run goes on",
        count="maybe",
        bare="IPU_PROFILE",
        choices=("DEVICE_PROFILE", "IPU_PROFILE", "TILE_PROFILE", "NO_PROFILE"),
    ),
    becomes(
        "--dataset-benchmark",
        "flag",
        None,
        "passes",
        dataset_benchmark,
        "`falconet data bench` with one pass over the images: what each stage of the input does in a second, and all",
    ),
    becomes(
        "--available-memory-proportion",
        "text",
        None,
        "available-memory-proportion",
        memory_shares,
        f"{MEMORY}; of two a stage, that of the convolutions",
        count="some",
    ),
    nothing("--disable-variable-offloading", "flag", "state stays on the device unless --offload-optimizer is given"),
    becomes("--offload-fp32-weight-copy", "flag", None, "precision offload-optimizer", offloading, "16.32"),
    nothing("--min-remote-tensor-size", "whole", "--offload-optimizer takes all of the state", "128"),
    nothing("--gather-conv-output", "flag", IPU),
    nothing("--enable-conv-dithering", "flag", IPU),
    nothing("--internal-exchange-optimisation-target", "text", IPU, choices=("balanced", "cycles", "memory")),
    becomes("--compile-only", "flag", None, "plan", compile_only, OFFLINE),
    nothing("--on-demand", "flag", IPU),
    nothing("--prefetch-depth", "whole", "the loader reads ahead by itself, bounded in bytes"),
    nothing("--num-io-tiles", "whole", "copies overlap with compute by themselves", "0"),
    nothing("--saturate-on-overflow", "flag", OVERFLOW),
    nothing("--latency", "flag", "always told: in the line of a validation, and by `falconet bench infer`"),
    nothing("--scheduling-algorithm", "text", IPU),
    same("--identical-replica-seeding", "flag", effect="the same, for dropout; the noise of rounding is always alike"),
    nothing("--max-reduce-many-buffer-size", "whole", "--bucket-size groups reductions", "0"),
)


SYNC = "replicas hold the same bits after every update, which is checked at the start"
LOGGED_ONCE = "the first process alone logs and saves"


def checkpoints(old: Values) -> Iterable[Effect]:
    """Epochs between checkpoints, or checkpoints of an epoch; the two together were refused there too."""
    if old.whole("--epochs-per-ckpt") and old.whole("--ckpts-per-epoch") != 1:
        raise ConfigError("--epochs-per-ckpt: cannot be combined with --ckpts-per-epoch; wanted one of the two")
    saves = old.whole("--epochs-per-ckpt") or old.whole("--ckpts-per-epoch")
    if saves:
        yield To("initial-checkpoint")
    if saves and old.whole("--ckpt-epochs-offset"):
        yield To("checkpoint-first-epoch", (old.text("--ckpt-epochs-offset"),))
    if old.whole("--epochs-per-ckpt"):
        yield To("checkpoint-save-freq", (old.text("--epochs-per-ckpt"),))
    elif old.whole("--ckpts-per-epoch"):
        yield To("checkpoint-save-freq", (short(1 / old.whole("--ckpts-per-epoch")),))
    else:
        yield To("checkpoint-save-freq", (str(tensorflow_facts.whole_epochs(old)),))
        yield Say("--ckpts-per-epoch 0: the end of training is saved all the same")
    yield To("checkpoints-kept", ("all",))


def validation(old: Values) -> Iterable[Effect]:
    """Theirs measured each epoch's checkpoint when training was over; the same numbers come epoch by epoch."""
    yield To("validation-mode", ("none" if old.flag("--no-validation") else "during",))


def averaging(old: Values) -> Iterable[Effect]:
    """The first one, exponential ones before means, and all others beside it."""
    apart = old.whole("--epochs-per-ckpt") or 1 / max(1, old.whole("--ckpts-per-epoch"))  # epochs
    decays = old.texts("--weight-avg-exp")
    # Theirs counts epochs and takes the checkpoint at the beginning of the first one too.
    counts = [str(int(int(epochs) / apart) + 1) for epochs in old.texts("--weight-avg-N")]
    if decays:
        yield To("weight-avg-strategy", ("exponential",))
        yield To("weight-avg-exp-decay", (decays[0],))
    elif counts:
        yield To("weight-avg-strategy", ("mean",))
        yield To("weight-avg-N", (counts[0],))
    rest = [f"exponential:{decay}" for decay in decays[1:]] + [f"mean:{count}" for count in counts]
    if rest[0 if decays else 1 :]:
        yield To("weight-avg-also", tuple(rest[0 if decays else 1 :]))


def logs(old: Values) -> Iterable[Effect]:
    if old.has("--iterations") and not old.has("--epochs"):
        count = max(1, tensorflow_facts.updates_per_epoch(old) // old.whole("--log-freq"))
        yield To("logs-per-epoch", (str(count),))
    else:
        yield To("logs-per-epoch", (old.text("--logs-per-epoch"),))


def run_folder(old: Values) -> Iterable[Effect]:
    """The folder itself, or where folders of the program's own names go."""
    if old.flag("--no-logs"):
        yield To("temporary")
        return
    if old.has("--logs-path"):
        yield To("run-dir", (old.text("--logs-path"),))
        return
    if old.has("--name-suffix"):
        yield To("name-suffix", (old.text("--name-suffix"),))
    if old.given("--log-dir"):
        yield Variable("FALCONET_RUNS", old.text("--log-dir"))


def wandb(old: Values) -> Iterable[Effect]:
    if old.flag("--wandb"):
        yield To("wandb")
        yield To("wandb-project", (old.text("--wandb-project"),))


KEEPING: tuple[Old, ...] = (
    becomes(
        "--ckpts-per-epoch",
        "whole",
        "1",
        "checkpoint-save-freq initial-checkpoint",
        checkpoints,
        "1 / n, and the weights before the first update as ckpt-0; 0: only the end of training",
    ),
    part_of("--epochs-per-ckpt", "whole", "0", "checkpoint-save-freq", "the same"),
    part_of(
        "--ckpt-epochs-offset",
        "whole",
        "0",
        "checkpoint-first-epoch",
        "the same: the end of that epoch is saved first, others are counted from there; the last is always saved",
    ),
    nothing("--ckpt-all-instances", "text", LOGGED_ONCE),
    becomes("--no-validation", "flag", None, "validation-mode", validation, "validation-mode none, else during"),
    becomes(
        "--weight-avg-exp",
        "number",
        None,
        "weight-avg-strategy weight-avg-exp-decay weight-avg-also",
        averaging,
        "the first one; all others by --weight-avg-also",
        count="some",
    ),
    part_of(
        "--weight-avg-N",
        "whole",
        None,
        "weight-avg-strategy weight-avg-N weight-avg-also",
        "epochs become checkpoints",
        count="some",
        least=0,
    ),
    nothing("--syncs-per-epoch", "whole", SYNC, "0"),
    nothing("--epochs-per-sync", "number", SYNC, "0"),
    becomes(
        "--log-dir",
        "text",
        "./logs/",
        "FALCONET_RUNS run-dir name-suffix temporary",
        run_folder,
        "where run folders go",
    ),
    part_of("--logs-path", "text", None, "run-dir", "the run folder itself"),
    part_of("--name-suffix", "text", None, "name-suffix", "the same: behind the name of the run"),
    becomes("--logs-per-epoch", "whole", "16", "logs-per-epoch", logs, "the same; --log-freq with --iterations"),
    part_of("--log-freq", "whole", "500", "logs-per-epoch", "updates between log points, with --iterations", least=1),
    part_of(
        "--no-logs",
        "flag",
        None,
        "temporary",
        "a temporary run folder, removed at a clean end, kept after a failure; counts more than --logs-path",
    ),
    nothing("--log-all-instances", "text", LOGGED_ONCE),
    same("--mlperf-logging", "flag", effect="the same: result_<seed>.txt in the run folder; no package is needed"),
    becomes("--wandb", "flag", None, "wandb wandb-project", wandb, "the same"),
    part_of("--wandb-project", "text", "tf-cnn", "wandb-project", "the same"),
)
