"""A model repository for NVIDIA's Triton server: the ONNX model, and an ensemble that takes encoded photos.

The standard image of the server is enough: its ONNX Runtime backend computes, its DALI backend decodes.
"""

from dataclasses import dataclass
from pathlib import Path

from falconet import writing
from falconet.data.preprocessing import Preprocessing
from falconet.export.graph import INPUT, OUTPUT, Graph

MODELS, VERSION, LABELS = "models", "1", "labels.txt"
ENCODED = "encoded"  # the ensemble's input: the bytes of a photo
MOST = 64  # images computed at once
DELAY = 2000  # microseconds that a request may wait for others


def version_folder(graph: Graph, folder: Path) -> Path:
    """The folder of the ONNX model."""
    return folder / MODELS / graph.name / VERSION


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    """The server's settings for batching and computing."""

    max_batch: int = MOST
    delay: int = DELAY
    threads: int | None = None  # of one instance, on the CPU; None: as many instances and threads as the server decides


EXPORTED = Scheduling()


def write(graph: Graph, folder: Path, scheduling: Scheduling = EXPORTED) -> Path:
    """Write everything except the ONNX model; return the folder for it."""
    labels = writing.coded("".join(f"{name}\n" for name in _one_line_each(graph.class_names)))
    classifier = folder / MODELS / graph.name
    version_folder(graph, folder).mkdir(parents=True)
    (classifier / "config.pbtxt").write_text(_classifier(graph, scheduling))
    (classifier / LABELS).write_bytes(labels)
    if graph.preprocessing.antialias:  # DALI has no equal of TensorFlow 1's resizing
        decoder, ensemble = (folder / MODELS / f"{graph.name}{suffix}" for suffix in ("_decode", "_photo"))
        (decoder / VERSION).mkdir(parents=True)
        (decoder / "config.pbtxt").write_text(_decoder(graph))
        (decoder / VERSION / "dali.py").write_text(decoding_program(graph.preprocessing))
        (ensemble / VERSION).mkdir(parents=True)
        (ensemble / VERSION / ".keep").write_text("")  # git and some object stores drop empty folders; Triton needs it
        (ensemble / "config.pbtxt").write_text(_ensemble(graph))
        (ensemble / LABELS).write_bytes(labels)
    return version_folder(graph, folder)


def _one_line_each(names: tuple[str, ...]) -> list[str]:
    """Class names as single lines; a name with several lines would shift all that follow."""
    return [" ".join(name.splitlines()) or "-" for name in names]


def _logits(graph: Graph) -> str:
    return (
        f'output [ {{ name: "{OUTPUT}" data_type: TYPE_FP32 dims: [ {len(graph.class_names)} ]'
        f' label_filename: "{LABELS}" }} ]'
    )


def _classifier(graph: Graph, scheduling: Scheduling) -> str:
    shape = ", ".join(map(str, graph.input_shape))
    warm = "\n".join(
        f"""model_warmup [ {{
  name: "batch of {size}"
  batch_size: {size}
  inputs {{ key: "{INPUT}" value {{ data_type: TYPE_UINT8 dims: [ {shape} ] random_data: true }} }}
}} ]"""
        for size in sorted({1, scheduling.max_batch})
    )
    computing = ""
    if scheduling.threads is not None:
        computing = f"""instance_group [ {{ kind: KIND_CPU count: 1 }} ]
parameters {{ key: "intra_op_thread_count" value: {{ string_value: "{scheduling.threads}" }} }}
"""
    return f"""# {graph.describe_input()}
name: "{graph.name}"
backend: "onnxruntime"
max_batch_size: {scheduling.max_batch}
input [ {{ name: "{INPUT}" data_type: TYPE_UINT8 dims: [ {shape} ] }} ]
{_logits(graph)}
dynamic_batching {{ max_queue_delay_microseconds: {scheduling.delay} }}
{computing}{warm}
"""


def _decoder(graph: Graph) -> str:
    shape = ", ".join(map(str, graph.input_shape))
    return f"""# Decodes, resizes and crops photos, on the CPU; 1/dali.py is the program.
name: "{graph.name}_decode"
backend: "dali"
max_batch_size: {MOST}
input [ {{ name: "{ENCODED}" data_type: TYPE_UINT8 dims: [ -1 ] allow_ragged_batch: true }} ]
output [ {{ name: "{INPUT}" data_type: TYPE_UINT8 dims: [ {shape} ] }} ]
instance_group [ {{ kind: KIND_CPU }} ]
dynamic_batching {{ max_queue_delay_microseconds: {DELAY} }}
"""


def _ensemble(graph: Graph) -> str:
    steps = ",\n".join(
        f'    {{ model_name: "{model}" model_version: -1\n'
        f'      input_map {{ key: "{given}" value: "{given}" }} output_map {{ key: "{made}" value: "{made}" }} }}'
        for model, given, made in ((f"{graph.name}_decode", ENCODED, INPUT), (graph.name, INPUT, OUTPUT))
    )
    return f"""# Takes the bytes of a JPEG or PNG file.
name: "{graph.name}_photo"
platform: "ensemble"
max_batch_size: {MOST}
input [ {{ name: "{ENCODED}" data_type: TYPE_UINT8 dims: [ -1 ] }} ]
{_logits(graph)}
ensemble_scheduling {{
  step [
{steps}
  ]
}}
"""


def decoding_program(preprocessing: Preprocessing) -> str:
    """A DALI pipeline that reads the same pixels as validation, to one level of 255."""
    size, resize = preprocessing.image_size, preprocessing.resize
    kind = {"bilinear": "INTERP_LINEAR", "bicubic": "INTERP_CUBIC"}[preprocessing.interpolation]
    return f'''"""Decode a photo, resize its short side to {resize} pixels, take the central {size} x {size}."""

from nvidia import dali
from nvidia.dali import fn, types
from nvidia.dali.plugin.triton import autoserialize

SIZE, RESIZE = {size}, {resize}  # pixels


def span(side, short):
    """The part of a side, in its own pixels, that is left by resizing and cropping: torchvision's, rounded alike."""
    resized = side * RESIZE // short
    spare = resized - SIZE
    half = spare // 2
    start = half + (spare - 2 * half) * (half - 2 * (half // 2))  # half of it; between two numbers, the even one
    pixels = fn.cast(side, dtype=types.FLOAT) / fn.cast(resized, dtype=types.FLOAT)
    return start * pixels, (start + SIZE) * pixels


@autoserialize
@dali.pipeline_def(batch_size={MOST}, num_threads=4, device_id=None, output_dtype=[types.UINT8], output_ndim=[3])
def decode():
    encoded = fn.external_source(device="cpu", name="{ENCODED}", dtype=types.UINT8, ndim=1)
    shape = fn.peek_image_shape(encoded, adjust_orientation=False)
    height, width = shape[0], shape[1]
    short = dali.math.min(height, width)
    (top, bottom), (left, right) = span(height, short), span(width, short)
    images = fn.decoders.image(encoded, device="cpu", output_type=types.RGB, adjust_orientation=False)
    return fn.resize(
        images,
        size=[SIZE, SIZE],
        roi_start=fn.stack(top, left),
        roi_end=fn.stack(bottom, right),
        interp_type=types.{kind},
        antialias=True,
        dtype=types.UINT8,
    )
'''
