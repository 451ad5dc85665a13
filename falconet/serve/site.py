"""What a browser shows: the page at `/`, the API's description, and Swagger UI at `/docs`; all of it works offline."""

import hashlib
import importlib
import json
from importlib import resources
from importlib.resources.abc import Traversable

from aiohttp import web

from falconet.serve import openapi
from falconet.serve.connections import refusal

# `blob:` is for the chosen photos, `data:` for the icons in Swagger UI's style sheet.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' {images}; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_POLICY = _POLICY.format(images="blob:") + "; require-trusted-types-for 'script'"  # text never becomes HTML
DOCS_POLICY = _POLICY.format(images="data:")
SAFE = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY"}
NO_SWAGGER = "/docs needs swagger-ui-bundle: pip install 'falconet[serve]'; the description itself is at /openapi.json"
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class Fixed:
    """A file in memory, the same for every client; a browser asks each time whether it has changed."""

    def __init__(self, content: bytes, kind: str, policy: str = PAGE_POLICY) -> None:
        """`kind`: the media type; `policy`: what the browser may do with it."""
        self._content, self._kind = content, kind
        self._tag = hashlib.blake2b(content, digest_size=16).hexdigest()
        self._headers = SAFE | {"Content-Security-Policy": policy, "Cache-Control": "no-cache"}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if any(known.value in (self._tag, "*") for known in request.if_none_match or ()):
            response = web.Response(status=304, headers=self._headers)
        else:
            response = web.Response(body=self._content, content_type=self._kind, charset="utf-8", headers=self._headers)
        response.etag = self._tag
        return response


def add_routes(app: web.Application) -> None:
    """Add the page, the description and Swagger UI. They reveal nothing about the models, so they need no API key."""
    pages = {file.name: file for file in (resources.files("falconet.serve") / "page").iterdir()}
    app.router.add_get("/", _fixed(pages.pop("index.html")).answer)
    description = Fixed(json.dumps(openapi.document()).encode(), "application/json")
    app.router.add_get("/openapi.json", description.answer)
    swagger, docs = _swagger_files(), _fixed(pages.pop("docs.html"), DOCS_POLICY)
    app.router.add_get("/docs", docs.answer if swagger else _without_swagger)
    for name, file in pages.items():
        app.router.add_get(f"/page/{name}", _fixed(file).answer)
    for file in swagger:
        app.router.add_get(f"/docs/{file.name}", _fixed(file, DOCS_POLICY).answer)


def _fixed(file: Traversable, policy: str = PAGE_POLICY) -> Fixed:
    return Fixed(file.read_bytes(), _KINDS[file.name.rpartition(".")[2]], policy)


def _swagger_files() -> list[Traversable]:
    """Swagger UI's files that /docs uses; none if the package is not installed."""
    try:
        folder = importlib.import_module("swagger_ui_bundle").swagger_ui_path
    except ModuleNotFoundError:
        return []
    return [folder / "swagger-ui.css", folder / "swagger-ui-bundle.js"]


async def _without_swagger(_: web.Request) -> web.StreamResponse:
    return refusal(404, NO_SWAGGER)
