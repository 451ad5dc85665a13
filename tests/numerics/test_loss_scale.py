"""Loss scales against their formulas, and non-finite gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import nn

from falconet.errors import CheckpointError, ConfigError
from falconet.numerics.loss_scale import (
    HISTORY,
    AutomaticScale,
    FixedScale,
    Offender,
    SteppedScale,
    doublings,
    find_non_finite,
    watched,
)

CPU = torch.device("cpu")
NO, YES = torch.tensor(False), torch.tensor(True)
EDGE = 65504 / 16


def test_scale_from_16_to_128_over_100_epochs_doubles_at_26_51_and_76():
    assert doublings(16.0, 128.0, epochs=100) == ((1, 16.0), (26, 32.0), (51, 64.0), (76, 128.0))


@given(power=st.integers(0, 10), initial=st.sampled_from([0.5, 1.0, 3.0, 16.0]), epochs=st.integers(1, 400))
@settings(max_examples=100, deadline=None)
def test_doublings_follow_the_originals_formula(power, initial, epochs):
    final = initial * 2**power
    n = int(math.log2(final // initial)) + 1
    if epochs < n:
        return
    assert doublings(initial, final, epochs=epochs) == tuple((i * (epochs // n) + 1, initial * 2**i) for i in range(n))


MISTAKES = {
    (16.0, 100.0, 100): "got 16, which doubling does not bring to 100; expected 100 divided by 1, 2, 4 and so on",
    (128.0, 16.0, 100): "got 128, which doubling does not bring to 16",
    (16.0, 128.0, 3): "got 16, whose 4 scales up to 128 need at least 4 epochs; there are 3",
}


@pytest.mark.parametrize(("scales", "message"), MISTAKES.items())
def test_scales_that_doubling_does_not_connect_are_refused(scales, message):
    initial, final, epochs = scales
    with pytest.raises(ConfigError) as caught:
        doublings(initial, final, epochs=epochs)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_stepped_scale_follows_the_epoch_also_after_a_restore():
    scale = SteppedScale(16.0, 128.0, epochs=100, updates_per_epoch=10, device=CPU)
    value = scale.value
    found = {}
    for update in (0, 249, 250, 251, 999):
        scale.before(update)
        found[update] = value.item()
    assert found == {0: 16.0, 249: 16.0, 250: 32.0, 251: 32.0, 999: 128.0}


def test_the_epochs_of_a_stepped_scale_are_counted_from_its_first_update():
    scale = SteppedScale(16.0, 32.0, epochs=4, updates_per_epoch=10, device=CPU, first=-30)
    found = []
    for update in (-11, -10):
        scale.before(update)
        found.append(scale.value.item())
    assert found == [16.0, 32.0]


def test_fixed_scale_counts_skipped_updates():
    scale = FixedScale(128.0, device=CPU)
    for update, found in enumerate((NO, YES, YES, NO)):
        scale.before(update)
        scale.after(found)
    assert (scale.value.item(), scale.updates.item(), scale.skipped.item()) == (128.0, 4, 2)
    assert scale.history[:5].tolist() == [128.0] * 4 + [0.0]


def automatic(**changes):
    return AutomaticScale(dtype=torch.float16, device=CPU, **changes)


def gradients(above, count=1000, dtype=torch.float16):
    grads = torch.full((count,), EDGE - 4, dtype=dtype)
    grads[:above] = -(EDGE + 4)
    return grads


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("above", "factor"), [(0, 2.0), (1, 0.5), (1000, 0.5)])
def test_automatic_scale_halves_when_too_many_gradients_are_large(above, factor, dtype):
    scale = automatic(initial=8.0)
    scale.watch([gradients(0, dtype=dtype), gradients(above, dtype=dtype), torch.zeros(3)])
    scale.after(NO)
    assert scale.value.item() == 8.0 * factor


@pytest.mark.parametrize(("total", "factor"), [(9_000_000, 0.5), (11_000_000, 2.0)])
def test_one_large_gradient_in_ten_million_is_the_limit(total, factor):
    scale = automatic()
    grads = torch.zeros(total, dtype=torch.float16)
    grads[7] = 65504
    scale.watch([grads])
    scale.after(NO)
    assert scale.value.item() == factor


def test_counts_are_summed_over_micro_batches_and_replicas():
    """One large gradient in eight million on one replica is none too many among sixteen."""
    half = torch.zeros(4_000_000, dtype=torch.float16)
    large = half.clone()
    large[0] = 5000
    alone, among = automatic(), automatic(sum=lambda counts: counts + torch.tensor([0.0, 8e6]))
    for scale in (alone, among):
        scale.watch([half])
        scale.watch([large])
        scale.after(NO)
    assert (alone.value.item(), among.value.item()) == (0.5, 2.0)


@pytest.mark.parametrize("spoiled", [math.inf, -math.inf, math.nan])
def test_skipped_update_halves_the_scale(spoiled):
    scale = automatic()
    grads = torch.tensor([spoiled, 1.0], dtype=torch.float16)
    scale.watch([grads])
    scale.after(find_non_finite([grads]).found)
    scale.watch([torch.ones(2, dtype=torch.float16)])
    scale.after(NO)
    assert scale.history[:2].tolist() == [1.0, 0.5]
    assert scale.value.item() == 1.0
    assert scale.skipped.item() == 1


def test_automatic_scale_stays_within_its_bounds():
    scale = automatic(bounds=(0.5, 4.0))
    for above, expected in ((0, 2.0), (0, 4.0), (0, 4.0), (1, 2.0), (1, 1.0), (1, 0.5), (1, 0.5)):
        scale.watch([gradients(above)])
        scale.after(NO)
        assert scale.value.item() == expected


def test_counts_are_summed_over_a_period():
    scale = automatic(period=3, initial=8.0)
    for above, expected in ((1, 8.0), (0, 8.0), (0, 4.0), (0, 4.0), (0, 4.0), (0, 8.0)):
        scale.watch([gradients(above)])
        scale.after(NO)
        assert scale.value.item() == expected


def test_history_holds_the_latest_scales():
    scale = automatic(bounds=(1.0, 2.0))
    for update in range(HISTORY + 3):
        scale.watch([gradients(update % 2)])
        scale.after(NO)
    expected = [1.0 if update % 2 == 0 else 2.0 for update in range(HISTORY + 3)]
    assert [scale.history[update % HISTORY].item() for update in range(3, HISTORY + 3)] == expected[3:]


@pytest.mark.parametrize(
    "make",
    [
        lambda: automatic(period=4),
        lambda: FixedScale(2.0, device=CPU),
        lambda: SteppedScale(1.0, 4.0, epochs=6, updates_per_epoch=2, device=CPU),
    ],
)
def test_restored_scale_continues_bit_for_bit(make):
    def run(scale, updates):
        for update in updates:
            scale.before(update)
            scale.watch([gradients(update % 5 == 4)])
            scale.after(torch.tensor(update % 3 == 2))

    straight = make()
    run(straight, range(6))
    stored = load(save({name: t.clone() for name, t in straight.state_tensors().items()}))
    run(straight, range(6, 11))
    restored = make()
    value = restored.value
    restored.load_state_tensors(stored)
    run(restored, range(6, 11))
    assert restored.value is value  # a captured graph holds it
    for name, t in straight.state_tensors().items():
        assert torch.equal(t, restored.state_tensors()[name]), name


def test_restored_fixed_scale_follows_the_options():
    before, now = FixedScale(128.0, device=CPU), FixedScale(256.0, device=CPU)
    before.after(YES)
    now.load_state_tensors(before.state_tensors())
    now.before(1)
    assert (now.value.item(), now.skipped.item()) == (256.0, 1)


def test_state_of_another_shape_is_refused_and_changes_nothing():
    scale = FixedScale(128.0, device=CPU)
    stored = FixedScale(256.0, device=CPU).state_tensors()
    with pytest.raises(CheckpointError, match="loss scale: 'history' has a shape other than"):
        scale.load_state_tensors(stored | {"history": stored["history"].view(1, -1)})
    assert scale.value == 128.0


def test_state_of_another_kind_is_refused_and_changes_nothing():
    fixed, scale = FixedScale(128.0, device=CPU), automatic()
    with pytest.raises(CheckpointError, match="loss scale: 'counts' is missing; was the run's scale of another kind"):
        scale.load_state_tensors(fixed.state_tensors())
    assert scale.value.item() == 1.0


@pytest.mark.parametrize("spoiled", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", [0, 2, 3])
def test_first_non_finite_tensor_is_found_among_mixed_types(where, spoiled):
    types = [torch.float32, torch.float16, torch.float32, torch.bfloat16, torch.float16]
    grads = [torch.ones(4, 3, dtype=dtype) for dtype in types]
    assert find_non_finite(grads) == (NO, torch.tensor(-1))
    grads[where][2, 1] = spoiled
    grads[4][0, 0] = math.inf
    found, first = find_non_finite(grads)
    assert (found.item(), first.item()) == (True, where)


def test_largest_finite_gradients_count_as_finite():
    grads = [torch.full((70000,), torch.finfo(dtype).max, dtype=dtype) for dtype in (torch.float16, torch.float32)]
    assert not find_non_finite(grads).found


def test_first_offender_since_the_last_read_is_reported():
    offender, names = Offender(CPU), ["stem", "body", "head"]
    fine, bad = torch.ones(2), torch.tensor([1.0, math.nan])
    assert offender.read(names) is None
    for grads in ([fine, fine, fine], [fine, bad, bad], [bad, fine, fine]):
        offender.note(find_non_finite(grads))
    assert offender.read(names) == "body"
    assert offender.read(names) is None


def test_trained_weights_of_convolutions_and_linear_layers_are_watched():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[3].weight = model[2].weight
    model[4].requires_grad_(False)
    assert [id(w) for w in watched(model)] == [id(model[0].weight), id(model[2].weight)]


@pytest.mark.gpu
def test_scales_and_checks_never_wait_for_the_device():
    cuda = torch.device("cuda")
    scale = AutomaticScale(dtype=torch.float16, device=cuda)
    grads = [torch.ones(1000, device=cuda, dtype=dtype) for dtype in (torch.float16, torch.float32)]
    offender = Offender(cuda)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for update in range(3):
            scale.before(update)
            scale.watch(grads)
            non_finite = find_non_finite(grads)
            offender.note(non_finite)
            scale.after(non_finite.found)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert scale.value.item() == 8.0
