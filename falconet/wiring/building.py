"""The options of the model in, a new model out."""

from torch import nn

from falconet.config.model import Model
from falconet.models import zoo
from falconet.models.mobile import MobileNetShape
from falconet.models.norms import Norm
from falconet.models.proxynorm import Proxy
from falconet.models.residual import ResidualShape
from falconet.models.squeeze import SqueezeNetShape


def build_model(model: Model, *, classes: int, seed: int) -> nn.Module:
    norm = Norm(
        kind=model.norm_type,
        eps=None if model.norm_eps == "auto" else model.norm_eps,
        groups=model.norm_num_groups,
        momentum=None if model.batchnorm_momentum == "auto" else model.batchnorm_momentum,
        fast=model.enable_fast_groupnorm,
        stable=not model.disable_stable_batchnorm,
        strided=model.norm_grouping == "strided",
        proxy=Proxy(eps=model.proxy_epsilon, recompute=model.proxy_recompute) if model.proxy_norm else None,
        biases=model.conv_bias,
    )
    return zoo.build(
        model.model,
        classes=classes,
        seed=seed,
        norm=norm,
        shape=shape_of(model),
        variant=zoo.Variant(
            weights=model.weight_init,
            zeros=model.zero_init,
            padding=model.padding,
            padded_input=model.input_image_padding,
        ),
    )


def shape_of(model: Model) -> zoo.Shape | None:
    """What the options change about the model's family; the rules refuse those of another family."""
    if model.model.startswith("efficientnet"):
        return zoo.EfficientNetShape(
            expand_ratio=model.efficientnet_expand_ratio,
            group_dim=model.efficientnet_group_dim,
            dropout=None if model.efficientnet_dropout == "auto" else model.efficientnet_dropout,
            drop_path=model.efficientnet_drop_path,
            se=model.efficientnet_se,
            activation=model.efficientnet_activation,
            divisor=model.efficientnet_depth_divisor,
            top_width=model.efficientnet_top_width,
            width=None if model.efficientnet_width == "auto" else model.efficientnet_width,
            depth=None if model.efficientnet_depth == "auto" else model.efficientnet_depth,
        )
    if model.model.startswith(("resnet", "resnext")):
        return ResidualShape(
            groups=model.resnext_groups,
            group_dim=model.resnext_group_dim,
            stride=model.bottleneck_stride,
            wide=model.resnext_wide,
            shortcut=model.shortcut_type,
            stem=model.stem,
        )
    if model.model.startswith("mobilenet-v3"):
        return MobileNetShape(wide_head=model.mobilenet_wide_head)
    return SqueezeNetShape(bypass=True) if model.squeezenet_bypass else None
