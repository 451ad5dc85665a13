"""The formats: functions that write each one's files, and engines that compute with them."""

import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from falconet.errors import CheckpointError, DeviceError, first_line, memory_shortage
from falconet.export import timm_folder, triton_repository
from falconet.export.graph import INPUT, OUTPUT, Graph, Values, dynamic_batch
from falconet.infer.engines import import_openvino

Engine = Callable[[Values], Values]  # the graph's input in host memory -> logits
ONNX, TORCH, OPENVINO = "model.onnx", "model.pt2", "model.xml"
# Operators with 8-bit inputs and outputs. A convolution's output is stored after its ReLU or Clip, which the rounding
# does itself. Other operators stay in fp32, such as sigmoids and group norms.
IN_INT8 = ["Conv", "Gemm", "MatMul", "Relu", "Clip", "Add", "MaxPool", "GlobalAveragePool", "ReduceMean"]


class Format(NamedTuple):
    """The requirements and functions of one format."""

    write: Callable[[Graph, Path, torch.device], None]  # into an empty folder
    open: Callable[[Graph, Path, torch.device], Engine]  # what was written there
    libraries: tuple[str, ...] = ()  # whose versions matter, beside torch's
    on_device: bool = (
        False  # whether the file is for one kind of device; the others are for all, and checked on the CPU
    )
    takes_pixels: bool | None = None  # whether pixels are normalised inside; None: as asked


def write_onnx(graph: Graph, folder: Path, _: torch.device) -> None:
    save_onnx(graph, folder / ONNX)


def save_onnx(graph: Graph, path: Path) -> None:
    """Write ONNX from the traced graph, with class names and preprocessing in its metadata."""
    with _one_line(graph, "ONNX"), warnings.catch_warnings(action="ignore"):
        program = torch.onnx.export(
            graph.traced(half=graph.half),
            dynamo=True,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=dynamic_batch(),
            verbose=False,
        )
        assert program is not None
        program.model.metadata_props.update(facts(graph))
        program.save(str(path), external_data=False)


def quantise(plain: Path, target: Path, batches: Iterator[Values], *, reduce_range: bool) -> None:
    """Convert the fp32 file `plain` to int8 for CPUs: signed weights with a scale per channel, unsigned activations.

    The range of an activation is from its smallest to its largest value in the batches. `reduce_range`: 7-bit weights.
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
            op_types_to_quantize=IN_INT8,
            nodes_to_exclude=[node.name for node in takewhile(lambda node: node.op_type != "Conv", nodes)],  # of pixels
            per_channel=True,
            reduce_range=reduce_range,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
    model = onnx.load(target)
    used = {node.domain for node in model.graph.node}
    # ONNX Runtime lists every domain that it knows, and other programs refuse those.
    for stated in [each for each in model.opset_import if each.domain not in used]:
        model.opset_import.remove(stated)
    onnx.save(model, target)


def open_onnx(_: Graph, folder: Path, device: torch.device) -> Engine:
    return onnx_engine(folder / ONNX, device)


def onnx_engine(path: Path, _: torch.device) -> Engine:
    """ONNX Runtime on the CPU, with as many threads as torch."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors: its warnings are about its own optimisations
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def compute(images: Values) -> Values:
        (logits,) = session.run([OUTPUT], {INPUT: images})
        found: Values = logits
        return found

    return compute


def write_program(graph: Graph, folder: Path, _: torch.device) -> None:
    """Write torch.export's archive, with class names and preprocessing as extra files in it."""
    with warnings.catch_warnings(action="ignore"):
        program = graph.traced(half=graph.half)
        torch.export.save(program, folder / TORCH, extra_files=dict[str, Any](facts(graph)))


def open_program(_: Graph, folder: Path, device: torch.device) -> Engine:
    with warnings.catch_warnings(action="ignore"):
        return torch_engine(torch.export.load(folder / TORCH).module(), device)


def write_compiled(graph: Graph, folder: Path, device: torch.device) -> None:
    """Write AOTInductor's package: machine code for this kind of device and processor."""
    from torch._inductor import aoti_compile_and_package, cpp_builder, exc
    from torch.export.passes import move_to_device_pass

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        raise DeviceError("AOTInductor needs a C++ compiler, and g++ is not installed: apt-get install g++") from None
    with _one_line(graph, "AOTInductor"), warnings.catch_warnings(action="ignore"):
        # Traced on the CPU and moved: models have fused kernels for CUDA that cannot be traced.
        there = torch.empty(0, device=device).device  # with its number, which the graph's own checks ask for
        program = move_to_device_pass(graph.traced(half=graph.half), str(there))
        aoti_compile_and_package(program, package_path=str(folder / TORCH))


def open_compiled(_: Graph, folder: Path, device: torch.device) -> Engine:
    from torch._inductor import aoti_load_package

    with warnings.catch_warnings(action="ignore"):
        return torch_engine(aoti_load_package(str(folder / TORCH)), device)


def torch_engine(compute: Callable[[Tensor], Tensor], device: torch.device) -> Engine:
    """An engine from a function that takes and returns torch tensors."""

    @torch.inference_mode()
    def computed(images: Values) -> Values:
        logits: Values = compute(torch.from_numpy(images).to(device)).cpu().numpy()
        return logits

    return computed


def write_openvino(graph: Graph, folder: Path, _: torch.device) -> None:
    """Write OpenVINO's XML and its weights; with --half, only the weights are fp16, as in its own tools."""
    openvino = import_openvino()
    with _one_line(graph, "OpenVINO"), warnings.catch_warnings(action="ignore"):
        model = openvino.convert_model(graph.traced(half=False), input=[-1, *graph.input_shape])
    model.inputs[0].set_names({INPUT})
    model.outputs[0].set_names({OUTPUT})
    for name, value in facts(graph).items():
        model.set_rt_info(value, ["falconet", name])
    openvino.save_model(model, str(folder / OPENVINO), compress_to_fp16=graph.half)


def open_openvino(_: Graph, folder: Path, __: torch.device) -> Engine:
    """An engine in fp32; on processors with bf16, OpenVINO would otherwise compute in bf16."""
    how = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = import_openvino().Core().compile_model(str(folder / OPENVINO), "CPU", how)
    return lambda images: compiled(images)[0]


def write_timm(graph: Graph, folder: Path, _: torch.device) -> None:
    timm_folder.write(graph, folder)


def open_timm(_: Graph, folder: Path, device: torch.device) -> Engine:
    return torch_engine(timm_folder.create_model(folder), device)


def write_triton(graph: Graph, folder: Path, _: torch.device) -> None:
    save_onnx(graph, triton_repository.write(graph, folder) / ONNX)


def open_triton(graph: Graph, folder: Path, device: torch.device) -> Engine:
    return onnx_engine(triton_repository.version_folder(graph, folder) / ONNX, device)


FORMATS = {  # by the choices of --format
    "onnx": Format(write_onnx, open_onnx, ("onnx", "onnxscript", "onnxruntime")),
    "pt2": Format(write_program, open_program),
    "aoti": Format(write_compiled, open_compiled, on_device=True),
    "timm": Format(write_timm, open_timm, ("timm",), takes_pixels=False),
    "triton": Format(write_triton, open_triton, ("onnx", "onnxscript", "onnxruntime"), takes_pixels=True),
    "openvino": Format(write_openvino, open_openvino, ("openvino",)),
}


def facts(graph: Graph) -> dict[str, str]:
    """The facts that a program needs besides the graph, for formats that have room for them."""
    return {
        "class_names": json.dumps(graph.class_names),
        "preprocessing": json.dumps(graph.preprocessing.to_json()),
        "input": graph.describe_input(),
        "probabilities": graph.activation,
    }


@contextmanager
def _one_line(graph: Graph, library: str) -> Iterator[None]:
    """Report in one line that another library cannot convert the model."""
    try:
        yield
    except RuntimeError as error:
        if memory_shortage(error):
            raise
        raise CheckpointError(f"{graph.name} cannot be converted by {library}: {first_line(error)}") from error
