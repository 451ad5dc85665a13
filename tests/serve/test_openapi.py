"""The description of the API is valid, complete, and true of the server."""

import importlib
import io
import json
import re
import sys

import jsonschema
import numpy as np
import pytest
from aiohttp import web
from openapi_spec_validator import validate
from PIL import Image

from falconet.serve import openapi, site
from served import NAME, SIDE, pixels, running

METRICS = ("GET", "/metrics")


def operations():
    """Every operation in the description: method, path, content."""
    for path, item in openapi.document()["paths"].items():
        for method, content in item.items():
            if method != "parameters":
                yield method.upper(), path, content


def test_the_description_is_valid_openapi():
    validate(openapi.document())


def routes(app):
    """Every route of an application that is not a page or its file: method, path."""
    found = {(route.method, route.resource.canonical) for route in app.router.routes()}
    pages = re.compile(r"/|/openapi\.json|/docs|/(docs|page)/.*")
    return {(method, path) for method, path in found if method != "HEAD" and not pages.fullmatch(path)}


def test_the_description_has_exactly_the_routes_of_the_server():
    with running() as server:
        found = routes(server.front.application())
    assert found | {METRICS} == {(method, path) for method, path, _ in operations()}


def test_every_operation_says_what_it_does_and_how_it_is_refused():
    for method, path, content in operations():
        assert content["summary"], (method, path)
        assert content["tags"], (method, path)
        assert "200" in content["responses"], (method, path)
        needs_key = content.get("security") != []
        assert needs_key == (not path.startswith("/v2/health/")), (method, path)
        assert ("401" in content["responses"]) == needs_key, (method, path)
    names = {tag["name"] for tag in openapi.document()["tags"]}
    assert {tag for *_, content in operations() for tag in content["tags"]} == names


def test_photos_may_be_sent_in_every_form():
    (body,) = [content["requestBody"]["content"] for _, path, content in operations() if path == "/predict"]
    assert set(body) == {"image/jpeg", "image/png", "image/webp", "multipart/form-data", "application/json"}
    files = body["multipart/form-data"]["schema"]["properties"]["photo"]["items"]
    assert files == {"type": "string", "format": "binary"}


def examples(value):
    """Every example with its schema."""
    if isinstance(value, dict):
        if "schema" in value:
            given = [value["example"]] if "example" in value else []
            given += [one["value"] for one in value.get("examples", {}).values()]
            yield from ((value["schema"], one) for one in given)
        for inner in value.values():
            yield from examples(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from examples(inner)


def test_every_example_fits_its_schema():
    document = openapi.document()
    found = list(examples(document))
    assert len(found) > 30
    for schema, example in found:
        jsonschema.validate(example, {**schema, "components": document["components"]})


def test_the_servers_answers_fit_their_schemas():
    document, file = openapi.document(), io.BytesIO()
    Image.new("RGB", (9, 9)).save(file, "PNG")
    tensor = {"name": "input_0", "shape": [1, 3, SIDE, SIDE], "datatype": "UINT8", "data": pixels(1).ravel().tolist()}
    bodies = {"/predict": file.getvalue(), "infer": json.dumps({"inputs": [tensor]}), "index": "{}"}
    seen = 0
    with running(decode=lambda _: np.zeros((SIDE, SIDE, 3), dtype=np.uint8)) as server:
        for method, path, content in operations():
            body = next((body for end, body in bodies.items() if path.endswith(end)), None)
            if (method, path) == METRICS or (method == "POST" and body is None):
                continue
            real = path.replace("{model}", NAME).replace("{version}", "1")
            status, headers, answer = server.request(body, method=method, path=real)
            assert (status, headers.get_content_type()) == (200, "application/json"), path
            schema = content["responses"]["200"]["content"]["application/json"]["schema"]
            jsonschema.validate(json.loads(answer), {**schema, "components": document["components"]})
            seen += 1
        status, _, answer = server.request(b"{", method="POST", path="/predict")
        assert status == 400
        jsonschema.validate(
            json.loads(answer), {"$ref": "#/components/schemas/Error", "components": document["components"]}
        )
    assert seen == 16


def test_every_schema_and_response_is_used():
    document = openapi.document()
    text = repr(document)
    for kind, names in document["components"].items():
        for name in names if kind != "securitySchemes" else ():
            assert f"#/components/{kind}/{name}'" in text, (kind, name)


@pytest.fixture
def no_swagger(monkeypatch):
    monkeypatch.setitem(sys.modules, "swagger_ui_bundle", None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("swagger_ui_bundle")


@pytest.mark.usefixtures("no_swagger")
def test_docs_without_swagger_says_what_to_install_in_one_line():
    with running() as server:
        status, _, answer = server.request(None, method="GET", path="/docs")
        assert (status, site.NO_SWAGGER.encode() in answer) == (404, True)
        assert server.request(None, method="GET", path="/")[0] == 200


def test_the_pages_are_routes_of_their_own():
    app = web.Application()
    site.add_routes(app)
    assert not routes(app)
