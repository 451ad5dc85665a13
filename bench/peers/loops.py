"""The peers' training loops on one batch that stays on the device, rewritten here with their libraries.

Both do what their scripts do in every update with `--amp`: autocast, a gradient scaler for fp16, the optimizer and
loss of their defaults, cuDNN's trials, and reading numbers from the device for their meters. Left out:
loading and normalising data, printing, validation, checkpoints. Channels-last memory and compilation are timm's
`--channels-last` and `--torchcompile`; torchvision's script has neither, and gets both here as its user would add them.
"""

from collections.abc import Callable

import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import AverageMeter, NativeScaler
from torch import Tensor, nn

Update = Callable[[Tensor, Tensor], None]  # images, labels


def timm_loop(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Update:
    """The loop of timm 1.0's train.py: Nesterov's SGD without decay of vectors, label smoothing 0.1; reads the loss."""
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.01, weight_decay=2e-5, momentum=0.9)
    scaler = NativeScaler(device=device.type) if dtype == torch.float16 else None  # type: ignore[no-untyped-call]
    criterion = LabelSmoothingCrossEntropy(smoothing=0.1)  # type: ignore[no-untyped-call]
    losses = AverageMeter()  # type: ignore[no-untyped-call]

    def update(images: Tensor, labels: Tensor) -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = criterion(model(images), labels)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler(loss, optimizer)
        losses.update(loss.item(), len(images))  # type: ignore[no-untyped-call]
        optimizer.zero_grad()

    return update


def torchvision_loop(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Update:
    """The loop of torchvision's references/classification: SGD, decay of all; reads the loss and two accuracies."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    criterion = nn.CrossEntropyLoss()

    def update(images: Tensor, labels: Tensor) -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            output = model(images)
            loss = criterion(output, labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        with torch.inference_mode():
            right = labels == output.topk(5).indices.T
            for count in (1, 5):
                (right[:count].flatten().sum(dtype=torch.float32) * (100 / len(labels))).item()
        loss.item()

    return update
