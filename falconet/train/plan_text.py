"""The plan in words: everything that was decided for a run before its first update. Pure."""

import torch

from falconet.config import commands, facts, options, values
from falconet.config.facts import PHOTO_KINDS
from falconet.data import input, native
from falconet.data.order import class_weights
from falconet.errors import named_option
from falconet.models import views
from falconet.numerics.loss_scale import doublings
from falconet.numerics.precision import Regime, describe_half_partials, describe_workspace
from falconet.report.console import counted
from falconet.train.build import BuiltPhase, rounding, workspace_share
from falconet.train.plan import Plan


def describe(built: BuiltPhase) -> list[str]:
    """Everything about the first phase; about a later one, what it changes."""
    if built.phase.count == 1:
        return _whole(built)
    return [_heading(built), *(_whole(built) if built.phase.number == 1 else _changes(built))]


def brief(built: BuiltPhase) -> list[str]:
    """The plan without what only plan.txt and `--plan` show; of one for photos, the usual in two lines.

    That Pillow decodes photos is always printed: it costs time.
    """
    asked, device = built.options, built.site.world.device
    details = [
        *([] if built.uncaptured else _updates(built)),
        *(_decoding(built) if native.library() else []),
        *input.input_lines(built.images, asked.data, asked.augmentation, device=device),
    ]
    if not built.images.where or built.phase.count > 1:
        return [line for line in describe(built) if line not in details]
    details += [
        *(_images(built), _machine(built), _optimizer(built)),
        *_numerics(asked, regime=built.regime, device=device),
        *built.plan.lines(),
    ]
    is_whole, plan = asked.training.has_whole_epochs, built.plan
    length = counted(plan.last_epoch, "epoch") if is_whole else counted(plan.updates, "update")
    return [
        *(line for line in describe(built) if line not in details),
        f"{length}, {counted(plan.global_batch, 'photo')} of {built.images.shape()} per update,"
        f" {asked.optimizer.optimizer} at {asked.learning_rate.peak:g}",
        f"device {device}, precision {built.regime.name}; --plan shows all of the plan",
    ]


def _heading(built: BuiltPhase) -> str:
    phase, side = built.phase, built.images.training.image_size
    first, last = built.plan.epochs_before + 1, built.plan.last_epoch
    start = "" if phase.number == 1 else f", starting with the average of phase {phase.number - 1}'s checkpoints"
    return f"phase {phase.number} of {phase.count}: epochs {first} to {last} at {side} x {side}{start}"


def _whole(built: BuiltPhase) -> list[str]:
    asked, device = built.options, built.site.world.device
    is_synthetic, others = asked.data.data == "synthetic", asked.validation.validate_checkpoints
    lines = [
        f"model {asked.model.model}, {built.placement.network.parameters:,} parameters",
        *built.images.found(),
        _images(built),
        *_decoding(built),
        _machine(built),
        *input.input_lines(built.images, asked.data, asked.augmentation, device=device),
        *_numerics(asked, regime=built.regime, device=device),
        *_workspace(built),
        *_weights(built),
        *built.placement.lines(),
        *_updates(built),
        *built.plan.lines(),
        *_warmup(built.plan),
        *_resolutions(asked.fine_tuning),
        *_balance(built),
        *_views(asked),
        *([f"then validates each checkpoint in {others}"] if others and not is_synthetic else []),
        _optimizer(built),
    ]
    if is_synthetic and asked.validation.validation_mode != "none":
        lines.append("note: synthetic data has no validation images, so nothing is validated")
    return lines


def _images(built: BuiltPhase) -> str:
    """What the model gets; of the user's own photos, everything else has been printed."""
    images = built.images
    words = f"images {images.shape()}" if images.where else f"data {images.kind}: {images.describe()}"
    return f"{words}, augment {_augment(built)}"


def _changes(built: BuiltPhase) -> list[str]:
    rule = built.options.optimizer
    momentum = f"momentum {rule.momentum:g}" if rule.momentum else "no momentum"
    return [
        *_weights(built),
        *built.placement.lines(),
        *built.plan.lines(),
        f"optimizer {rule.optimizer}, {momentum}; augment {_augment(built)}, no mixing",
    ]


def _augment(built: BuiltPhase) -> str:
    """The crop, then what else happens to the pixels."""
    asked = built.options.augmentation
    details = {
        "randaugment": f" ({asked.randaugment_ops} of magnitude {asked.randaugment_magnitude})",
        "autoaugment": f" ({asked.autoaugment_policy})",
    }
    reach = "" if asked.shift_reach == "auto" else f" by at most {counted(asked.shift_reach, 'pixel')}"
    beyond = {"zeros": "black", "reflect": "reflected"}[asked.shift_padding]
    crop = built.images.augment(asked.augment)
    further = {
        f"shifted{reach}, {beyond} beyond": crop.startswith("shift")
        and (asked.shift_reach, asked.shift_padding) != ("auto", "zeros"),
        "alternating flips": asked.flip == "alternating" and crop.endswith("flip"),
        f"vertical flip {asked.vertical_flip:g}": asked.vertical_flip,
        f"{asked.auto_augment}{details.get(asked.auto_augment, '')}": asked.auto_augment != "none",
        f"colour jitter {asked.color_jitter:g}": asked.color_jitter,
        f"random erasing {asked.random_erasing:g}": asked.random_erasing,
        f"cutout {asked.cutout}": asked.cutout,
        f"{asked.repeated_augmentation} copies of each image in an update": asked.repeated_augmentation > 1,
    }
    return ", ".join([crop, *(words for words, is_asked in further.items() if is_asked)])


def _views(asked: commands.TrainOptions) -> list[str]:
    """Test-time augmentation, where something is validated."""
    if asked.views.tta == "none" or asked.validation.validation_mode == "none":
        return []
    return [f"validation averages the logits of {views.describe(asked.views.tta)}"]


def _decoding(built: BuiltPhase) -> list[str]:
    data = built.options.data
    if data.data not in PHOTO_KINDS:
        return []
    where = input.decode_device(data, built.images.train, built.site.world.device)
    return [f"photos are decoded by {input.decoder(where)}"]


def _machine(built: BuiltPhase) -> str:
    site, count = built.site, built.launch.division.processes
    loaders = counted(input.workers(built.options.data, count), "loader thread")
    threads = f"{counted(site.threads, 'CPU thread')} and {loaders}"
    return f"device {site.world.device}, {threads}{' per process' if count > 1 else ''}"


def _numerics(asked: commands.TrainOptions, *, regime: Regime, device: torch.device) -> list[str]:
    written = "stochastic rounding" if rounding(asked, regime=regime) else "rounding to nearest"
    lines = [f"precision {regime.describe(device)}" + (f", {written}" if regime.is_half else "")]
    if facts.is_scaled(asked.numerics, asked.machine):
        lines.append(f"loss scale {_loss_scale(asked)}")
    if asked.numerics.half_partial:
        lines.append(describe_half_partials(regime, device))
    return lines


def _loss_scale(asked: commands.TrainOptions) -> str:
    numerics = asked.numerics
    initial, final = numerics.initial_loss_scaling, numerics.loss_scaling
    if numerics.auto_loss_scaling:
        period = numerics.auto_loss_scaling_period
        every = "update" if period == 1 else f"{period} updates"
        return f"automatic, from {final:g}, adjusted every {every}"
    if initial is not None and initial != final:
        with named_option("initial_loss_scaling"):
            steps = doublings(initial, final, epochs=asked.training.epochs)
        return ", ".join(f"{value:g} from epoch {epoch}" for epoch, value in steps)
    return f"{final:g}"


def _workspace(built: BuiltPhase) -> list[str]:
    share = workspace_share(built.options, built.site.grid)
    return [] if share is None else [describe_workspace(share, built.site.world.device)]


def _updates(built: BuiltPhase) -> list[str]:
    """How they run on CUDA; on a CPU there is one way."""
    if built.site.world.device.type != "cuda":
        return []
    reason = built.uncaptured
    return [f"updates: not captured: {reason}" if reason else "updates: captured as CUDA graphs"]


def _weights(built: BuiltPhase) -> list[str]:
    """Which weights it starts with, if not random ones, and which are trained, if not all."""
    placement, setup = built.placement, built.placement.setup
    lines = [f"starts with the weights of {setup.initial}"] if setup.initial else []
    lines += [setup.pretrained.describe(built.images.class_names)] if setup.pretrained else []
    patterns, trains = built.options.training.trainable, f"trains {placement.network.trained_parameters:,}"
    if setup.first_trained is not None:
        also = ", whatever --trainable names" if patterns else ""
        lines.append(f"{trains} parameters, from {setup.first_trained}; the layers before it are frozen{also}")
    elif built.options.training.freeze is not None:
        frozen = f"{trains} of {placement.network.parameters:,} parameters: --freeze {built.options.training.freeze}"
        epochs = built.options.training.unfreeze_after
        later = built.options.training.freeze_after
        if later:
            lines.append(f"{trains} parameters, without --freeze {built.options.training.freeze} after epoch {later:g}")
        else:
            lines.append(f"{frozen} for {counted(epochs, 'epoch')}, then all" if epochs else frozen)
    elif patterns:
        lines.append(f"{trains} of {placement.network.parameters:,} parameters: those that match {' '.join(patterns)}")
    return lines


def _warmup(plan: Plan) -> list[str]:
    if not plan.schedule.warms_up(plan.updates - plan.updates_before - 1):
        return []
    return ["note: all updates are warm-up, so the learning rate never reaches its peak; --warmup-epoch shortens it"]


def _resolutions(asked: options.FineTuning) -> list[str]:
    sides = values.resolutions(asked.resolution_schedule) or {}
    words = ", ".join(f"{side} x {side} from epoch {epoch}" for epoch, side in sides.items())
    return [f"training images: {words}"] if words else []


def _balance(built: BuiltPhase) -> list[str]:
    """What is done about classes of unequal sizes."""
    training, labels = built.options.training, built.images.train.labels
    lines = []
    if training.sampler == "balanced":
        lines.append("sampler balanced: every class equally often per epoch")
    if training.class_weights == "balanced":
        weights = [weight for weight in class_weights(labels, built.images.classes) if weight]
        lines.append(f"class weights balanced: {min(weights):.3g} to {max(weights):.3g}")
    return lines


def _optimizer(built: BuiltPhase) -> str:
    asked, device = built.options, built.site.world.device
    state = _optimizer_state(asked.parallel, device, replicas=built.launch.division.replicas)
    return f"optimizer {asked.optimizer.optimizer}{_layer_decay(asked.optimizer)}{state}, seed {asked.run.seed}"


def _layer_decay(rule: options.Optimizer) -> str:
    return "" if rule.layer_decay == 1.0 else f", rate times {rule.layer_decay:g} per block before the classifier"


def _optimizer_state(parallel: options.Parallel, device: torch.device, *, replicas: int) -> str:
    """Where the optimizer's state is; empty for the usual place. `replicas`: those that run."""
    words = ", state sharded over the replicas" if parallel.enable_optimizer_rts and replicas > 1 else ""
    if not parallel.offload_optimizer:
        return words
    if device.type == "cpu":
        return f"{words}, state in host memory (as always on a CPU: --offload-optimizer has no effect)"
    return f"{words}, state in host memory, copied to the device bucket by bucket"
