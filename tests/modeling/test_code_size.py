"""Files that travel stay readable: no class over 250 lines, no function over 60."""

import ast
from pathlib import Path

import hf_posenc.modeling


FILES = sorted(Path(hf_posenc.modeling.__file__).parent.rglob("*.py"))


def test_classes_and_functions_are_short():
    limits = {ast.ClassDef: 250, ast.FunctionDef: 60, ast.AsyncFunctionDef: 60}
    long = {
        f"{path.name}: {node.name}": node.end_lineno - node.lineno + 1
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if node.__class__ in limits and node.end_lineno - node.lineno + 1 > limits[node.__class__]
    }
    assert not long
