from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import interpreting
from falconet.models import zoo
from falconet.models.freezing import Frozen
from falconet.models.fused import fusion
from falconet.models.fused.layers import FusedExcitation, FusedHalving, FusedNorm, fits
from falconet.models.groupnorm import FastGroupNorm, FusedGroupNorm
from falconet.models.padding import SameMaxPool2d
from falconet.parallel.batchnorm import over

SHAPES = ["few channels", "a short last tile", "several programs", "channels beyond a tile"]
ADDED = {"none": (0, 1, 2), "relu": (0, 1, 2), "silu": (0,), "hard_swish": (0,), "relu6": (0,), "gelu": (0,)}
DRAWN = ("random", "huge mean", "tiny variance", "constant")
CASES = [
    "one row",
    *SHAPES,
    *(f"{act}, {adds} added, {n} gradients" for act, kinds in ADDED.items() for adds in kinds for n in (1, 2)),
    *(f"{name}, gated" for name in SHAPES),
    *("9 pixels, pooled", "12 pixels, pooled"),
    *(f"{size} pixels, pooled with SAME padding" for size in ("12 x 9", "9 x 10", "2 x 12")),
    *("9 pixels, halved, gelu", "12 pixels, halved, relu", "13 pixels, halved, none", "channels beyond a tile, halved"),
    "more images than a program takes, halved",
    *("9 pixels, stem", "32 pixels, stem", "several images of a program, stem", "peaks", "peaks of NaN"),
    *(f"{drawn}{what}" for drawn in DRAWN for what in ("", ", added", ", gated", ", pooled")),
]
# The input's own rounding is that large a part of its deviation.
ROUNDED = {case: 1e-4 for case in CASES if case.startswith(("huge mean", "tiny variance"))}


@pytest.fixture(scope="module")
def interpreted():
    """The kernels' errors by case, from Triton's interpreter."""
    return interpreting.errors(Path(__file__).with_name("interpreted_batchnorm.py"))


@pytest.mark.run
def test_all_cases_are_known(interpreted):
    assert sorted(interpreted) == sorted(CASES)


@pytest.mark.run
@pytest.mark.parametrize("case", CASES)
def test_kernels_are_as_exact_as_fp32(case, interpreted):
    for what, error in interpreted[case].items():
        assert error < ROUNDED.get(case, 1e-5), what


def images(side, *, count=4):
    noise = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, side, side, generator=noise).contiguous(memory_format=torch.channels_last)


NETWORKS = {
    "resnet18": 20,
    "resnet50": 53,
    "resnext50": 53,
    "efficientnet-b0": 49,
    "mobilenet": 52,
    "mobilenet-v3-large": 46,
    "resnet20-cifar": 19,
    "timm:regnety_002": 44,
    "timm:seresnet50": 53,
    "timm:resnet50_gn": 53,
    "resnet20-cifar with strided group norm": 19,
    "efficientnet-b0 with group norm": 49,
    "efficientnet-cifar with proxy norm": 49,
    "resnet18 with one-pass norm": 20,
    "speednet8-cifar": 6,
    "speednet11-cifar": 9,
    "resnet50 with SAME padding": 53,
    "resnext50 with SAME padding": 53,
    "efficientnet-b0 with SAME padding": 49,
    "mobilenet-v3-large with SAME padding": 46,
    "timm:tf_efficientnet_lite0": 49,
}
GROUPS = {"norm_type": "group", "norm_num_groups": 8}
VARIANTS = {
    "group norm": GROUPS,
    "fast group norm": {**GROUPS, "enable_fast_groupnorm": True},
    "strided group norm": {**GROUPS, "norm_grouping": "strided"},
    "proxy norm": {**GROUPS, "norm_num_groups": 4, "proxy_norm": True},
    "one-pass norm": {"disable_stable_batchnorm": True},
    "SAME padding": {"padding": "same"},
}


def built(name):
    """A network of NETWORKS."""
    model, _, variant = name.partition(" with ")
    return zoo.build(model, classes=10, seed=0, **VARIANTS.get(variant, {}))


@pytest.mark.parametrize("name", NETWORKS)
def test_every_norm_of_a_network_is_fused_and_computes_the_same(name):
    model, plain = (built(name).train() for _ in range(2))
    found = fusion.fuse(model)
    assert found.fused == found.norms == NETWORKS[name]
    results = []
    for each in (plain, found.model):
        torch.manual_seed(0)
        logits = each(images(32))
        logits.square().sum().backward()
        results.append(logits.detach())
    assert torch.equal(*results)
    tolerance = 1e-4 if "proxy" in name else 0.0  # its sums of an expanded gradient have another order
    for (key, expected), weight in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, expected.grad, rtol=tolerance, atol=tolerance, msg=key)
    for (key, expected), value in zip(plain.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(expected, value), key


@pytest.mark.parametrize(("name", "pools"), [("resnet50", 1), ("efficientnet-b0", 0), ("mobilenet-v3-large", 0)])
def test_a_network_with_same_padding_is_fused_as_the_one_without(name, pools):
    plain, same = (fusion.fuse(built(each).train()) for each in (name, f"{name} with SAME padding"))
    assert plain.channels == same.channels > 3
    names = [[type(layer).__name__ for layer in found.model.modules()] for found in (plain, same)]
    kinds = [Counter(name for name in each if name.startswith(("Fused", "Padded", "Means"))) for each in names]
    assert kinds[0] == kinds[1]
    assert kinds[0]["FusedPool"] == pools


@pytest.mark.parametrize(
    ("name", "side"),
    [("resnet18 with SAME padding", 32), ("resnet18 with SAME padding", 33), ("timm:tf_efficientnet_lite0", 32)],
)
def test_a_stem_with_same_padding_takes_images_with_further_channels(name, side):
    model = built(name).eval()
    found, inputs = fusion.fuse(model), images(side)
    padded = nn.functional.pad(inputs, (0, 0, 0, 0, 0, found.channels - 3))
    torch.testing.assert_close(found.model(padded), model(inputs))


class Halved(nn.Module):
    """A pool, a norm and an activation after a convolution."""

    def __init__(self, act):
        super().__init__()
        self.conv, self.pool, self.norm, self.act = nn.Conv2d(3, 8, 1), nn.MaxPool2d(2), nn.BatchNorm2d(8), act

    def forward(self, x):
        return self.act(self.norm(self.pool(self.conv(x))))


@pytest.mark.parametrize(
    ("act", "kind"),
    [(nn.GELU(), "gelu"), (nn.functional.gelu, "gelu"), (nn.ReLU(), "relu"), (nn.GELU("tanh"), "none")],
)
def test_a_pool_before_a_norm_is_part_of_it(act, kind):
    (layer,) = [each for each in fusion.fuse(Halved(act)).model.modules() if isinstance(each, FusedHalving)]
    assert layer.kind == kind


def test_a_pool_with_same_padding_before_a_norm_is_left_to_torch():
    """It keeps the last line of an odd side."""
    model = Halved(nn.ReLU())
    model.pool = SameMaxPool2d(2, 2)
    found = fusion.fuse(model).model
    assert found(images(9)).shape[2:] == (5, 5)
    assert not any(isinstance(layer, FusedHalving) for layer in found.modules())


def test_gelu_by_a_tangent_is_left_to_torch():
    def act(x):
        return nn.functional.gelu(x, approximate="tanh")

    model = Halved(act).train()
    found = fusion.fuse(model).model
    assert torch.equal(found(images(8)), model(images(8)))
    assert [each.kind for each in found.modules() if isinstance(each, FusedHalving)] == ["none"]


@pytest.mark.parametrize(("count", "side"), [(1, 2), (1, 3), (4, 1)])
def test_what_torch_refuses_is_refused_when_fused(count, side, monkeypatch):
    """One value per channel has no variance, and an image of one pixel has nothing to pool."""
    monkeypatch.setattr("falconet.models.fused.layers.fits", lambda *_: True)
    found = fusion.fuse(Halved(nn.ReLU()).train()).model
    with pytest.raises((ValueError, RuntimeError), match=r"more than 1 value|too small"):
        found(images(side, count=count))


def test_fusing_leaves_the_model_as_it_was():
    model = zoo.build("resnet18", classes=10, seed=0)
    keys, training = [*model.state_dict()], model.training
    fusion.fuse(model)
    assert [*model.state_dict()] == keys
    assert model.training == training
    assert not any(isinstance(module, FusedNorm) for module in model.modules())


def layers_of(name):
    found = fusion.fuse(built(name))
    return [each for each in found.model.modules() if isinstance(each, FusedNorm | FusedGroupNorm | FusedExcitation)]


def test_a_block_takes_its_shortcut_into_the_norm_and_forks_its_result():
    layers = layers_of("resnet50")
    assert sum(layer.shortcut_norm is not None for layer in layers) == 4  # one for each stage
    assert sum(layer.forks for layer in layers) == 15  # every block but the last, after whose pool nothing is added


def test_a_group_norm_takes_its_shortcut_and_forks_its_result():
    layers = layers_of("resnet50 with fast group norm")
    assert all(isinstance(layer, FusedGroupNorm) for layer in layers)
    assert sum(type(layer.act) is nn.ReLU for layer in layers) == 49  # all but those of the four projections
    assert sum(layer.forks for layer in layers) == 15


def test_squeeze_and_excite_are_part_of_the_norm():
    assert sum(isinstance(layer, FusedExcitation) for layer in layers_of("efficientnet-b0")) == 16


def with_blocks_dropped(norm):
    norm.drop = nn.Dropout2d()
    return norm


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(4, momentum=None),
        nn.BatchNorm2d(4, affine=False),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.InstanceNorm2d(4),
        with_blocks_dropped(FastGroupNorm(2, 4)),
    ],
)
def test_other_norms_stay_as_they_are(norm):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), norm, nn.ReLU())
    assert fusion.fuse(model).fused == 0


def test_a_sum_that_is_used_elsewhere_too_stays_apart():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x):
            normed = self.norm(self.conv(x))
            return (normed + x).relu() + normed

    model = Model()
    found = fusion.fuse(model)
    assert found.fused == 1
    torch.testing.assert_close(found.model.eval()(images(8)), model.eval()(images(8)), rtol=0, atol=0)


def on_a_gpu(*shape):
    """A tensor with neither memory nor values, as the choice of a layer's path sees it."""
    return torch.empty(shape, device="cuda", memory_format=torch.channels_last)


def keeps_its_statistics(norm):
    Frozen(norms=frozenset({"0"})).set(nn.Sequential(norm))


def averages_all_batches(norm):
    norm.momentum = None


@pytest.mark.parametrize("change", [keeps_its_statistics, averages_all_batches, nn.Module.eval])
def test_a_norm_that_changes_after_it_was_fused_runs_as_it_is(change):
    norm = nn.BatchNorm2d(8)
    with FakeTensorMode():
        assert fits(on_a_gpu(2, 8, 4, 4), norm)
        change(norm)
        assert not fits(on_a_gpu(2, 8, 4, 4), norm)


def test_a_shortcut_for_all_images_is_added_by_torch():
    with FakeTensorMode():
        layer = FusedNorm(nn.BatchNorm2d(8, device="cuda"))
        assert layer(on_a_gpu(2, 8, 4, 4), on_a_gpu(1, 8, 4, 4)).shape == (2, 8, 4, 4)


def without_noise(model):
    for module in model.modules():
        for name in ("p", "drop_prob", "drop_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.cuda().to(memory_format=torch.channels_last).train()


def learning(name):
    """A network on the GPU, none of whose weights is 0, which would hide a block's gradients."""
    model = without_noise(built(name))
    for weight in model.parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, 1.0, 0.1, generator=torch.Generator("cuda").manual_seed(len(weight)))
    return model


def gradients(model, forward, inputs, *, dtype=None):
    model.zero_grad()
    with torch.autocast("cuda", dtype or torch.float16, enabled=dtype is not None):
        logits = forward(inputs)
    nn.functional.cross_entropy(logits.double(), torch.arange(len(inputs), device="cuda") % 10).backward()
    return torch.cat([weight.grad.double().flatten() for weight in model.parameters() if weight.requires_grad])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_fused_network_on_a_gpu_is_as_exact_as_the_plain_one(name, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    exact, plain, model = (learning(name) for _ in range(3))
    inputs = images(64, count=16).cuda()
    right = gradients(exact.double(), exact, inputs.double())
    found = fusion.fuse(model)
    padded = nn.functional.pad(inputs, (0, 0, 0, 0, 0, found.channels - 3))
    fused = gradients(model, found.model, padded, dtype=dtype)
    moved = {key: value.clone() for key, value in model.named_buffers() if "running" in key}
    usual = gradients(plain, plain, inputs, dtype=dtype)
    away, usually = (((each - right).norm() / right.norm()).item() for each in (fused, usual))
    # Under autocast, torch's group norm and what follows it are in fp32; our own keeps the format of convolutions.
    more = 3.0 if any(isinstance(each, nn.GroupNorm) for each in plain.modules()) else 1.5
    assert away < more * usually + 1e-3  # a rectified value near 0 may fall on the other side: 3e-4 in fp32
    assert torch.equal(fused, gradients(model, found.model, padded, dtype=dtype)), "the same input gave other bits"
    for key, value in exact.named_buffers():
        if key in moved:
            tolerance = 1e-4 if dtype is None else 0.05
            torch.testing.assert_close(moved[key].double(), value, rtol=tolerance, atol=tolerance, msg=key)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count_are_normalised():
    from falconet.models.fused import batchnorm_kernels

    count = 2**31 // (64 * 256 * 256) + 2
    y = torch.randn(count, 64, 256, 256, device="cuda", dtype=torch.float16).contiguous(
        memory_format=torch.channels_last
    )
    ones = torch.ones(64, device="cuda")
    found = batchnorm_kernels.statistics(y, ones, ones, None, eps=1e-5)
    z, _ = batchnorm_kernels.normalise(y, found, act="relu")
    reached, slopes, _ = batchnorm_kernels.sum_gradients(z, y, found, act="relu")
    dy, _ = batchnorm_kernels.spread_gradients(reached, y, found, slopes.found)
    torch.testing.assert_close(z[-1].float(), (y[-1].float() + 1).relu(), rtol=0.02, atol=0.02)
    assert dy[-1].float().abs().mean() > 0.01


class Twins:
    """A span of two replicas that see the same batch: mean, variance and gradients are those of one."""

    def gathered(self, values):
        return torch.stack((values, values))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["resnet50", "efficientnet-b0"])
def test_a_fused_network_over_two_replicas_on_a_gpu_is_as_exact_as_over_one(name, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    exact, alone, together = (learning(name) for _ in range(3))
    inputs = images(64, count=16).cuda()
    right = gradients(exact.double(), exact, inputs.double())
    usual = gradients(alone, fusion.fuse(alone).model, inputs, dtype=dtype)
    found = fusion.fuse(over(together, Twins()))
    assert found.fused == found.norms
    fused = gradients(together, found.model, inputs, dtype=dtype)
    away, usually = (((each - right).norm() / right.norm()).item() for each in (fused, usual))
    assert away < 1.5 * usually + 1e-3
    for (key, value), other in zip(alone.named_buffers(), together.buffers(), strict=True):
        if key.endswith("running_mean"):
            tolerance = 1e-4 if dtype is None else 0.05
            torch.testing.assert_close(other, value, rtol=tolerance, atol=tolerance, msg=key)
