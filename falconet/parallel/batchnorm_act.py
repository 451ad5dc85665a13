"""Batch norm over several replicas with an activation, as timm has it; apart, because timm is slow to import."""

from timm.layers.norm_act import BatchNormAct2d as BatchNormAct2d
from torch import Tensor

from falconet.parallel.batchnorm import Span, normalised


class SpanBatchNormAct2d(BatchNormAct2d):
    """Batch norm over a span, then the activation; its state is that of a plain one."""

    span: Span

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.act(self.drop(normalised(self, x)))  # type: ignore[no-any-return]
        return super().forward(x)  # type: ignore[no-untyped-call,no-any-return]
