#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the CUDA libraries that a torch wheel from the Python package index links with. For tests on a CPU only.

usage: cuda_stub.py FOLDER      FOLDER is torch/lib of an environment whose torch was installed with --no-deps

The wheel itself is 530 MB; the CUDA libraries beside it are 3 GB more that a machine without a GPU never calls. torch cannot be
imported without them, since the loader wants every library and every symbol version that torch's own libraries name. This
program asks readelf and nm for them, and compiles for each CUDA library a small one of that name, next to torch's own, where
the loader looks before it looks at the system's. Each function in it answers 100, which is cudaErrorNoDevice; the ones that
return text answer "stub". So torch.cuda.is_available() is False, on a machine with CUDA too, and all else of torch works.
"""
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ANSWER = """
static int no_device(void) { return 100; }
static const char *text(void) { return "stub"; }
"""
TEXT = re.compile(r"(Error|Status)(String|Name)$|_?[gG]et_?[eE]rror_?[sS]tring$")


def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def cuda_needed(library):
    """Names of the CUDA libraries that the library names itself."""
    return re.findall(r"\(NEEDED\).*\[(lib(?:cu|nv|nccl)[^\]]*)\]", output("readelf", "--dynamic", "--wide", library))


def version_owners(library):
    """Symbol version -> the library that has to define it."""
    owners, owner = {}, None
    for line in output("readelf", "--version-info", "--wide", library).splitlines():
        if file := re.search(r"File: (\S+)", line):
            owner = file[1]
        elif (name := re.search(r"Name: (\S+)\s+Flags:", line)) and owner:
            owners[name[1]] = owner
    return owners


def symbols(library, *options):
    return {line.split()[-1] for line in output("nm", "--dynamic", *options, library).splitlines()}


def strong_undefined(library):
    lines = (line.split() for line in output("nm", "--dynamic", "--undefined-only", library).splitlines())
    return {fields[-1] for fields in lines if fields[-2] == "U"}


def wanted_symbols(libraries):
    """CUDA library -> version ("" for none) -> names of the functions that torch's libraries want from it."""
    needed = {library: cuda_needed(library) for library in libraries}
    wanted = {name: defaultdict(set) for names in needed.values() for name in names}
    defined = {name.split("@")[0] for library in libraries for name in symbols(library, "--defined-only")}
    for library in libraries:
        owners = version_owners(library)
        for symbol in strong_undefined(library):
            name, _, version = symbol.partition("@")
            version = version.lstrip("@")
            if owners.get(version) in wanted:
                wanted[owners[version]][version].add(name)
            elif not version and name not in defined and re.match(r"_*(cu|nv|nccl)", name):
                # Without a version it may be in any library that is loaded by then; most such are of C++ and Python.
                wanted[(needed[library] or list(wanted))[0]][""].add(name)
    return wanted


def compile_stub(folder, library, versions):
    source, script = folder / "cuda_stub.c", folder / "cuda_stub.map"
    names = {name for group in versions.values() for name in group}
    source.write_text(ANSWER + "".join(
        f'const char *{name}(void) __attribute__((alias("text")));\n' if TEXT.search(name)
        else f'int {name}(void) __attribute__((alias("no_device")));\n' for name in sorted(names)))
    named = {version: sorted(group) for version, group in versions.items() if version}
    script.write_text("".join(f"{version} {{ global: {'; '.join(group)}; }};\n" for version, group in named.items()))
    subprocess.run(["cc", "-shared", "-fPIC", "-nostdlib", "-fno-builtin", "-w", f"-Wl,-soname,{library}",
                    *([f"-Wl,--version-script={script}"] if named else []), "-o", folder / library, source], check=True)
    source.unlink()
    script.unlink()
    return len(names)


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    libraries = sorted(path for path in folder.glob("lib*.so*") if path.name.startswith(("libtorch", "libc10", "libcaffe2", "libshm")))
    if not libraries:
        sys.exit(f"cuda_stub: no libtorch*.so in {folder}: name the folder torch/lib of an environment")
    wanted = wanted_symbols(libraries)
    count = sum(compile_stub(folder, library, versions) for library, versions in wanted.items())
    print(f"cuda_stub: {len(wanted)} libraries with {count} functions in {folder}")


main()
