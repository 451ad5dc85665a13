"""Modules are found where they are used: a small one with one importer is a part of that."""

import ast
from collections import defaultdict
from pathlib import Path

import falconet

SMALL = 60  # lines
OF_A_KIND = ("falconet.commands.", "falconet.report.trackers.aim")  # one of several: commands, trackers


def test_a_small_module_has_more_than_one_importer():
    root = Path(falconet.__file__).parent
    names = {path: ".".join(path.relative_to(root.parent).with_suffix("").parts) for path in root.rglob("*.py")}
    importers = defaultdict(set)
    for path in names:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                for name in (node.module, *(f"{node.module}.{each.name}" for each in node.names)):
                    importers[name].add(path)
    small = {name for path, name in names.items() if len(path.read_text(encoding="utf-8").splitlines()) < SMALL}
    assert "falconet.models.fused.own_convolution" in small
    assert [name for name in small if len(importers[name]) == 1 and not name.startswith(OF_A_KIND)] == []
