"""Every model by name: ours, timm's and torchvision's under the originals' names, and any other timm model."""

from typing import Any

import torch
from torch import Tensor, nn

from falconet.config.options import Model
from falconet.errors import ConfigError, did_you_mean, named_option
from falconet.models import cifar_resnet, efficientnet, init, norms, padding, resnet, speednet

# timm and torchvision are imported where they are used: each takes two seconds, and the CIFAR networks need neither.
TIMM_PREFIX = "timm:"
_MOBILENETS = {
    "mobilenet": "mobilenetv2_100",
    "mobilenet-v3-small": "mobilenetv3_small_100",
    "mobilenet-v3-large": "mobilenetv3_large_100",
}
# The module before the classifier; after it timm calls dropout as a function, which torch.fx would freeze.
_BEFORE_CLASSIFIER = {"mobilenet": "global_pool", "mobilenet-v3-small": "flatten", "mobilenet-v3-large": "flatten"}
_MOBILENET_DROPOUT = 0.2
_WIDE_HEAD = 1280  # channels
SQUEEZENETS = ("squeezenet", "squeezenet-cifar")
SMALLEST_SIDE = {
    "squeezenet": 21,
    "squeezenet-cifar": 8,
    **dict.fromkeys(speednet.NAMES, speednet.SMALLEST),
}  # pixels; smaller images shrink to nothing on the way
_BYPASSED = ("features.4", "features.7", "features.9", "features.12")  # fire 3, 5, 7 and 9, as wide as their input


def build_model(options: Model, *, classes: int, seed: int) -> nn.Module:
    """A new fp32 model on the CPU, channels-last; its weights depend only on the options and `seed`."""
    with named_option("model"):
        _check_name(options.model)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed the GPUs
        model = _create(options, classes=classes)
        init.draw(model, options.weight_init)
        init.set_zeros(model, options.zero_init)
    norms.apply(model, options)
    if options.input_image_padding:
        with named_option("input_image_padding"):
            padding.pad_input(model)
    if options.padding == "same":
        padding.pad_as_tensorflow(model)
    return model.to(memory_format=torch.channels_last)


def build(name: str, *, classes: int, seed: int, **options: Any) -> nn.Module:
    """The named model with every option but the given ones at its default."""
    _check_name(name)
    return build_model(Model(model=name, **options), classes=classes, seed=seed)


def names() -> tuple[str, ...]:
    """The names of the models that need no `timm:`."""
    return (*resnet.NAMES, *efficientnet.SIZES, *_MOBILENETS, *cifar_resnet.NAMES, *SQUEEZENETS, *speednet.NAMES)


def image_size(name: str) -> int:
    """The side, in pixels, of the images that the model was designed for."""
    _check_name(name)
    if name in efficientnet.SIZES:
        return efficientnet.SIZES[name].side
    if name in names():
        return 32 if name.endswith("-cifar") else 224
    import timm

    timm_config = timm.get_pretrained_cfg(name.removeprefix(TIMM_PREFIX))
    assert timm_config is not None  # only a model missing from timm's list may have none
    _, height, width = timm_config.input_size
    if height != width:
        raise ConfigError(f"'{name}' takes images of {height} x {width}; expected a model for square images")
    return int(height)


def check_image_size(name: str, size: int) -> None:
    """Refuse images that the model's strides would shrink to nothing."""
    least = SMALLEST_SIDE.get(name, 1)
    if size < least:
        smaller = "" if name.endswith("-cifar") else f"; {name}-cifar takes smaller images"
        raise ConfigError(f"got {size}, expected at least {least} for {name}{smaller}")


def count_parameters(model: nn.Module) -> int:
    """The number of parameters; running statistics do not count."""
    return sum(parameter.numel() for parameter in model.parameters())


def _create(options: Model, *, classes: int) -> nn.Module:
    name = options.model
    if name in resnet.NAMES or name in cifar_resnet.NAMES:
        create = resnet.create if name in resnet.NAMES else cifar_resnet.create
        model = create(options, classes=classes)
        resnet.set_shortcuts(model, options.shortcut_type)
        resnet.pad_shortcuts(model, options.shortcut_padding)
        resnet.set_stem(model, options.stem)
        return model
    if name in efficientnet.SIZES:
        return efficientnet.create(options, classes=classes)
    if name in _MOBILENETS:
        return _create_mobilenet(options, classes=classes)
    if name in SQUEEZENETS:
        return _create_squeezenet(options, classes=classes)
    if name in speednet.NAMES:
        return speednet.create(options, classes=classes)
    import timm

    other: nn.Module = timm.create_model(name.removeprefix(TIMM_PREFIX), pretrained=False, num_classes=classes)
    return other


def _create_mobilenet(options: Model, *, classes: int) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(_MOBILENETS[options.model], pretrained=False, num_classes=classes)
    if options.mobilenet_wide_head:
        from timm.models._efficientnet_builder import efficientnet_init_weights

        channels = model.get_submodule("conv_head").in_channels
        assert isinstance(channels, int)
        model.set_submodule("conv_head", nn.Conv2d(channels, _WIDE_HEAD, 1, bias=False))
        model.set_submodule("classifier", nn.Linear(_WIDE_HEAD, classes))
        efficientnet_init_weights(model)  # all layers again, by timm's rule
    efficientnet.append_dropout(model, after=_BEFORE_CLASSIFIER[options.model], rate=_MOBILENET_DROPOUT)
    return model


def _create_squeezenet(options: Model, *, classes: int) -> nn.Module:
    """torchvision's SqueezeNet with the original's initial weights, after Glorot and Bengio.

    With torchvision's larger ones the bypass, which has no norm to limit it, overflows within ten updates at the
    original's learning rate, and the last layer's rectified logits stay at zero (docs/maintaining/log.md has both).
    """
    from torchvision.models.squeezenet import Fire, SqueezeNet

    class BypassedFire(Fire):  # type: ignore[misc]  # torchvision has no types
        """The simple bypass of Iandola et al.: a fire module that adds its input to its output."""

        def forward(self, x: Tensor) -> Tensor:  # N x C x H x W, both
            out: Tensor = x + super().forward(x)
            return out

    model: nn.Module = SqueezeNet("1_0", num_classes=classes)
    if options.model == "squeezenet-cifar":
        model.set_submodule("features.0", nn.Conv2d(3, 96, 3, padding=1))  # 32 pixels become 32, 16, 8, 4; not 13 to 1
        model.set_submodule("classifier.2", nn.Identity())  # with few classes a relu often leaves no logit above zero
    init.draw(model, "glorot")
    if options.squeezenet_bypass:
        for path in _BYPASSED:
            model.get_submodule(path).__class__ = BypassedFire  # keeps the layers and their weights
    return model


def _check_name(name: str) -> None:
    if name in names():
        return
    import timm

    known = {*timm.list_models(), *timm.list_pretrained()}  # the latter with tags, such as resnet50.a1_in1k
    if not name.startswith(TIMM_PREFIX):
        # resnet20 means resnet20-cifar, though resnet50 is nearer by spelling.
        longer = [each for each in names() if each.startswith(name)]
        if name in known and name.replace("_", "-") not in names():
            longer = [TIMM_PREFIX + name]
        raise ConfigError(f"'{name}' is not a model{did_you_mean(name, longer or names())}")
    if name.removeprefix(TIMM_PREFIX) not in known:
        # Sorted, so that of two equally near names the suggestion is always the same one.
        spellings = sorted((TIMM_PREFIX + each for each in known), key=lambda each: (len(each), each))
        longer = [each for each in spellings if each.startswith(name)]  # timm:resnext means one of them
        meant = f"; did you mean '{longer[0]}'?" if longer else did_you_mean(name, spellings)
        raise ConfigError(f"'{name}' is not a model of timm{meant}")
