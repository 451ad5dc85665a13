"""From options to model, data, optimizer and step: the only place that knows all of them."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial

from torch import nn
from torch.optim import Optimizer

from falconet.checkpoint import disk
from falconet.checkpoint.state import TrainState
from falconet.checkpoint.writer import Company, SharedWriter, Writer
from falconet.config import commands, facts
from falconet.config.fields import value_or
from falconet.config.values import rate_share, resolutions, share_of
from falconet.data.dataset import Dataset, published_dataset
from falconet.data.loader import BatchShape
from falconet.data.resident import require_size
from falconet.data.storage import ArraySource
from falconet.errors import ConfigError, named_option
from falconet.evaluation.evaluate import require_accuracy
from falconet.evaluation.saved_model import refuse_download
from falconet.models import zoo
from falconet.models.depth import orthogonal_names
from falconet.models.freezing import matching
from falconet.models.norms import move_once
from falconet.numerics.loss_scale import AutomaticScale, FixedScale, Offender, Scale, SteppedScale
from falconet.numerics.precision import (
    REGIMES,
    Regime,
    allow_half_partials,
    limit_workspace,
)
from falconet.numerics.rounding import Part, Rounding
from falconet.optim import ema
from falconet.optim.half_optimizers import HalfLars, HalfOptimizer
from falconet.optim.offload import HostedState
from falconet.optim.optimizers import (
    Lars,
    Treatment,
    build_optimizer,
    build_scaled_optimizer,
    decay_groups,
    undecayed_names,
)
from falconet.parallel import world
from falconet.parallel.batchnorm import span_batchnorm
from falconet.parallel.collectives import Processes
from falconet.parallel.data_parallel import AveragedReplicas, OneReplica, Replicas
from falconet.parallel.grid import Grid, divide
from falconet.parallel.slices import is_channels_last
from falconet.parallel.world import World, keep_compiled, open_world
from falconet.parallel.zero import Piece, ShardedReplicas
from falconet.report import console
from falconet.report.console import Say, Screen, counted
from falconet.train import defaults, processes
from falconet.train.capture import WARM, CapturedStep, Preparing
from falconet.train.placement import Placement, WholeModel
from falconet.train.plan import Phase, Plan, phases_of, plan_of
from falconet.train.preparation import Launch
from falconet.train.setup import Setup, numbered
from falconet.train.step import LocalStep, Prepare, Step


@dataclass(frozen=True, kw_only=True)
class Site:
    """What all phases of a run share in this process."""

    world: World
    grid: Grid
    threads: int
    screen: Screen  # silent in all processes but the first
    note: Say  # for messages about this process alone


def open_site(launch: Launch) -> Site:
    """Open the device, or join the processes that a launcher started."""
    options = launch.loaded.options
    threads = _threads(launch)
    with named_option("model_cache_path"):
        keep_compiled(options.machine.model_cache_path)
    world = open_world(
        options.machine.device,
        threads=threads,
        deterministic=options.machine.deterministic,
        place=launch.place,
        timeout=options.parallel.collective_timeout,
    )
    # A plan is printed by one process, however many processes it is for.
    grid = divide(world, stages=launch.division.stages if world.size > 1 else 1)
    words = launch.conventions.words
    return Site(
        world=world,
        grid=grid,
        threads=threads,
        screen=console.screen_of(world, words=words),
        note=console.spoken(world, words=words),
    )


def _threads(launch: Launch) -> int:
    """The restored run's number, because it changes bits; with another number of processes it means nothing."""
    runtime = launch.restored.manifest.runtime if launch.restored else {}
    stored = runtime.get("threads") if runtime.get("processes", 1) == launch.division.processes else None
    return value_or(launch.loaded.options.machine.threads, stored or world.threads(launch.division.processes))


def phases_built(launch: Launch, site: Site) -> list["BuiltPhase"]:
    """All phases of a run, in order."""
    built = [BuiltPhase(launch, site)]
    for _ in phases_of(launch.loaded.options)[1:]:
        built.append(BuiltPhase(launch, site, before=built[-1]))
    return built


def with_images(launch: Launch) -> Launch:
    """The run with its data open, once for everything that needs it; images that are made up depend on the batch."""
    options = launch.loaded.options
    if launch.images is not None or not facts.is_stored(options.data):
        return launch
    return replace(launch, images=_open_images(launch, global_batch=options.data.micro_batch))


def _open_images(launch: Launch, *, global_batch: int) -> Dataset:
    """The data of a run; a plan alone does not need the files."""
    options = launch.loaded.options
    if options.run.plan:
        percentage = options.training.dataset_percentage
        published = published_dataset(options.data, model=options.model.model, percentage=percentage)
        if published is not None:
            return published
    if launch.restored:
        refuse_download(launch.loaded)
    return defaults.open_images(options, global_batch=global_batch)


def limit_libraries(options: commands.TrainOptions, grid: Grid) -> None:
    """Set what the CUDA libraries may do in this process; before the first convolution, which reads the limit."""
    device, share = grid.world.device, workspace_share(options, grid)
    if options.numerics.half_partial:
        allow_half_partials(device)
    if share is not None:
        limit_workspace(share, device)


def workspace_share(options: commands.TrainOptions, grid: Grid) -> float | None:
    """The share of the device's memory that a convolution may take beside its data; None: no limit."""
    shares = options.workspace.available_memory_proportion
    return share_of(shares, stage=grid.stages.rank, stages=grid.stages.size)


def _check_labels(images: Dataset, launch: Launch) -> None:
    """Refuse what is not defined for photos with several labels."""
    if images.label_sets is None:
        return
    if launch.loaded.options.training.sampler == "balanced":
        raise ConfigError(
            "--sampler: got 'balanced', but photos with several labels have no one class to draw by; expected"
            " --class-weights balanced"
        )
    if not launch.conventions.takes_several_labels:
        require_accuracy(images, "falconet train")


def _check_resolutions(options: commands.TrainOptions, images: Dataset) -> None:
    """Memory is planned for the full size, so no image may be larger."""
    most = images.preprocessing.image_size
    with named_option("resolution_schedule"):
        for side in (resolutions(options.fine_tuning.resolution_schedule) or {}).values():
            zoo.check_image_size(options.model.model, side)
            if side > most:
                raise ConfigError(f"got a side of {side}, expected at most --image-size, which is {most}")


def _check_resident(options: commands.TrainOptions, images: Dataset) -> None:
    """Refuse images that cannot be kept on the device as they are, before anything is printed or written."""
    if options.data.dataset_location == "device" and isinstance(images.train, ArraySource):
        require_size(images.train, images.training)


class BuiltPhase:
    """One phase of a run in this process: what was decided for it, and how its parts are built."""

    def __init__(self, launch: Launch, site: Site, *, before: "BuiltPhase | None" = None) -> None:
        """`before`: the phase before this one. Only the data is opened here; the model is built by `new_state`."""
        self.launch, self.site = launch, site
        self.phase: Phase = phases_of(launch.loaded.options)[before.phase.number if before else 0]
        self.options = self.phase.options
        restored = launch.restored
        self.restored = restored if restored and restored.manifest.progress.phase == self.phase.number else None
        self.regime = REGIMES[self.options.machine.precision]
        self.shape = BatchShape(
            micro_batch=self.options.data.micro_batch,
            accumulation=processes.accumulation_of(self.phase, launch.division),
            replicas=launch.division.replicas,
            replica=site.grid.replicas.rank,
            joined=processes.joined(self.options.parallel, launch.division),
            folded=processes.folded(self.options.parallel, launch.division),
        )
        self.full_size: Dataset = before.full_size if before else self._images()
        _check_labels(self.full_size, launch)
        self.images = self.full_size.at_reduced_size() if self.phase.is_reduced else self.full_size
        _check_resolutions(self.options, self.images)
        _check_resident(self.options, self.images)
        planned = partial(plan_of, self.phase, images=len(self.images.train), shape=self.shape)
        plan = planned(updates_before=before.plan.updates if before else 0)
        if self.restored:
            plan = planned(updates_before=plan.start_of(self.restored.manifest.progress))
        self.plan: Plan = plan
        self.offender = Offender(site.world.device)
        self.placement: Placement = self._place()

    def _images(self) -> Dataset:
        return self.launch.images or _open_images(self.launch, global_batch=self.shape.global_batch)

    def _place(self) -> Placement:
        """The whole model in each process, or a stage of it."""
        # A later phase starts with what the one before left, a restored run with its checkpoint.
        is_new = not self.launch.restored and self.phase.number == 1
        setup = Setup(
            options=self.options,
            images=self.images,
            shape=self.shape,
            grid=self.site.grid,
            regime=self.regime,
            note=self.site.note,
            initial=self.options.training.init_path if is_new else None,
            pretrained=self.launch.initial if is_new else None,
            first_trained=self.phase.first_trained,
            unfrozen_at=self.plan.unfrozen_at,
            frozen_from=self.plan.frozen_from,
            prepare=self._preparation(),
            is_new=is_new,
        )
        stages = self.launch.division.stages
        if stages == 1:
            return WholeModel(setup)
        from falconet.train.pipeline_step import StagedModel  # torch's pipelines take a second to import

        stored = self.restored.manifest.runtime.get("splits") if self.restored else None
        return StagedModel(setup, stages=stages, stored=stored)

    def _preparation(self) -> Prepare | None:
        """Does not hold the phase: the step that holds it must end with the phase."""
        if self.site.world.device.type != "cuda":
            return None
        return partial(_compile_ahead, launch=self.launch, site=self.site, network=self.options.model.model)

    @cached_property
    def model(self) -> nn.Module:
        """What this process trains, on its device."""
        return self.placement.build()

    @cached_property
    def replicas(self) -> Replicas:
        parallel = self.options.parallel
        return build_replicas(
            self.model,
            self.site.grid.replicas,
            bucket=parallel.bucket_size,
            sharded=parallel.enable_optimizer_rts,
        )

    def new_state(self) -> TrainState:
        """The model and its optimizer before the first update."""
        options, grid, device = self.options, self.site.grid, self.site.world.device
        treatment = self._treatment()
        with named_option("batchnorm_span"):
            span_batchnorm(self.model, grid, span=options.parallel.batchnorm_span // self.shape.joined)
        if options.training.batchnorm_per_update:
            move_once(self.model, micro_batches=self.shape.as_run.accumulation)
        shards = self.replicas if isinstance(self.replicas, ShardedReplicas) else None
        if shards and options.optimizer.optimizer == "lars":
            _require_one_format(self.model, treatment.undecayed)
        scale = loss_scale(options, self.plan, regime=self.regime, world=self.site.world)
        trained = shards.trained if shards else self.model
        optimizer = (
            build_scaled_optimizer(
                trained, options.optimizer, rounding=rounding(options, regime=self.regime), treatment=treatment
            )
            if scale
            else build_optimizer(trained, options.optimizer, treatment=treatment)
        )
        state = TrainState(
            self.model,
            optimizer,
            scale=scale,
            shards=shards,
            stages=self.placement.stages(),
            rank=grid.replicas.rank,
            copies=grid.replicas.size,
        )
        attach_pieces(optimizer, self.model, shards=shards, numbers=self.placement.network.numbers)
        if options.parallel.offload_optimizer and device.type != "cpu":
            state.hosted = HostedState(optimizer, bucket_megabytes=options.parallel.bucket_size, device=device)
        if options.optimizer.ema_half_life is not None:
            decay = ema.decay_for(options.optimizer.ema_half_life, self.plan.updates_per_epoch)
            state.ema = ema.Ema(self.model, decay)
        return state

    def _treatment(self) -> Treatment:
        rule = self.options.optimizer
        return Treatment(
            undecayed=self._undecayed(),
            shares=self._shares(),
            later=self.placement.network.later,
            orthogonal=orthogonal_names(self.placement.network.model) if rule.optimizer == "muon" else frozenset(),
        )

    def _shares(self) -> dict[str, float]:
        """The shares of the learning rate, by the weights' depth and by their names."""
        rule = self.options.optimizer
        shares = dict(self.placement.network.rate_shares(rule.layer_decay)) if rule.layer_decay != 1.0 else {}
        for pattern, factor in map(rate_share, rule.lr_share):
            with named_option("lr_share"):
                for name in matching(self.placement.network.weights, [pattern]):
                    shares[name] = shares.get(name, 1.0) * factor
        return shares

    def _undecayed(self) -> frozenset[str] | None:
        """The weights that are neither decayed nor scaled by lars; None: vectors."""
        options = self.options.optimizer
        if options.optimizer == "lars" and options.lars_skip:
            # Matched against all weights: a pattern may name those that --trainable freezes.
            with named_option("lars_skip"):
                named = matching(self.placement.network.weights, options.lars_skip)
            return named & frozenset(self.placement.network.trained)
        return undecayed_names(self.model, options.weight_decay_exclude)

    def step(self, state: TrainState, *, preparing: Preparing = nullcontext, warm: int = WARM) -> Step:
        """`preparing`: the context in which kernels are compiled and updates captured. `warm`: updates before that."""

        def capture(step: LocalStep) -> Step:
            if self.uncaptured:
                return step
            return CapturedStep(step, self.site.world, note=self.site.note, preparing=preparing, warm=warm)

        return self.placement.step(state, replicas=self.replicas, offender=self.offender, capture=capture)

    @property
    def uncaptured(self) -> str | None:
        """Why updates are not captured as CUDA graphs; None: they are."""
        if self.site.world.device.type != "cuda":
            return "there is no CUDA device"
        if not self.options.machine.capture:
            return "--no-capture"
        if self.placement.uncaptured:
            return self.placement.uncaptured
        if self.options.parallel.offload_optimizer:
            return "the optimizer's state is in host memory"
        return None


def _compile_ahead(rehearse: Callable[[], None], *, launch: Launch, site: Site, network: str) -> None:
    """Compile our kernels that an update needs, before it launches them one by one."""
    from falconet.numerics.kernels.compilation import Compilation  # Triton comes with CUDA only

    def report(number: int) -> None:
        if launch.conventions.shows_compilation:
            site.screen.line(f"compiling {counted(number, 'kernel')} for {network}")

    place = launch.place if site.world.size > 1 else None  # a process that tries something is alone
    Compilation(
        workers=world.cores(),
        report=report,
        note=site.screen.line,
        number=place.local_rank if place else 0,
        processes=place.local_size if place else 1,
        meet=lambda: site.world.barrier("compiling kernels"),
    ).ahead(rehearse)


def loss_scale(options: commands.TrainOptions, plan: Plan, *, regime: Regime, world: World) -> Scale | None:
    """The scale that the options ask for; None: neither they nor the regime need one."""
    numerics = options.numerics
    initial, final = numerics.initial_loss_scaling, numerics.loss_scaling
    if not facts.is_scaled(numerics, options.machine):
        return None
    if numerics.auto_loss_scaling:
        return AutomaticScale(
            dtype=regime.compute,
            device=world.device,
            initial=final,
            period=numerics.auto_loss_scaling_period,
            sum=world.sum,
        )
    if initial is not None and initial != final:
        with named_option("initial_loss_scaling"):
            return SteppedScale(
                initial,
                final,
                epochs=options.training.epochs,
                updates_per_epoch=plan.updates_per_epoch,
                device=world.device,
                first=plan.updates_before,
            )
    return FixedScale(final, device=world.device)


def rounding(options: commands.TrainOptions, *, regime: Regime) -> Rounding | None:
    return Rounding(options.run.seed) if options.numerics.enable_stochastic_rounding and regime.is_half else None


def build_replicas(model: nn.Module, world: World, *, bucket: float, sharded: bool) -> Replicas:
    """The replicas of `model` in `world`; a world of one has nothing to divide. `bucket`: megabytes."""
    if not isinstance(world, Processes):
        return OneReplica()
    with named_option("enable_optimizer_rts"):
        return (ShardedReplicas if sharded else AveragedReplicas)(model, world, bucket_megabytes=bucket)


def attach_pieces(
    optimizer: Optimizer, model: nn.Module, *, shards: ShardedReplicas | None, numbers: Mapping[str, int] | None = None
) -> None:
    """Give an optimizer that holds pieces what it needs of the whole: norms for lars, numbers for rounding noise.

    `numbers`: those of the weights in the whole model, where `model` is a stage of it. Sending updated weights to the
    other processes is left to `sharded_step`.
    """
    if shards and isinstance(optimizer, Lars | HalfLars):
        optimizer.norms = shards.norms
        adapting = {p for group in optimizer.param_groups if group["adapts"] for p in group["params"]}
        shards.adapt([piece for piece in shards.pieces if piece.weights in adapting])
    if isinstance(optimizer, HalfOptimizer):
        numbers = numbers or numbered(model)
        whole = {p: Part(numbers[name]) for name, p in model.named_parameters() if p.requires_grad}
        optimizer.parts = (
            {piece.weights: _part(piece, whole[piece.whole]) for piece in shards.pieces}  # type: ignore[index]
            if shards
            else whole
        )


def _part(piece: Piece, whole: Part) -> Part:
    """The rounding's numbers of a piece, from those of its whole."""
    if not is_channels_last(piece.whole):
        return whole._replace(first=piece.begin)
    _, channels, height, width = piece.whole.shape
    return whole._replace(first=piece.begin, channels=channels, pixels=height * width)


def _require_one_format(model: nn.Module, undecayed: frozenset[str] | None) -> None:
    """The norms of sharded weights are summed in one message, so all that lars scales must have one format."""
    if len({p.dtype for p in decay_groups(model, undecayed)[0]}) > 1:
        raise ConfigError(
            "--lars-skip: leaves weights of two number formats to lars, which --enable-optimizer-rts cannot shard;"
            " expected patterns that match the weights of all norm layers, which are fp32"
        )


def checkpoint_writer(world: World, *, timeout: float) -> Writer:
    """One process writes whole tensors, several each write their share. `timeout`: seconds."""
    if world.size == 1:
        return Writer()
    return SharedWriter(Company(rank=world.rank, size=world.size, token=world.once(disk.token), timeout=timeout))
