"""Batch norm folded into the convolutions before it, for a model that only predicts.

In evaluation mode a norm is a product and a sum per channel: the product goes into the convolution's weights, the sum
becomes its bias. A residual sum, an activation or squeeze and excite after it runs with the bias: in the convolution's
own kernel if cuDNN or, on a CPU, oneDNN has one for both; otherwise in one more pass by Triton, or in place.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_weights

from falconet.errors import ConfigError
from falconet.models.fused.fusion import copied, fuse_norms, fuse_stem, layer_of, stem_of
from falconet.models.fused.layers import FusedExcitation, FusedHalving, FusedNorm, FusedPool, kind_of
from falconet.models.fused.outer_layers import padded_stem
from falconet.models.groupnorm import FusedGroupNorm
from falconet.numerics.segments import trace

# Known by name: timm takes two seconds to import, and the CIFAR networks do not need it.
_CONVOLUTIONS = ("Conv2d", "PaddedConv2d", "SameConv2d", "SamePaddedConv2d", "Conv2dSame")
_NORMS = ("BatchNorm2d", "BatchNormAct2d", "OnePassBatchNorm2d")
_ONEDNN = {  # its names of activations, with their numbers
    "none": ("none",),
    "relu": ("relu",),
    "silu": ("swish",),
    "hard_swish": ("hardswish",),
    "relu6": ("hardtanh", 0.0, 6.0),
}  # GELU is left to torch
_NOTHING = ("Identity", "Dropout", "Dropout2d", "DropPath")  # in evaluation


@dataclass(frozen=True)
class Folding:
    """A model for evaluation, and the number of its norms that are folded."""

    model: nn.Module  # in evaluation mode
    folded: int
    norms: int
    # Format and channels of images that need no conversion; others are accepted too.
    dtype: torch.dtype = torch.float32
    channels: int = 3  # those beyond three are 0


@torch.no_grad()
def fold(model: nn.Module, dtype: torch.dtype) -> Folding:
    """A folded copy of the model that computes in `dtype`; the model itself if it cannot be traced or has no such norm.

    The copy has the current weights, folded in fp32 and rounded once. Group norms cannot be folded, but
    on CUDA they are fused with what follows them.
    """
    norms = sum(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())
    fuses = any(isinstance(layer, nn.GroupNorm) and _is_on_cuda(layer) for layer in model.modules())
    if not norms and not fuses:
        return Folding(model, 0, 0)
    try:
        traced = trace(model, training=False)
    except ConfigError:
        return Folding(model, 0, norms)
    made = fuse_norms(_without_training(traced)).model
    stem = stem_of(made)
    folded = sum(_fold_at(made, node, dtype) for node in [*made.graph.nodes])
    fused = fuse_stem(made) if _is_on_cuda(model) else None
    if not folded and not (fuses and any(isinstance(layer, FusedGroupNorm) for layer in made.modules())):
        return Folding(model, 0, norms)
    for target in {str(node.target) for node in made.graph.nodes if node.op == "call_module"}:
        layer = made.get_submodule(target)
        if not isinstance(layer, FoldedConv2d | FoldedHalving):
            made.set_submodule(target, _evaluating(layer, dtype))
    made.graph.lint()
    made.recompile()
    made.delete_all_unused_submodules()
    given = (dtype, fused.channels) if fused is not None else _input_of(made, stem)
    return Folding(made.eval(), folded, norms, *given)


def _is_on_cuda(layer: nn.Module) -> bool:
    return any(weight.is_cuda for weight in layer.parameters())


def _input_of(made: fx.GraphModule, stem: fx.Node | None) -> tuple[torch.dtype, int] | tuple[()]:
    """Format and channels of a folded first convolution; empty: images are taken unchanged."""
    layer = made.get_submodule(str(stem.target)) if stem is not None else None
    if not isinstance(layer, FoldedConv2d):
        return ()
    return layer.conv.weight.dtype, layer.conv.weight.shape[1]


class FoldedConv2d(nn.Module):
    """act(conv(x) + shortcut), times the result of `excite` for its mean over each image's pixels."""

    table: Tensor

    def __init__(self, conv: nn.Conv2d, *, act: nn.Module | None = None, excite: nn.Module | None = None) -> None:
        """`conv` has the norm in its weight and bias."""
        super().__init__()
        self.conv, self.excite = conv, excite
        self.act = _in_place(nn.Identity() if act is None else act)
        self.kind = kind_of(self.act)
        self.is_plain = type(conv) is nn.Conv2d and conv.padding_mode == "zeros" and isinstance(conv.padding, tuple)
        assert conv.bias is not None
        shift, one = conv.bias.detach().float(), torch.ones_like(conv.bias, dtype=torch.float32)
        # As the kernels of norms take it: factor, shift, mean, 1 / deviation.
        self.register_buffer("table", torch.stack((one, shift, torch.zeros_like(one), one)), persistent=False)
        self._packed: Tensor | None = None  # the weight, as oneDNN reads it
        self._has_engine = conv.groups == 1  # in cuDNN, for the convolution and what follows it

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        x = x.to(self.conv.weight.dtype)  # from images, or from a norm in fp32
        missing = self.conv.weight.shape[1] * self.conv.groups - x.shape[1]
        if missing > 0:
            x = functional.pad(x, (0, 0, 0, 0, 0, missing))
        if x.is_cuda and self.kind is not None and self.is_plain:
            return self._on_cuda(x, shortcut, act=self.kind)
        if self.kind in _ONEDNN and self.is_plain and _onednn_takes(x):
            z = self._by_onednn(x, shortcut, act=self.kind)
        else:
            z = self.conv(x)
            if shortcut is not None:
                z += shortcut
            z = self.act(z)
        return z if self.excite is None else z.mul_(self.excite(z.mean((2, 3), keepdim=True)))

    def _by_onednn(self, x: Tensor, shortcut: Tensor | None, *, act: str) -> Tensor:
        """Compute the convolution and what follows it in one oneDNN kernel, on weights in oneDNN's own layout."""
        conv = self.conv
        how = (conv.padding, conv.stride, conv.dilation, conv.groups)
        if self._packed is None:
            # Always the layout for one image, so that neither it nor the bits depend on which batch came first.
            self._packed = torch.ops.mkldnn._reorder_convolution_weight(conv.weight.detach(), *how, [1, *x.shape[1:]])
        z: Tensor
        if shortcut is None:
            name, *numbers = _ONEDNN[act]
            z = torch.ops.mkldnn._convolution_pointwise(x, self._packed, conv.bias, *how, name, numbers, "")
        elif shortcut.shape[1] == 1 or shortcut.shape[2:].numel() == 1:
            # torch 2.11 "could not create a memory" for sums whose memory is both contiguous and channels-last.
            z = torch.ops.mkldnn._convolution_pointwise(x, self._packed, conv.bias, *how, "none", [], "")
            z = self.act(z.add_(shortcut))
        else:
            last = None if act == "none" else _ONEDNN[act][0]
            z = torch.ops.mkldnn._convolution_pointwise.binary(
                x, shortcut, self._packed, conv.bias, *how, "add", 1.0, last, [], ""
            )
        return z

    def _on_cuda(self, x: Tensor, shortcut: Tensor | None, *, act: str) -> Tensor:
        if act == "relu" and self.excite is None and self._has_engine:
            found = self._by_cudnn(x, shortcut)
            if found is not None:
                return found
        if act == "none" and self.excite is None and shortcut is None:
            alone: Tensor = self.conv(x)
            return alone
        from falconet.models.fused import batchnorm_kernels, excitation_kernels

        conv = self.conv
        y = functional.conv2d(x, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)
        y = y.contiguous(memory_format=torch.channels_last)
        z: Tensor
        if self.excite is not None:
            activated = excitation_kernels.Excitation(y, self.table, act)
            gate = self.excite(activated.sums()[0, :, :, None, None].to(y.dtype))
            z = activated.apply(gate.to(y.dtype).contiguous())
            return z
        if shortcut is not None:
            # A position embedding, for example, is one for all images.
            shortcut = shortcut.to(y.dtype).expand_as(y).contiguous(memory_format=torch.channels_last)
        z, _ = batchnorm_kernels.normalise(y, self.table, act=act, shortcut=shortcut)
        return z

    def _by_cudnn(self, x: Tensor, shortcut: Tensor | None) -> Tensor | None:
        """Compute everything in one cuDNN kernel; None: there is none for this layer on this device."""
        conv = self.conv
        stride, padding, dilation, groups = conv.stride, conv.padding, conv.dilation, conv.groups
        assert isinstance(padding, tuple)
        try:
            if shortcut is None:
                return torch.cudnn_convolution_relu(x, conv.weight, conv.bias, stride, padding, dilation, groups)
            shortcut = shortcut.to(x.dtype)
            return torch.cudnn_convolution_add_relu(
                x, conv.weight, shortcut, 1.0, conv.bias, stride, padding, dilation, groups
            )
        except RuntimeError as error:
            if "engine" not in str(error) and "cudnn" not in str(error).lower():
                raise
            self._has_engine = False
            return None


class FoldedHalving(nn.Module):
    """act(norm(pool(x))); on CUDA in one pass."""

    table: Tensor

    def __init__(self, layer: FusedHalving) -> None:
        super().__init__()
        self.norm, self.act, self.pool = (copy.copy(each) for each in (layer.norm, layer.act, layer.pool))
        self.norm.training, self.kind = False, layer.kind
        # Copies, like the table of numbers: a later change of the weights affects all layers or none.
        kept = {name: value.detach().clone() for name, value in layer.norm.named_parameters(recurse=False)}
        self.norm._parameters = {name: nn.Parameter(value, requires_grad=False) for name, value in kept.items()}
        self.norm._buffers = {name: value.clone() for name, value in layer.norm.named_buffers(recurse=False)}
        mean, variance = layer.norm.running_mean, layer.norm.running_var
        assert mean is not None
        assert variance is not None
        inverse = (variance + layer.norm.eps).rsqrt()
        rows = (layer.norm.weight.detach() * inverse, layer.norm.bias.detach(), mean, inverse)
        self.register_buffer("table", torch.stack([row.float() for row in rows]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            plain: Tensor = self.act(self.norm(self.pool(x)))
            return plain
        from falconet.models.fused import pool_kernels

        z: Tensor = pool_kernels.halve_normed(
            x.contiguous(memory_format=torch.channels_last), self.table, act=self.kind
        )
        return z


def _onednn_takes(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32 and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def _evaluating(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a layer for evaluation, with the weights of convolutions and products in another format.

    It shares hooks and all other weights with the layer: norms compute in fp32.
    """
    if isinstance(layer, nn.Conv2d | nn.Linear):
        return _with_weights(layer, layer.weight, layer.bias, dtype)
    made = copy.copy(layer)
    made._modules = {name: child and _evaluating(child, dtype) for name, child in layer._modules.items()}
    made.training = False
    return made


def _with_weights(layer: nn.Module, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
    made = copy.copy(layer)
    made.__dict__.pop("forward", None)  # left by a regime that rounds the weights at every call
    made._parameters, made.training = {}, False
    for name, value in (("weight", weight), ("bias", bias)):
        kept = None if value is None else value.detach().to(dtype, copy=True)  # a copy, as in FoldedHalving
        if kept is not None and kept.dim() == 4:
            kept = kept.contiguous(memory_format=torch.channels_last)
        made.register_parameter(name, None if kept is None else nn.Parameter(kept, requires_grad=False))
    return made


def _without_training(traced: fx.GraphModule) -> fx.GraphModule:
    """The graph without the parts for training, which would hide a norm or what follows it.

    Layers that do nothing in evaluation are removed; norms that span replicas become plain ones again.
    """
    graph = copied(traced.graph)
    made = fx.GraphModule(traced, graph)
    for node in [*graph.nodes]:
        layer = layer_of(made, node)
        if layer is not None and type(layer).__name__ in _NOTHING:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif isinstance(layer, nn.BatchNorm2d) and hasattr(layer, "span"):
            plain = copy.copy(layer)
            plain.__class__ = type(layer).__bases__[0]
            made.set_submodule(str(node.target), plain)
    made.recompile()
    return made


def _fold_at(traced: fx.GraphModule, node: fx.Node, dtype: torch.dtype) -> int:
    """Fold the norms of a node into the convolutions before it; return their number."""
    layer = layer_of(traced, node)
    made: nn.Module | None = None
    if isinstance(layer, FusedHalving):
        traced.set_submodule(str(node.target), FoldedHalving(layer))
        return 1
    if isinstance(layer, FusedExcitation):
        act = layer.act if type(layer.act) is not nn.Identity else _own(layer.norm)
        made = _folded(traced, node.args[0], layer.norm, dtype, act=act, excite=_evaluating(layer.excite, dtype))
    elif isinstance(layer, FusedNorm | FusedPool):
        act = layer.act if type(layer.act) is not nn.Identity else _own(layer.norm)
        made = _folded(traced, node.args[0], layer.norm, dtype, act=act)
    elif isinstance(layer, nn.BatchNorm2d) and type(layer).__name__ in _NORMS:
        made = _folded(traced, node.args[0], layer, dtype, act=_own(layer))
    if made is None:
        return 0
    shortcut = node.args[1:]
    other = layer.shortcut_norm if isinstance(layer, FusedNorm) else None
    if other is not None:
        projection = shortcut[0]
        projected = _folded(traced, projection, other, dtype, act=None)
        if projected is None:
            return 0
        assert isinstance(projection, fx.Node)
        traced.set_submodule(str(projection.target), projected)  # in the place of the convolution alone
    convolution = node.args[0]
    assert isinstance(convolution, fx.Node)
    traced.set_submodule(str(convolution.target), made)
    with traced.graph.inserting_before(node):
        call = traced.graph.call_module(str(convolution.target), (convolution.args[0], *shortcut))
        if isinstance(layer, FusedPool):
            traced.add_submodule(f"{node.name}_pool", layer.pool)
            call = traced.graph.call_module(f"{node.name}_pool", (call,))
    node.replace_all_uses_with(call)
    traced.graph.erase_node(node)
    traced.graph.erase_node(convolution)
    return 1 if other is None else 2


def _folded(
    traced: fx.GraphModule,
    node: object,
    norm: nn.BatchNorm2d,
    dtype: torch.dtype,
    *,
    act: nn.Module | None,
    excite: nn.Module | None = None,
) -> FoldedConv2d | None:
    """A node's convolution with a norm folded into it; None: it is no convolution, or is used elsewhere too."""
    if not isinstance(node, fx.Node) or len(node.users) > 1:
        return None
    conv = layer_of(traced, node) if _calls(traced, node.target) == 1 else None
    if not isinstance(conv, nn.Conv2d) or type(conv).__name__ not in _CONVOLUTIONS or conv._forward_pre_hooks:
        return None
    if norm.running_mean is None or norm.running_var is None or conv._forward_hooks or norm._forward_hooks:
        return None
    before = None if conv.bias is None else conv.bias.float()
    weight, bias = fuse_conv_bn_weights(
        conv.weight.float(), before, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    )
    if not all(each.to(dtype).isfinite().all() for each in (weight, bias)):
        return None  # a channel that hardly varied has a factor beyond the format
    if weight.is_cuda and node is stem_of(traced):
        weight = nn.Parameter(functional.pad(weight, (0, 0, 0, 0, 0, padded_stem(conv).channels - conv.in_channels)))
    made = _with_weights(conv, weight, bias, dtype)
    assert isinstance(made, nn.Conv2d)
    return FoldedConv2d(made, act=act, excite=excite)


def _calls(traced: fx.GraphModule, target: object) -> int:
    return sum(node.op == "call_module" and node.target == target for node in traced.graph.nodes)


def _own(norm: nn.BatchNorm2d) -> nn.Module | None:
    """The activation inside a timm norm, if any."""
    act: nn.Module | None = getattr(norm, "act", None)
    return act


def _in_place(act: nn.Module) -> nn.Module:
    """The activation in place, because a convolution does not need its output again."""
    if not hasattr(act, "inplace"):
        return act
    made = copy.copy(act)
    made.inplace = True  # type: ignore[assignment]
    return made
