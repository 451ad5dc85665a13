"""Time and memory of layers: whose work each operator is, against sizes of tensors and totals of the profiler."""

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules

from falconet.models.fused.fusion import fuse
from falconet.numerics.recompute import recompute
from falconet.report.profile import trace
from falconet.report.profile.kernel_times import kernel_times, works_of
from falconet.report.profile.layer_costs import POINTS, Layers, layer_costs

CPU = torch.device("cpu")
IMAGES = 8


class Block(nn.Module):
    """A convolution, a norm, an activation and a sum that is in no layer of its own."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x):
        return x + self.act(self.norm(self.conv(x)))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 4, 1), Block()
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 5)

    def forward(self, x):
        return self.fc(self.pool(self.block(self.stem(x))).flatten(1))


def profiled(model, run=None, *, passes=1):
    """The costs of an update, and what the profiler recorded."""
    run, layers = run or model, Layers(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    images = torch.randn(IMAGES, 3, 16, 16)
    with trace.warnings_withheld():
        tracing = trace.started(CPU, memory=True)
        with layers.marked():
            for _ in range(passes):
                run(images).square().sum().backward()
            optimizer.step()
        traced = trace.stopped(tracing)
    return layer_costs(traced, layers, before=None), traced


def by_name(costs):
    return {"+".join(row["names"]): row for row in costs.rows}


def test_torch_is_told_that_the_events_of_the_one_cycle_stay():
    tracing = trace.started(CPU)
    torch.ones(1).add(1)
    traced = trace.stopped(tracing)
    assert tracing.profiler.acc_events  # else torch 2.11 warns on the terminal that they are cleared
    assert "aten::add" in {event.name() for event in traced.events}


def test_each_layer_has_its_own_time_forward_and_backward():
    rows = by_name(profiled(Small())[0])
    for name in ("stem", "block.conv", "block.norm", "block.act", "pool", "fc"):
        assert rows[name]["forward"] > 0, name
        assert rows[name]["backward"] > 0, name
    assert rows["block"]["forward"] > 0  # its sum
    assert rows["block.conv"]["kind"] == "Conv2d"


def test_the_time_of_all_layers_and_of_the_rest_is_that_of_all_operators():
    costs, traced = profiled(Small(), passes=2)
    rows = costs.rows
    inside = sum(row["forward"] + row["backward"] for row in rows)
    # But for Python's own time within a layer, which is the marks'.
    operators = sum(work.own for work in works_of(traced) if not work.name.startswith("falconet layer")) / 1e6
    assert inside + sum(costs.rest.values()) == pytest.approx(operators, rel=1e-3)
    assert costs.rest["optimizer"] > 0
    assert costs.passes == 2


def test_the_backward_pass_of_a_layer_is_known_by_its_operators():
    """As many milliseconds as the profiler's own records of the steps that reverse convolutions have."""
    costs, traced = profiled(Small())
    rows = by_name(costs)
    reverse = sum(
        event.duration_ns()
        for event in traced.events
        if event.name() == "autograd::engine::evaluate_function: ConvolutionBackward0"
    )
    found = rows["stem"]["backward"] + rows["block.conv"]["backward"]
    assert found >= 0.99 * reverse / 1e6  # adding the gradients to the weights comes on top


def test_layers_keep_what_the_sizes_of_their_outputs_say():
    rows = by_name(profiled(Small())[0])
    output = IMAGES * 4 * 16 * 16 * 4  # bytes
    assert rows["stem"]["kept"] == output
    assert rows["block.conv"]["kept"] == output
    assert rows["block.norm"]["kept"] == 2 * 4 * 4  # mean and deviation; its output is not needed after the activation
    assert rows["block.act"]["kept"] == output
    assert rows["fc"]["kept"] == IMAGES * 5 * 4


def test_memory_is_that_of_a_micro_batch_and_time_that_of_the_update():
    once, twice = by_name(profiled(Small())[0]), by_name(profiled(Small(), passes=2)[0])
    assert {name: row["kept"] for name, row in once.items()} == {name: row["kept"] for name, row in twice.items()}


def test_micro_batches_before_one_backward_pass_count_each():
    """As in a pipeline."""
    model = Small()
    costs, _ = profiled(model, lambda x: model(x) + model(x))
    assert costs.passes == 2
    assert by_name(costs)["stem"]["kept"] == IMAGES * 4 * 16 * 16 * 4


def test_the_memory_of_an_update_has_a_peak_and_phases():
    model = Small()
    costs, _ = profiled(model)
    memory = costs.memory
    gradients = sum(weight.numel() * 4 for weight in model.parameters())
    assert len(memory["points"]) == POINTS
    assert memory["peak"] == max(memory["points"])
    assert memory["peak_phase"] == "backward"
    assert memory["after"] == gradients  # all else is freed
    assert [phase for phase, _, _ in memory["phases"]] == ["forward", "backward", "optimizer"]
    ends = [time for _, *times in memory["phases"] for time in times]
    assert ends == sorted(ends)
    assert memory["is_whole"] is False


def test_recomputed_layers_are_part_of_the_backward_pass():
    plain, again = nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())
    images = torch.randn(IMAGES, 4, 16, 16)

    def costs(model):
        layers = Layers(model)
        with trace.warnings_withheld():
            tracing = trace.started(CPU, memory=True)
            with layers.marked():
                model(images).sum().backward()
            return by_name(layer_costs(trace.stopped(tracing), layers, before=None))

    recompute(again, ["0"])
    kept, recomputed = costs(plain), costs(again)
    assert kept["0.conv"]["kept"] > 0
    assert recomputed["0.conv"]["kept"] == 0
    assert recomputed["0.conv"]["made"] > kept["0.conv"]["made"]


class Joined(nn.Module):
    """One layer that computes what two of the model do, as fused layers do on a GPU."""

    def __init__(self, block):
        super().__init__()
        self.norm, self.conv = block.norm, block.conv

    def forward(self, x):
        weight = self.conv.weight
        return nn.functional.batch_norm(nn.functional.conv2d(x, weight, padding=1), None, None, training=True)


def test_a_layer_that_stands_for_several_has_their_names():
    model = Small()
    joined = Joined(model.block)
    rows = by_name(profiled(model, lambda x: joined(model.stem(x)))[0])
    assert set(rows) == {"stem", "block.conv+block.norm"}
    assert rows["block.conv+block.norm"]["backward"] > 0
    assert rows["block.conv+block.norm"]["kind"] == "Joined"


class Instead(nn.Module):
    """Computes a layer in its place, as our own convolutions do, or leaves it to the layer."""

    def __init__(self, conv, *, itself):
        super().__init__()
        self.conv, self.itself = conv, itself

    def forward(self, x):
        return nn.functional.conv2d(x, self.conv.weight, self.conv.bias) if self.itself else self.conv(2 * x)


@pytest.mark.parametrize("itself", [False, True])
def test_a_layer_that_another_one_computes_has_one_row(itself):
    model = Small()
    instead = Instead(model.stem, itself=itself)
    costs, _ = profiled(model, instead)
    (row,) = costs.rows
    assert costs.passes == 1
    assert (row["names"], row["kind"]) == (["stem"], "Conv2d")
    assert row["forward"] > 0
    assert row["backward"] > 0


def test_the_layers_of_a_fused_model_have_the_names_of_the_model():
    model = Small()
    names = {name for name, _ in model.named_modules()}
    rows, _ = profiled(model, fuse(model).model)
    assert {name for row in rows.rows for name in row["names"]} <= names
    found = by_name(rows)
    assert found["block.conv"]["backward"] > 0
    assert found["block.norm"]["backward"] > 0


def test_nothing_is_left_behind_also_after_an_error():
    model = Small()
    with pytest.raises(RuntimeError), Layers(model).marked():
        model(torch.randn(1, 7, 16, 16))
    assert not modules._global_forward_hooks
    assert not modules._global_forward_pre_hooks
    assert all(not each._forward_hooks and not each._forward_pre_hooks for each in model.modules())


def test_marks_change_no_bit():
    results = []
    for marked in (False, True):
        torch.manual_seed(0)
        model = Small()
        with Layers(model).marked() if marked else torch.enable_grad():
            model(torch.ones(2, 3, 16, 16)).sum().backward()
        results.append([weight.grad for weight in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_on_a_gpu_kernels_belong_to_the_layers_that_launched_them(fused):
    device = torch.device("cuda")
    model = Small().to(device, memory_format=torch.channels_last).train()
    run = fuse(model).model if fused else model
    images = torch.randn(IMAGES, 3, 16, 16, device=device).contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update():
        optimizer.zero_grad()
        run(images).square().sum().backward()
        optimizer.step()

    for _ in range(2):
        update()
    layers = Layers(model)
    tracing = trace.started(device, memory=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with layers.marked():
        update()
    traced = trace.stopped(tracing)
    costs, times = layer_costs(traced, layers, before=before), kernel_times(traced, calls=1)
    named = {name for row in costs.rows for name in row["names"]}
    assert {"stem", "block.conv", "block.norm", "fc"} <= named
    for row in costs.rows:
        if set(row["names"]) & {"stem", "block.conv", "block.norm", "fc"}:
            assert row["forward"] > 0, row
            assert row["backward"] > 0, row
    inside = sum(row["forward"] + row["backward"] for row in costs.rows) + sum(costs.rest.values())
    assert inside == pytest.approx(sum(each["milliseconds"] for each in times["kinds"]), rel=1e-3)
    assert costs.rest["optimizer"] > 0
    assert costs.memory["peak"] == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.01)
    assert costs.memory["before"] == before
    assert [phase for phase, _, _ in costs.memory["phases"]] == ["forward", "backward", "optimizer"]
