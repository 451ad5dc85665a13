"""A small network with every kind of parameter, and a keyed micro-batch."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

Accumulate = Callable[[nn.Module, int], None]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:  # N x 3 x H x W -> N x 5
        return self.head(self.norm(self.conv(images)).relu().mean((2, 3)))


@pytest.fixture
def network() -> Callable[[], nn.Module]:
    """Makes the same channels-last network each time."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Network().to(memory_format=torch.channels_last)

    return make


@pytest.fixture
def accumulate() -> Accumulate:
    """Runs one keyed micro-batch forward and backward."""

    def backward(model: nn.Module, key: int) -> None:
        noise = torch.Generator().manual_seed(key)
        images = torch.randn(4, 3, 6, 6, generator=noise).contiguous(memory_format=torch.channels_last)
        labels = torch.randint(5, (4,), generator=noise)
        nn.functional.cross_entropy(model(images), labels).backward()

    return backward


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are tiny, and results that are compared bit for bit depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
