"""Proxy norm: standardise activations by the mean and deviation they would have if their input were Gaussian.

After Labatie et al., "Proxy-Normalizing Activations to Match Batch Normalization while Removing Batch Dependence"
(arXiv 2106.03743). It follows a norm that does not depend on other images and has no scale or shift.
"""

from statistics import NormalDist
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase

from falconet.config.options import Model
from falconet.errors import ConfigError
from falconet.numerics.precision import uncast

SAMPLES = 200  # quantiles that represent the Gaussian, as in the original
Activation = Literal["silu", "relu"]
_ACTIVATIONS: dict[type[nn.Module], Activation] = {nn.SiLU: "silu", nn.ReLU: "relu"}


class ProxyNorm(_NormBase):
    """(f(weight x + bias) - mean) / deviation of an already normalised `x`, where f is the activation.

    A channel's mean and deviation are those of f(weight z + bias) for a Gaussian z with deviation 1 + proxy_scale
    around proxy_shift. Both are learned, starting at 0, and gradients flow through the moments. The arithmetic is
    fp32, as in other norms; the output has the input's type and memory format.
    """

    samples: Tensor

    def __init__(
        self, channels: int, *, activation: Activation, eps: float = Model.proxy_epsilon, recompute: bool = True
    ) -> None:
        """`recompute`: save only the input for the backward pass, and compute the activation again."""
        super().__init__(channels, eps, affine=True, track_running_stats=False)
        self.proxy_scale = nn.Parameter(torch.zeros(channels))
        self.proxy_shift = nn.Parameter(torch.zeros(channels))
        self.register_buffer("samples", torch.tensor(quantiles()), persistent=False)
        self.activation = activation
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:  # N x C x H x W
        compute = recomputed_proxy_norm if self.recompute else plain_proxy_norm
        with uncast(x):
            return compute(x, self.factors(), self.samples, activation=self.activation, eps=self.eps)

    def factors(self) -> Tensor:  # 4 x C
        return torch.stack((self.weight, self.bias, self.proxy_scale, self.proxy_shift))


def apply(model: nn.Module, *, eps: float, recompute: bool) -> None:
    """Replace the activation of every norm, in place, by a normalised one that takes over the norm's scale and shift.

    As in the original, a norm without an activation keeps its scale and loses its shift, which would undo the
    normalisation.
    """
    norms = [layer for layer in model.modules() if isinstance(layer, _NormBase | nn.GroupNorm) and layer.affine]
    active: list[Any] = [layer for layer in norms if type(getattr(layer, "act", None)) in _ACTIVATIONS]
    if not active:
        raise ConfigError("this model has no norm with an activation; expected an EfficientNet")
    for layer in active:
        channels, activation = layer.weight.numel(), _ACTIVATIONS[type(layer.act)]
        norm = ProxyNorm(channels, activation=activation, eps=eps, recompute=recompute)
        norm.weight, norm.bias = layer.weight, layer.bias
        layer.act = norm.train(layer.training)
        layer.register_parameter("weight", None)
        layer.affine = False
    for layer in norms:
        layer.register_parameter("bias", None)


def quantiles() -> list[float]:
    """The middle quantiles of equally likely intervals of the standard normal distribution."""
    return [NormalDist().inv_cdf((number + 0.5) / SAMPLES) for number in range(SAMPLES)]


def proxy_moments(factors: Tensor, samples: Tensor, *, activation: Activation, eps: float) -> tuple[Tensor, Tensor]:
    """Each channel's mean and 1 / deviation of the activation; `factors`: a proxy norm's."""
    weight, bias, scale, shift = wide(factors).unsqueeze(2)  # C x 1 each
    inputs = weight * ((1 + scale) * wide(samples) + shift) + bias  # C x samples
    variance, mean = torch.var_mean(_activated(inputs, activation), dim=1, correction=0)
    return mean, torch.rsqrt(variance + eps)


def plain_proxy_norm(x: Tensor, factors: Tensor, samples: Tensor, *, activation: Activation, eps: float) -> Tensor:
    """Proxy norm by the plain formula; torch saves two more tensors of the input's size for the backward pass."""
    mean, rstd = proxy_moments(factors, samples, activation=activation, eps=eps)
    weight, bias = wide(factors[:2])
    y = (_activated(wide(x) * _spread(weight) + _spread(bias), activation) - _spread(mean)) * _spread(rstd)
    return y.to(x.dtype)


def recomputed_proxy_norm(x: Tensor, factors: Tensor, samples: Tensor, *, activation: Activation, eps: float) -> Tensor:
    """Proxy norm that saves only the input; fused for channels-last memory on CUDA."""
    if torch.compiler.is_compiling():  # it fuses the formula anyway, and torch 2.11's loses what a Function saves
        return plain_proxy_norm(x, factors, samples, activation=activation, eps=eps)
    norm = FusedProxyNorm if fits(x) else Recomputed
    y: Tensor = norm.apply(x, factors, samples, activation, eps)
    return y


def fits(x: Tensor) -> bool:
    """Whether the kernels of norms, which compute in fp32, can take this input."""
    dense = x.is_cuda and x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return dense and x.numel() > 0 and x.dtype != torch.float64


class Recomputed(torch.autograd.Function):
    """`plain_proxy_norm` whose backward pass recomputes everything but the moments, two vectors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Tensor, samples: Tensor, activation: Activation, eps: float) -> Tensor:
        moments = torch.stack(proxy_moments(factors, samples, activation=activation, eps=eps))
        ctx.save_for_backward(x, factors, samples, moments)
        ctx.activation = activation
        weight, bias, mean, rstd = (_spread(vector) for vector in (*wide(factors[:2]), *moments))
        return ((_activated(wide(x) * weight + bias, activation) - mean) * rstd).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, factors, samples, moments = ctx.saved_tensors
        weight, bias, mean, rstd = (_spread(vector) for vector in (*wide(factors[:2]), *moments))
        values, given = wide(x), wide(dy)
        inputs = values * weight + bias
        centred = _activated(inputs, ctx.activation) - mean
        slope = given * rstd * _derivative(inputs, ctx.activation)  # of the affine input
        dmoments = torch.stack([(-given * rstd).sum(_PIXELS), (given * centred).sum(_PIXELS)])
        dfactors = _through_moments(factors, samples, moments, dmoments, activation=ctx.activation)
        dfactors[0] += (slope * values).sum(_PIXELS)
        dfactors[1] += slope.sum(_PIXELS)
        return (slope * weight).to(x.dtype), dfactors.to(factors.dtype), None, None, None


def _through_moments(
    factors: Tensor, samples: Tensor, moments: Tensor, dmoments: Tensor, *, activation: Activation
) -> Tensor:
    """The gradients of the factors, 4 x C, from those of the moments, 2 x C."""
    weight, bias, scale, shift = wide(factors).unsqueeze(2)
    mean, rstd = moments.unsqueeze(2)
    dmean, drstd = dmoments.unsqueeze(2)
    points = wide(samples)
    proxies = (1 + scale) * points + shift  # C x samples
    inputs = weight * proxies + bias
    dvariance = -0.5 * drstd * rstd**3
    slopes = (dmean + 2 * dvariance * (_activated(inputs, activation) - mean)) / points.numel()
    slopes = slopes * _derivative(inputs, activation)
    parts = (slopes * proxies, slopes, slopes * weight * points, slopes * weight)
    return torch.stack([part.sum(1) for part in parts])


class FusedProxyNorm(torch.autograd.Function):
    """Proxy norm by two kernels forward and three backward; the input is the only large tensor saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Tensor, samples: Tensor, activation: Activation, eps: float) -> Tensor:
        from falconet.models.fused import proxynorm_kernels

        y, moments = proxynorm_kernels.forward(x, factors, samples, activation, eps)
        ctx.save_for_backward(x, factors, samples, moments)
        ctx.activation = activation
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from falconet.models.fused import proxynorm_kernels

        x, factors, samples, moments = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx, dfactors = proxynorm_kernels.backward(x, dy, factors, samples, moments, ctx.activation)
        return dx, dfactors.to(factors.dtype), None, None, None


_PIXELS = (0, 2, 3)  # everything but the channels


def _activated(values: Tensor, activation: Activation) -> Tensor:
    return functional.silu(values) if activation == "silu" else functional.relu(values)


def _derivative(values: Tensor, activation: Activation) -> Tensor:
    if activation == "relu":
        return (values > 0).to(values.dtype)
    chance = torch.sigmoid(values)
    return chance * (1 + values * (1 - chance))


def wide(values: Tensor) -> Tensor:
    """The values in fp32, or in fp64 if they have it."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _spread(vector: Tensor) -> Tensor:
    return vector.view(1, -1, 1, 1)
