"""What a phase is made of before it lies on devices: its network, images, loss and loaders."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from falconet.checkpoint.initial_weights import InitialWeights
from falconet.config import commands
from falconet.config.values import resolutions
from falconet.data import mixing
from falconet.data.crops import Crops
from falconet.data.dataset import Dataset
from falconet.data.image_files import BadImages
from falconet.data.input import Input
from falconet.data.keyed import IntArray
from falconet.data.loader import BatchShape, IdleLoader, Loader, LoaderByEpoch, SyntheticLoader
from falconet.data.order import balanced, class_weights
from falconet.data.preprocessing import Normalise
from falconet.data.readers import reader_for
from falconet.errors import named_option
from falconet.evaluation import saved_model
from falconet.evaluation.loss import Loss, MultiLabelLoss, WeightedLoss, presence_weights
from falconet.models import zoo
from falconet.models.depth import rate_shares
from falconet.models.freezing import Frozen, count_trained, frozen_before, frozen_by, trained_by
from falconet.models.speednet import WHITENED_FROM, SpeedNet
from falconet.models.zoo import build_model
from falconet.numerics.precision import Regime
from falconet.optim.optimizers import decay_groups
from falconet.parallel.grid import Grid
from falconet.report.console import Say
from falconet.train.step import Prepare

AHEAD = 2  # updates whose images are on the device in any case: the one in use, and the next
WHITENED_AT_ONCE = 500  # images: their patches take 46 MB at 32 x 32
TrainingLoader = Loader | SyntheticLoader | LoaderByEpoch | IdleLoader


@dataclass(frozen=True, kw_only=True)
class Network:
    """The whole network of a phase, on the host until it is built, and what of it is frozen."""

    model: nn.Module  # only to look at, until it is built
    frozen: Frozen
    later: frozenset[str]  # names of trained weights that are frozen at first

    @property
    def parameters(self) -> int:
        return zoo.count_parameters(self.model)

    @property
    def trained_parameters(self) -> int:
        """The parameters that the first update trains."""
        return count_trained(self.model) - sum(self.model.get_parameter(name).numel() for name in self.later)

    @property
    def layers(self) -> str:
        """The layers as torch prints them."""
        return str(self.model)

    @property
    def weights(self) -> list[str]:
        """The names of all weights."""
        return [name for name, _ in self.model.named_parameters()]

    @property
    def trained(self) -> list[str]:
        """The names of all trained weights, in the model's order."""
        return [name for name, weight in self.model.named_parameters() if weight.requires_grad]

    @property
    def numbers(self) -> Mapping[str, int]:
        """The numbers of the trained weights in the update rule's order."""
        return numbered(self.model)

    def rate_shares(self, decay: float) -> Mapping[str, float]:
        """The share of the learning rate that each weight gets by its depth."""
        return rate_shares(self.model, decay)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a model is placed from, whole or in stages."""

    options: commands.TrainOptions
    images: Dataset
    shape: BatchShape
    grid: Grid
    regime: Regime
    note: Say
    initial: Path | None = None  # the weights to start with; None: random ones
    pretrained: InitialWeights | None = None  # or those of another training
    first_trained: str | None = None  # layers that run before it are frozen
    unfrozen_at: int | None = None  # the first update that trains everything; None: what is frozen stays so
    frozen_from: int | None = None  # the first update that does not train what is frozen; None: there is none
    prepare: Prepare | None = None  # called before the first update of each shape
    is_new: bool = False  # whether the weights are drawn here, and not read later

    def new_network(self) -> Network:
        """The whole network in fp32, on the host."""
        model = build_model(self.options.model, classes=self.images.classes, seed=self.options.run.seed)
        if self.initial is not None:
            saved_model.load_initial(model, self.initial, name=self.options.model.model, note=self.note)
        if self.pretrained is not None and self.pretrained.is_here:  # a plan downloads none
            with named_option("pretrained"):
                self.pretrained.load(model, name=self.options.model.model, class_names=self.images.class_names)
        frozen = self._frozen(model)
        # What is frozen for a while is held by the optimizer all the same: the step freezes it.
        if self.unfrozen_at is None and self.frozen_from is None:
            frozen.set(model)
        return Network(model=model, frozen=frozen, later=frozenset() if self.unfrozen_at is None else frozen.weights)

    def whiten(self, model: nn.Module) -> None:
        """Set the first filters of a new model by the training images, if it whitens them."""
        is_read = self.initial is not None or self.pretrained is not None
        if not isinstance(model, SpeedNet) or not model.whitens or not self.is_new or is_read:
            return
        source, normalise = self.images.train, self.normalise
        crops = Crops(preprocessing=self.images.training)
        reader = reader_for(source, crops=crops, bad=BadImages(None, note=self.note))
        chosen = np.linspace(0, len(source), min(len(source), WHITENED_FROM), endpoint=False, dtype=np.int64)

        def normalised(indices: IntArray) -> Tensor:
            pixels = np.empty((len(indices), reader.size, reader.size, 3), np.uint8)
            is_good = reader.read(indices, epoch=0, out=pixels)
            values: Tensor = normalise(torch.from_numpy(pixels[is_good]).permute(0, 3, 1, 2).to(self.device))
            return values

        model.whiten(normalised(part) for part in np.array_split(chosen, -(-len(chosen) // WHITENED_AT_ONCE)))

    def _frozen(self, model: nn.Module) -> Frozen:
        training = self.options.training
        evaluates = training.frozen_batchnorm == "statistics"
        if self.first_trained is not None:
            with named_option("fine_tune_first_trainable_layer"):
                return frozen_before(model, self.first_trained)
        if training.freeze is not None:
            with named_option("freeze"):
                return frozen_by(model, training.freeze, evaluates=evaluates)
        with named_option("trainable"):
            return trained_by(model, training.trainable, evaluates=evaluates)

    @property
    def device(self) -> torch.device:
        return self.grid.world.device

    @property
    def normalise(self) -> Normalise:
        return self.images.normalise(self.device)

    def normalise_to(self, channels: int) -> Normalise:
        """The normalisation into the regime's own format, unless images are mixed, which takes full precision."""
        is_mixed = mixing.mixes_or_cuts(self.options.augmentation)
        is_direct = self.device.type == "cuda" and not is_mixed
        dtype = self.regime.formats(self.device)["activations"] if is_direct else torch.float32
        return self.images.normalise(self.device, dtype=dtype, channels=channels)

    @property
    def loss(self) -> Loss:
        classes, smoothing = self.images.classes, self.options.augmentation.label_smoothing
        is_weighted, sets = self.options.training.class_weights != "none", self.images.label_sets
        if sets is not None:
            present = presence_weights(self.images.train.labels, sets) if is_weighted else None
            return MultiLabelLoss(
                classes,
                smoothing,
                sets=torch.from_numpy(sets).to(self.device),
                weights=None if present is None else torch.tensor(present, device=self.device),
            )
        if not is_weighted:
            return Loss(classes, smoothing)
        weights = torch.tensor(class_weights(self.images.train.labels, classes), device=self.device)
        return WeightedLoss(classes, smoothing, weights=weights)

    @property
    def seed(self) -> int:
        """The seed of dropout: different in every process, or in every stage but the same in all replicas."""
        alike = self.options.parallel.identical_replica_seeding
        return self.options.run.seed + ((self.grid.stages if alike else self.grid.world).rank << 40)

    @property
    def input(self) -> Input:
        return Input(data=self.options.data, regime=self.regime, world=self.grid.world, note=self.note)

    @property
    def images_held(self) -> int:
        """Images on the device in updates, and in validations between them: delivered, or decoded there, read ahead."""
        shape, side = self.shape, self.images.training.image_size
        ahead = self.input.images_on_device(self.images.train, shape=shape, side=side)
        return AHEAD * shape.micro_batch * shape.accumulation + ahead

    def training_loader(self) -> TrainingLoader:
        sides = resolutions(self.options.fine_tuning.resolution_schedule)
        if not sides:
            return self._loader_of(self.images)
        return LoaderByEpoch(
            {epoch - 1: self._loader_of(self.images.trained_at(side)) for epoch, side in sides.items()}
        )

    def _loader_of(self, images: Dataset) -> Loader | SyntheticLoader:
        crops = images.training_crops(self.options.augmentation, seed=self.options.run.seed)
        is_balanced = self.options.training.sampler == "balanced"
        order = balanced(images.train.labels, seed=self.options.run.seed) if is_balanced else None
        return self.input.training_loader(images, crops=crops, shape=self.shape, order=order)


def numbered(model: nn.Module) -> dict[str, int]:
    """The number of each trained weight in the update rule's order."""
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: number for number, p in enumerate(p for group in decay_groups(model) for p in group)}
