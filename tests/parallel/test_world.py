"""A world of one is a World, on the chosen or detected device."""

import pytest
import torch

from falconet.errors import DeviceError
from falconet.parallel.world import World, open_world


@pytest.fixture(autouse=True)
def as_before():
    """Threads and kernel choices are settings of the whole process."""
    cudnn = torch.backends.cudnn
    before = torch.get_num_threads(), cudnn.deterministic, cudnn.benchmark
    yield
    torch.set_num_threads(before[0])
    cudnn.deterministic, cudnn.benchmark = before[1:]


def with_cuda(monkeypatch, there):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_a_world_of_one_is_first_and_its_sum_is_itself():
    world = World(device=torch.device("cpu"))
    values = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert (world.rank, world.size, world.is_first) == (0, 1, True)
    assert torch.equal(world.sum(values), torch.tensor([1.0, 2.0], dtype=torch.float64))


def test_only_rank_0_is_first():
    assert not World(device=torch.device("cpu"), rank=1, size=2).is_first


CHOICES = {
    ("auto", False): torch.device("cpu"),
    ("auto", True): torch.device("cuda", 0),
    ("cpu", True): torch.device("cpu"),
    ("cuda", True): torch.device("cuda", 0),
}


@pytest.mark.parametrize(("asked", "device"), CHOICES.items())
def test_auto_chooses_a_device_and_a_named_one_overrides(monkeypatch, asked, device):
    with_cuda(monkeypatch, asked[1])
    assert open_world(asked[0], threads=1, deterministic=True).device == device


def test_a_missing_device_is_refused_in_one_line(monkeypatch):
    with_cuda(monkeypatch, False)
    with pytest.raises(DeviceError) as refused:
        open_world("cuda", threads=1, deterministic=True)
    assert str(refused.value) == "device cuda: PyTorch finds no CUDA device here; device cpu runs on the processor"


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_is_set(threads):
    open_world("cpu", threads=threads, deterministic=True)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("deterministic", [True, False])
def test_cuda_kernels_are_deterministic_or_the_fastest(monkeypatch, deterministic):
    with_cuda(monkeypatch, True)
    open_world("cuda", threads=1, deterministic=deterministic)
    assert torch.backends.cudnn.deterministic is deterministic
    assert torch.backends.cudnn.benchmark is not deterministic
