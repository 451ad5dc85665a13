"""Every layer of the PyTorch program's models by its name there, and ours; regular expressions over those names."""

import re
from collections.abc import Iterator

from falconet.dialects.layers import BASIC, EFFICIENTNET, MOBILENET, RESIDUAL, RESNET, pytorch_layer

_PLAIN = re.compile(r"[\w/]+")
_MOBILENET_V2 = (1, 2, 3, 4, 3, 3, 1)  # blocks of each stage, in torchvision and in timm
# Parts of a block in order, where ours have the activation inside the norm.
_SEPARABLE = ("conv_dw", "bn1", "bn1", "conv_pw", "bn2")
_INVERTED = ("conv_pw", "bn1", "bn1", "conv_dw", "bn2", "bn2", "conv_pwl", "bn3")
# Blocks of the program's own MobileNetV3 that squeeze and excite, before the last convolution.
_EXCITED = {"mobilenet-v3-large": (3, 4, 5, 10, 11, 12, 13, 14), "mobilenet-v3-small": (0, *range(3, 11))}
_FIRST_PARTS = ("conv_dw", "bn1", "se", "conv_pw", "bn2")
_PARTS = ("conv_pw", "bn1", "conv_dw", "bn2", "se", "conv_pwl", "bn3")


def recomputed_layers(pattern: str, *, model: str) -> tuple[str, ...]:
    """What a rule of `--recompute-checkpoints` means here: layers, or itself where the names are the same."""
    renamed = {name: layers for name, layers in _names(model).items() if layers != (name,)}
    if pattern in renamed:
        return renamed[pattern]
    if _PLAIN.fullmatch(pattern):
        return (pytorch_layer(pattern, model=model),)
    try:
        rule = re.compile(pattern)
    except re.error:
        return (pattern,)  # told when it is used
    found = [layer for name, layers in renamed.items() if rule.fullmatch(name) for layer in layers]
    same = any(rule.fullmatch(name) for name in _names(model).keys() - renamed.keys())
    return tuple(dict.fromkeys([*([pattern] if same or not found else []), *found]))


def mobilenet_layer(name: str, *, model: str) -> str | None:
    """Where a stage of a MobileNet begins, or None; with its first part, a block begins as a whole."""
    name = re.sub(r"^(mb_block/\d+)/seq(/0)?$", r"\1", name)
    names = dict(_mobilenet_v2()) if model == "mobilenet" else dict(_mobilenet_v3(model)) if model in MOBILENET else {}
    return names.get(name)


def _names(model: str) -> dict[str, tuple[str, ...]]:
    if model.startswith(RESIDUAL):
        return dict(_resnet(model.removeprefix("resnet").removeprefix("resnext")))
    if model.startswith("efficientnet"):
        return dict(_efficientnet(model.removeprefix("efficientnet-b")))
    single = _mobilenet_v2() if model == "mobilenet" else _mobilenet_v3(model)
    return {name: (layer,) for name, layer in single}


def _resnet(depth: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    convolutions = 2 if depth in BASIC else 3
    yield from ((name, (name,)) for name in ("conv1", "bn1", "maxpool", "fc"))
    yield from (("relu", ("act1",)), ("avgpool", ("global_pool",)))
    number = 0
    for stage, blocks in enumerate(RESNET[depth], 1):
        for block in range(blocks):
            place = f"layer{stage}/{block}"
            for part in range(1, convolutions + 1):
                yield from ((f"{place}/{kind}{part}", (f"{place}/{kind}{part}",)) for kind in ("conv", "bn"))
            if block == 0 and (stage > 1 or convolutions == 3):
                yield from ((f"{place}/downsample/{part}", (f"{place}/downsample/{part}",)) for part in (0, 1))
            # One module there, called after every convolution and after the addition.
            yield f"{place}/relu", tuple(f"{place}/act{part}" for part in range(1, convolutions + 1))
            yield f"add_{number}" if number else "add", (f"{place}/act{convolutions}",)
            number += 1


def _efficientnet(size: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield from ((name, (name,)) for name in ("conv_stem", "bn1", "conv_head", "bn2", "global_pool", "classifier"))
    number = 0
    for stage, blocks in enumerate(EFFICIENTNET[size]):
        for block in range(blocks):
            place = f"blocks/{stage}/{block}"
            yield from ((f"{place}/{part}", (f"{place}/{part}",)) for part in (_PARTS if stage else _FIRST_PARTS))
            if block:
                yield f"add_{number}" if number else "add", (place,)
                number += 1


def _mobilenet_v2() -> Iterator[tuple[str, str]]:
    """torchvision's: features/0, a block each, features/18, classifier/1."""
    yield from zip(("features/0", "features/0/0", "features/0/1", "features/0/2"), _stem("conv_stem"), strict=True)
    places = [(stage, block) for stage, blocks in enumerate(_MOBILENET_V2) for block in range(blocks)]
    added = 0
    for number, (stage, block) in enumerate(places, 1):
        old, ours = f"features/{number}", f"blocks/{stage}/{block}"
        parts = ("0/0", "0/1", "0/2", "1", "2") if number == 1 else ("0/0", "0/1", "0/2", "1/0", "1/1", "1/2", "2", "3")
        yield old, ours
        layers = _SEPARABLE if number == 1 else _INVERTED
        yield from ((f"{old}/conv/{part}", f"{ours}/{layer}") for part, layer in zip(parts, layers, strict=True))
        if block:
            yield f"add_{added}" if added else "add", ours
            added += 1
    yield from zip(("features/18", "features/18/0", "features/18/1", "features/18/2"), _stem("conv_head"), strict=True)
    yield from (("classifier", "classifier"), ("classifier/1", "classifier"))


def _stem(convolution: str) -> tuple[str, ...]:
    norm = {"conv_stem": "bn1", "conv_head": "bn2"}[convolution]
    return (convolution, convolution, norm, norm)


def _mobilenet_v3(model: str) -> Iterator[tuple[str, str]]:
    """The program's own: first_block, mb_block/N/seq/M, last_block, output."""
    yield from zip(("first_block", "first_block/0", "first_block/1", "first_block/2"), _stem("conv_stem"), strict=True)
    places = [(stage, block) for stage, blocks in enumerate(MOBILENET[model]) for block in range(blocks)]
    for number, (stage, block) in enumerate(places):
        old, ours = f"mb_block/{number}", f"blocks/{stage}/{block}"
        layers = list(_SEPARABLE if number == 0 else _INVERTED)
        if number in _EXCITED[model]:
            layers.insert(len(layers) - 2, "se")
        yield old, ours
        yield from ((f"{old}/seq/{part}", f"{ours}/{layer}") for part, layer in enumerate(layers))
    last = f"blocks/{len(MOBILENET[model])}/0"
    tail = (f"{last}/conv", f"{last}/bn1", f"{last}/bn1", "global_pool", "conv_head", "act2", "flatten", "flatten")
    yield "last_block", last
    yield from ((f"last_block/{part}", layer) for part, layer in enumerate(tail))
    yield "output", "classifier"
