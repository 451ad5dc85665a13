"""Translation of parts of the TensorFlow program's variable names to patterns of our weights' names."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from falconet.errors import did_you_mean
from falconet.legacy.layer_names import BASIC, CIFAR_BASIC, EFFICIENTNET, RESNET, SQUEEZENET

_SHIFT, _SCALE = ("beta", "bias"), ("gamma", "weight")
# Rows of proxy norm's one variable; its other two rows held what is computed here.
_PROXY = (("0", "bias"), ("1", "weight"), ("4", "proxy_shift"), ("5", "proxy_scale"))
_MOVING = (("moving_mean", "running_mean"), ("moving_variance", "running_var"))


class Network(NamedTuple):
    """The facts on which a model's variables depend."""

    family: str
    size: str  # as the program spells it
    cifar: bool = False  # the family's form for CIFAR
    batch_norm: bool = True
    excites: bool = True  # EfficientNet: squeeze and excitation
    proxied: bool = False  # EfficientNet: proxy norm


class Found(NamedTuple):
    """The weights that fragments name, and the fragments that name none."""

    weights: frozenset[str]
    unknown: tuple[str, ...]


def find(network: Network, fragments: Sequence[str]) -> Found:
    """Find the variables that contain each fragment, first among SDK 2.1's names, then among SDK 2.5's."""
    tables = [dict(_variables(network, release)) for release in _RELEASES]
    weights: set[str] = set()
    unknown = []
    for fragment in fragments:
        hits = [own for table in tables if (own := {table[name] for name in table if fragment in name})]
        weights |= hits[0] if hits else set()
        unknown += [] if hits else [fragment]
    return Found(frozenset(weights), tuple(unknown))


def weights_of(network: Network) -> list[str]:
    """All weights, and all statistics of batch norm, in the order of execution."""
    return [ours for _, ours in _variables(network, _RELEASES[0])]


def meant(network: Network, fragment: str) -> str:
    """A suggestion for an unknown fragment."""
    names = [name for name, _ in _variables(network, _RELEASES[0])]
    parts = dict.fromkeys(part for name in names for part in (*name.removesuffix(":0").split("/"), *_scopes(name)))
    return did_you_mean(fragment, list(parts)) or f"; expected a part of a name such as {names[0]} or {names[-1]}"


def patterns(chosen: Collection[str], *, every: Sequence[str]) -> tuple[str, ...]:
    """The fewest patterns that match `chosen` and none of the other weights: by layer, or by the ends of names."""
    expected = set(chosen)
    ways = [_by_layer(expected, every), _by_ending(expected, every)]
    right = [way for way in ways if _matched(way, every) == expected]
    assert right, "patterns by layer are always exact"
    return min(right, key=len)


def _by_layer(chosen: set[str], every: Sequence[str], inside: str = "") -> tuple[str, ...]:
    """Patterns of whole layers if all of their weights are chosen, otherwise of their parts."""
    parts = dict.fromkeys(name[len(inside) :].partition("/")[0] for name in every if name.startswith(inside))
    found: list[str] = []
    for part in parts:
        path = f"{inside}{part}"
        own = {name for name in every if name == path or name.startswith(f"{path}/")}
        if own <= chosen:
            found.append(path)
        elif own & chosen:
            found += _by_layer(chosen, every, f"{path}/")
    return tuple(found)


def _by_ending(chosen: set[str], every: Sequence[str]) -> tuple[str, ...]:
    """Patterns of common ends of names (.*bn1, .*bn1/bias), and the rest by layer."""
    found, left = [], set(chosen)
    for depth in (1, 0):  # endings of layers, then of weights
        for ending in dict.fromkeys(_ending(name, depth) for name in every):
            own = {name for name in every if _ending(name, depth) == ending}
            layers = {name.rpartition("/")[0] for name in own}
            if own <= left and len(layers) > 1:
                found.append(f".*{ending}")
                left -= own
    return (*found, *_by_layer(left, every))


def _ending(name: str, depth: int) -> str:
    """The end of a weight's name, or of its layer's; a layer that is a number includes the one around it."""
    layer, _, weight = name.rpartition("/")
    around, _, last = layer.rpartition("/")
    layer = f"{around.rpartition('/')[2]}/{last}" if last.isdigit() else last
    return layer if depth else f"{layer}/{weight}"


def _matched(found: Sequence[str], every: Sequence[str]) -> set[str]:
    wholes = [re.compile(pattern) for pattern in found]

    def paths(name: str) -> list[str]:
        parts = name.split("/")
        return ["/".join(parts[:depth]) for depth in range(1, len(parts) + 1)]

    return {name for name in every if any(whole.fullmatch(path) for whole in wholes for path in paths(name))}


def _scopes(name: str) -> list[str]:
    """The parts of a variable's name: `batch_norm/beta` at its end, and its first two scopes after `all`."""
    parts = name.removesuffix(":0").split("/")
    return ["/".join(parts[-2:]), "/".join(parts[1:3])]


class _Release(NamedTuple):
    """The names in one release; `{}`: the number of a layer in its block, 0 in the stem, `sc` in a shortcut."""

    stem: str
    block: str  # of stage and block, from 0
    conv: str
    norm: str
    shortcut: str
    kernel: str
    dense: str


_RELEASES = (
    _Release("b0", "b{0}/{1}", "{}/conv/conv2d", "{}/{norm}", "p", "kernel", "dense/kernel dense/bias"),
    _Release(
        "stage0", "stage{0}/unit{2}", "conv{}", "{scope}{}/{norm}", "sc", "weight", "weight bias"
    ),  # SDK 2.5; efficientnets kept theirs
    _Release("b0", "b{0}/{1}", "{}/conv", "{}/{norm}", "p", "kernel", "kernel bias"),  # a common abbreviation
)


def _variables(network: Network, release: _Release) -> Iterator[tuple[str, str]]:
    """Pairs of the program's name and ours, each weight once."""
    families = {"efficientnet": _efficientnet, "squeezenet": _squeezenet}
    for name, ours in families.get(network.family, _resnet)(network, release):
        yield f"all/{re.sub('/+', '/', name)}:0", ours


def _resnet(network: Network, release: _Release) -> Iterator[tuple[str, str]]:
    basic = network.size in (CIFAR_BASIC if network.cifar else BASIC)
    repeats: tuple[int, ...] = (
        ((int(network.size) - 2) // (6 if basic else 9),) * 3 if network.cifar else RESNET[network.size]
    )
    number = "0" if "{scope}" in release.norm else ""
    yield from _layer(network, release, release.stem, number, conv="conv1", norm="bn1")
    for stage, blocks in enumerate(repeats, 1):
        for block in range(blocks):
            scope, ours = release.block.format(stage, block, block + 1), f"layer{stage}/{block}"
            for each in range(1, 3 if basic else 4):
                yield from _layer(
                    network, release, scope, str(each), conv=f"{ours}/conv{each}", norm=f"{ours}/bn{each}"
                )
            # Ours have no projection where the width stays, nor in the small networks for CIFAR.
            if block == 0 and not (basic and (network.cifar or stage == 1)):
                shortcut = f"{ours}/downsample"
                yield from _layer(network, release, scope, release.shortcut, conv=f"{shortcut}/0", norm=f"{shortcut}/1")
    yield from _dense(release, "fc1", "fc")


def _efficientnet(network: Network, release: _Release) -> Iterator[tuple[str, str]]:
    older = _RELEASES[0] if "{scope}" in release.norm else release
    yield from _layer(network, older, "block0", "", conv="conv_stem", norm="bn1")
    for stage, blocks in enumerate(EFFICIENTNET[network.size.removeprefix("B")]):
        for block in range(blocks):
            scope, ours = f"block{stage + 1}{'abcdefghijklm'[block]}", f"blocks/{stage}/{block}"
            layers = (("a", "conv_pw", "bn1"), ("b", "conv_dw", "bn2"), ("c", "conv_pwl", "bn3"))
            if stage == 0:  # nothing is expanded
                layers = (("b", "conv_dw", "bn1"), ("c", "conv_pw", "bn2"))  # type: ignore[assignment]
            for part, conv, norm in layers:
                yield from _layer(network, older, scope, part, conv=f"{ours}/{conv}", norm=f"{ours}/{norm}")
                if part == "b" and network.excites:
                    for number, layer in (("1", "conv_reduce"), ("2", "conv_expand")):
                        where = f"{scope}/SE/{older.conv.format(number)}"
                        yield f"{where}/{older.kernel}", f"{ours}/se/{layer}/weight"
                        yield f"{where}/bias", f"{ours}/se/{layer}/bias"
    yield from _layer(network, older, "Top", "", conv="conv_head", norm="bn2")
    yield from _dense(older, "Top/logits", "classifier")


def _squeezenet(network: Network, release: _Release) -> Iterator[tuple[str, str]]:
    """The variables of a SqueezeNet; our biases count with the kernels."""
    layers = {"initialconv/conv": "features/0"}
    for fire, ours in SQUEEZENET.items():
        if fire.startswith("fire"):
            for part, layer in (("s_1", "squeeze"), ("e_1", "expand1x1"), ("e_3", "expand3x3")):
                layers[f"{fire}/{fire}{part}/conv"] = f"{ours}/{layer}"
        elif not network.cifar:
            layers[f"{fire}/conv"] = ours
    for scope, ours in layers.items():
        yield f"{scope}/conv2d/{release.kernel}", f"{ours}/weight"
        yield f"{scope}/conv2d/bias", f"{ours}/bias"
    if network.cifar:
        yield from _dense(release, "", SQUEEZENET["finalconv"])


def _layer(
    network: Network, release: _Release, scope: str, number: str, *, conv: str, norm: str
) -> Iterator[tuple[str, str]]:
    """The variables of a convolution and its norm."""
    yield f"{scope}/{release.conv.format(number)}/{release.kernel}", f"{conv}/weight"
    kind = {"norm": "batch_norm", "scope": "bn"} if network.batch_norm else {"norm": "GroupNorm", "scope": "gn"}
    where = f"{scope}/{release.norm.format(number, **kind)}"
    moving: Mapping[str, str] = dict(_MOVING) if network.batch_norm else {}
    ends = number == "c"  # a block's last norm has no activation, so proxy norm leaves it its scale
    own = (_SCALE, _SHIFT) if not network.proxied else (_SCALE,) if ends else ()
    for name, ours in (*own, *moving.items()):
        yield f"{where}/{name}", f"{norm}/{ours}"
    for row, ours in _PROXY if network.proxied and not ends else ():
        yield f"{scope}/{number}/proxy/{row}", f"{norm}/act/{ours}"


def _dense(release: _Release, scope: str, ours: str) -> Iterator[tuple[str, str]]:
    for name, weight in zip(release.dense.split(), ("weight", "bias"), strict=True):
        yield f"{scope}/{name}", f"{ours}/{weight}"
