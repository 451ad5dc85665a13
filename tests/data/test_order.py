"""The order of an epoch, shuffled or balanced, is the same however often it is asked for; weights of classes."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from falconet.data import keyed
from falconet.data.buffers import PixelRows
from falconet.data.loader import BatchShape, Loader, Resources
from falconet.data.order import COPY_BITS, balanced, class_weights, shuffled
from falconet.evaluation.loss import WeightedLoss

LABELS = np.array([0] * 50 + [1] * 10 + [3] * 3)  # class 2 has no images
IMAGE = (1 << COPY_BITS) - 1


def test_shuffled_shows_every_image_once_as_before():
    np.testing.assert_array_equal(shuffled(9, seed=3)(5), keyed.permutation(9, seed=3, epoch=5))


def test_every_class_comes_equally_often_in_every_epoch():
    order = balanced(LABELS, seed=1)
    for epoch in range(6):
        drawn = order(epoch)
        assert len(drawn) == len(LABELS)
        counts = np.bincount(LABELS[drawn & IMAGE])
        assert counts.tolist() == [21, 21, 0, 21]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(0, 9))
def test_shares_differ_by_at_most_one_and_the_remainder_rotates(labels, epoch):
    labels = np.array(labels)
    order = balanced(labels, seed=0)
    epochs = [labels[order(each) & IMAGE] for each in range(epoch + 1)]
    counts = [np.bincount(drawn, minlength=5)[np.unique(labels)] for drawn in (epochs[-1], np.concatenate(epochs))]
    assert all(np.ptp(each) <= 1 for each in counts)


def test_a_class_shows_all_its_images_before_one_comes_again():
    order = balanced(LABELS, seed=1)
    drawn = np.concatenate([order(epoch) for epoch in range(5)]) & IMAGE
    counts = np.bincount(drawn, minlength=len(LABELS))
    for members, times in ((slice(0, 50), 2), (slice(50, 60), 10), (slice(60, 63), 35)):  # 105 draws of each class
        assert set(counts[members].tolist()) <= {times, times + 1}


def test_copies_of_an_image_in_an_epoch_are_numbered():
    drawn = balanced(LABELS, seed=1)(0)
    assert len(np.unique(drawn)) == len(drawn)
    for image in np.unique(drawn & IMAGE):
        copies = np.sort(drawn[(drawn & IMAGE) == image] >> COPY_BITS)
        np.testing.assert_array_equal(copies, np.arange(len(copies)))


def test_seeds_and_epochs_give_different_orders():
    orders = [balanced(LABELS, seed=seed)(epoch).tolist() for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]
    assert orders[0] == balanced(LABELS, seed=0)(0).tolist()


class Noted:
    """A reader that writes the number and the epoch of each image into its first pixels."""

    size, rows = 2, 4

    def read(self, indices, *, epoch, out):
        out[:] = 0
        out[:, 0, 0, 0], out[:, 0, 0, 1] = indices, epoch >> COPY_BITS
        return np.ones(len(indices), dtype=np.bool_)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("workers", [0, 3])
def test_replicas_and_threads_read_the_same_copies_of_the_same_images(replicas, workers):
    def read(replica):
        shape = BatchShape(micro_batch=6, accumulation=4 // replicas, replicas=replicas, replica=replica)
        loader = Loader(
            PixelRows(Noted()),
            labels=LABELS,
            shape=shape,
            seed=1,
            order=balanced(LABELS, seed=1),
            resources=Resources(workers=workers),
        )
        return [
            [(batch.images[:, :2, 0, 0].clone(), batch.labels.clone()) for batch in each] for each in loader.updates(3)
        ]

    whole = read(0) if replicas == 1 else [a + b for a, b in zip(read(0), read(1), strict=True)]
    seen = torch.cat([images for update in whole for images, _ in update])
    expected = balanced(LABELS, seed=1)(3)[: len(seen)]
    found = seen[:, 0].long().numpy() + (seen[:, 1].long().numpy() << COPY_BITS)
    np.testing.assert_array_equal(np.sort(found), np.sort(expected))
    labels = torch.cat([labels for update in whole for _, labels in update]).numpy()
    np.testing.assert_array_equal(labels, LABELS[found & IMAGE])


def test_weights_are_inverse_to_the_images_and_average_to_one():
    weights = np.array(class_weights(LABELS, 4))
    assert weights[2] == 0.0
    np.testing.assert_allclose(weights[[0, 1, 3]] * [50, 10, 3], 21.0)
    assert weights[LABELS].mean() == pytest.approx(1.0)


def test_the_weighted_loss_is_torchs():
    noise = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(6, 4, generator=noise), torch.tensor([0, 1, 3, 3, 0, 1])
    weights = torch.tensor(class_weights(LABELS, 4))
    loss = WeightedLoss(4, 0.1, weights=weights)(logits, F.one_hot(labels, 4).float())
    expected = F.cross_entropy(logits, labels, weight=weights, label_smoothing=0.1, reduction="none")
    torch.testing.assert_close(loss, expected)
