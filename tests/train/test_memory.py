"""The memory that training is predicted to need, against what it keeps."""

from functools import partial

import pytest
import torch

from falconet.data.buffers import Batch
from falconet.data.input import Input
from falconet.models import zoo
from falconet.models.fused import fusion
from falconet.numerics.precision import REGIMES
from falconet.train import fitting, memory
from phases import built
from tiny import TINY

GPU = "--data generated --image-size 224 --classes 1000 --iterations 2 --epoch 1 --warmup-epoch 0 --device cuda"


MODELS = (
    "resnet8-cifar",
    "mobilenet-v3-small",
    "resnet18 --precision bf16.bf16",
    "resnet18 --precision bf16.32",
    "efficientnet-b0 --precision bf16.32",
)


@pytest.mark.parametrize("model", MODELS)
def test_predicted_activations_are_what_a_training_pass_keeps(model):
    phase = built(f"{TINY} --image-size 64 --model {model}")
    made = phase.new_state()
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    need = phase.placement.need(made.model)
    after = made.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)  # nothing has changed
    kept = {}
    known = {memory._storage(p) for p in (*made.model.parameters(), *made.model.buffers())}
    alive = []

    def keep(tensor):
        alive.append(tensor)
        kept[memory._storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    setup = phase.placement.setup
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        setup.regime.run(made.model.train(), setup.normalise(memory.black(8, 64, setup.device)))
    training = [count for storage, count in kept.items() if storage not in known]
    pixels = 3 * 64 * 64
    weights = 4 * sum(p.numel() for p in made.model.parameters()) * 3  # with gradients and momentum
    beside = 8 * 4 * pixels + 2 * 8 * pixels + (weights if "bf16.bf16" not in model else need.fixed - 2 * 8 * pixels)
    assert sum(training) <= need.of(8) - beside <= sum(training) + max(training)


def test_weights_gradients_and_state_are_predicted_exactly():
    phase = built(f"{TINY} --optimizer adamw --ema-half-life 1")
    weights = sum(p.numel() for p in phase.model.parameters())
    assert phase.placement.need(phase.model).fixed == 5 * 4 * weights + 2 * 8 * 3 * 16 * 16


def test_images_that_wait_on_the_device_are_counted_in_updates_and_validations(monkeypatch):
    phase, held = built(TINY), []
    without = phase.placement.need(phase.model).fixed
    monkeypatch.setattr(Input, "images_on_device", lambda *_, **__: 5)
    assert phase.placement.need(phase.model).fixed == without + 5 * 3 * 16 * 16
    plain = memory.black
    monkeypatch.setattr(memory, "black", lambda images, *rest: held.append(plain(images, *rest)) or held[-1])
    fitting._try(phase, messages=False)
    assert len(held[0]) == 2 * 8 + 5


def test_weights_cast_by_autocast_are_counted_once_not_per_image():
    line = f"{TINY} --image-size 64 --model resnet50"
    half, full = (built(f"{line} --precision {name}") for name in ("bf16.32", "32.32"))
    need, other = (phase.placement.need(phase.model) for phase in (half, full))
    casts = 2 * sum(p.numel() for p in half.model.parameters() if p.ndim > 1)
    assert need.fixed - other.fixed == pytest.approx(casts, rel=0.01)
    assert need.per_image < 0.6 * other.per_image  # with the casts it was more


def test_a_micro_batch_of_one_is_predicted_from_one_image(monkeypatch):
    phase, sizes = built(f"{TINY} --micro-batch-size 1"), []
    plain = memory.black
    monkeypatch.setattr(memory, "black", lambda images, *rest: sizes.append(images) or plain(images, *rest))
    assert phase.placement.need(phase.model) is not None
    assert sizes == [1]


def test_the_processes_of_a_plan_share_the_memory_of_the_host(monkeypatch):
    monkeypatch.setattr(memory.host, "available", lambda: 1200)
    assert memory.capacity(torch.device("cpu")) == 1200
    assert memory.capacity(torch.device("cpu"), 4) == 300


def test_recomputed_layers_by_name_are_not_predicted():
    phase = built(f"{TINY} --enable-recompute --recompute-checkpoints layer1/.*")
    assert phase.placement.need(phase.model) is None


def kept_by(model, precision, *, side):
    """Bytes of each tensor that the backward pass of the fused model keeps, of one image and for each further one."""
    fused, regime = fusion.fuse(model).model, REGIMES[precision]

    def forward(images, keep):
        regime.run(memory.FusedPass(fused, keep).run, torch.zeros(images, side, side, 3).permute(0, 3, 1, 2))

    one, two = (memory._saved(model, partial(forward, images)) for images in (1, 2))
    return one, [more - less for less, more in zip(one, two, strict=True)]


@pytest.mark.run
def test_a_fused_group_norm_keeps_as_much_as_a_fused_batch_norm():
    batch, group = (
        zoo.build("resnet8-cifar", classes=10, seed=0, norm_type=norm, norm_num_groups=4) for norm in ("batch", "group")
    )
    (_, each), (_, other) = (kept_by(model, "32.32", side=32) for model in (batch, group))
    assert sorted(each) == sorted(other)


@pytest.mark.run
@pytest.mark.parametrize(
    ("name", "precision", "allocated"),  # GiB, on an H200, 64 images of 224 x 224, with sgd
    [("resnet18", "32.32", 1.36), ("resnet18", "bf16.32", 0.81), ("mobilenet-v3-large", "32.32", 2.47)],
)
def test_what_fused_layers_keep_is_what_they_were_seen_to_take(name, precision, allocated):
    model = zoo.build(name, classes=1000, seed=0)
    one, growth = kept_by(model, precision, side=224)
    state = 3 * 4 * sum(weight.numel() for weight in model.parameters())  # weights, gradients, velocities
    need = state + sum(one) - sum(growth) + 64 * (sum(growth) + max(growth) + 18 * 224 * 224)
    assert 0.9 < need / (allocated * 2**30) < 1.1


@pytest.mark.gpu
@pytest.mark.parametrize(
    "model",
    ["resnet18", "resnet50", "efficientnet-b0", "mobilenet-v3-large", "resnet50 --norm-type group"],
)
@pytest.mark.parametrize("precision", ["32.32", "16.32", "bf16.32"])
def test_the_prediction_is_near_what_torch_allocates(model, precision):
    """Prints both, for docs/using/troubleshooting.md."""
    phase = built(f"{GPU} --model {model} --precision {precision} --micro-batch-size 64")
    made = phase.new_state()
    need = phase.placement.need(made.model).of(64)
    fitting.release(torch.device("cuda"))
    torch.cuda.reset_peak_memory_stats()
    stepping, held = phase.step(made), [memory.black(128, 224, torch.device("cuda"))]
    batch = Batch(memory.black(64, 224, torch.device("cuda")), torch.zeros(64, dtype=torch.int64, device="cuda"), None)
    for update in range(2):
        stepping([batch], update=update, lr=0.0)
    peak = torch.cuda.max_memory_allocated()
    print(f"{model} {precision}: predicted {need / 2**30:.2f} GiB, allocated {peak / 2**30:.2f} GiB, {need / peak:.2f}")
    del held
    assert 0.6 < need / peak < 1.2
