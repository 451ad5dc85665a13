"""A folder that timm opens: `timm.create_model("local-dir:FOLDER", pretrained=True)`, or from the Hugging Face hub."""

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from falconet.config.options import Model
from falconet.data.preprocessing import Preprocessing
from falconet.errors import ConfigError
from falconet.export.graph import Graph
from falconet.models.zoo import TIMM_PREFIX

# Names of timm's models with the same layers, and the arguments that make them so.
NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"resnet{depth}": (f"resnet{depth}", {}) for depth in (18, 26, 34, 50, 101, 152)},
    "resnet10": ("resnet18", {"layers": [1, 1, 1, 1]}),
    "resnet14": ("resnet50", {"layers": [1, 1, 1, 1]}),
    "resnext14": ("resnext50_32x4d", {"layers": [1, 1, 1, 1]}),
    "resnext26": ("resnext50_32x4d", {"layers": [2, 2, 2, 2]}),
    "resnext50": ("resnext50_32x4d", {}),
    "resnext101": ("resnext101_32x4d", {}),
    "resnext152": ("resnext101_32x4d", {"layers": [3, 8, 36, 3]}),
    **{f"efficientnet-b{size}": (f"efficientnet_b{size}", {}) for size in range(8)},
    "mobilenet": ("mobilenetv2_100", {}),
    "mobilenet-v3-small": ("mobilenetv3_small_100", {}),
    "mobilenet-v3-large": ("mobilenetv3_large_100", {}),
}
# Options that change how a model is trained or computed, not the function of its weights, or that are mapped below.
FREE = (
    *("model", "weight_init", "zero_init", "batchnorm_momentum", "disable_stable_batchnorm", "input_image_padding"),
    *("efficientnet_dropout", "efficientnet_drop_path", "resnext_groups", "resnext_group_dim"),
    *("norm_num_groups", "norm_grouping", "enable_fast_groupnorm", "proxy_epsilon", "proxy_recompute"),
)


def write(graph: Graph, folder: Path) -> None:
    """Write config.json and model.safetensors with timm's own function."""
    import timm
    from timm.models import save_for_hf

    name, arguments = architecture(graph.options)
    configuration = _configuration(graph.preprocessing)
    classes = len(graph.class_names)
    model: Any = timm.create_model(name, pretrained=False, num_classes=classes, **arguments)
    model.load_state_dict(graph.model.state_dict())
    model.pretrained_cfg = {**model.pretrained_cfg, **configuration, "num_classes": classes, "tag": ""}
    for layer in model.parameters():
        layer.data = layer.data.contiguous()  # safetensors takes no channels-last memory
    labels = {"label_names": list(graph.class_names)}
    save_for_hf(model, str(folder), model_config=labels, model_args=arguments, safe_serialization=True)


def create_model(folder: Path) -> nn.Module:
    """Open the model in the way that its users do."""
    import timm

    model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return model.eval()


def architecture(options: Model) -> tuple[str, dict[str, Any]]:
    """timm's name for a model, and the arguments that build it; ConfigError if timm has none like it."""
    if options.model.startswith(TIMM_PREFIX):
        return options.model.removeprefix(TIMM_PREFIX), {}
    if options.model not in NAMES:
        raise ConfigError(f"timm has no model like {options.model}; expected onnx or pt2, which take any model")
    for field in fields(options):
        if field.name not in FREE and getattr(options, field.name) != field.default:
            option = f"--{field.name.replace('_', '-')}"
            raise ConfigError(
                f"timm's model has no {option}, with which {options.model} was trained; expected onnx or pt2,"
                " which take any model"
            )
    name, arguments = NAMES[options.model]
    if options.model.startswith("resnext"):
        groups = {"cardinality": options.resnext_groups, "base_width": options.resnext_group_dim}
        default = {"cardinality": Model.resnext_groups, "base_width": Model.resnext_group_dim}
        arguments = arguments | ({} if groups == default else groups)
    return name, arguments


def _configuration(preprocessing: Preprocessing) -> dict[str, Any]:
    """The preprocessing in timm's terms."""
    if preprocessing.standardised:
        raise ConfigError("timm cannot standardise each image by itself, as this model needs; expected onnx or pt2")
    side = preprocessing.image_size
    return {
        "input_size": (3, side, side),
        "mean": preprocessing.mean,
        "std": preprocessing.std,
        "interpolation": preprocessing.interpolation,
        "crop_pct": _share(preprocessing),
        "crop_mode": "center",
        "test_input_size": None,
        "test_crop_pct": None,
        "pool_size": None,
        "fixed_input_size": False,
        **dict.fromkeys(("license", "origin_url", "paper_ids", "paper_name")),  # of weights that these are not
    }


def _share(preprocessing: Preprocessing) -> float:
    """The side of the crop over the resized short side, such that timm, which rounds down, resizes to the same."""
    side, resize = preprocessing.image_size, preprocessing.resize
    plain = side / resize
    return plain if math.floor(side / plain) == resize else side / (resize + 0.5)
