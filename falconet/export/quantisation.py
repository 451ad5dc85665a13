"""int8 for CPUs: an ONNX file with 8-bit weights and activations, whose ranges are measured on images."""

import tempfile
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from falconet.export.graph import INPUT, Values

# Operators with 8-bit inputs and outputs. A convolution's output is stored after its ReLU or Clip, which the rounding
# does itself. Other operators stay in fp32, such as sigmoids and group norms.
OPERATORS = ["Conv", "Gemm", "MatMul", "Relu", "Clip", "Add", "MaxPool", "GlobalAveragePool", "ReduceMean"]


def quantise(plain: Path, target: Path, batches: Iterator[Values], *, reduce_range: bool) -> None:
    """Write the fp32 file `plain` as int8: weights signed with a scale per channel, activations unsigned.

    The range of an activation is from its least to its largest value in the batches. `reduce_range`: 7-bit weights.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader:  # a CalibrationDataReader by its method
        def get_next(self) -> dict[str, Values] | None:
            images = next(batches, None)
            return None if images is None else {INPUT: images}

    with tempfile.TemporaryDirectory() as folder:
        simplified = Path(folder) / "simplified.onnx"  # constants folded, shapes inferred
        quant_pre_process(plain, simplified, skip_symbolic_shape=True)
        nodes = onnx.load(simplified).graph.node
        quantize_static(
            simplified,
            target,
            Reader(),
            op_types_to_quantize=OPERATORS,
            nodes_to_exclude=[node.name for node in takewhile(lambda node: node.op_type != "Conv", nodes)],  # of pixels
            per_channel=True,
            reduce_range=reduce_range,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
    model = onnx.load(target)
    used = {node.domain for node in model.graph.node}
    for stated in [each for each in model.opset_import if each.domain not in used]:
        model.opset_import.remove(stated)  # ONNX Runtime names all that it knows, and other programs refuse those
    onnx.save(model, target)
