"""Translation of the originals' layer names, for pipeline splits and for layers kept for recomputation."""

import re
from collections.abc import Iterator, Sequence

from falconet.errors import ConfigError, did_you_mean

# Blocks of each stage.
RESNET = {
    **{"10": (1, 1, 1, 1), "18": (2, 2, 2, 2), "34": (3, 4, 6, 3), "14": (1, 1, 1, 1), "26": (2, 2, 2, 2)},
    **{"50": (3, 4, 6, 3), "101": (3, 4, 23, 3), "152": (3, 8, 36, 3)},
}
RESIDUAL = ("resnet", "resnext")  # and a depth; their layers have the same names
BASIC = ("10", "18", "34")  # two convolutions per block; the others have three
CIFAR_BASIC = ("8", "14", "20", "32", "44", "110")
EFFICIENTNET = {  # B0 to B7: ceil of the depth coefficient times 1, 2, 2, 3, 3, 4, 1
    **{"0": (1, 2, 2, 3, 3, 4, 1), "1": (2, 3, 3, 4, 4, 5, 2), "2": (2, 3, 3, 4, 4, 5, 2), "3": (2, 3, 3, 5, 5, 6, 2)},
    **{"4": (2, 4, 4, 6, 6, 8, 2), "5": (3, 5, 5, 7, 7, 9, 3), "6": (3, 6, 6, 8, 8, 11, 3)},
    **{"7": (4, 7, 7, 10, 10, 13, 4), "CIFAR": (1, 2, 2, 3, 3, 4, 1)},
}
SQUEEZENET = {  # its layers; poolings are between them
    **{f"fire{number}": f"features/{number + 1 + (number > 4) + (number > 8)}" for number in range(2, 10)},
    "finalconv": "classifier/1",
}
MOBILENET = {"mobilenet-v3-large": (1, 2, 3, 4, 2, 3), "mobilenet-v3-small": (1, 2, 3, 2, 3)}
_PLAIN = re.compile(r"[\w/]+")
_MOBILENET_V2 = (1, 2, 3, 4, 3, 3, 1)  # blocks of each stage, in torchvision and in timm
# Parts of a block in order; our norms include the activation.
_SEPARABLE = ("conv_dw", "bn1", "bn1", "conv_pw", "bn2")
_INVERTED = ("conv_pw", "bn1", "bn1", "conv_dw", "bn2", "bn2", "conv_pwl", "bn3")
# Blocks of the program's own MobileNetV3 that squeeze and excite, before the last convolution.
_EXCITED = {"mobilenet-v3-large": (3, 4, 5, 10, 11, 12, 13, 14), "mobilenet-v3-small": (0, *range(3, 11))}
_FIRST_PARTS = ("conv_dw", "bn1", "se", "conv_pw", "bn2")
_PARTS = ("conv_pw", "bn1", "conv_dw", "bn2", "se", "conv_pwl", "bn3")


def pytorch_layer(name: str, *, model: str) -> str:
    """Our name of a layer of the PyTorch program, from torchvision's, timm's or its MobileNet's, or of an addition."""
    added = re.fullmatch(r"add(?:_(\d+))?", name)
    if added:
        return _addition(int(added[1] or 0), model=model, name=name)
    block = re.fullmatch(r"mb_block/(\d+)(?:/.*)?", name)
    if block and model in MOBILENET:
        return _mobilenet_block(int(block[1]), model=model, name=name)
    whole = {"avgpool": "global_pool", "relu": "act1", "first_block/0": "conv_stem", "layer0": "conv1"}
    if name in whole and not model.startswith("efficientnet"):
        return whole[name]
    name = re.sub(r"/downsample_(\d)$", r"/downsample/\1", name)  # as one of its configs spells it
    name = re.sub(r"^(layer\d)/block(\d+)", r"\1/\2", name)  # as an example in its documents spells it
    name = re.sub(r"^(layer\d)/(conv|bn)$", r"\1/0/\2", name)
    name = re.sub(r"^(layer\d/\d+)/(conv|bn)$", r"\1/\g<2>1", name)
    return re.sub(r"^(layer\d/\d+)/relu$", r"\1/act1", name)


def _addition(number: int, *, model: str, name: str) -> str:
    """The layer after the residual addition of that number, counted as torch.fx does: add, add_1, add_2, ..."""
    if model.startswith(RESIDUAL):
        depth = model.removeprefix("resnet").removeprefix("resnext")
        places = [(stage, block) for stage, blocks in enumerate(RESNET[depth], 1) for block in range(blocks)]
        template = f"layer{{}}/{{}}/act{2 if depth in BASIC else 3}"
    elif model.startswith("efficientnet-b"):
        repeats = EFFICIENTNET[model.removeprefix("efficientnet-b")]
        places = [(stage, block) for stage, blocks in enumerate(repeats) for block in range(1, blocks)]
        template = "blocks/{}/{}"
    else:
        return name
    if number >= len(places):
        raise ConfigError(f"{name}: {model} has {len(places)} additions, add to add_{len(places) - 1}")
    return template.format(*places[number])


def _mobilenet_block(number: int, *, model: str, name: str) -> str:
    places = [(stage, block) for stage, blocks in enumerate(MOBILENET[model]) for block in range(blocks)]
    if number >= len(places):
        raise ConfigError(f"{name}: {model} has {len(places)} blocks, mb_block/0 to mb_block/{len(places) - 1}")
    return "blocks/{}/{}".format(*places[number])


def mobilenet_layer(name: str, *, model: str) -> str | None:
    """The layer that starts a stage of a MobileNet, or None; the first part of a block stands for the whole block."""
    name = re.sub(r"^(mb_block/\d+)/seq(/0)?$", r"\1", name)
    names = dict(_mobilenet_v2()) if model == "mobilenet" else dict(_mobilenet_v3(model)) if model in MOBILENET else {}
    return names.get(name)


def recomputed_layers(pattern: str, *, model: str) -> tuple[str, ...]:
    """The layers that a rule of `--recompute-checkpoints` names; the rule itself where the names are the same."""
    renamed = {name: layers for name, layers in _names(model).items() if layers != (name,)}
    if pattern in renamed:
        return renamed[pattern]
    if _PLAIN.fullmatch(pattern):
        return (pytorch_layer(pattern, model=model),)
    try:
        rule = re.compile(pattern)
    except re.error:
        return (pattern,)  # refused where it is used
    found = [layer for name, layers in renamed.items() if rule.fullmatch(name) for layer in layers]
    same = any(rule.fullmatch(name) for name in _names(model).keys() - renamed.keys())
    return tuple(dict.fromkeys([*([pattern] if same or not found else []), *found]))


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
            # One module in the original, called after every convolution and after the addition.
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
    """The names of torchvision's MobileNetV2: features/0, one per block, features/18, classifier/1."""
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
    """The names of the program's own MobileNetV3: first_block, mb_block/N/seq/M, last_block, output."""
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


def tensorflow_layer(name: str, *, family: str, size: str, cifar: bool = False) -> str:
    """Our name for an operation of the TensorFlow program; there too it is the first of the next stage."""
    legal = legal_splits(family=family, size=size, cifar=cifar)
    if name not in legal:
        meant = did_you_mean(name, legal) or f"; expected some of {_some(legal)}"
        raise ConfigError(f"--pipeline-splits: '{name}' is not a split of {family} {size}{meant}")
    return legal[name]


def legal_splits(*, family: str, size: str, cifar: bool = False) -> dict[str, str]:
    """Every name that may start a stage of a model, and the name of our module."""
    if family == "squeezenet":
        return SQUEEZENET
    return _efficientnet_splits(size) if family == "efficientnet" else _resnet_splits(size, cifar=cifar)


def _resnet_splits(size: str, *, cifar: bool) -> dict[str, str]:
    repeats: tuple[int, ...]
    if cifar:
        basic = size in CIFAR_BASIC
        repeats, last, pool = ((int(size) - 2) // (6 if basic else 9),) * 3, "relu2" if basic else "relu3", "avgpool"
    else:
        repeats, last, pool = RESNET[size], "act2" if size in BASIC else "act3", "global_pool"
    splits = {}
    for stage, blocks in enumerate(repeats, 1):
        for block in range(blocks):
            splits[f"b{stage}/{block}"] = f"layer{stage}/{block}"
            for relu in (f"b{stage}/{block}/relu", f"stage{stage}/unit{block + 1}/relu"):  # the name of SDK 2.5
                splits[relu] = f"layer{stage}/{block}/{last}"
    return {**splits, "reduce_mean": pool, "fc1": "fc"}


def _efficientnet_splits(size: str) -> dict[str, str]:
    splits = {}
    for stage, blocks in enumerate(EFFICIENTNET[size.removeprefix("B")]):
        for block in range(blocks):
            old, ours = f"block{stage + 1}{'abcdefghijklm'[block]}", f"blocks/{stage}/{block}"
            if stage or block:
                splits[old] = ours
            if block == 0:  # a block without a shortcut may also be cut inside
                last = "conv_pwl" if stage else "conv_pw"
                splits |= {f"{old}/b": f"{ours}/conv_dw", f"{old}/SE": f"{ours}/se", f"{old}/c": f"{ours}/{last}"}
    return {**splits, "Top": "conv_head"}


def _some(names: Sequence[str] | dict[str, str]) -> str:
    relus = [name for name in names if name.endswith("/relu") and name.startswith("b")]
    return ", ".join(relus or names)
