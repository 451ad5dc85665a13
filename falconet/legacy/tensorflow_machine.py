"""The TensorFlow program's options about the machine: precision, replicas, pipeline, device."""

from collections.abc import Iterable

from falconet.errors import ConfigError
from falconet.legacy import tensorflow_facts
from falconet.legacy.layer_names import legal_splits, tensorflow_layer
from falconet.legacy.pytorch_training import EXCHANGE, FP_EXCEPTIONS, MEMORY, OFFLINE
from falconet.legacy.table import IPU, Effect, Note, Old, To, Values, Variable, becomes, nothing, part_of, same, short

SELECT = "devices are chosen by CUDA_VISIBLE_DEVICES"
OVERFLOW = (
    "values that overflow in fp16 become infinite; in 16.16 and 16.32 an update with such gradients is skipped, and a"
    " loss that is not finite stops the run"
)
MEGABYTE = 2**20


def replicas(old: Values) -> Iterable[Effect]:
    if tensorflow_facts.replicas(old) > 1:
        yield To("replicas", (str(tensorflow_facts.replicas(old)),))


def pipeline(old: Values) -> Iterable[Effect]:
    """A pipeline over several devices; on one device its splits are where activations are kept."""
    shards, names = old.whole("--shards"), old.texts("--pipeline-splits")
    if shards == 1 and old.given("--shards") and old.has("--restore-path"):
        yield To("pipeline-splits")  # none, even if the restored run had some
    if not old.flag("--pipeline"):
        if shards > 1:
            yield To("pipeline-splits", (f"auto:{shards}",))
            yield To("pipeline-schedule", ("sequential",))
            yield Note(f"--shards {shards} without --pipeline: {shards} stages of equal cost, one after the other")
        elif names:
            yield Note("--pipeline-splits: has no effect without --pipeline")
        return
    layers = _layers(old, names, shards)
    if shards > 1:
        yield To("pipeline-splits", layers)
        yield To("pipeline-schedule", (old.text("--pipeline-schedule").lower(),))
    elif old.flag("--enable-recomputation"):
        yield To("recompute-mode", ("manual",))
        yield To("recompute-checkpoints", layers)
    else:
        yield Note("--pipeline: on one device it sets where to recompute; it needs --enable-recomputation")


def _layers(old: Values, names: tuple[str, ...], shards: int) -> tuple[str, ...]:
    tensorflow_facts.model(old)  # refuses an unknown size
    kind = {"family": tensorflow_facts.family(old), "size": tensorflow_facts.size(old)}
    cifar = not tensorflow_facts.is_imagenet(old) and tensorflow_facts.family(old) != "efficientnet"
    if not names or (shards > 1 and len(names) != shards - 1):
        legal = [name for name in legal_splits(**kind, cifar=cifar) if not name.startswith("stage")]
        relus = [name for name in legal if name.endswith("/relu")] or legal
        expected = f"{shards - 1}, one less than --shards" if shards > 1 else "one or more"
        raise ConfigError(f"--pipeline-splits: got {len(names)}, expected {expected}, of {' '.join(relus)}")
    return tuple(tensorflow_layer(name, cifar=cifar, **kind) for name in names)


def recomputation(old: Values) -> Iterable[Effect]:
    """Stages of a pipeline recompute here unless that is turned off."""
    staged = old.whole("--shards") > 1
    if old.flag("--enable-recomputation") and not staged and not old.flag("--pipeline"):
        yield To("enable-recompute")
    elif staged and not old.flag("--enable-recomputation"):
        yield To("recompute-mode", ("none",))


def buffer_size(old: Values) -> Iterable[Effect]:
    if tensorflow_facts.replicas(old) > 1:
        yield To("bucket-size", (short(old.whole("--max-cross-replica-buffer-size") / MEGABYTE),))


def rounding(old: Values) -> Iterable[Effect]:
    on = tensorflow_facts.rounds_stochastically(old)
    yield To("enable-stochastic-rounding" if on else "no-enable-stochastic-rounding")


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
    """fp32 weights with fp16 compute are the regime 16.32; the optimizer state goes to the host."""
    if old.flag("--offload-fp32-weight-copy"):
        yield To("precision", ("32.32" if old.text("--precision") == "32.32" else "16.32",))
        yield To("offload-optimizer")


def compile_only(old: Values) -> Iterable[Effect]:
    if old.flag("--compile-only"):
        yield To("plan")
        yield Note(f"--compile-only: {OFFLINE}")


def memory_shares(old: Values) -> Iterable[Effect]:
    """Shares for convolutions and matrix products: one, or two per stage; the original too refused other numbers."""
    shares, shards = old.numbers("--available-memory-proportion"), old.whole("--shards")
    several = 2 * shards if old.flag("--pipeline") else 1
    if shares and len(shares) not in (1, several):
        each = f"one, or {several}: two for each of the {shards} --shards" if several > 1 else "one without --pipeline"
        raise ConfigError(f"--available-memory-proportion: got {len(shares)} values, expected {each}")
    if shares:
        yield To("available-memory-proportion", tuple(short(share) for share in shares[::2]))


def half_partials(old: Values) -> Iterable[Effect]:
    """Partial sums in half precision; in full precision without effect, as in the newest release of the original."""
    if old.flag("--enable-half-partials") and old.text("--precision") != "32.32":
        yield To("half-partial")
    elif old.flag("--enable-half-partials"):
        yield Note("--enable-half-partials: has no effect with --precision 32.32")


def select(old: Values) -> Iterable[Effect]:
    """The device of a training on one device; for several, the number was that of a group of IPUs."""
    number = old.texts("--select-ipu")[0]
    devices = tensorflow_facts.replicas(old) * old.whole("--shards")
    if number.isdigit() and devices == 1:
        yield Variable("CUDA_VISIBLE_DEVICES", number)
    elif number != "AUTO":
        yield Note(f"--select-ipu {number}: {SELECT}")


def distributed(old: Values) -> Iterable[Effect]:
    if old.flag("--distributed"):
        count = tensorflow_facts.workers(old)
        yield Note(
            f"--distributed: {count} workers of TF_CONFIG"
            if count > 1
            else "--distributed: TF_CONFIG lists no other worker"
        )


def in_a_row(old: Values) -> Iterable[Effect]:
    """Updates in a row, only on request: with the original's default, Ctrl-C would wait for hundreds of updates."""
    if old.given("--batches-per-step"):
        yield To("device-iterations", (old.text("--batches-per-step"),))


MACHINE: tuple[Old, ...] = (
    becomes(
        "--replicas",
        "whole",
        "1",
        "replicas",
        replicas,
        "times the workers; a launcher's number takes precedence",
        least=1,
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
    part_of(
        "--pipeline-splits",
        "text",
        None,
        "pipeline-splits",
        "under our names: b1/2/relu is layer1/2/act3",
        count="some",
    ),
    part_of(
        "--pipeline-schedule",
        "text",
        "Grouped",
        "pipeline-schedule",
        "in lower case; Grouped by default, as documented",
        choices=("Grouped", "Interleaved", "Sequential"),
    ),
    same("--precision", "text", "16.16", choices=("16.16", "16.32", "32.32")),
    becomes("--enable-half-partials", "flag", None, "half-partial", half_partials, "the same; not with 32.32"),
    becomes("--no-stochastic-rounding", "flag", None, "enable-stochastic-rounding", rounding, "on by default"),
    part_of(
        "--stochastic-rounding",
        "text",
        "ON",
        "enable-stochastic-rounding",
        "OFF turns it off; the other values are the same here",
        choices=("ON", "ON_prng_stable", "RI_prng_stable", "OFF"),
    ),
    becomes(
        "--batches-per-step",
        "whole",
        "1000",
        "device-iterations",
        in_a_row,
        "the same, fewer up to a log, a save or a validation; 1 by default",
        aliases=("--device-iterations",),  # its name from SDK 2.6 on
        least=1,
    ),
    becomes(
        "--select-ipu",
        "text",
        "AUTO",
        "CUDA_VISIBLE_DEVICES",
        select,
        "the device with that number, for a model on one device",
        aliases=("--select-ipus",),
        count="some",
    ),
    nothing("--sharding-exclude-filter", "text", "--pipeline-splits sets where to cut", count="some"),
    nothing("--sharding-include-filter", "text", "--pipeline-splits sets where to cut", count="some"),
    nothing("--fp-exceptions", "flag", FP_EXCEPTIONS),
    becomes(
        "--enable-recomputation",
        "flag",
        None,
        "enable-recompute recompute-mode",
        recomputation,
        "the same; stages of a pipeline recompute if it is given, as in the original",
        aliases=("--xla-recompute", "--enable-recompute"),
    ),
    becomes("--seed", "text", None, "seed", seed, "the same; 0 by default, where the original drew one at random"),
    becomes(
        "--gc-profile",
        "text",
        None,
        "profile",
        profile,
        "torch.profiler for a few updates; the run continues",
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
        "`falconet data bench` with one pass over the images: the rate of each step of the input, and of all",
    ),
    becomes(
        "--available-memory-proportion",
        "text",
        None,
        "available-memory-proportion",
        memory_shares,
        f"{MEMORY}; of two per stage, that of the convolutions",
        count="some",
    ),
    nothing("--disable-variable-offloading", "flag", "state stays on the device without --offload-optimizer"),
    becomes("--offload-fp32-weight-copy", "flag", None, "precision offload-optimizer", offloading, "16.32"),
    nothing("--min-remote-tensor-size", "whole", "--offload-optimizer moves all of the state", "128"),
    nothing("--gather-conv-output", "flag", IPU),
    nothing("--enable-conv-dithering", "flag", IPU),
    nothing("--internal-exchange-optimisation-target", "text", EXCHANGE, choices=("balanced", "cycles", "memory")),
    becomes("--compile-only", "flag", None, "plan", compile_only, OFFLINE),
    nothing("--on-demand", "flag", IPU),
    nothing("--prefetch-depth", "whole", "the loader reads ahead, within a limit of bytes"),
    nothing("--num-io-tiles", "whole", "copies always overlap with compute", "0"),
    nothing("--saturate-on-overflow", "flag", OVERFLOW),
    nothing("--latency", "flag", "always reported: in the validation line, and by `falconet bench infer`"),
    nothing("--scheduling-algorithm", "text", IPU),
    same(
        "--identical-replica-seeding",
        "flag",
        effect="the same, for dropout; the noise of rounding is always the same on all replicas",
    ),
    nothing("--max-reduce-many-buffer-size", "whole", "--bucket-size groups reductions", "0"),
)
