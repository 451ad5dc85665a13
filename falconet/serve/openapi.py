"""The OpenAPI description of the HTTP API, in version 3.0: the bundled Swagger UI does not show 3.1."""

from typing import Any

import falconet

Json = dict[str, Any]  # a part of the document

ABOUT = """\
Class names and probabilities for photos, and the [Open Inference Protocol](https://github.com/kserve/open-inference-protocol)
(version 2) with Triton's extensions for binary tensors, classification, model configuration, statistics and the model
repository.

Every error is `{"error": "one line"}`. If the server has an API key, everything except health and these pages needs it:
press **Authorize**. Every answer has an `X-Request-Id` header; a client may send its own.
"""
JPEG = "/9j/4AAQSkZJRgABAQAAAQABAAD..."  # how a JPEG file begins in base64
TENSOR = {"name": "input_0", "datatype": "UINT8", "shape": [1, 3, 2, 2]}
PREDICTED = {"name": "a.jpg", "label": "robin", "probability": 0.93}
TOP = [{"label": "robin", "probability": 0.93}, {"label": "wren", "probability": 0.05}]
TIMES = {"decode": 3.1, "queue": 0.4, "compute": 8.2, "total": 12.5}


def document() -> Json:
    """The whole document."""
    return {
        "openapi": "3.0.3",
        "info": {
            "title": "Falconet",
            "version": falconet.__version__,
            "description": ABOUT,
            "license": {"name": "MIT", "url": "https://opensource.org/license/mit"},
        },
        "servers": [{"url": "."}],  # relative to the document, so that a proxy may add a prefix
        "tags": [
            {"name": "Photos", "description": "Photos in, class names out"},
            {"name": "Server", "description": "Health, metadata and metrics"},
            {"name": "Models", "description": "One model: metadata, readiness, configuration, statistics"},
            {"name": "Tensors", "description": "Inference on pixels that the client has prepared"},
            {"name": "Repository", "description": "Loading and unloading of models"},
        ],
        "security": [{"bearer": []}, {"header": []}, {}],
        "paths": _paths(),
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "`Authorization: Bearer KEY`"},
                "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
            "parameters": _parameters(),
            "responses": {name: _refused(*about) for name, about in REFUSALS.items()},
            "schemas": _schemas(),
        },
    }


# By name: its meaning, and an example.
REFUSALS = {
    "Bad": ("The request is wrong", "inputs[0].datatype: got 'FP32', expected 'UINT8'"),
    "NoKey": ("The API key is missing or wrong", "API key: missing; send Authorization: Bearer KEY"),
    "Forbidden": ("The server was started without `--repository`", "loading and unloading is off; see --repository"),
    "NoModel": ("There is no such model, or no such version of it", "there is no model 'brids'; did you mean 'birds'?"),
    "Slow": (
        "The request was not received in time",
        "received only 9,000 of 80,000 bytes in 60 s; send faster, or less",
    ),
    "NoLength": ("The request has no Content-Length", "Content-Length: required"),
    "TooLarge": ("The request is too large", "Content-Length: got 80,000,000, expected at most 67,108,864"),
    "Overloaded": ("Too many requests are waiting", "256 images are waiting; try again later"),
    "Failed": ("The model failed; the server has logged why", "the model failed"),
    "NotReady": ("The server is starting or stopping, or the model is not ready", "the server is stopping"),
    "Late": ("The deadline has passed", "not computed within 30 s"),
}
_CODES = {
    "400": "Bad",
    "401": "NoKey",
    "403": "Forbidden",
    "404": "NoModel",
    "408": "Slow",
    "411": "NoLength",
    "413": "TooLarge",
    "429": "Overloaded",
    "500": "Failed",
    "503": "NotReady",
    "504": "Late",
}
_OF_WORK = ("400", "401", "404", "408", "411", "413", "429", "500", "503", "504")


def _refused(about: str, example: str) -> Json:
    response: Json = {"description": about, "content": _json("Error", {"error": example})}
    if about == REFUSALS["Overloaded"][0]:
        seconds = {"description": "Seconds to wait before trying again", "schema": {"type": "integer"}, "example": 1}
        response["headers"] = {"Retry-After": seconds}
    return response


def _paths() -> Json:
    paths: Json = {
        "/predict": {"post": _predict()},
        "/metrics": {"get": _metrics()},
        "/v2": {
            "get": _reads(
                "Server",
                "The server's name, version and extensions",
                _json("ServerMetadata", {"name": "falconet", "version": "1.0", "extensions": ["binary_tensor_data"]}),
            )
        },
        "/v2/health/live": {"get": _health("Whether the process answers", "live")},
        "/v2/health/ready": {"get": _health("Whether every model is ready", "ready", and_503=True)},
        "/v2/repository/index": {"post": _index()},
        "/v2/repository/models/{model}/load": {"post": _changes("Load a model, or its newest version", "load")},
        "/v2/repository/models/{model}/unload": {"post": _changes("Unload a model, after its requests", "unload")},
    }
    paths["/v2/models/stats"] = {"get": _statistics("every model")}
    for base, names in (
        ("/v2/models/{model}", ["Model"]),
        ("/v2/models/{model}/versions/{version}", ["Model", "Version"]),
    ):
        common: Json = {"parameters": [{"$ref": f"#/components/parameters/{name}"} for name in names]}
        which = "the newest version of a model" if len(names) == 1 else "one version of a model"
        paths[base] = common | {"get": _metadata(which)}
        paths[f"{base}/ready"] = common | {"get": _readiness(which)}
        paths[f"{base}/config"] = common | {"get": _configuration(which)}
        paths[f"{base}/stats"] = common | {"get": _statistics(which)}
        paths[f"{base}/infer"] = common | {"post": _infer(which)}
    return paths


def _predict() -> Json:
    multipart = {
        "type": "object",
        "required": ["photo"],
        "properties": {
            "photo": {"type": "array", "items": {"type": "string", "format": "binary"}, "description": "Any field name"}
        },
    }
    many = {"images": [JPEG, {"name": "b.jpg", "data": JPEG}], "top": 5}
    answered = {
        "one": {
            "summary": "One label per photo, and a file that is not a photo",
            "value": {
                "model": "birds",
                "version": "7",
                "predictions": [{**PREDICTED, "top": TOP}, {"name": "b.txt", "error": "not an image"}],
                "milliseconds": TIMES,
            },
        },
        "several": {
            "summary": "Several labels per photo",
            "value": {
                "model": "scenes",
                "version": "1",
                "predictions": [
                    {
                        "name": "a.jpg",
                        "label": "beach",
                        "probability": 0.97,
                        "top": [{"label": "beach", "probability": 0.97}, {"label": "sunset", "probability": 0.81}],
                        "labels": ["beach", "sunset"],
                    }
                ],
                "milliseconds": TIMES,
            },
        },
    }
    image = {"schema": {"type": "string", "format": "binary"}}
    return {
        "tags": ["Photos"],
        "operationId": "predict",
        "summary": "Classify photos",
        "description": "Send one photo as the body, or one or more as files in a form or as base64 in JSON. Photos are"
        " prepared exactly as in the model's validation. A photo that cannot be read does not affect the others.",
        "parameters": [{"$ref": f"#/components/parameters/{name}"} for name in ("Top", "ModelName", "VersionOfModel")],
        "requestBody": {
            "required": True,
            "content": {
                "multipart/form-data": {"schema": multipart},
                "image/jpeg": image,
                "image/png": image,
                "image/webp": image,
                "application/json": {"schema": _ref("Photos"), "example": many},
            },
        },
        "responses": {
            "200": {
                "description": "The classes of each photo, in the order of the request",
                "content": {"application/json": {"schema": _ref("Predictions"), "examples": answered}},
            },
            **_refusals(*_OF_WORK),
        },
    }


def _metrics() -> Json:
    text = {"schema": {"type": "string"}, "example": "# TYPE falconet_requests_total counter\n"}
    return _reads("Server", "Counters and histograms for Prometheus", {"text/plain": text})


def _health(summary: str, name: str, *, and_503: bool = False) -> Json:
    found = _reads("Server", summary, _json("Health", {name: True}), refusals=())
    if and_503:
        found["responses"]["503"] = {"description": "Not ready", "content": _json("Health", {name: False})}
    return found | {"security": []}


def _index() -> Json:
    models = [
        {"name": "birds", "version": "7", "state": "READY", "reason": ""},
        {"name": "scenes", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"},
    ]
    return _reads("Repository", "All models on the server, loaded or not", _json("Index", models)) | {
        "requestBody": {"content": _json("IndexRequest", {"ready": False})}
    }


def _changes(summary: str, action: str) -> Json:
    return _reads("Repository", summary, None, refusals=("400", "401", "403", "404", "503")) | {
        "operationId": action,
        "description": "This needs a server that was started with `--repository`.",
        "parameters": [{"$ref": "#/components/parameters/Model"}],
        "requestBody": {"content": _json("Parameters", {})},
    }


def _metadata(which: str) -> Json:
    example = {
        "name": "birds",
        "versions": ["7"],
        "platform": "falconet_pytorch",
        "inputs": [{"name": "input_0", "datatype": "UINT8", "shape": [-1, 3, 224, 224]}],
        "outputs": [{"name": "output_0", "datatype": "FP32", "shape": [-1, 2]}],
        "parameters": {
            "max_batch_size": 64,
            "class_names": ["robin", "wren"],
            "probabilities": "softmax",
            "preprocessing": {"image_size": 224, "resize": 256},
        },
    }
    return _reads(
        "Models", f"The tensors, classes and preprocessing of {which}", _json("ModelMetadata", example), "404"
    )


def _readiness(which: str) -> Json:
    found = _reads("Models", f"Whether {which} is ready", _json("Health", {"ready": True}), "404")
    found["responses"]["503"] = {"description": "Not ready", "content": _json("Health", {"ready": False})}
    return found


def _configuration(which: str) -> Json:
    example = {
        "name": "birds",
        "platform": "falconet_pytorch",
        "max_batch_size": 64,
        "input": [{"name": "input_0", "data_type": "TYPE_UINT8", "dims": [3, 224, 224]}],
        "output": [{"name": "output_0", "data_type": "TYPE_FP32", "dims": [2]}],
        "dynamic_batching": {"max_queue_delay_microseconds": 2000},
    }
    return _reads("Models", f"Triton's configuration of {which}", _json("Object", example), "404")


def _statistics(which: str) -> Json:
    stats = {"name": "birds", "version": "7", "inference_count": 1200, "execution_count": 75}
    return _reads(
        "Models", f"Images and batches computed so far by {which}", _json("Statistics", {"model_stats": [stats]}), "404"
    )


def _infer(which: str) -> Json:
    values = {"inputs": [{**TENSOR, "data": [0, 64, 128, 255] * 3}]}
    names = {**values, "outputs": [{"name": "output_0", "parameters": {"classification": 2}}]}
    scores = {"name": "output_0", "datatype": "FP32", "shape": [1, 2], "data": [2.71, -0.12]}
    binary = {"schema": {"type": "string", "format": "binary", "description": "JSON, then the tensors' bytes"}}
    requests = {
        "scores": {"summary": "Logits", "value": values},
        "names": {"summary": "The two best classes by name", "value": names},
    }
    return {
        "tags": ["Tensors"],
        "summary": f"Compute with {which}",
        "description": "`input_0`: uint8 pixels [N, 3, S, S], resized and cropped as `parameters.preprocessing` in the"
        " model's metadata says. `output_0`: logits [N, classes].",
        "parameters": [{"$ref": "#/components/parameters/JsonLength"}],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": _ref("InferRequest"), "examples": requests},
                "application/octet-stream": binary,
            },
        },
        "responses": {
            "200": {
                "description": "The scores",
                "headers": {
                    "Inference-Header-Content-Length": {
                        "description": "Bytes of JSON, if binary tensors follow",
                        "schema": {"type": "integer"},
                    }
                },
                "content": {
                    **_json("InferAnswer", {"model_name": "birds", "model_version": "7", "outputs": [scores]}),
                    "application/octet-stream": binary,
                },
            },
            **_refusals(*_OF_WORK),
        },
    }


def _reads(tag: str, summary: str, content: Json | None, *more: str, refusals: tuple[str, ...] = ("401",)) -> Json:
    """An operation that answers 200, with or without content."""
    good: Json = {"description": "Done"} if content is None else {"description": summary, "content": content}
    return {"tags": [tag], "summary": summary, "responses": {"200": good, **_refusals(*refusals, *more)}}


def _refusals(*codes: str) -> Json:
    return {code: {"$ref": f"#/components/responses/{_CODES[code]}"} for code in codes}


def _ref(schema: str) -> Json:
    return {"$ref": f"#/components/schemas/{schema}"}


def _json(schema: str, example: object) -> Json:
    return {"application/json": {"schema": _ref(schema), "example": example}}


def _parameters() -> Json:
    text, name = {"type": "string"}, "Inference-Header-Content-Length"
    top = {"type": "integer", "minimum": 1, "default": 5}
    return {
        "Model": {"name": "model", "in": "path", "required": True, "schema": text, "example": "birds"},
        "Version": {"name": "version", "in": "path", "required": True, "schema": text, "example": "7"},
        "Top": {"name": "top", "in": "query", "description": "Classes per photo", "schema": top},
        "ModelName": {"name": "model", "in": "query", "description": "Needed if there are several", "schema": text},
        "VersionOfModel": {"name": "version", "in": "query", "description": "Default: the newest", "schema": text},
        "JsonLength": {
            "name": name,
            "in": "header",
            "description": "Bytes of JSON before the binary tensors, if there are any",
            "schema": {"type": "integer", "minimum": 1},
        },
    }


def _schemas() -> Json:
    text, number, integer = {"type": "string"}, {"type": "number"}, {"type": "integer"}
    share = {"type": "number", "minimum": 0, "maximum": 1}
    free: Json = {"type": "object", "additionalProperties": True}
    base64 = {"type": "string", "format": "byte"}
    return {
        "Error": _object({"error": text}),
        "Photos": _object(
            {
                "images": _list({"oneOf": [base64, _object({"data": base64, "name": text}, "name")]}),
                "top": {"type": "integer", "minimum": 1},
            },
            "top",
        ),
        "Score": _object({"label": text, "probability": share}),
        "Prediction": _object(
            {
                "name": text,
                "label": text,
                "probability": share,
                "top": _list(_ref("Score")),
                "labels": {**_list(text), "description": "For several labels per photo: classes of 0.5 or more"},
                "error": {"type": "string", "description": "Why the photo has no classes"},
            },
            *("label", "probability", "top", "labels", "error"),
        ),
        "Predictions": _object(
            {
                "model": text,
                "version": text,
                "predictions": _list(_ref("Prediction")),
                "milliseconds": _object({"decode": number, "queue": number, "compute": number, "total": number}),
            }
        ),
        "ServerMetadata": _object({"name": text, "version": text, "extensions": _list(text)}),
        "Health": _object({"live": {"type": "boolean"}, "ready": {"type": "boolean"}}, "live", "ready"),
        "Tensor": _object({"name": text, "datatype": text, "shape": _list(integer)}),
        "ModelMetadata": _object(
            {
                "name": text,
                "versions": _list(text),
                "platform": text,
                "inputs": _list(_ref("Tensor")),
                "outputs": _list(_ref("Tensor")),
                "parameters": _object({"class_names": _list(text), "preprocessing": free}),
            }
        ),
        "Object": free,
        "Parameters": _object({"parameters": free}, "parameters"),
        "Statistics": _object(
            {
                "model_stats": _list(
                    _object({"name": text, "version": text, "inference_count": integer, "execution_count": integer})
                )
            }
        ),
        "IndexRequest": _object({"ready": {"type": "boolean", "description": "Only models that are ready"}}, "ready"),
        "Index": _list(
            _object(
                {
                    "name": text,
                    "version": text,
                    "state": {"type": "string", "enum": ["READY", "UNAVAILABLE"]},
                    "reason": text,
                },
                *("version", "reason"),
            )
        ),
        "InferRequest": _object(
            {
                "id": text,
                "inputs": _list(
                    _object(
                        {
                            "name": text,
                            "datatype": {"type": "string", "enum": ["UINT8"]},
                            "shape": _list(integer),
                            "data": {**_list({}), "description": "Flat or nested; or see `binary_data_size`"},
                            "parameters": free,
                        },
                        *("data", "parameters"),
                    )
                ),
                "outputs": _list(_object({"name": text, "parameters": free}, "parameters")),
                "parameters": free,
            },
            *("id", "outputs", "parameters"),
        ),
        "InferAnswer": _object(
            {
                "id": text,
                "model_name": text,
                "model_version": text,
                "outputs": _list(
                    _object(
                        {
                            "name": text,
                            "datatype": {"type": "string", "enum": ["FP16", "FP32", "BYTES"]},
                            "shape": _list(integer),
                            "data": _list({}),
                            "parameters": free,
                        },
                        *("data", "parameters"),
                    )
                ),
            },
            "id",
        ),
    }


def _object(properties: Json, *optional: str) -> Json:
    found: Json = {"type": "object", "properties": properties}
    if required := [name for name in properties if name not in optional]:
        found["required"] = required
    return found


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}
