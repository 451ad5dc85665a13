"""Small networks that learn 32 x 32 images in seconds: fixed whitening filters, then three stages of convolutions.

The architecture is that of Keller Jordan's speed records for CIFAR-10 (arXiv 2404.00498): each stage convolves, halves
the image by max pooling, and convolves once more, or twice around a shortcut. Norms shift but do not scale.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from falconet.config.options import Model

KERNEL = 2  # pixels, of the whitening filters
PATCH = 3 * KERNEL * KERNEL  # values
SMALLEST = 9  # pixels: 8 after the filters, then 4, 2, 1
WHITENED_FROM = 5000  # images
RIDGE = 5e-4  # added to each variance, so that directions of noise are not blown up
MOMENTUM = 0.4  # of batch norm's statistics: a training of 200 updates has no time for torch's 0.1
EPS = 1e-12
WIDTHS = {"speednet8-cifar": (64, 256, 256), "speednet11-cifar": (128, 384, 512)}
NAMES = tuple(WIDTHS)
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"gelu": nn.GELU, "silu": nn.SiLU}


class Stage(nn.Module):
    """A 3 x 3 convolution, a pool that halves the image, then one more convolution, or two around a shortcut."""

    def __init__(self, channels: int, *, width: int, is_deep: bool, act: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.conv1 = _conv3x3(channels, width)
        self.pool = nn.MaxPool2d(2)
        self.bn1, self.act1 = _shift(width), act()
        self.conv2 = _conv3x3(width, width)
        self.bn2, self.act2 = _shift(width), act()
        self.is_deep = is_deep
        if is_deep:
            self.conv3 = _conv3x3(width, width)
            self.bn3, self.act3 = _shift(width), act()

    def forward(self, x: Tensor) -> Tensor:  # N x C x H x W -> N x width x H/2 x W/2
        x = self.act1(self.bn1(self.pool(self.conv1(x))))
        out: Tensor = self.act2(self.bn2(self.conv2(x)))
        return self.act3(self.bn3(self.conv3(out)) + x) if self.is_deep else out


class SpeedNet(nn.Module):
    """Whitening filters, three stages, the maximum of each channel, a classifier without bias; 9 x 9 and larger."""

    def __init__(
        self, widths: Sequence[int], *, classes: int, is_deep: bool, act: Callable[[], nn.Module], whitens: bool
    ) -> None:
        super().__init__()
        self.whitens = whitens
        self.conv1 = nn.Conv2d(3, 2 * PATCH, KERNEL)
        self.conv1.weight.requires_grad_(not whitens)
        self.act = act()
        first, second, third = widths
        self.layer1 = Stage(2 * PATCH, width=first, is_deep=is_deep, act=act)
        self.layer2 = Stage(first, width=second, is_deep=is_deep, act=act)
        self.layer3 = Stage(second, width=third, is_deep=is_deep, act=act)
        self.fc = nn.Linear(third, classes, bias=False)
        with torch.no_grad():
            self.fc.weight.div_(self.fc.weight.std())

    def forward(self, images: Tensor) -> Tensor:  # N x 3 x H x W -> N x classes
        x = self.layer3(self.layer2(self.layer1(self.act(self.conv1(images)))))
        # The gradient of a maximum that several pixels share is divided among them, so it is deterministic on CUDA.
        features = torch.amax(x, dim=(2, 3))
        logits: Tensor = self.fc(features) / self.fc.in_features
        return logits

    @torch.no_grad()
    def whiten(self, batches: Iterable[Tensor]) -> None:
        """Set the filters from batches of normalised images, N x 3 x H x W each."""
        filters = whitening_filters(patch_covariance(batches))
        self.conv1.weight[:, :3].copy_(torch.cat((filters, -filters)))


@torch.no_grad()
def patch_covariance(batches: Iterable[Tensor]) -> Tensor:  # PATCH x PATCH, float64, on the host
    """The mean product of the values of a patch, over all patches of all images."""
    total, patches = torch.zeros((), dtype=torch.float64), 0
    for images in batches:
        # N x 3 x H x W x KERNEL x KERNEL, a view: torch's own unfold launches a kernel for every image.
        windows = images.double().unfold(2, KERNEL, 1).unfold(3, KERNEL, 1)
        columns = windows.permute(1, 4, 5, 0, 2, 3).reshape(PATCH, -1)
        # Sums stay on their device until the end: the host waits once, not for every batch.
        total = columns @ columns.T + total.to(columns.device)
        patches += columns.shape[1]
    return total.cpu() / patches


def whitening_filters(covariance: Tensor) -> Tensor:  # PATCH x 3 x KERNEL x KERNEL
    """Filters whose responses to such patches are uncorrelated, with a mean square of 1 where there is contrast."""
    variances, directions = torch.linalg.eigh(covariance)
    scaled = directions.T / (variances + RIDGE).sqrt()[:, None]
    filters: Tensor = scaled.reshape(PATCH, 3, KERNEL, KERNEL)
    return filters


def create(options: Model, *, classes: int) -> SpeedNet:
    """A new network; its weights come from torch's generator, its filters from `whiten`."""
    return SpeedNet(
        options.speednet_widths or WIDTHS[options.model],
        classes=classes,
        is_deep=options.model == "speednet11-cifar",
        act=ACTIVATIONS[options.speednet_activation],
        whitens=options.speednet_whitening,
    )


def _conv3x3(channels: int, width: int) -> nn.Conv2d:
    """A 3 x 3 convolution that passes its input on in its first channels; the other filters are random."""
    conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    nn.init.dirac_(conv.weight.data[: min(channels, width)])
    return conv


def _shift(width: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(width, eps=EPS, momentum=MOMENTUM)
    norm.weight.requires_grad_(False)
    return norm
