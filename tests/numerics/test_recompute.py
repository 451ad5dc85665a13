"""Recomputation changes memory and nothing else: outputs, gradients and statistics are equal bit for bit."""

import copy
import math

import pytest
import torch
from torch import nn

from falconet.errors import ConfigError
from falconet.models.fused import fusion
from falconet.numerics.recompute import (
    _Segment,
    automatic,
    matching,
    measure_footprint,
    pieces,
    recompute,
    recompute_stage,
)

MODELS = {
    "resnet8-cifar": 16,
    "resnet18": 32,
    "resnet50": 32,
    "resnext50": 32,
    "efficientnet-b0": 32,  # dropout, drop path, squeeze and excite
    "mobilenet": 32,
    "mobilenet-v3-small": 32,
}


def build(name):
    # Imported late: models are above numerics.
    from falconet.models import zoo

    return zoo.build(name, classes=5, seed=0).train()


def images(name, count=2):
    noise = torch.Generator().manual_seed(1)
    size = MODELS[name]
    return torch.randn(count, 3, size, size, generator=noise).contiguous(memory_format=torch.channels_last)


def step(model, x):
    """Two micro-batches forward and backward; outputs and gradients."""
    torch.manual_seed(7)  # dropout
    model.zero_grad()
    outputs = []
    for part in (x, x + 1):
        outputs.append(model(part))
        outputs[-1].square().mean().backward()
    return [*(y.detach() for y in outputs), *(p.grad for p in model.parameters())]


def saved_bytes(model, x):
    """Bytes that the backward pass needs of the forward pass, each storage once."""
    kept = {}
    weights = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}

    def pack(t):
        if t.data_ptr() not in weights:
            kept[t.untyped_storage().data_ptr()] = (t.untyped_storage().nbytes(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x)
    del y
    return sum(size for size, _ in kept.values())


CASES = [(name, [".*(bn|add).*"]) for name in MODELS] + [
    (name, patterns)
    for name in ("resnet8-cifar", "mobilenet-v3-small")
    for patterns in ([".*conv.*"], [".*"], ["layer2|blocks/1"], ["(add|mul).*|layer./0|blocks/./0", "fc|classifier"])
]


@pytest.mark.run
@pytest.mark.parametrize(("name", "patterns"), CASES)
def test_recomputation_changes_no_bit(name, patterns):
    plain = build(name)
    changed = copy.deepcopy(plain)
    matched = recompute(changed, patterns)
    assert matched
    for first, second in zip(step(plain, images(name)), step(changed, images(name)), strict=True):
        assert torch.equal(first, second)
    assert list(changed.state_dict()) == list(plain.state_dict())
    for key, value in plain.state_dict().items():
        assert torch.equal(value, changed.state_dict()[key]), key  # running statistics, and how often they moved


class Both(nn.Module):
    """Numbers drawn in place and changed, and dropout, in a segment that is computed twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
        self.drop, self.head = nn.Dropout(0.4), nn.Linear(4, 5)

    def forward(self, x):
        y = self.drop(torch.relu(self.first(x)))
        y = torch.relu(self.second(y * y.new_empty(y.shape[0], 1, 1, 1).bernoulli_(0.5).div_(0.5)))
        return self.head(y.mean((2, 3)))


@pytest.mark.parametrize("name", ["efficientnet-b0", None])
def test_numbers_kept_for_a_captured_graph_change_no_bit(name, monkeypatch):
    """A CPU captures nothing: what a graph keeps is tried without one, and the generator is never set back."""
    torch.manual_seed(3)
    plain = build(name) if name else Both().train()
    x = images(name or "resnet18", count=4)
    kept, reset = copy.deepcopy(plain), copy.deepcopy(plain)
    expected, state = step(plain, x), torch.get_rng_state()
    for model, captures in ((reset, False), (kept, True)):
        recompute(model, [".*(bn|add|second).*"])
        monkeypatch.setattr("falconet.numerics.recompute._is_capturing", lambda values, answer=captures: answer)
        if captures:
            monkeypatch.setattr(torch, "set_rng_state", lambda state: pytest.fail("the generator was set back"))
        assert all(map(torch.equal, step(model, x), expected)), captures
        assert torch.equal(torch.get_rng_state(), state), captures
    for key, value in plain.state_dict().items():
        assert torch.equal(value, kept.state_dict()[key]), key


def fused(pieces):
    return [piece.model for piece in fusion.fuse_pieces(pieces)]


@pytest.mark.run
@pytest.mark.parametrize("name", ["resnet18", "efficientnet-b0", "mobilenet-v3-small"])
def test_fused_pieces_change_nothing_on_a_cpu(name):
    """There the fused layers run as they are; only gradients that meet may be added in another order."""
    plain = build(name)
    changed = copy.deepcopy(plain)
    choice = automatic(plain, example=images(name), budget_bytes=None)
    recompute(changed, choice.patterns, change=fused)
    for first, second in zip(step(plain, images(name)), step(changed, images(name)), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)
    assert list(changed.state_dict()) == list(plain.state_dict())
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(value, changed.state_dict()[key], rtol=1e-5, atol=1e-6)
        assert key.rpartition(".")[2] != "num_batches_tracked" or value == 2
    assert saved_bytes(changed, images(name)) < 0.8 * saved_bytes(plain, images(name))


@pytest.mark.run
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "efficientnet-b0", "mobilenet-v3-small"])
def test_gradients_that_meet_at_the_end_of_a_segment_are_added_by_its_norm(name):
    model = build(name)
    choice = automatic(model, example=images(name), budget_bytes=None)
    segments = fused(pieces(model, matching(model, choice.patterns)))
    whole = fusion.fuse(model).model
    assert sum(map(forks, segments)) == forks(whole) > 0


@pytest.mark.run
def test_a_norm_that_is_a_segment_alone_is_not_run_again_even_if_its_value_passes_twice():
    model = build("resnet18")
    recompute(model, ["layer1/0/conv2", "layer1/0/act2", "layer1/1/act2"], change=fused)
    norm = model._segments[1].piece.get_submodule("fused_layer1_0_bn2")
    assert norm.forks  # the next block takes its value twice, as input and as shortcut
    begun, _ = counted([norm])
    step(model, images("resnet18"))
    assert begun[norm] == 2  # once for each of two micro-batches


def forks(model):
    return sum(getattr(layer, "forks", False) for layer in model.modules())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["resnet18", "efficientnet-b0", "mobilenet-v3-small"])
def test_gpu_recomputation_with_fused_norms_has_the_gradients_of_the_fused_model(name):
    plain = build(name).cuda().to(memory_format=torch.channels_last)
    recomputed = copy.deepcopy(plain)
    x = images(name, count=16).cuda().contiguous(memory_format=torch.channels_last)
    choice = automatic(plain, example=x, budget_bytes=None)
    recompute(recomputed, choice.patterns, change=fused)
    begun, _ = counted([module for module in recomputed.modules() if isinstance(module, nn.Conv2d)])
    whole = fusion.fuse(plain).model
    for first, second in zip(step(whole, x), step(recomputed, x), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-4)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(value, recomputed.state_dict()[key], rtol=1e-4, atol=1e-5)
    assert max(begun.values()) == 4  # two micro-batches, each forward and once more


@pytest.mark.run
@pytest.mark.parametrize("name", ["resnet8-cifar", "efficientnet-b0"])
def test_stage_recomputes_every_segment_and_stores_as_predicted(name):
    plain = build(name)
    changed = copy.deepcopy(plain)
    footprint = measure_footprint(plain, images(name))
    recompute_stage(changed, footprint.stored_layers(footprint.every))
    for first, second in zip(step(plain, images(name)), step(changed, images(name)), strict=True):
        assert torch.equal(first, second)
    for key, value in plain.state_dict().items():
        assert torch.equal(value, changed.state_dict()[key]), key
    kept = saved_bytes(changed, images(name))
    assert kept == pytest.approx(footprint.stored(footprint.every), rel=0.05)
    assert kept < saved_bytes(plain, images(name)) / 2


def test_prediction_for_named_layers_matches_what_is_stored():
    model = build("resnet8-cifar")
    names = ["layer1/0/conv2", "add", "add_2"]
    footprint = measure_footprint(model, images("resnet8-cifar"), stored=names)
    assert len(footprint.blocks) == 4
    recompute_stage(model, names)
    kept = saved_bytes(model, images("resnet8-cifar"))
    assert kept == pytest.approx(footprint.stored(footprint.every), rel=0.05)


def counted(layers):
    """How often each layer was started, and how often it finished."""
    begun, ended = dict.fromkeys(layers, 0), dict.fromkeys(layers, 0)

    def note(counts):
        def hook(layer, *_):
            counts[layer] += 1

        return hook

    for layer in layers:
        layer.register_forward_pre_hook(note(begun))
        layer.register_forward_hook(note(ended))
    return begun, ended


def test_layers_between_stored_ones_run_twice():
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(6)))
    _, ended = counted(list(model))
    recompute(model, ["1", "3"])
    model(torch.randn(2, 3)).sum().backward()
    # 0 and 2 are recomputed; 1 and 3 end a segment, so their outputs are stored; the last segment is not recomputed.
    assert list(ended.values()) == [2, 1, 2, 1, 1, 1]


def test_block_is_stored_when_all_of_its_layers_match():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(3, 3), nn.Sigmoid()) for _ in range(3)))
    begun, _ = counted([layer for part in model for layer in part])
    recompute(model, ["0/.*", "1"])
    model(torch.randn(2, 3)).sum().backward()
    assert list(begun.values()) == [1, 1, 2, 2, 1, 1]


class InPlace(nn.Module):
    """Overwrites its values in every way, where its backward pass allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.flat, self.silu = nn.Flatten(), nn.SiLU(inplace=True)
        self.c.weight.requires_grad_(False)  # so that its input may change

    def forward(self, x):
        x = self.a(x)
        y = self.silu(self.flat(x.clone()))  # through a view
        y = self.b(y)
        z = self.c(y)
        y.mul_(2.0)
        z = nn.functional.silu(z, True)
        return (z + y.tanh() + x).sigmoid()


@pytest.mark.parametrize(
    "stored",
    [["a"], ["clone"], ["clone", "b"], ["b"], ["c"], ["b", "c", "mul_"], ["mul_", "add"], ["c", "add"], [".*"]],
)
def test_in_place_layers_do_not_change_stored_outputs(stored):
    torch.manual_seed(0)
    plain = InPlace().train()
    changed = copy.deepcopy(plain)
    recompute(changed, stored)
    for first, second in zip(outputs_and_gradients(plain), outputs_and_gradients(changed), strict=True):
        assert torch.equal(first, second)


def outputs_and_gradients(model):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_copied_model_runs_the_copied_layers():
    """The moving average of the weights is a copy of the model."""
    model = build("resnet8-cifar")
    recompute(model, ["layer1"])
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.fc.bias.add_(100.0)
        other.conv1.weight.zero_()
    x = images("resnet8-cifar")
    assert other(x).mean() > 50
    assert model(x).mean() < 50
    other(x).mean().backward()
    assert model.fc.bias.grad is None


def test_evaluation_is_unchanged():
    plain = build("efficientnet-b0").eval()
    changed = copy.deepcopy(plain)
    recompute(changed, [".*bn.*"])
    x = images("efficientnet-b0")
    assert torch.equal(plain(x), changed(x))
    assert not changed.training
    assert not any(module.training for module in changed.modules())


def test_recomputation_stores_less():
    plain = build("resnet18")
    kept = saved_bytes(plain, images("resnet18"))
    recompute(plain, ["layer./."])
    # What the segments hold instead: the inputs of 8 blocks, and all of the last stretch.
    assert saved_bytes(plain, images("resnet18")) < kept / 2


def test_layers_are_named_by_path_or_traced_function():
    names = matching(build("resnet18"), [".*"])
    for name in ("conv1", "layer1", "layer1/0", "layer1/0/conv1", "layer4/0/downsample/1", "add", "add_7", "fc"):
        assert name in names
    assert "add_8" not in names


MISTAKES = {
    "layer9/.*": "'layer9/.*' matches no layer; the nearest are 'layer3/0'",
    "conv": "'conv' matches no layer; the nearest are 'conv1'",
    "layer1(": "'layer1(' is not a regular expression: missing )",
}


@pytest.mark.parametrize(("pattern", "message"), MISTAKES.items())
def test_pattern_without_a_match_is_answered_with_the_nearest(pattern, message):
    model = build("resnet8-cifar")
    with pytest.raises(ConfigError) as caught:
        recompute(model, ["layer1/0", pattern])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "forward" not in vars(model)


def test_model_that_branches_on_its_input_is_refused_in_one_line():
    class Branching(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(ConfigError, match="Branching cannot be traced") as caught:
        recompute(Branching(), [".*"])
    assert "\n" not in str(caught.value)


@pytest.mark.run
@pytest.mark.parametrize("name", ["resnet18", "efficientnet-b0", "resnet8-cifar"])
def test_prediction_without_recomputation_matches_autograd(name):
    model, x = build(name), images(name)
    choice = automatic(model, example=x, budget_bytes=None)
    assert choice.without_bytes == pytest.approx(saved_bytes(model, x), rel=0.03)
    assert choice.predicted_bytes < 0.6 * choice.without_bytes


def test_prediction_equals_a_calculation_by_hand():
    """A block saves its input and the outputs of two sigmoids, 128 bytes each; its output is the next block's input."""
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 8), nn.Sigmoid()) for _ in range(3))
    choice = automatic(nn.Sequential(*blocks), example=torch.empty(4, 8), budget_bytes=None)
    assert choice.without_bytes == 7 * 128
    assert choice.predicted_bytes == 5 * 128  # three inputs, and the two outputs of the last block
    assert choice.blocks == ("0/3", "1/3")
    assert choice.patterns == ("0/3", "1/3")


def test_prediction_scales_with_micro_batch_and_type():
    model = build("resnet18")
    one = automatic(model, example=torch.empty(1, 3, 64, 64), budget_bytes=None).predicted_bytes
    eight = automatic(model, example=torch.empty(8, 3, 64, 64), budget_bytes=None).predicted_bytes
    half = automatic(model, example=torch.empty(8, 3, 64, 64, dtype=torch.bfloat16), budget_bytes=None).predicted_bytes
    assert eight == pytest.approx(8 * one, rel=0.1)
    assert half < 0.62 * eight  # the indices of max pooling do not shrink


@pytest.mark.run
@pytest.mark.parametrize("share", [1.0, 0.9, 0.7, 0.5])
def test_only_as_much_as_needed_is_recomputed_to_fit_the_budget(share):
    model, x = build("resnet18"), images("resnet18")
    every = automatic(model, example=x, budget_bytes=None)
    budget = int(share * every.without_bytes)
    choice = automatic(model, example=x, budget_bytes=budget)
    assert choice.predicted_bytes <= budget
    assert len(choice.blocks) <= len(every.blocks)
    assert (choice.blocks == ()) == (share == 1.0)
    changed = copy.deepcopy(model)
    if choice.patterns:
        recompute(changed, choice.patterns)
    for first, second in zip(step(model, x), step(changed, x), strict=True):
        assert torch.equal(first, second)


def test_too_small_budget_is_refused_in_one_line():
    with pytest.raises(ConfigError) as caught:
        automatic(build("resnet8-cifar"), example=torch.empty(64, 3, 32, 32), budget_bytes=2**20)
    assert "got 0.000977 GiB, expected at least 0.0" in str(caught.value)
    assert "activations of a micro-batch of 64 with" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_choosing_blocks_leaves_the_model_unchanged():
    model = build("resnet8-cifar")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    automatic(model, example=torch.empty(2, 3, 16, 16), budget_bytes=None)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert math.isfinite(model(images("resnet8-cifar")).sum().item())


def test_a_norm_with_its_convolution_is_recomputed_and_a_norm_alone_is_not():
    conv, norm = nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16)
    assert not _Segment.of(fusion.fuse(nn.Sequential(conv, norm)).model).single
    assert _Segment.of(fusion.fuse(nn.Sequential(norm)).model).single
