"""How convolutions by our own kernels are compared with float64 on a GPU."""

import torch

ERRORS = {torch.float16: 5e-4, torch.bfloat16: 4e-3}  # relative, by format


def relative(value, exact):
    return ((value.double() - exact).norm() / exact.norm()).item()


def gradients(layer, conv, x, dy):
    """The layer's result, and the gradients of its input and of the convolution's weight."""
    conv.weight.grad, x.grad = None, None
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, conv.weight.grad


def assert_exact_and_repeatable(kind, conv, exact, shape):
    """A layer of this kind, made of `conv`, equals `exact`, in float64, and repeats its bits; `shape`: of its input."""
    dtype = conv.weight.dtype
    exact.weight.data.copy_(conv.weight.data)
    x = torch.randn(shape, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
    dy = torch.randn_like(conv(x)).contiguous(memory_format=torch.channels_last)
    results = gradients(kind(conv), conv, x, dy)
    leaf = x.detach().double().contiguous().requires_grad_()
    expected = gradients(exact, exact, leaf, dy.double().contiguous())
    for name, a, b in zip(("output", "input", "weight"), results, expected, strict=True):
        assert relative(a, b) < ERRORS[dtype], name
    for a, b in zip(results, gradients(kind(conv), conv, x, dy), strict=True):
        assert torch.equal(a, b)
