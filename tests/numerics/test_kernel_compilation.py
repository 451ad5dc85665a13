"""Every Triton kernel compiles for an H100 or H200, on a machine without one.

The interpreter, which runs the kernels in other tests, accepts types and shapes that the compiler refuses.
"""

import importlib
import inspect
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from falconet.data.augment import VALUES, Chain
from falconet.data.preprocessing import Preprocessing
from falconet.models.fused import narrow
from falconet.models.proxynorm import SAMPLES
from falconet.numerics.rounding import Rounding
from half_rules import MAKERS, optimizer_of

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from falconet.models.fused.batchnorm_kernels import ACTIVATIONS, Reached  # noqa: E402

ARCHITECTURE = 90  # they also compile for 80, tried by hand
NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """What was compiled: several modules launch the kernels that merge sums, and every test those of its dtype."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def compiled(kept, monkeypatch, tmp_path):
    """The names of the kernels that were launched; they are compiled to files and do not run."""
    found = set()

    def compile_instead(kernel, *args, grid, warmup, **named):
        parameters = {parameter.name: parameter for parameter in kernel.params}
        bound = inspect.signature(kernel.fn).bind(
            *args, **{key: named.pop(key) for key in [*named] if key in parameters}
        )
        constants = {key: value for key, value in bound.arguments.items() if parameters[key].is_constexpr}
        types = {key: "constexpr" if key in constants else type_of(value) for key, value in bound.arguments.items()}
        # As tensors of torch are: without it, elements would be read one by one.
        aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind.startswith("*")}
        source = ASTSource(kernel, signature=types, constexprs=constants, attrs=aligned)
        code = triton.compile(source, target=GPUTarget("cuda", ARCHITECTURE, 32), options=named)
        (tmp_path / f"{kernel.fn.__name__}.cubin").write_bytes(code.asm["cubin"])
        found.add(kernel.fn.__name__)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(kept))
    monkeypatch.setattr(JITFunction, "run", compile_instead)
    return found


def resources(cubin):
    """Registers, bytes of the stack and so on of a thread."""
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    words = subprocess.run([program, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    return {name: int(number) for name, number in re.findall(r"\b([A-Z]+):(\d+)", words)}


def is_read_ahead(cubin):
    """Whether tiles are copied to shared memory while others are computed."""
    program = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    words = subprocess.run([program, "-c", cubin], capture_output=True, text=True, check=True).stdout
    return "LDGSTS" in words


def type_of(value):
    if isinstance(value, torch.Tensor):
        return f"*{NAMES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def kernels_of(name):
    module = importlib.import_module(name)
    called = {
        word
        for kernel in vars(module).values()
        if isinstance(kernel, JITFunction)
        for word in kernel.fn.__code__.co_names
    }
    own = {key for key, kernel in vars(module).items() if isinstance(kernel, JITFunction) and kernel.__module__ == name}
    return module, own - called


@pytest.mark.run
@pytest.mark.parametrize(
    ("acts", "dtype", "channels", "strided"),
    [
        (["none"], torch.float16, 24, False),
        (["silu", "relu6"], torch.bfloat16, 256, True),
        (["hard_swish"], torch.float32, 6, False),
    ],
)
def test_group_norm_compiles(acts, dtype, channels, strided, compiled):
    module, kernels = kernels_of("falconet.models.fused.groupnorm_kernels")
    x = torch.zeros(2, channels, 12, 12, dtype=dtype).to(memory_format=torch.channels_last)
    weight = torch.ones(channels)
    found = module.statistics(x, 2, strided=strided, eps=1e-5)
    for act in acts:
        norm = module.GroupNorm(x, found, weight, weight, act, strided)
        norm.apply()
        norm.backward(x, dz2=x)
    norm = module.GroupNorm(x, found, weight, weight, "relu", strided)
    norm.backward(x, adds=True, bits=norm.apply(x)[1])
    assert compiled == kernels


@pytest.mark.run
@pytest.mark.parametrize("act", ["relu", "silu"])
def test_a_group_norm_with_a_proxy_norm_compiles(act, compiled):
    module, kernels = kernels_of("falconet.models.fused.groupnorm_kernels")
    x, ones = torch.zeros(2, 24, 12, 12, dtype=torch.float16).to(memory_format=torch.channels_last), torch.ones(2, 24)
    found = module.statistics(x, 4, strided=act == "silu", eps=1e-5)
    norm = module.GroupNorm(x, found, ones[0], ones[1], act, act == "silu", ones)
    norm.apply()
    norm.backward(x)
    assert compiled == kernels


@pytest.mark.run
@pytest.mark.parametrize(
    ("dtype", "channels", "acts"),
    [
        (torch.float16, 24, [*ACTIVATIONS]),  # they compute in fp32, whatever they read and store
        (torch.float16, 256, ["relu"]),
        (torch.float32, 24, ["silu"]),
        (torch.float32, 256, ["gelu"]),
    ],
)
def test_batch_norm_compiles(dtype, channels, acts, compiled):
    module, kernels = kernels_of("falconet.models.fused.batchnorm_kernels")
    x = torch.zeros(2, channels, 40, 40, dtype=dtype).to(memory_format=torch.channels_last)
    weight = bias = torch.ones(channels)
    running = module.Running(weight, bias, torch.tensor(0), 0.1)
    found = module.statistics(x, weight, bias, running, eps=1e-5)
    module.dense(torch.zeros(2, channels, 1, 1, dtype=dtype).expand(2, channels, 7, 7))
    for act in acts:
        module.normalise(x, found, act=act)
        reached, slopes, _ = module.sum_gradients(x, x, found, act=act, dz2=x)
        module.spread_gradients(reached, x, found, slopes.found)
    _, bits = module.normalise(x, found, act="relu", shortcut=x, shortcut_found=found)
    added = module.Added(x, found, bits)
    reached, slopes, others = module.sum_gradients(x, x, found, act="relu", dz2=x, added=added)
    module.spread_gradients(reached, x, found, slopes.found, x, others.found)
    module.sum_gradients(x, x, found, act="relu", added=module.Added(None, None, bits))
    assert compiled == kernels


@pytest.mark.run
@pytest.mark.parametrize(
    ("inputs", "outputs", "dtype"),
    [
        (16, 96, torch.float16),
        (24, 144, torch.bfloat16),
        (256, 64, torch.bfloat16),
        (128, 512, torch.float16),
    ],
)
def test_convolution_with_its_norm_compiles(inputs, outputs, dtype, compiled):
    module, kernels = kernels_of("falconet.models.fused.pointwise_kernels")
    x = torch.zeros(2, inputs, 40, 40, dtype=dtype).to(memory_format=torch.channels_last)
    weight = torch.zeros(outputs, inputs, 1, 1, dtype=dtype)
    y, _ = module.forward(x, weight)
    if not module.can_go_back(inputs, outputs):
        assert compiled == {"_convolve"}
        return
    found = torch.zeros(4, outputs)
    for reached in (Reached(y, act="silu"), Reached(y, y)):
        module.backward(reached, y, found, found, x, weight)
    assert compiled == kernels


@pytest.mark.run
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_batch_norm_over_replicas_compiles(dtype, compiled):
    module, kernels = kernels_of("falconet.models.fused.span_kernels")
    batchnorm, _ = kernels_of("falconet.models.fused.batchnorm_kernels")
    x = torch.zeros(2, 24, 40, 40, dtype=dtype).to(memory_format=torch.channels_last)
    weight = bias = torch.ones(24)
    spanning = module.Spanning(SimpleNamespace(gathered=lambda values: values.expand(2, -1)))
    running = batchnorm.Running(weight, bias, torch.tensor(0), 0.1)
    found = batchnorm.statistics(x, weight, bias, running, eps=1e-5, span=spanning)
    batchnorm.sum_gradients(x, x, found, act="relu", span=spanning)
    assert compiled > kernels  # and the sums of one replica


@pytest.mark.run
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_excitation_compiles(dtype, compiled):
    module, kernels = kernels_of("falconet.models.fused.excitation_kernels")
    x, gate = torch.zeros(2, 24, 40, 40, dtype=dtype).to(memory_format=torch.channels_last), torch.zeros(2, 24)
    excitation = module.Excitation(x, torch.ones(4, 24), "silu")
    excitation.apply(gate)
    excitation.backward(x, gate, gate, (excitation.sums(), excitation.gate_sums(x)))
    assert compiled > kernels  # and what merges a norm's sums


@pytest.mark.run
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_pooled_norm_compiles(dtype, compiled):
    module, kernels = kernels_of("falconet.models.fused.pool_kernels")
    x, found = torch.zeros(2, 64, 40, 40, dtype=dtype).to(memory_format=torch.channels_last), torch.ones(4, 64)
    z, *won = module.forward(x, found)
    module.backward(z, x, found, *won, dz2=z)
    z, *won = module.forward(x, found, (0, 0))
    module.backward(z, x, found, *won, padding=(0, 0))
    module.spread_peak(module.peak(x), x, module.peak(x))
    pooled, winners, _ = module.halve(x)
    module.halve_normed(x, found, act="gelu")
    module.spread_halved(Reached(pooled, pooled, act="gelu"), pooled, found, found, winners, shape=x.shape)
    assert compiled > kernels  # and what merges a norm's sums


@pytest.mark.run
@pytest.mark.parametrize("channels", [64, 256])
def test_the_gradient_of_a_halved_image_compiles_without_spills(channels, compiled, tmp_path):
    module, _ = kernels_of("falconet.models.fused.pool_kernels")
    pooled = torch.zeros(2, channels, 15, 15, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    found, winners = torch.ones(4, channels), pooled.to(torch.uint8)
    shape = torch.Size((2, channels, 31, 31))
    module.spread_halved(Reached(pooled, act="gelu"), pooled, found, found, winners, shape=shape)
    assert resources(tmp_path / "_spread_halved.cubin")["STACK"] == 0
    assert is_read_ahead(tmp_path / "_spread_halved.cubin")


@pytest.mark.run
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_fused_stem_compiles_without_spills(dtype, compiled, tmp_path):
    module, kernels = kernels_of("falconet.models.fused.stem_kernels")
    images, conv = (
        torch.zeros(2, 4, 32, 32, dtype=dtype).to(memory_format=torch.channels_last),
        torch.nn.Conv2d(3, 24, 2),
    )
    z = module.forward(images, conv, act="gelu", outputs=32)
    module.bias_gradient(z, images, conv, act="gelu")
    assert compiled == kernels
    assert all(resources(tmp_path / f"{name}.cubin")["STACK"] == 0 for name in kernels)
    assert all(is_read_ahead(tmp_path / f"{name}.cubin") for name in kernels)


@pytest.mark.run
@pytest.mark.parametrize(
    ("classes", "dtype"),
    [(10, torch.float32), (1000, torch.float32), (21_843, torch.float32), (21_843, torch.bfloat16)],
)
@pytest.mark.parametrize("is_soft", [False, True])
def test_the_loss_compiles_almost_without_spills(classes, dtype, is_soft, compiled, tmp_path):
    module, kernels = kernels_of("falconet.evaluation.loss_kernels")
    logits, labels = torch.zeros(3, classes, dtype=dtype, requires_grad=True), torch.zeros(3, dtype=torch.int64)
    targets, weights = (torch.zeros(3, classes), torch.zeros(classes)) if is_soft else (None, None)
    module.scored(logits, module.Expected(labels, targets, weights, 0.2), images=3)[0].backward()
    assert compiled == kernels
    # Bytes of a thread: Triton 3.6 needs some.
    assert all(resources(tmp_path / f"{name}.cubin")["STACK"] <= 16 for name in kernels)


@pytest.mark.run
def test_pixels_compile(compiled):
    module, kernels = kernels_of("falconet.data.pixel_kernels")
    images = torch.zeros(3, 32, 32, 3, dtype=torch.uint8)
    for reflects in (False, True):
        module.pick(images, torch.zeros(3, 4, dtype=torch.int64), reflects=reflects, out=images)
    module.normalise(images.permute(0, 3, 1, 2), *torch.ones(2, 3), dtype=torch.bfloat16, channels=4)
    assert compiled == kernels


@pytest.mark.run
def test_changes_of_pixels_compile_without_spilling(compiled, tmp_path):
    module, kernels = kernels_of("falconet.data.augment_kernels")
    images = torch.zeros(3, 3, 40, 40, dtype=torch.uint8).to(memory_format=torch.channels_last)
    module.apply(images, Chain(torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 3, VALUES)))
    assert compiled == kernels
    assert all(resources(tmp_path / f"{name}.cubin")["LOCAL"] == 0 for name in kernels)


@pytest.mark.run
@pytest.mark.parametrize(("kernel", "dtype"), [(3, torch.float16), (5, torch.bfloat16)])
def test_depthwise_convolution_compiles(kernel, dtype, compiled):
    module, kernels = kernels_of("falconet.models.fused.depthwise_kernels")
    x = torch.zeros(2, 24, 9, 9, dtype=dtype).to(memory_format=torch.channels_last)
    taps = module.transposed(torch.zeros(24, 1, kernel, kernel), dtype)
    shape = module.Geometry(2, 24, 9, 9, kernel, 2, kernel // 2, kernel // 2, 5, 5)
    dy = module.forward(x, taps, shape)
    module.input_gradient(dy, taps, shape)
    module.weight_gradient(x, dy, shape, dtype=torch.float32)
    assert compiled == kernels - {"_spread_and_sum"}


@pytest.mark.run
def test_both_depthwise_gradients_compile_as_one_kernel(compiled):
    module, _ = kernels_of("falconet.models.fused.depthwise_kernels")
    x = torch.zeros(2, 24, 9, 9, dtype=torch.float16).to(memory_format=torch.channels_last)
    shape = module.Geometry(2, 24, 9, 9, 3, 1, 1, 1, 9, 9)
    module.gradients(x, x, module.transposed(torch.zeros(24, 1, 3, 3), x.dtype), shape, dtype=torch.float32)
    assert compiled == {"_spread_and_sum", "_merge"}


@pytest.mark.run
@pytest.mark.parametrize(("dtype", "group"), [(torch.float16, 4), (torch.bfloat16, 16)])
def test_a_grouped_convolution_compiles(dtype, group, compiled):
    module, kernels = kernels_of("falconet.models.fused.grouped_kernels")
    weight, x = (torch.zeros(shape, dtype=dtype) for shape in ((64, group, 3, 3), (2, 64, 8, 8)))
    dy, packed = x.to(memory_format=torch.channels_last), module.pack(weight, dtype)
    sizes = module.Geometry(2, 64, 8, 8, group, 1)
    module.forward(dy, packed, sizes)
    module.weight_gradient(dy, dy, weight, sizes)
    module.input_gradient(dy, packed, module.Geometry(2, 64, 16, 16, group, 2))
    assert compiled == kernels


@pytest.mark.run
def test_a_strided_convolution_of_wide_groups_compiles(compiled):
    module = importlib.import_module("falconet.models.fused.grouped_kernels")
    weight, dy = torch.zeros(64, 32, 3, 3), torch.zeros(2, 64, 8, 8, dtype=torch.float16)
    packed = module.pack(weight, dy.dtype)
    module.input_gradient(dy.to(memory_format=torch.channels_last), packed, module.Geometry(2, 64, 16, 16, 32, 2))
    assert compiled == {"_pack", "_spread"}


@pytest.mark.run
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("channels", "tiling"), narrow._TILINGS.items())
def test_a_narrow_convolutions_gradient_compiles_without_spills(channels, tiling, dtype, compiled, tmp_path):
    module, kernels = kernels_of("falconet.models.fused.narrow_kernels")
    inputs, outputs = channels
    x, dy = (torch.zeros(2, 32 * -(-n // 32), 31, 31, dtype=dtype) for n in channels)
    module.weight_gradient(x, dy, torch.zeros(outputs, inputs, 3, 3), tiling)
    assert compiled == kernels
    assert resources(tmp_path / "_sum_products.cubin")["STACK"] == 0


@pytest.mark.run
@pytest.mark.parametrize("act", ["relu", "silu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_proxy_norm_compiles(dtype, act, compiled):
    module, kernels = kernels_of("falconet.models.fused.proxynorm_kernels")
    x, factors = torch.zeros(2, 32, 7, 7, dtype=dtype).to(memory_format=torch.channels_last), torch.ones(4, 32)
    samples = torch.zeros(SAMPLES)
    _, moments = module.forward(x, factors, samples, act, 1e-5)
    module.backward(x, x, factors, samples, moments, act)
    assert compiled == kernels


@pytest.mark.parametrize("facts", [{}, {"antialias": False}, {"interpolation": "bicubic"}])
def test_resizing_compiles(facts, compiled):
    module, kernels = kernels_of("falconet.data.gpu_resize")
    out = torch.zeros((1, 12, 12, 3), dtype=torch.uint8)
    images = [torch.zeros((3, 20, 20), dtype=torch.uint8)]
    made = Preprocessing(image_size=12, resize=12, mean=(0, 0, 0), std=(1, 1, 1), **facts)
    module.resize_boxes(images, np.array([[0.0, 0, 20, 20]]), np.array([True]), out, preprocessing=made)
    assert compiled == kernels


@pytest.mark.run
@pytest.mark.parametrize("rounding", [None, Rounding(5)], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("name", MAKERS)
def test_update_rules_compile(name, rounding, compiled):
    model = torch.nn.ParameterList([torch.zeros(20, 30, dtype=torch.float16)])
    optimizer = optimizer_of(name, model, rounding)
    optimizer._fuses = True
    optimizer.scale, optimizer.found = torch.tensor(1.0), torch.tensor(False)
    model[0].grad = torch.zeros_like(model[0])
    optimizer.at(0)
    optimizer.step()
    assert compiled == {"_kernel", *({"_squares", "_ratios"} if name == "lars" else ())}
