"""Weights that timm and torchvision publish: their names, their preprocessing, and fetching timm's."""

import math
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from falconet.errors import CheckpointError
from falconet.models.zoo import TIMM_PREFIX

FILE = "model.safetensors"
TORCHVISION_FILE = re.compile(r".+-[0-9a-f]{8,10}\.pth")
IMAGENET_CLASSES = 1000
REACHED_WITHIN = 3.0  # seconds; Hugging Face's library tries for most of a minute
# torchvision's first weights of the ResNets, as in the PyTorch program; for the rest, timm's for the same layers.
TAGS = {
    **{f"resnet{depth}": f"resnet{depth}.tv_in1k" for depth in (18, 34, 50, 101, 152)},
    "resnext50": "resnext50_32x4d.tv_in1k",
    "resnext101": "resnext101_32x4d.gluon_in1k",
    "efficientnet-b0": "efficientnet_b0.ra_in1k",
    "efficientnet-b1": "efficientnet_b1.ft_in1k",
    "efficientnet-b2": "efficientnet_b2.ra_in1k",
    "efficientnet-b3": "efficientnet_b3.ra2_in1k",
    "efficientnet-b4": "efficientnet_b4.ra2_in1k",
    "efficientnet-b5": "efficientnet_b5.sw_in12k_ft_in1k",
    "mobilenet": "mobilenetv2_100.ra_in1k",
    "mobilenet-v3-small": "mobilenetv3_small_100.lamb_in1k",
    "mobilenet-v3-large": "mobilenetv3_large_100.ra_in1k",
}


@dataclass(frozen=True)
class Published:
    """Weights that can be downloaded."""

    tag: str  # timm's name of the model and its weights
    repository: str  # on the Hugging Face hub
    classes: int
    config: Mapping[str, Any] = field(default_factory=dict)  # timm's: input size, interpolation, crop and so on


def published(name: str) -> Published:
    """The published weights of a model."""
    tag = TAGS.get(name) or (name.removeprefix(TIMM_PREFIX) if name.startswith(TIMM_PREFIX) else None)
    if tag is None:
        raise CheckpointError(f"there are no published weights for {name}")
    import timm

    config = timm.get_pretrained_cfg(tag)
    if config is None or not config.hf_hub_id or not config.architecture or not isinstance(config.classifier, str):
        raise CheckpointError(f"there are no published weights for {name}")
    full = f"{config.architecture}.{config.tag}" if config.tag else config.architecture
    repository = f"{config.hf_hub_id}{full}" if config.hf_hub_id.endswith("/") else config.hf_hub_id
    return Published(full, repository, config.num_classes, asdict(config))


def is_published(name: str) -> bool:
    """Whether there are weights of a model to download."""
    try:
        published(name)
    except CheckpointError:
        return False
    return True


def download_line(name: str) -> str:
    """The command that downloads a model's published weights into the folder that it is typed in."""
    return f"hf download {published(name).repository} {FILE} --local-dir ."


def imagenet_classes(classes: int) -> tuple[str, ...]:
    """The names of ImageNet's class folders by number; empty for another number of classes."""
    from timm.data.imagenet_info import ImageNetInfo

    names: list[str] = ImageNetInfo().label_names()  # type: ignore[no-untyped-call]
    return tuple(names) if classes == len(names) else ()


def imagenet_descriptions() -> tuple[str, ...]:
    """The descriptions of ImageNet's classes by number, such as `tabby, tabby cat`."""
    from timm.data.imagenet_info import ImageNetInfo

    return tuple(ImageNetInfo().label_descriptions())


def torchvision_config(file: str) -> dict[str, Any] | None:
    """torchvision's facts about weights that it publishes under this file name, in timm's terms."""
    if not TORCHVISION_FILE.fullmatch(file):
        return None
    from torchvision import models  # also imports torch's compiler: three seconds

    for name in models.list_models(module=models):
        for weights in models.get_model_weights(name):
            if weights.url.rpartition("/")[2] == file:
                made = weights.transforms()
                (crop,), (resize,) = made.crop_size, made.resize_size
                ratio = crop / resize
                return {
                    "input_size": (3, crop, crop),
                    "crop_pct": ratio if int(crop / ratio) == resize else math.nextafter(ratio, 0),
                    "interpolation": made.interpolation.value,
                    "mean": tuple(made.mean),
                    "std": tuple(made.std),
                }
    return None


def fetch(weights: Published) -> Path:
    """The path of the weights in the Hugging Face cache, downloaded if need be."""
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of its HTTP library

    cached = huggingface_hub.try_to_load_from_cache(weights.repository, FILE)
    if isinstance(cached, str):
        return Path(cached)
    if constants.HF_HUB_OFFLINE or not _reached(constants.ENDPOINT):
        server = urllib.parse.urlsplit(constants.ENDPOINT).netloc
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{server} cannot be reached"
        raise CheckpointError(f"the weights {weights.repository} are not in the Hugging Face cache, and {why}")
    try:
        return Path(huggingface_hub.hf_hub_download(weights.repository, FILE))
    except (OSError, HTTPError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise CheckpointError(f"the weights {weights.repository} cannot be downloaded: {lines[0]}") from error


def _reached(endpoint: str) -> bool:
    """Whether the server accepts connections; with a proxy, assume that it does."""
    if urllib.request.getproxies().get("https"):
        return True
    address = urllib.parse.urlsplit(endpoint)
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname or "", port), timeout=REACHED_WITHIN).close()
    except OSError:
        return False
    return True
