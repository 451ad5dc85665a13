"""One update: the same however its images are split, and equal to the closed form."""

import numpy as np
import pytest
import torch
from torch import nn

from falconet.config.options import Optimizer
from falconet.data.buffers import Batch
from falconet.data.mixing import Mix
from falconet.data.preprocessing import Normalise, Preprocessing
from falconet.evaluation.loss import Loss
from falconet.models import zoo
from falconet.models.freezing import Hold, frozen_by
from falconet.numerics.loss_scale import FixedScale, Offender
from falconet.numerics.precision import REGIMES
from falconet.optim.ema import Ema
from falconet.optim.optimizers import build_optimizer, build_scaled_optimizer
from falconet.train.step import LocalStep, Moving, PlainMove, ScaledMove, ShownStep, Update

CLASSES = 4
PREPROCESSING = Preprocessing(image_size=8, resize=8, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network(*middle):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), *middle, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return layers.append(nn.Linear(32, CLASSES)).to(memory_format=torch.channels_last)


def sixteen(seed=0):
    noise = np.random.default_rng(seed)
    images = torch.from_numpy(noise.integers(0, 256, (16, 8, 8, 3), dtype=np.uint8)).permute(0, 3, 1, 2)
    return Batch(images, torch.from_numpy(noise.integers(0, CLASSES, 16)), None)


def split(batch, sizes):
    images, labels = batch.images.split(sizes), batch.labels.split(sizes)
    return [Batch(*part, None) for part in zip(images, labels, strict=True)]


def stepper(model, *, rule=None, smoothing=0.0, regime="32.32", seed=0, averages=()):
    rule = rule or Optimizer(optimizer="sgd", momentum=0.0, weight_decay=0.0)
    move = PlainMove(build_optimizer(model, rule), device=torch.device("cpu"))
    return LocalStep(
        Moving(model=model, move=move, seed=seed, averages=averages),
        normalise=Normalise(PREPROCESSING),
        loss=Loss(CLASSES, smoothing),
        regime=REGIMES[regime],
    )


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def relative(found, expected):
    """The distance of two tensors over the length of the second."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


SPLITS = {1: [16], 2: [8, 8], 4: [4] * 4, 8: [2] * 8, "uneven": [10, 1, 5]}
MODELS = {
    "no norm": network,
    "group norm": lambda: network(nn.GroupNorm(4, 8)),
    "resnet8, group norm": lambda: zoo.build(
        "resnet8-cifar", classes=CLASSES, seed=0, norm_type="group", norm_num_groups=4
    ),
}


@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS.keys())
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_accumulation_changes_nothing(make, sizes):
    whole, parted = make(), make()
    rule = Optimizer(optimizer="sgd", momentum=0.9, weight_decay=1e-3)
    one, several = stepper(whole, rule=rule, smoothing=0.1), stepper(parted, rule=rule, smoothing=0.1)
    for update in range(3):
        expected = one([sixteen(update)], update=update, lr=0.05)
        found = several(split(sixteen(update), sizes), update=update, lr=0.05)
        assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
        assert (found.correct, found.images) == (expected.correct, expected.images)
    for name, parameter in weights(parted).items():
        # Biases that have hardly left zero differ by the rounding of gradients: 1.01e-6 on an Intel Xeon.
        assert relative(parameter, weights(whole)[name]) < 3e-6, name


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_gradient_equals_autograd_of_the_closed_form(smoothing):
    model, batch = network(), sixteen()
    reference = network().double()
    stepper(model, smoothing=smoothing)(split(batch, [4] * 4), update=0, lr=0.1)

    mean, std = (torch.tensor(x, dtype=torch.float64).view(3, 1, 1) for x in (PREPROCESSING.mean, PREPROCESSING.std))
    logits = reference((batch.images.double() / 255 - mean) / std)
    nll = logits.exp().sum(1, keepdim=True).log() - logits
    own = nll[torch.arange(16), batch.labels]
    ((1 - smoothing) * own + smoothing * nll.mean(1)).mean().backward()
    for (name, found), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert relative(found.grad, expected.grad) < 1e-5, name


@pytest.mark.parametrize("lr", [0.0, 0.01, 1.0])
def test_the_weights_move_by_the_rate_times_the_gradient(lr):
    model = network()
    before = weights(model)
    step = stepper(model)
    step([sixteen()], update=0, lr=0.5)  # an earlier rate must not linger
    model.load_state_dict(before)
    step([sixteen()], update=1, lr=lr)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] - lr * parameter.grad, rtol=1e-6, atol=1e-7)
        assert lr or torch.equal(parameter, before[name])


def test_a_gradient_is_not_carried_into_the_next_update():
    model, fresh = network(), network()
    step = stepper(model)
    step([sixteen(0)], update=0, lr=0.0)
    step([sixteen(1)], update=1, lr=0.0)
    stepper(fresh)([sixteen(1)], update=1, lr=0.0)
    for found, expected in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


def test_a_label_of_minus_one_adds_neither_loss_nor_gradient_nor_count():
    batch, model, fewer = sixteen(), network(), network()
    labels = batch.labels.clone()
    labels[[3, 12]] = -1
    kept = labels >= 0
    found = stepper(model, smoothing=0.1)([Batch(batch.images, labels, None)], update=0, lr=0.1)
    expected = stepper(fewer, smoothing=0.1)([Batch(batch.images[kept], labels[kept], None)], update=0, lr=0.1)
    # The weight of an image is 1 / 16 whether the others can be read or not.
    assert found.loss.item() == pytest.approx(expected.loss.item() * 14 / 16, rel=1e-6)
    assert (found.correct, found.images) == (expected.correct, expected.images)
    for (name, one), other in zip(model.named_parameters(), fewer.parameters(), strict=True):
        assert relative(one.grad, other.grad * 14 / 16) < 1e-5, name


def test_an_update_without_any_label_moves_nothing():
    model, batch = network(), sixteen()
    before = weights(model)
    found = stepper(model, smoothing=0.1)([Batch(batch.images, torch.full((16,), -1), None)], update=0, lr=1.0)
    assert (found.loss, found.correct, found.images) == (0, 0, 0)
    assert all(torch.equal(parameter, before[name]) for name, parameter in weights(model).items())


def test_an_update_returns_its_mean_loss_and_correct_count():
    model, batch = network(), sixteen()
    reference = network()(Normalise(PREPROCESSING)(batch.images))
    found = stepper(model)(split(batch, [8, 8]), update=0, lr=0.1)
    assert found.loss.item() == pytest.approx(nn.functional.cross_entropy(reference, batch.labels).item(), rel=1e-6)
    assert found.correct == (reference.argmax(1) == batch.labels).sum()
    assert found.images == 16
    assert not any(tensor.requires_grad for tensor in found)


def test_mixed_images_are_scored_by_their_first_labels():
    model, batch = network(), sixteen()
    mix = Mix(torch.full((16,), 0.6), torch.tensor([0, 8, 0, 6]))  # a quarter of 0.6 is left of the own image
    normalised = Normalise(PREPROCESSING)(batch.images)
    mixed = 0.6 * normalised + 0.4 * normalised.roll(1, 0)
    mixed[:, :, :, :6] = mixed.roll(2, 0)[:, :, :, :6]
    right = (network()(mixed).argmax(1) == batch.labels).sum()
    assert stepper(model)([Batch(batch.images, batch.labels, mix)], update=0, lr=0.1).correct == right


def test_dropout_depends_only_on_the_seed_and_the_update():
    def drawn(*, update, seed=0, before=0):
        model = network(nn.Dropout(0.5))
        step = stepper(model, seed=seed)
        for earlier in range(before):
            step([sixteen(earlier)], update=earlier, lr=0.0)
        torch.manual_seed(123 + before)
        return step(split(sixteen(), [8, 8]), update=update, lr=0.0).loss.item()

    assert drawn(update=5) == drawn(update=5, before=3)
    others = [drawn(update=5), drawn(update=6), drawn(update=5, seed=1)]
    assert len(set(others)) == 3


def test_micro_batches_of_one_update_drop_different_units():
    batch = split(sixteen(), [8, 8])[0]
    model = network(nn.Dropout(0.5))
    seen = []
    model[1].register_forward_hook(lambda layer, inputs, output: seen.append(output.detach().clone()))
    stepper(model)([batch, batch], update=0, lr=0.0)
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("seed", [10**14, 2**62, 2**64 - 1])
def test_any_seed_can_be_used(seed):
    step = stepper(network(nn.Dropout(0.5)), seed=seed)
    assert torch.isfinite(step([sixteen()], update=7, lr=0.1).loss)


def test_bf16_computes_in_bf16_and_keeps_weights_and_their_update_in_fp32():
    model, reference = network(), network()
    seen = []
    model[0].register_forward_hook(lambda layer, inputs, output: seen.append(output.dtype))
    found = stepper(model, regime="bf16.32")(split(sixteen(), [8, 8]), update=0, lr=0.1)
    expected = stepper(reference)([sixteen()], update=0, lr=0.1)
    assert seen == [torch.bfloat16] * 2
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert found.loss.dtype == torch.float32
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=0.01)
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert 0 < relative(one.grad, other.grad) < 0.05, name


def test_batch_norm_sees_every_micro_batch_once_and_the_model_trains_even_after_an_evaluation():
    model = network(nn.BatchNorm2d(8)).eval()
    stepper(model)(split(sixteen(), [4] * 4), update=0, lr=0.1)
    assert model.training
    assert model[1].num_batches_tracked == 4


def test_moving_averages_include_the_weights_after_the_update():
    model = network()
    average = Ema(model, decay=0.5)
    step = stepper(model, averages=[average])
    seen = []
    for update in range(2):
        step([sixteen(update)], update=update, lr=0.5)
        seen.append(weights(model))
    for name, parameter in average.model.named_parameters():
        torch.testing.assert_close(parameter, (0.25 * seen[0][name] + 0.5 * seen[1][name]) / 0.75)


def test_the_layer_that_overflowed_is_named_while_layers_before_it_are_frozen():
    model = zoo.build("resnet8-cifar", classes=CLASSES, seed=0)
    hold, device = Hold(model, frozen_by(model, "backbone"), until=1), torch.device("cpu")
    optimizer, offender = build_scaled_optimizer(model, Optimizer(), rounding=None), Offender(device)
    move = ScaledMove(model, optimizer, FixedScale(1e38, device=device), offender=offender)
    names = [name for name, _ in model.named_parameters()]
    for update, expected in ((0, "fc.weight"), (1, "conv1.weight")):  # each the first of those that train
        model.train()
        hold.at(update)
        move.at(update, 0.1)
        move.begin()
        move.root(model(torch.rand(4, 3, 8, 8)).square().sum() * 1e38).backward()
        assert move.end() == 1
        assert offender.read(names) == expected


class Counted:
    """A step whose loss is the number of the update."""

    def __call__(self, micro_batches, *, update, lr):
        zero = torch.tensor(0)
        return Update(torch.tensor(float(update)), zero, zero, zero, zero)


def test_the_loss_is_shown_from_time_to_time():
    now, shown = [0.0], []
    step = ShownStep(Counted(), shown.append, device=torch.device("cpu"), clock=lambda: now[0])
    for update in range(40):
        now[0] = update / 64
        step([], update=update, lr=0.1)
    assert shown == [0.0, 7.0, 14.0, 21.0, 28.0, 35.0]  # at most ten in a second


@pytest.mark.gpu
def test_showing_the_loss_waits_for_no_device():
    device, shown = torch.device("cuda"), []
    loss = torch.full((), 2.5, device=device)

    def made(micro_batches, *, update, lr):
        return Update(loss + update, loss, loss, loss, loss)

    step = ShownStep(made, shown.append, device=device, clock=iter(range(1000)).__next__)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for update in range(50):
            step([], update=update, lr=0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    step([], update=50, lr=0.1)
    assert shown
    assert all(value - 2.5 in range(51) for value in shown)
