# SPDX-License-Identifier: Apache-2.0
"""Writes the texts of _kvferry.pyi as a header, so that help() shows them: manual.py _kvferry.pyi manual.h

`KVFP_MANUAL_Store` is the text of a class, `KVFP_MANUAL_Store_flush` that of a method.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path


def texts(stub: str) -> Iterator[tuple[str, str]]:
    for kind in ast.parse(stub).body:
        if isinstance(kind, ast.ClassDef):
            yield kind.name, ast.get_docstring(kind) or ""
            for call in kind.body:
                if isinstance(call, ast.FunctionDef):
                    yield f"{kind.name}_{call.name}", ast.get_docstring(call) or ""


def main() -> None:
    stub, header = map(Path, sys.argv[1:])
    lines = [
        f"#define KVFP_MANUAL_{name} {json.dumps(text)}\n" for name, text in texts(stub.read_text("utf-8")) if text
    ]
    header.write_text("".join(lines), "utf-8")


if __name__ == "__main__":
    main()
