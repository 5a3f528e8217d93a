#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that includes and calls go down only, folder by folder.

usage: checks/layers.py BUILD   a folder that cmake and ninja have built, e.g. build/release
       checks/layers.py --self-test

The compiler says what depends on what: ninja keeps the headers that each object file includes, and nm names the symbols
that it defines and needs. A folder depends on another where one of its files includes a header of it, or calls a
function of it. Such dependencies must have no circle, neither among folders nor among the source files of one folder;
the folders then have an order, and everything goes down. Two more rules hold: an engine includes public headers only,
and no library includes anything of cli.

A symbol named llama_* or ggml_* is API of llama.cpp, wherever it is defined: the shim defines such names in order to
stand in front of libllama. A call of one is a call of llama.cpp, and does not count.

Prints every circle with the calls and direct includes that close it. There is no list of exceptions.
"""

import collections
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOPS = ("include", "src", "engines", "cli")


def output_of(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"check-layers: {' '.join(map(str, command))}: {done.stderr.strip()}")
    return done.stdout


def inside(path):
    """The path below the root of the project, or None for what is not part of it."""
    name = os.path.relpath(path, ROOT)
    return name if name.split("/")[0] in TOPS else None


def includes_of(build):
    """{object file: (source file, [headers])}, as ninja has read them from the compiler."""
    found = {}
    name, paths = None, []
    for line in output_of("ninja", "-C", build, "-t", "deps").splitlines() + [""]:
        if line.startswith("    "):
            paths.append(inside(build / line.strip()))
            continue
        if name and paths and paths[0] and paths[0].endswith(".c") and (ROOT / paths[0]).exists():  # else: long gone
            found[name] = paths[0], [p for p in paths[1:] if p]
        name, paths = line.split(":")[0], []
    return found


def symbols_of(build, objects):
    """(defined, needed): {symbol: source file}, {source file: symbols}. Names of the C library stay undefined."""
    defined, needed = {}, collections.defaultdict(set)
    for name, source in objects.items():
        for line in output_of("nm", "--extern-only", build / name).splitlines():
            kind, symbol = line.split()[-2:]
            if re.match("llama_|ggml_", symbol):
                continue
            if kind == "U":
                needed[source].add(symbol)
            elif kind not in ("w", "v"):
                defined.setdefault(symbol, source)
    return defined, needed


def named_includes(path):
    return re.findall(r'^\s*#\s*include\s*["<]([^">]+)[">]', (ROOT / path).read_text(), re.MULTILINE)


def direct_includes(source, headers):
    """The pairs (file, header that it names) by which the compiler came from a source file to these headers."""
    pairs = set()
    for path in [source] + headers:
        for name in named_includes(path):
            beside = os.path.normpath(os.path.join(os.path.dirname(path), name))
            pairs.update(
                (path, h) for h in headers if h == beside or (beside not in headers and h.endswith("/" + name))
            )
    unnamed = set(headers) - {header for _, header in pairs}
    if unnamed:
        sys.exit(f"check-layers: {source} includes {', '.join(sorted(unnamed))}, and no file says so: build it again")
    return pairs


def edges_of(build):
    """{(from file, to file): why}; headers stand for themselves."""
    found = {name: pair for name, pair in includes_of(build).items() if name.endswith(".o") and "/test/" not in name}
    edges = {}
    for source, headers in found.values():
        for pair in direct_includes(source, headers):
            edges[pair] = "includes"
    defined, needed = symbols_of(build, {name: source for name, (source, _) in found.items()})
    for source, symbols in needed.items():
        for symbol in sorted(symbols & defined.keys()):
            if defined[symbol] != source:
                edges[source, defined[symbol]] = f"calls {symbol}"
    return edges


def circles(edges):
    """The sets of more than one node that reach each other (Tarjan), the nodes in an order that goes down."""
    below = collections.defaultdict(set)
    for a, b in edges:
        below[a].add(b)
        below.setdefault(b, set())
    index, low, stack, found, order = {}, {}, [], [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(below[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            group = stack[at:]
            del stack[at:]
            order.append(node)
            if len(group) > 1:
                found.append(sorted(group))

    sys.setrecursionlimit(10000)
    for node in sorted(below):
        if node not in index:
            visit(node)
    return found, order[::-1]


def folder_of(path):
    return os.path.dirname(path)


def between_folders(edges):
    """{(folder, folder): [(file, file, why)]}"""
    out = collections.defaultdict(list)
    for (a, b), why in edges.items():
        if folder_of(a) != folder_of(b):
            out[folder_of(a), folder_of(b)].append((a, b, why))
    return out


def within_folders(edges):
    """The same of the source files of one folder, by their calls: a header serves several."""
    return {
        (a, b): why
        for (a, b), why in edges.items()
        if folder_of(a) == folder_of(b) and a.endswith(".c") and b.endswith(".c")
    }


def forbidden(edges):
    for (a, b), why in sorted(edges.items()):
        if why != "includes":
            continue
        if a.startswith("engines/") and b.startswith("src/"):
            yield f"{a} includes {b}: an engine stands on the public headers"
        if not a.startswith("cli/") and b.startswith("cli/"):
            yield f"{a} includes {b}: nothing but the program is above cli"


def faults_of(edges):
    folders = between_folders(edges)
    for group in circles(folders)[0]:
        yield f"a circle of folders: {', '.join(group)}"
        for a, b in sorted(folders):
            if a in group and b in group:
                for source, other, why in sorted(folders[a, b])[:6]:
                    yield f"    {source} {why} ({other})"
    files = within_folders(edges)
    for group in circles(files)[0]:
        yield f"a circle of files: {', '.join(group)}"
        for (a, b), why in sorted(files.items()):
            if a in group and b in group:
                yield f"    {a} {why} ({b})"
    yield from forbidden(edges)


def self_test():
    down = {
        ("src/a/x.c", "src/b/y.c"): "calls y",
        ("src/a/x.c", "src/a/z.c"): "calls z",
        ("src/b/y.c", "src/c/w.h"): "includes",
    }
    assert not list(faults_of(down))
    assert [
        f
        for f in faults_of(down | {("src/c/w.h", "src/a/a.h"): "includes"})
        if f.startswith("a circle of folders: src/a, src/b, src/c")
    ]
    assert [
        f
        for f in faults_of(down | {("src/a/z.c", "src/a/x.c"): "calls x"})
        if f.startswith("a circle of files: src/a/x.c")
    ]
    assert [f for f in faults_of(down | {("engines/e/e.c", "src/b/y.h"): "includes"}) if "public headers" in f]
    print("check-layers: the check itself is as it should be")


def main():
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    build = pathlib.Path(sys.argv[1]).resolve()
    edges = edges_of(build)
    faults = list(faults_of(edges))
    print("\n".join(faults) if faults else "down: " + " > ".join(circles(between_folders(edges))[1]))
    num_files = len({a for a, _ in edges} | {b for _, b in edges})
    num_circles = sum(f.startswith("a circle") for f in faults)
    num_faults = sum(not f.startswith(" ") for f in faults)
    print(
        f"check-layers: {'ok' if not faults else 'FAILED'}: {num_files} files, {len(edges)} includes and calls, "
        f"{num_circles} circles, {num_faults - num_circles} includes that a rule forbids"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
