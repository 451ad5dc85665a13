"""The document around a page: styles, scripts, and a policy that allows no other script and no request."""

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from falconet.report.pages.parts import details, inert

FOOT = "Made by Falconet from the files of the run folder."


def document(title: str, body: str, data: Mapping[str, object], *, follows: bool = False) -> str:
    """The page around its header and its main part, with a policy that names its scripts by their digests.

    `follows`: the page asks its server for changes.
    """
    names = ["uplot/uPlot.iife.min.js", "report.js", *(["live.js"] if follows else [])]
    scripts = [asset(name) for name in names]
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none';"
        " form-action 'none'" + ("; connect-src 'self'" if follows else "")
    )
    # Without "<", the data cannot end the element or start a comment in it.
    island = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    licence = inert(asset("uplot/LICENSE"))
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<meta name="generator" content="falconet report">',
            f"<title>{inert(title)} - Falconet</title>",
            f"<style>{asset('uplot/uPlot.min.css')}{asset('base.css')}{asset('report.css')}</style>",
            "</head>",
            "<body>",
            f'<a class="skip" href="#main">Skip to the content</a>{body}',
            f"<footer>{FOOT} Charts by uPlot 1.6.32 (MIT):"
            f" {details('licence', f'<pre>{licence}</pre>')}</footer></main>",
            f'<script type="application/json" id="data">{island}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body>",
            "</html>",
            "",
        ]
    )


@cache
def asset(name: str) -> str:
    return files("falconet.report.pages").joinpath(f"assets/{name}").read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
