"""The PyTorch program's networks: which there are, and how they begin."""

from collections.abc import Iterable

from falconet.dialects.rows import becomes
from falconet.dialects.table import Effect, Old, Say, To
from falconet.dialects.values import Values

MODELS = (
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "mobilenet", "efficientnet-b0"),
    *("efficientnet-b4", "mobilenet-v3-large", "mobilenet-v3-small"),
    # Of releases up to SDK 2.6, whose benchmarks measure some of them.
    *("resnext50", "resnext101", *(f"efficientnet-b{size}" for size in (1, 2, 3, 5, 6, 7))),
)


def model(old: Values) -> Iterable[Effect]:
    """Their MobileNetV3 was their own; all others are torchvision's or timm's."""
    yield To("model", (old.text("--model"),))
    if old.text("--model").startswith("mobilenet-v3"):
        yield To("mobilenet-wide-head")


def beginning(old: Values) -> Iterable[Effect]:
    """The first weights of its networks: torchvision's, timm's, torch's; of ResNet-50 some norms begin at zero.

    Group norms were new ones, so that nothing of them began at zero.
    """
    name = old.text("--model")
    if name.startswith("mobilenet"):
        yield To("weight-init", ("normal" if name == "mobilenet" else "uniform",))
    if name.startswith("resne"):
        zeroed = name == "resnet50" and old.text("--norm-type") == "batch"
        yield To("zero-init", ("shortcut" if zeroed else "none",))


def efficientnet(name: str, default: str) -> Old:
    """A part of the shape of an EfficientNet, which the other models passed over."""

    def rule(old: Values) -> Iterable[Effect]:
        if old.text("--model").startswith("efficientnet"):
            yield To(name.lstrip("-"), (old.text(name),))
        elif old.given(name):
            yield Say(f"{name}: has no effect on --model {old.text('--model')}")

    return becomes(name, "whole", default, name.lstrip("-"), rule, "the same; no effect on other models")
