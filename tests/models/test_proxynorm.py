"""Proxy norm against Gaussian integrals and the paper's formula: gradients, kernels and whole models."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import interpreting
from falconet.config.options import Model
from falconet.errors import ConfigError
from falconet.models import norms, splits, zoo
from falconet.models.proxynorm import (
    SAMPLES,
    ProxyNorm,
    plain_proxy_norm,
    proxy_moments,
    quantiles,
    recomputed_proxy_norm,
)
from falconet.numerics.precision import REGIMES
from falconet.numerics.recompute import recompute
from falconet.optim.optimizers import undecayed_names

ACTIVATIONS = ("silu", "relu")
EPS = 0.03
# weight, bias, proxy scale, proxy shift of a channel
CHANNELS = [(1, 0, 0, 0), (0.5, 2, 0, 0), (-1.5, 0.3, 0, 0), (1, -3, 0, 0), (2, 0.5, 0.4, -0.7), (0.1, 0, -0.5, 1)]


def factors_of(channels, dtype=torch.float64):
    return torch.tensor(channels, dtype=dtype).T.contiguous()  # 4 x C


def samples(dtype=torch.float64):
    return torch.tensor(quantiles(), dtype=dtype)


def normal_integrals(channel, activation):
    """Mean and variance of the activation of weight z + bias, z Gaussian around shift: closed form, or quadrature."""
    weight, bias, scale, shift = channel
    m, s = weight * shift + bias, abs(weight * (1 + scale))
    if activation == "relu":
        density, chance = math.exp(-((m / s) ** 2) / 2) / math.sqrt(2 * math.pi), (1 + math.erf(m / s / 2**0.5)) / 2
        mean = m * chance + s * density
        return mean, (m * m + s * s) * chance + m * s * density - mean**2
    points, weights = np.polynomial.hermite_e.hermegauss(100)
    values = m + s * points
    values, weights = values / (1 + np.exp(-values)), weights / weights.sum()
    mean = (weights * values).sum()
    return mean, (weights * (values - mean) ** 2).sum()


def test_samples_are_quantiles_of_the_normal_distribution():
    chances = (torch.arange(200, dtype=torch.float64) + 0.5) / 200
    torch.testing.assert_close(samples(), torch.special.ndtri(chances), rtol=0, atol=1e-12)
    assert SAMPLES == 200


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("channel", CHANNELS)
def test_moments_equal_gaussian_integrals(channel, activation):
    mean, rstd = proxy_moments(factors_of([channel]), samples(), activation=activation, eps=EPS)
    expected, variance = normal_integrals(channel, activation)
    spread = math.sqrt(variance + EPS)  # what the mean is a part of
    assert abs(mean.item() - expected) < 0.01 * spread  # 200 samples have 0.99 of a normal's variance
    assert rstd.item() == pytest.approx(1 / spread, rel=0.01)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("compute", [plain_proxy_norm, recomputed_proxy_norm])
def test_gaussian_input_gives_mean_0_and_deviation_1(activation, compute):
    """For any scale and shift, as batch norm would do, but without looking at the batch."""
    noise = torch.Generator().manual_seed(0)
    weight, bias = torch.rand(64, generator=noise) * 2 + 0.2, torch.randn(64, generator=noise)
    scale, shift = torch.rand(64, generator=noise) - 0.3, torch.randn(64, generator=noise) / 2
    x = torch.randn(40, 64, 50, 50, generator=noise) * (1 + scale).view(-1, 1, 1) + shift.view(-1, 1, 1)
    factors = torch.stack((weight, bias, scale, shift))
    y = compute(x, factors, samples(torch.float32), activation=activation, eps=1e-5)
    variance, mean = torch.var_mean(y, (0, 2, 3))
    # Where a relu is nearly always 0, 200 samples know its rare values less well.
    assert mean.abs().median() < 0.01
    assert (variance.sqrt() - 1).abs().median() < 0.01
    plain = nn.functional.silu(x * weight.view(-1, 1, 1) + bias.view(-1, 1, 1))
    assert plain.mean((0, 2, 3)).abs().median() > 0.1  # without it, they are neither


def by_definition(x, factors, activation):
    """In numpy, from the paper's formula and torch's quantiles."""
    z = torch.special.ndtri((torch.arange(200, dtype=torch.float64) + 0.5) / 200).numpy()
    f = (lambda v: v / (1 + np.exp(-v))) if activation == "silu" else (lambda v: np.maximum(v, 0))
    out = np.empty_like(x)
    for channel, (weight, bias, scale, shift) in enumerate(factors.T):
        proxied = f(weight * ((1 + scale) * z + shift) + bias)
        out[:, channel] = (f(weight * x[:, channel] + bias) - proxied.mean()) / np.sqrt(proxied.var() + EPS)
    return out


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("compute", [plain_proxy_norm, recomputed_proxy_norm])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_output_follows_the_papers_formula(activation, compute, dtype):
    noise = torch.Generator().manual_seed(1)
    x = torch.randn(3, len(CHANNELS), 5, 4, generator=noise).to(dtype).contiguous(memory_format=torch.channels_last)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    y = compute(x, factors_of(CHANNELS, wide), samples(wide), activation=activation, eps=EPS)
    expected = torch.from_numpy(by_definition(x.double().numpy(), np.array(CHANNELS, dtype=float).T, activation))
    torch.testing.assert_close(y.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=8 * torch.finfo(wide).eps)
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_equal_finite_differences_and_the_plain_formula(activation):
    noise = torch.Generator().manual_seed(2)
    x = torch.randn(2, len(CHANNELS), 3, 2, generator=noise, dtype=torch.float64).requires_grad_()
    factors = factors_of(CHANNELS).requires_grad_()

    def recomputed(x, factors):
        return recomputed_proxy_norm(x, factors, samples(), activation=activation, eps=EPS)

    assert torch.autograd.gradcheck(recomputed, (x, factors))
    dy = torch.randn(x.shape, generator=noise, dtype=torch.float64)
    plain = plain_proxy_norm(x, factors, samples(), activation=activation, eps=EPS)
    expected = torch.autograd.grad(plain, (x, factors), dy)
    for mine, theirs in zip(torch.autograd.grad(recomputed(x, factors), (x, factors), dy), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(("keep", "tensors"), [(True, 1), (False, 3)])
def test_recomputation_saves_only_the_input(keep, tensors):
    """Without it the affine input, the centred activation and the input itself are saved."""
    layer = ProxyNorm(16, activation="silu", recompute=keep)
    x = torch.randn(4, 16, 20, 20, requires_grad=True)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        layer(x)
    assert sum(t.numel() == x.numel() for t in kept.values()) == tensors
    rest = sum(t.numel() for t in kept.values() if t.numel() != x.numel())
    assert rest < 16 * (4 + 2) + 201 if keep else rest > 16 * 200  # vectors, or what each sample became


def test_autocast_keeps_the_type_of_the_input():
    layer = ProxyNorm(4, activation="silu")
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(1, 4, 2, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("keep", [True, False])
def test_meta_tensors_are_accepted(keep):
    """Recomputation and pipelines work out memory and shapes on the meta device."""
    layer = ProxyNorm(8, activation="silu", recompute=keep).to("meta", torch.float16)
    images = torch.empty(2, 8, 4, 4, dtype=torch.float16, device="meta")
    out = layer(images)
    assert (out.shape, out.dtype, out.device) == (images.shape, torch.float16, images.device)


@pytest.mark.run
def test_compiler_makes_one_graph():
    layer = ProxyNorm(6, activation="silu")
    x = torch.randn(2, 6, 3, 3, requires_grad=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    mine, theirs = compiled(x), layer(x)
    torch.testing.assert_close(mine, theirs)
    for one, other in zip(
        torch.autograd.grad(mine.square().sum(), (x, *layer.parameters())),
        torch.autograd.grad(theirs.square().sum(), (x, *layer.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def proxied(name="efficientnet-cifar", *, device=None, **options):
    settings = {"norm_type": "group", "norm_num_groups": 4, "proxy_norm": True, **options}
    with torch.device(device or "cpu"):
        return zoo.build(name, classes=10, seed=0, **settings)


SIZES = [*((f"efficientnet-b{size}", 1) for size in (0, 2, 4, 7)), ("efficientnet-b4", 16), ("efficientnet-cifar", 16)]


@pytest.mark.run
@pytest.mark.parametrize(("name", "group_dim"), SIZES)
def test_every_activation_after_a_norm_is_normalised_and_other_norms_lose_their_shift(name, group_dim):
    model, plain = (
        proxied(name, device="meta", efficientnet_group_dim=group_dim, proxy_norm=proxy) for proxy in (True, False)
    )
    layers = dict(model.named_modules())
    added_layers = {path: layer for path, layer in layers.items() if isinstance(layer, ProxyNorm)}
    active = {
        path for path, layer in plain.named_modules() if hasattr(layer, "num_groups") and layer.act.__class__ is nn.SiLU
    }
    assert {path.removesuffix(".act") for path in added_layers} == active
    bare = [layer for path, layer in layers.items() if isinstance(layer, nn.GroupNorm) and path not in active]
    assert all(layers[path].weight is None and layers[path].bias is None for path in active)
    assert bare
    assert all(layer.weight is not None and layer.bias is None for layer in bare)
    # Two more numbers for each channel with an activation, one less for each without.
    added = sum(2 * layer.num_features for layer in added_layers.values()) - sum(layer.num_channels for layer in bare)
    assert zoo.count_parameters(model) == zoo.count_parameters(plain) + added


KINDS = {
    "group": {},
    "strided": {"norm_grouping": "strided"},
    "fast": {"enable_fast_groupnorm": True},
    "batch": {"norm_type": "batch"},
    "one pass": {"norm_type": "batch", "disable_stable_batchnorm": True},
    "kept": {"proxy_recompute": False},
}


@pytest.mark.parametrize("norm", KINDS.values(), ids=KINDS)
def test_every_weight_gets_a_gradient_after_every_kind_of_norm(norm):
    model = proxied(**norm)
    images = torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    model(images).square().sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())
    assert model.bn1.act.proxy_scale.grad.any()


def test_first_layers_of_a_model_follow_the_definition():
    """The first layers of the model, by group norm without scale and the paper's formula."""
    model = proxied()
    with torch.no_grad():
        for weight in (model.bn1.act.weight, model.bn1.act.bias, model.bn1.act.proxy_scale, model.bn1.act.proxy_shift):
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
    x = torch.randn(2, 3, 32, 32)
    before = nn.functional.group_norm(model.conv_stem(x), 4, eps=model.bn1.eps)
    act = model.bn1.act
    factors = torch.stack((act.weight, act.bias, act.proxy_scale, act.proxy_shift)).detach().double().numpy()
    expected = by_definition(before.detach().double().numpy(), factors, "silu")
    np.testing.assert_allclose(model.bn1(model.conv_stem(x)).detach().numpy(), expected, rtol=1e-4, atol=1e-4)


def test_model_without_activations_after_its_norms_is_refused():
    with pytest.raises(ConfigError, match="--proxy-norm: this model has no norm with an activation"):
        norms.apply(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()), Model(proxy_norm=True))


def test_weights_stay_in_fp32_in_half_precision():
    model = REGIMES["16.16"].prepare(proxied(), torch.device("cpu"))
    types = {weight.dtype for layer in model.modules() if isinstance(layer, ProxyNorm) for weight in layer.parameters()}
    assert types == {torch.float32}
    assert model.conv_stem.weight.dtype == torch.float16


def test_weight_decay_spares_scales_and_shifts_but_not_those_of_the_gaussian():
    """In the original's optimizer too; with `vectors`, our default, neither is."""
    model = proxied()
    spared = undecayed_names(model, "norms")
    own = {name for name, _ in model.named_parameters() if ".act." in name}
    assert own & spared == {name for name in own if name.endswith(("act.weight", "act.bias"))}
    assert {name for name in own - spared if not name.endswith(("proxy_scale", "proxy_shift"))} == set()
    assert undecayed_names(model, "vectors") is None
    assert all(weight.ndim == 1 for name, weight in model.named_parameters() if name in own)


@pytest.mark.run
def test_stages_and_recomputation_change_no_bit():
    model, whole = proxied().train(), proxied().train()
    stages = [stage.module for stage in splits.split(model, ["blocks/1/0/bn1", "blocks/3/0", "conv_head"])]
    again = proxied().train()
    recompute(again, ["blocks/[0-9]"])
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(4))
    gradients = []
    for modules in ([whole], stages, [again]):
        torch.manual_seed(5)
        values = (x,)
        for module in modules:
            values = module(*values)
            values = values if isinstance(values, tuple) else (values,)
        values[0].square().mean().backward()
        gradients.append({name: weight.grad for module in modules for name, weight in module.named_parameters()})
    for other in gradients[1:]:
        assert other.keys() == gradients[0].keys()
        assert all(torch.equal(gradient, other[name]) for name, gradient in gradients[0].items())


@pytest.fixture(scope="module")
def interpreted():
    """The kernels' errors by case, from Triton's interpreter."""
    return interpreting.errors(Path(__file__).with_name("interpreted_proxynorm.py"))


@pytest.mark.run
def test_kernels_are_as_exact_as_fp32(interpreted):
    assert len(interpreted) == 6
    for case, errors in interpreted.items():
        assert max(errors) < 4e-6, (case, errors)  # of output, the input's gradient, the factors' gradients


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "shape", [(2, 6, 5, 7), (8, 96, 112, 112), (8, 1280, 7, 7), (2, 4, 1, 1), (3, 1, 4, 4)], ids=str
)
def test_gpu_result_is_exact_up_to_rounding(shape, activation, dtype):
    noise = torch.Generator().manual_seed(6)
    x, dy = (torch.randn(shape, generator=noise).to("cuda", dtype) for _ in range(2))
    x, dy = (t.contiguous(memory_format=torch.channels_last) for t in (x, dy))
    factors = torch.randn(4, shape[1], generator=noise).cuda()
    leaves = [x.detach().requires_grad_(), factors.requires_grad_()]
    y = recomputed_proxy_norm(*leaves, samples(torch.float32).cuda(), activation=activation, eps=EPS)
    found = [y, *torch.autograd.grad(y, leaves, dy)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    plain = plain_proxy_norm(*exact, samples().cuda(), activation=activation, eps=EPS)
    expected = [plain, *torch.autograd.grad(plain, exact, dy.double())]
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    for mine, theirs, rounding in zip(found, expected, (dtype, dtype, torch.float32), strict=True):
        error = (mine.double() - theirs).abs().max() / theirs.abs().max()
        assert error < max(1e-5, 2 * torch.finfo(rounding).eps)
