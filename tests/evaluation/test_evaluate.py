"""Exact evaluation against a count by hand: every image once, for any batch size."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from falconet.data.buffers import Batch, PixelRows
from falconet.data.crops import Crops
from falconet.data.image_files import BadImages
from falconet.data.loader import BatchShape, EvaluationLoader
from falconet.data.preprocessing import Normalise, Preprocessing
from falconet.data.readers import reader_for
from falconet.data.storage import ArraySource
from falconet.errors import DataError, Interrupted, WorldError, memory_shortage
from falconet.evaluation.evaluate import Evaluation, evaluate
from falconet.numerics.precision import REGIMES
from falconet.parallel.shared_failure import FailedTogetherError
from falconet.parallel.world import World

RAW = Preprocessing(image_size=1, resize=1, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
ONE = World(device=torch.device("cpu"))


class Table(nn.Module):
    """The logits of image number n, which is the colour of its only pixel, are row n of a table."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits
        self.seen = []

    def forward(self, images):
        numbers = (images[:, 0, 0, 0] * 255).round().long()
        self.seen += numbers.tolist()
        return self.logits[numbers]


def loader(labels, batch, *, replicas=1, replica=0):
    numbers = np.arange(len(labels), dtype=np.uint8)
    images = np.broadcast_to(numbers[:, None, None, None], (len(labels), 1, 1, 3)).copy()
    source = ArraySource(images, labels, tuple(map(str, range(labels.max() + 1))))
    reader = reader_for(source, crops=Crops(preprocessing=RAW), bad=BadImages(0, note=print))
    shape = BatchShape(micro_batch=batch, replicas=replicas, replica=replica)
    return EvaluationLoader(PixelRows(reader), labels=labels, shape=shape)


def measure(model, batches, *, world=ONE, regime="32.32"):
    return evaluate(model, batches, normalise=Normalise(RAW), regime=REGIMES[regime], world=world)


def by_hand(logits, labels):
    """Images, correct top-1, correct top-5, mean loss, in float64."""
    z = logits.double().numpy()
    own = z[np.arange(len(labels)), labels]
    better = (z > own[:, None]).sum(1)
    losses = np.log(np.exp(z).sum(1)) - own
    return len(labels), (better == 0).sum(), (better < 5).sum(), pytest.approx(losses.mean(), rel=1e-12)


@st.composite
def problems(draw):
    images, classes, seed = draw(st.integers(1, 60)), draw(st.integers(2, 12)), draw(st.integers(0, 10**6))
    noise = np.random.default_rng(seed)
    logits = torch.from_numpy(noise.standard_normal((images, classes)).astype(np.float32))
    return logits, noise.integers(0, classes, images)


@settings(deadline=None)
@given(problems(), st.integers(1, 70))
def test_accuracies_and_loss_equal_a_count_by_hand_for_any_batch_size(problem, batch):
    logits, labels = problem
    found = measure(Table(logits), loader(labels, batch).batches())
    assert (found.images, found.top1, found.top5, found.loss) == by_hand(logits, labels)
    assert found.accuracy == 100 * found.top1 / len(labels)
    assert found.top5_accuracy == 100 * found.top5 / len(labels)


@settings(deadline=None)
@given(problems(), st.integers(1, 20), st.integers(2, 5))
def test_replicas_together_count_every_image_once(problem, batch, replicas):
    logits, labels = problem
    counted = []

    class Shared(World):
        def sum(self, values):
            counted.append(values)
            return torch.stack(counted).sum(0)

    for replica in range(replicas):
        batches = loader(labels, batch, replicas=replicas, replica=replica).batches()
        found = measure(Table(logits), batches, world=Shared(device=torch.device("cpu"), rank=replica, size=replicas))
    assert (found.images, found.top1, found.top5, found.loss) == by_hand(logits, labels)


def test_a_stop_request_is_checked_before_every_batch_but_not_after_the_last():
    logits, labels = torch.eye(3), np.array([1, 0, 2])
    asked = iter([False, True])
    with pytest.raises(Interrupted):
        evaluate(
            Table(logits),
            loader(labels, 1).batches(),
            normalise=Normalise(RAW),
            regime=REGIMES["32.32"],
            world=ONE,
            stopping=lambda: next(asked),
        )
    assert next(asked, None) is None
    assert measure(Table(logits), loader(labels, 1).batches()).images == 3


def test_one_process_that_stops_stops_all_of_them():
    class OtherStops(World):
        def sum(self, values):
            return values + torch.tensor([0, 0, 0, 0, 1])

    with pytest.raises(Interrupted):
        measure(
            Table(torch.eye(3)),
            loader(np.array([1, 0]), 1).batches(),
            world=OtherStops(device=torch.device("cpu"), rank=0, size=2),
        )


def test_one_process_that_fails_ends_all_of_them_with_its_message():
    told = []

    class Failing(World):
        def sum(self, values):
            return values + torch.tensor([0, 0, 0, 0, 3 * self.rank])  # to the second one, the first has failed

        def texts(self, mine, operation):
            told.append(mine)
            return told[:1]

    class Short(Table):
        def forward(self, images):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB")

    logits, labels, raised = torch.eye(3), np.array([1, 0]), []
    for rank, model in enumerate((Short(logits), Table(logits))):
        world = Failing(device=torch.device("cpu"), rank=rank, size=2)
        with pytest.raises(FailedTogetherError) as caught:
            measure(model, loader(labels, 1).batches(), world=world)
        raised.append(caught.value.error)
    assert isinstance(raised[0], torch.OutOfMemoryError)
    assert memory_shortage(raised[1]) == memory_shortage(raised[0])


def test_a_failure_that_cannot_be_told_is_reported_here():
    class Broken(World):
        def sum(self, values):
            raise WorldError("lost another process")

    class Short(Table):
        def forward(self, images):
            raise RuntimeError("device-side assert")

    for model, error in ((Short(torch.eye(3)), RuntimeError), (Table(torch.eye(3)), WorldError)):
        with pytest.raises(error):
            measure(
                model,
                loader(np.array([1, 0]), 1).batches(),
                world=Broken(device=torch.device("cpu"), rank=0, size=2),
            )


def test_with_fewer_than_five_classes_top5_is_always_correct():
    logits, labels = torch.eye(3), np.array([1, 0, 2])
    found = measure(Table(logits), loader(labels, 2).batches())
    assert (found.top1, found.top5) == (1, 3)


def test_labels_of_minus_one_are_ignored_anywhere_in_a_batch():
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([1, -1, 3, -1, -1, 0])
    images = torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1).expand(6, 3, 1, 1)
    found = measure(Table(logits), [Batch(images[:4], labels[:4], None), Batch(images[4:], labels[4:], None)])
    kept = labels >= 0
    assert (found.images, found.top1, found.top5, found.loss) == by_hand(logits[kept], labels[kept].numpy())


def test_without_a_readable_image_evaluation_fails():
    batch = Batch(torch.zeros(2, 3, 1, 1, dtype=torch.uint8), torch.tensor([-1, -1]), None)
    with pytest.raises(DataError, match="none of the images could be read"):
        measure(Table(torch.eye(2)), [batch])


def test_evaluation_changes_nothing_and_applies_no_dropout():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(3, 2)).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    batches = [Batch(torch.arange(9, dtype=torch.uint8).view(3, 3, 1, 1), torch.tensor([0, 1, 1]), None)]
    assert measure(model, batches) == measure(model, batches)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bf16_logits_are_scored_in_full_precision():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, 4))
    seen = []
    model.register_forward_hook(lambda module, inputs, output: seen.append(output))
    labels = torch.tensor([0, 3])
    batch = Batch(torch.tensor([[10, 200, 30], [250, 3, 90]], dtype=torch.uint8).view(2, 3, 1, 1), labels, None)
    found = measure(model, [batch], regime="bf16.32")
    assert seen[0].dtype == torch.bfloat16
    assert found.loss == by_hand(seen[0], labels.numpy())[3]


@pytest.mark.parametrize(("loss", "said"), [(float("nan"), True), (float("inf"), True), (1e30, False)])
def test_a_loss_that_is_not_finite_gives_a_warning(loss, said):
    warning = Evaluation(images=10, top1=1, top5=5, loss=loss).warning("the validation")
    assert (warning is not None) == said
    assert warning is None or warning.startswith(f"warning: the validation loss is {loss} because the model")
