"""What measures a model on the validation images."""

from collections.abc import Callable

from torch import nn

from falconet.config import schema, sections
from falconet.config.ranges import value_or
from falconet.data.feed import singly
from falconet.data.loader import BatchShape
from falconet.numerics.precision import Regime
from falconet.parallel.world import World
from falconet.report.screen import Say
from falconet.train.evaluate import Evaluation, Measure, evaluate
from falconet.wiring import loading
from falconet.wiring.images import Images


def validation_batch(options: schema.TrainOptions) -> int:
    """Images of one batch of a validation on one replica; stages hand on batches of one size alone."""
    asked, micro_batch = options.data.validation_batch_size, options.data.micro_batch_size
    return micro_batch if options.parallel.pipeline_splits else value_or(asked, micro_batch)


def evaluator(images: Images, data: sections.Data, *, regime: Regime, world: World, note: Say) -> Measure:
    """Measures a model on the validation images."""
    batch = value_or(data.validation_batch_size, data.micro_batch_size)
    shape = BatchShape(micro_batch=batch, replicas=world.size, replica=world.rank)
    loader = loading.evaluation_loader(images, data, shape=shape, regime=regime, world=world, note=note)
    normalise = images.normalise(world.device)

    def measure(model: nn.Module, stopping: Callable[[], bool]) -> Evaluation:
        batches = singly(loader.batches(), device=world.device, ring=loader.ring)
        return evaluate(model, batches, normalise=normalise, regime=regime, world=world, stopping=stopping)

    return measure
