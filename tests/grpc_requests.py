"""Requests for inference over gRPC, as messages of the published interface, which knows nothing of ours."""

from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as published

from served import NAME, SIDE

IMAGE = 3 * SIDE * SIDE  # bytes


def request(*, raw=None, **changes):
    """A right one, but for the changes."""
    tensor = {"name": "input_0", "datatype": "UINT8", "shape": [1, 3, SIDE, SIDE]} | changes.pop("tensor", {})
    whole = {"model_name": NAME, "inputs": [tensor], "raw_input_contents": [bytes(IMAGE)] if raw is None else raw}
    return published.ModelInferRequest(**(whole | changes))


def parameter(value):
    kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
    return published.InferParameter(**{kind: value})


VALUES = st.builds(parameter, st.booleans() | st.integers(-9, 9) | st.text(max_size=3) | st.floats())
PARAMETERS = st.dictionaries(st.sampled_from(["timeout", "classification", "shared_memory_region", "x"]), VALUES)
CONTENTS = st.fixed_dictionaries(
    {},
    optional={
        "uint_contents": st.lists(st.integers(0, 300), max_size=4) | st.just([7] * IMAGE) | st.just([256] * IMAGE),
        "int_contents": st.lists(st.integers(-9, 9), max_size=4),
        "fp32_contents": st.lists(st.floats(width=32), max_size=4),
        "bytes_contents": st.lists(st.binary(max_size=4), max_size=4),
    },
)
SHAPES = st.lists(st.integers(-1, 9), max_size=5) | st.just([1, 3, SIDE, SIDE]) | st.just([2, 3, SIDE, SIDE])
INPUTS = st.fixed_dictionaries(
    {"name": st.sampled_from(["input_0", "", "x"]), "datatype": st.sampled_from(["UINT8", "FP32"]), "shape": SHAPES},
    optional={"contents": CONTENTS, "parameters": PARAMETERS},
)
OUTPUTS = st.fixed_dictionaries({"name": st.sampled_from(["output_0", "x"])}, optional={"parameters": PARAMETERS})
REQUESTS = st.builds(
    published.ModelInferRequest,
    model_name=st.sampled_from([NAME, "", "x"]),
    model_version=st.sampled_from(["", "1", "2"]),
    id=st.text(max_size=4),
    parameters=PARAMETERS,
    inputs=st.lists(INPUTS, max_size=2),
    outputs=st.lists(OUTPUTS, max_size=2),
    raw_input_contents=st.lists(st.binary(max_size=4) | st.just(bytes(IMAGE)) | st.just(bytes(2 * IMAGE)), max_size=2),
)
