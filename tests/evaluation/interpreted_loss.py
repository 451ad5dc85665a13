"""Run by test_loss_kernels in a process of its own, because Triton must be imported with its interpreter."""

import json

import torch

from falconet.evaluation import loss_kernels
from falconet.evaluation.loss import Loss, WeightedLoss
from falconet.evaluation.loss_kernels import Expected

ROOT = 128.0  # the gradient of the loss


def noise(seed=0):
    return torch.Generator().manual_seed(seed)


def given(images, classes, *, size=3.0, dtype=torch.float32):
    """Logits, and labels of which every fifth is -1."""
    logits = size * torch.randn(images, classes, generator=noise())
    labels = torch.randint(classes, (images,), generator=noise(1))
    labels[4::5] = -1
    return logits.to(dtype), labels


def mixed(labels, classes):
    """Soft targets; rows of zeros where the label is -1."""
    targets = torch.rand(len(labels), classes, generator=noise(2)).softmax(1)
    return targets * (labels >= 0)[:, None]


def scored(logits, labels, targets=None, *, loss, images=10):
    """What the kernels report and the gradient, each with torch's in float64."""
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    weights = loss.weights.float() if isinstance(loss, WeightedLoss) else None
    found = loss_kernels.scored(leaf, Expected(labels, targets, weights, loss.smoothing), images=images)
    rows = loss.targets(labels) if targets is None else targets
    losses, smoothing = loss.parts(exact, rows.double())
    expected = losses.sum() / images, smoothing / images, loss.correct(logits, labels), (labels >= 0).sum()
    for score in (found, expected):
        (ROOT * score[0]).backward()
    return [*found, leaf.grad], [*expected, exact.grad]


def errors(*case, loss, **options):
    """Relative errors, of the gradient by norm; those of counts are 0 or far from it."""
    found, expected = scored(*case, loss=loss, **options)
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    values = [((a - b).norm() / b.norm().clamp_min(1e-6)).item() for a, b in pairs]
    assert [each.dtype for each in found[2:4]] == [torch.int64] * 2
    return dict(zip(("loss", "smoothing", "correct", "images", "gradient"), values, strict=True))


def broken(value, smoothing):
    """Whether the loss of logits with such a number is the same as in fp32 by torch; and the right ones are."""
    logits, labels = given(6, 10)
    logits[0, 3] = logits[2, labels[2]] = value
    found, _ = scored(logits, labels, loss=Loss(10, smoothing))
    plain = Loss(10, smoothing).parts(logits, Loss(10).targets(labels))[0].sum()
    same = torch.equal(found[0].nan_to_num(5.0, 6.0, 7.0), plain.nan_to_num(5.0, 6.0, 7.0))
    return {
        "loss": float(not same or plain.isfinite().item()),
        "correct": float(found[2] != Loss(10).correct(logits, labels)),
    }


def ties():
    """Small whole numbers, so that many logits are equal; and rows of which one or all are NaN."""
    logits, labels = torch.randint(-1, 2, (400, 7), generator=noise()).float(), torch.arange(400) % 7
    logits[::9, 3] = torch.nan
    logits[5::9, 1:3] = torch.nan
    logits[7::27] = torch.nan
    found = loss_kernels.scored(logits, Expected(labels, None, None, 0.0), images=400)
    right = Loss(7).correct(logits, labels)
    assert 20 < int(right) < 380
    return {"correct": float(found[2] != right)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {}
    for classes in (1, 2, 10, 17, 1000, 5000):
        for smoothing in (0.0, 0.2):
            case, loss = given(7 if classes > 100 else 300, classes), Loss(classes, smoothing)
            found[f"{classes} classes, smoothing {smoothing}"] = errors(*case, loss=loss)
            found[f"{classes} classes, mixed, smoothing {smoothing}"] = errors(
                *case, mixed(case[1], classes), loss=loss
            )
    weights = torch.rand(17, generator=noise(3), dtype=torch.float64) * 3
    found["weights"] = errors(*given(9, 17), loss=WeightedLoss(17, 0.2, weights=weights))
    found["weights, mixed"] = errors(
        *given(9, 17), mixed(given(9, 17)[1], 17), loss=WeightedLoss(17, 0.2, weights=weights)
    )
    found["one image"] = errors(*given(1, 10), loss=Loss(10, 0.2), images=1)
    found["more programs than are merged at a time"] = errors(*given(1030, 600), loss=Loss(600, 0.2), images=1030)
    for name, size in {"constant": 0.0, "huge": 1e4, "tiny": 1e-6}.items():
        found[name] = errors(*given(20, 10, size=size), loss=Loss(10, 0.2))
    nothing = torch.full((20,), -1)
    found["no labels"] = errors(given(20, 10)[0], nothing, loss=Loss(10, 0.2))
    for value in (torch.nan, torch.inf, -torch.inf):
        for smoothing in (0.0, 0.2):
            found[f"{value}, smoothing {smoothing}"] = broken(value, smoothing)
    found["ties"] = ties()
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        found[name] = errors(*given(20, 10, dtype=dtype), loss=Loss(10, 0.2))
    print(json.dumps(found))
