"""TrainState: through a checkpoint and back bit for bit, for every optimizer."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from falconet.checkpoint import format
from falconet.checkpoint.state import Progress, Totals, TrainState
from falconet.config.options import Optimizer
from falconet.data.buffers import Batch
from falconet.data.preprocessing import Normalise, Preprocessing
from falconet.errors import CheckpointError
from falconet.evaluation.loss import Loss
from falconet.numerics.precision import REGIMES
from falconet.optim.ema import Ema
from falconet.optim.optimizers import build_optimizer
from falconet.train.step import LocalStep, Moving, PlainMove

OPTIMIZERS = ["sgd", "sgd_combined", "adamw", "rmsprop", "rmsprop_tf", "lars"]
CONTENT = {"model": "m", "classes": 4, "progress": {"epoch": 0, "images": 0, "update": 0}}
RAW = Preprocessing(image_size=6, resize=6, mean=(0.5, 0.5, 0.5), std=(0.3, 0.3, 0.3))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def new_state(optimizer="sgd", *, width=8, ema=True, seed=0):
    torch.manual_seed(seed)
    layers = (nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.2), nn.Flatten())
    model = nn.Sequential(*layers, nn.Linear(16 * width, 4)).to(memory_format=torch.channels_last)
    state = TrainState(model, build_optimizer(model, Optimizer(optimizer=optimizer, weight_decay=0.01)))
    state.ema = Ema(model, 0.7) if ema else None
    return state


def train(state, updates):
    move, averages = PlainMove(state.optimizer, device=torch.device("cpu")), [state.ema] if state.ema else []
    step = LocalStep(
        Moving(model=state.model, move=move, averages=averages),
        normalise=Normalise(RAW),
        loss=Loss(4, 0.1),
        regime=REGIMES["32.32"],
    )
    for update in updates:
        noise = torch.Generator().manual_seed(update)
        images = torch.randint(256, (2, 8, 3, 6, 6), generator=noise).to(torch.uint8)
        labels = torch.randint(4, (2, 8), generator=noise)
        micro_batches = [Batch(*part, None) for part in zip(images, labels, strict=True)]
        step(micro_batches, update=update, lr=0.01 * (1 + update % 3))


def save(state, folder):
    format.write(folder, state.tensors(), CONTENT)
    return folder


def assert_same(one, other):
    mine, yours = one.tensors(), other.tensors()
    assert mine.keys() == yours.keys()
    for stem, tensors in mine.items():
        assert tensors.keys() == yours[stem].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, yours[stem][name]), (stem, name)
            assert tensor.dtype == yours[stem][name].dtype, (stem, name)
            assert tensor.stride() == yours[stem][name].stride(), (stem, name)


@pytest.mark.parametrize("ema", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_restored_state_equals_the_saved_one_and_continues_bit_for_bit(tmp_path, optimizer, ema):
    straight = new_state(optimizer, ema=ema)
    train(straight, range(3))
    folder = save(straight, tmp_path / "c")
    restored = new_state(optimizer, ema=ema, seed=1)
    restored.load(folder, name="m")
    assert_same(straight, restored)
    train(straight, range(3, 6))
    train(restored, range(3, 6))
    assert_same(straight, restored)


def test_a_state_can_be_saved_before_its_first_update(tmp_path):
    state, restored = new_state(), new_state(seed=1)
    restored.load(save(state, tmp_path / "c"), name="m")
    assert_same(state, restored)


def test_tensors_are_grouped_by_kind():
    assert new_state().tensors().keys() == {"model", "optimizer", "ema"}
    assert new_state(ema=False).tensors().keys() == {"model", "optimizer"}


def test_a_run_without_a_moving_average_can_load_a_checkpoint_with_one(tmp_path):
    state = new_state()
    train(state, range(2))
    other = new_state(ema=False, seed=1)
    other.load(save(state, tmp_path / "c"), name="m")
    assert torch.equal(other.model[0].weight, state.model[0].weight)


MISFITS = {
    "another model": (lambda: new_state(width=4), lambda: new_state(), "does not fit m: "),
    "another optimizer": (lambda: new_state("adamw"), lambda: new_state("sgd"), "optimizer state: "),
    "no moving average": (
        lambda: new_state(ema=False),
        lambda: new_state(),
        "holds no 'ema'; it holds model, optimizer",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_line(tmp_path, case):
    saved, loading, message = MISFITS[case]
    state = saved()
    train(state, range(1))
    with pytest.raises(CheckpointError) as refused:
        loading().load(save(state, tmp_path / "c"), name="m")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_damaged_checkpoint_is_refused_before_anything_changes(tmp_path):
    folder = save(new_state(), tmp_path / "c")
    path = folder / "ema.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    state, untouched = new_state(seed=1), new_state(seed=1)
    with pytest.raises(CheckpointError, match="1 byte short"):
        state.load(folder, name="m")
    assert_same(state, untouched)


finite = st.floats(allow_nan=False, allow_infinity=False)
totals = st.builds(Totals, st.integers(0, 10**9), finite, st.integers(0, 10**12), st.integers(0, 10**12))


@given(st.builds(Progress, st.integers(0, 10**9), totals, totals))
def test_progress_round_trips_through_json_exactly(progress):
    assert Progress.from_json(json.loads(json.dumps(progress.to_json()))) == progress


def test_totals_are_sums_and_means():
    sums = Totals()
    for loss, correct, images in ((0.5, 3, 8), (1.5, 1, 8), (1.0, 0, 0)):
        sums.add(loss, correct, images, 0)
    assert sums == Totals(3, 3.0, 4, 16)
    assert sums.mean_loss == 1.0
    assert sums.accuracy == 25.0
    assert Totals().accuracy == 0.0
