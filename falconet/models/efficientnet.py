"""EfficientNets from timm's blocks, in the sizes and with the variations of the original programs."""

from dataclasses import dataclass
from functools import partial

from torch import nn

from falconet.config.options import Model


@dataclass(frozen=True)
class Size:
    """The differences of an EfficientNet of one size from B0, after Tan and Le."""

    width: float
    depth: float
    side: int  # pixels
    dropout: float
    small: bool = False  # for 32 x 32 images: no stride in the stem and the second stage


SIZES = {
    "efficientnet-b0": Size(1.0, 1.0, 224, 0.2),
    "efficientnet-b1": Size(1.0, 1.1, 240, 0.2),
    "efficientnet-b2": Size(1.1, 1.2, 260, 0.3),
    "efficientnet-b3": Size(1.2, 1.4, 300, 0.3),
    "efficientnet-b4": Size(1.4, 1.8, 380, 0.4),
    "efficientnet-b5": Size(1.6, 2.2, 456, 0.4),
    "efficientnet-b6": Size(1.8, 2.6, 528, 0.5),
    "efficientnet-b7": Size(2.0, 3.1, 600, 0.5),
    "efficientnet-cifar": Size(0.5, 1.0, 32, 0.0, small=True),
}
_STEM_CHANNELS = 32


def create(options: Model, *, classes: int) -> nn.Module:
    """A timm EfficientNet from our own architecture strings, because timm's builders fix the expansion ratio."""
    from timm.models._efficientnet_builder import decode_arch_def, round_channels  # timm takes two seconds to import
    from timm.models.efficientnet import EfficientNet

    size = SIZES[options.model]
    width = size.width if options.efficientnet_width == "auto" else options.efficientnet_width
    depth = size.depth if options.efficientnet_depth == "auto" else options.efficientnet_depth
    dropout = size.dropout if options.efficientnet_dropout == "auto" else options.efficientnet_dropout
    rounded = partial(round_channels, multiplier=width, divisor=options.efficientnet_depth_divisor)
    block_args = decode_arch_def(_stages(options, small=size.small), depth)  # type: ignore[no-untyped-call]
    channels = rounded(_STEM_CHANNELS)
    for block in (block for stage in block_args for block in stage):
        expanded = channels * int(block.get("exp_ratio", 1))
        block["group_size"] = _group_size(expanded, at_least=options.efficientnet_group_dim)
        channels = rounded(block["out_chs"])
    model: nn.Module = EfficientNet(
        block_args,
        num_classes=classes,
        stem_size=_STEM_CHANNELS,
        num_features=rounded(options.efficientnet_top_width),
        round_chs_fn=rounded,
        act_layer=nn.SiLU if options.efficientnet_activation == "silu" else nn.ReLU,
        norm_layer=nn.BatchNorm2d,
        drop_path_rate=options.efficientnet_drop_path,
    )
    if size.small:
        model.get_submodule("conv_stem").stride = (1, 1)  # type: ignore[assignment]  # a convolution
    append_dropout(model, after="global_pool", rate=dropout)
    return model


def append_dropout(model: nn.Module, *, after: str, rate: float) -> None:
    """Add dropout as a module, so that train() and eval() reach it in a traced model; no key of the state changes."""
    model.set_submodule(after, nn.Sequential(model.get_submodule(after), nn.Dropout(rate)))


def _stages(options: Model, *, small: bool) -> list[list[str]]:
    """B0's stages in timm's notation.

    ds: depthwise separable; ir: inverted residual; r: repeats; k: kernel; s: stride; e: expansion; c: channels out.
    """
    expand, se = options.efficientnet_expand_ratio, "_se0.25" if options.efficientnet_se else ""
    return [
        [f"ds_r1_k3_s1_e1_c16{se}"],
        [f"ir_r2_k3_s{1 if small else 2}_e{expand}_c24{se}"],
        [f"ir_r2_k5_s2_e{expand}_c40{se}"],
        [f"ir_r3_k3_s2_e{expand}_c80{se}"],
        [f"ir_r3_k5_s1_e{expand}_c112{se}"],
        [f"ir_r4_k5_s2_e{expand}_c192{se}"],
        [f"ir_r1_k3_s1_e{expand}_c320{se}"],
    ]


def _group_size(channels: int, *, at_least: int) -> int:
    """Channels per group: `channels // at_least` groups as in the original, or the next fewer that divide evenly."""
    groups = max(channels // at_least, 1)
    while channels % groups:
        groups -= 1
    return channels // groups
