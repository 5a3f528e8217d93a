#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check-docs: everything that the documentation says can be run, found and read.

usage: checks/docs.py [--quick] [--self-test] [FILE.md...]

Every file *.md that git knows is checked:
- Code stands in fences with a language. `sh` is executed, `python` is run, other languages are only read.
  `<!-- not run: REASON -->` on the line before a fence exempts it. `<!-- with: CODE -->` there is executed first: what
  the text assumes. `<!-- slow -->` there leaves the fence out of --quick.
- `c` is an excerpt of the programs in examples/, which the tests compile and run: each part of a fence, between lines
  `/* ... */`, is in one of these files, apart from its indentation.
- Every relative link, its anchor, every file, every identifier of kvferry and every `make` target that is named exists.
- No line is longer than 120 characters.
- Every `make check-NAME` of the Makefile is in docs/testing.md.
- Every message that heads a section of docs/troubleshooting.md is one that the program prints.
- Every function in include/kvferry has a comment, and every .c and .h file begins with what it is for.
- Commit subjects since the last release have at most 72 characters (a warning only).

Each document has a scratch folder as working directory and HOME. PATH begins with the commands kvferry and redis-cli of
the check. `cache:6379` in a command is a private server, started for the check. `model.gguf` and `document.txt` exist.
Needs KVFERRY, KVF_MODEL and KVF_PYTHON (make check-docs sets them).
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONGEST_LINE = 120
LONGEST_SUBJECT = 72
SECONDS = 300  # for one fence
# Files that the text names and that are not of this tree: llama.cpp's, the reader's own, those of other programs.
FOREIGN = {"llama.h", "llama-context.cpp", "llama-kv-cache.cpp", "prog.c", "zstd.h", "redis.md"}
NAMED = re.compile(r"`([A-Za-z0-9_.*<>/-]*[A-Za-z0-9_*>-]\.(?:c|h|py|sh|md|conf|svg|map|bash))`")
PATHS = re.compile(
    r"(?<![\w/`.])((?:src|cli|engines|include|docs|test|bench|scripts|checks)/[\w./-]+\.(?:c|h|py|sh|md|svg))\b"
)

IDENTIFIERS = re.compile(r"\b(kvf[il]?_[a-z0-9_]*[a-z0-9]|KVF_[A-Z0-9_]*[A-Z0-9])\b(?!_)")


class Fence:
    """One block of code: its language, its lines, and the comments before it."""

    def __init__(self, doc, line, language, orders):
        self.doc, self.line, self.language = doc, line, language
        self.orders = orders
        self.lines = []

    def order(self, name):
        return next((text for order, text in self.orders if order == name), None)

    def text(self):
        lines = self.lines
        if self.language == "sh" and any(line.startswith("$ ") for line in lines):
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        return "\n".join(lines) + "\n"


class Document:
    """A page: its fences, and the text outside them."""

    def __init__(self, root, path):
        self.root, self.path = root, path
        self.name = str(path.relative_to(root))
        self.lines = path.read_text(encoding="utf-8").split("\n")
        self.fences, self.prose = [], []
        self.faults = []
        self.read()

    def fault(self, line, what):
        self.faults.append(f"{self.name}:{line}: {what}")

    def read(self):
        fence, orders, comment = None, [], None
        for number, line in enumerate(self.lines, 1):
            if fence is not None:
                if line.strip() == "```":
                    fence = None
                else:
                    fence.lines.append(line)
            elif comment is not None or line.startswith("<!--"):
                comment = line if comment is None else comment + "\n" + line
                if "-->" in line:
                    order = re.match(r"<!--\s*([a-z ]+?)\s*(?::\s*(.*?))?\s*-->", comment, re.S)
                    orders.append((order.group(1), order.group(2) or "") if order else ("", ""))
                    comment = None
            elif line.startswith("```"):
                fence = Fence(self, number, line[3:].strip(), orders)
                self.fences.append(fence)
                orders = []
            else:
                orders = []
                self.prose.append((number, line))
        if fence is not None:
            self.fault(fence.line, "this fence has no end")

    def anchors(self):
        found = set()
        for _, line in self.prose:
            if line.startswith("#"):
                text = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower())
                found.add(text.replace(" ", "-"))
        return found


# --- what is read


def check_lines(doc):
    for number, line in enumerate(doc.lines, 1):
        if len(line) > LONGEST_LINE:
            doc.fault(number, f"{len(line)} characters; at most {LONGEST_LINE}")
    before = ""
    for number, line in doc.prose:
        if line.startswith("    ") and before == "":
            doc.fault(number, "indented code: put it into a fence with a language")
        before = line.strip() if not line.startswith("    ") else "code"
    for fence in doc.fences:
        if fence.language == "":
            doc.fault(fence.line, "this fence has no language (sh, c, python, json, text ...)")


def check_links(doc, docs):
    links = 0
    text = "\n".join(line for _, line in doc.prose)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        links += 1
        path, _, anchor = target.partition("#")
        file = (doc.path.parent / path).resolve() if path else doc.path
        if not file.exists():
            doc.fault(line_of(doc, target), f"a link to {path}, which is not there")
        elif anchor and file.suffix == ".md" and anchor not in docs[file].anchors():
            doc.fault(line_of(doc, target), f"a link to #{anchor}, which {path or 'this page'} does not have")
    return links


def line_of(doc, text):
    return next((number for number, line in doc.prose if text in line), 1)


def identifiers(root, files):
    found = set()
    for file in files:
        if file.startswith(("include/", "src/", "cli/", "engines/", "scripts/")) or file in (
            "Makefile",
            "CMakeLists.txt",
        ):
            found.update(IDENTIFIERS.findall((root / file).read_text(encoding="utf-8")))
    return found


def check_names(doc, files, targets, known):
    names = 0
    for number, line in doc.prose:
        for name in IDENTIFIERS.findall(line):
            names += 1
            if name not in known:
                doc.fault(number, f"{name} is no name of kvferry")
        for name in NAMED.findall(line) + PATHS.findall(line):
            if "*" in name or "<" in name or name in FOREIGN:
                continue
            names += 1
            if not any(file == name or file.endswith("/" + name) for file in files):
                doc.fault(number, f"`{name}` is not in the tree")
        for target in re.findall(r"`make ([a-z0-9-]+)(?=[ `])", line):
            names += 1
            if target not in targets:
                doc.fault(number, f"`make {target}` is no target of the Makefile")
    return names


def check_checks(doc, targets):
    """The page of the checks has all of them."""
    text = "\n".join(doc.lines)
    for target in sorted(targets):
        if target.startswith("check-") and not re.search(rf"`make {target}[ `]", text):
            doc.fault(1, f"`make {target}` is not described here")


def check_excerpts(doc, root):
    """Every part of a fence in C is in a file of examples/."""
    programs = [file.read_text(encoding="utf-8").split("\n") for file in sorted((root / "examples").glob("*.c"))]
    excerpts = 0
    for fence in doc.fences:
        if fence.language != "c":
            continue
        for part in re.split(r"^\s*/\* \.\.\. \*/\n", "\n".join(fence.lines) + "\n", flags=re.M):
            part = textwrap.dedent(part).strip("\n").split("\n")
            excerpts += 1
            if not any(is_part(part, program) for program in programs):
                doc.fault(fence.line, f"no file of examples/ has this code: {part[0].strip()} ...")
    return excerpts


def is_part(part, lines):
    spans = (lines[at : at + len(part)] for at in range(len(lines) - len(part) + 1))
    return any(textwrap.dedent("\n".join(span)).split("\n") == part for span in spans)


def literals(root):
    """All string literals of the program, adjacent ones joined."""
    found = []
    for folder in ("src", "cli", "engines"):
        for file in sorted((root / folder).rglob("*.[ch]")):
            for run in re.findall(r'"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*', file.read_text(encoding="utf-8")):
                found.append("".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', run)))
    return found


def check_messages(doc, root):
    """Headings of the form "### `message`". "..." in a message stands for variable text."""
    said, messages = None, 0
    for number, line in doc.prose:
        if not line.startswith("#"):
            continue
        for message in re.findall(r"`([^`]+)`", line):
            said = literals(root) if said is None else said
            messages += 1
            pieces = [re.escape(piece.strip().replace('"', '\\"')) for piece in message.split("...") if piece.strip()]
            if not any(re.search(".*".join(pieces), text) for text in said):
                doc.fault(number, f"the program does not say `{message}`")
    return messages


def check_headers(root):
    faults, functions = [], 0
    for file in sorted((root / "include/kvferry").glob("*.h")):
        lines = file.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines, 1):
            if not re.match(r"(KVF_API|static inline) ", line):
                continue
            functions += 1
            if not lines[number - 2].rstrip().endswith("*/"):
                faults.append(f"include/kvferry/{file.name}:{number}: a function without a comment")
    return faults, functions


HEAD = re.compile(r"/\* SPDX-License-Identifier: Apache-2\.0\n \*\n \* \S")


def check_heads(root, files):
    """Headers of earlier releases (test/abi) stay as they were."""
    sources = [file for file in files if file.endswith((".c", ".h")) and not file.startswith("test/abi/")]
    return [
        f"{file}:1: the file does not begin with what it is for"
        for file in sources
        if not HEAD.match((root / file).read_text(encoding="utf-8"))
    ]


def subjects(root):
    tag = git(root, "describe", "--tags", "--abbrev=0").strip()
    log = git(root, "log", "--format=%h %s", f"{tag}..HEAD" if tag else "-50")
    return [line for line in log.splitlines() if len(line.split(" ", 1)[1]) > LONGEST_SUBJECT]


def git(root, *words):
    return subprocess.run(
        ["git", "-C", root, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout


# --- what is executed


class Scratch:
    """A folder for the commands of one document, with the server that its text assumes."""

    def __init__(self):
        self.dir = Path(tempfile.mkdtemp(prefix="kvferry-docs-"))
        self.server = None
        (self.dir / "bin").mkdir()
        (self.dir / "home").mkdir()
        # Short answers: what is checked is that the commands work.
        self.put_command("kvferry", f'[[ $1 != run ]] || set -- "$@" -n 8\nexec "{env("KVFERRY")}" "$@"')
        self.put_command(
            "redis-cli", f'exec {shutil.which("redis-cli") or "redis-cli"} -s "{self.dir}/redis.sock" "$@"'
        )
        work = self.dir / "work"
        work.mkdir()
        (work / "model.gguf").symlink_to(env("KVF_MODEL"))
        (work / "document.txt").write_text("The lighthouse keeper wound the clock every evening at nine.\n" * 12)

    def put_command(self, name, text):
        file = self.dir / "bin" / name
        file.write_text(f"#!/bin/bash\n{text}\n")
        file.chmod(0o755)

    def start_server(self):
        """Starts a server on a socket and on a free port. Returns the port."""
        if self.server is None:
            for _ in range(5):
                port = free_port()
                self.server = subprocess.Popen(
                    [
                        "redis-server",
                        "--port",
                        str(port),
                        "--bind",
                        "127.0.0.1",
                        "--unixsocket",
                        f"{self.dir}/redis.sock",
                        "--dir",
                        str(self.dir),
                        "--save",
                        "",
                        "--maxmemory",
                        "256mb",
                        "--maxmemory-policy",
                        "allkeys-lru",
                        "--daemonize",
                        "no",
                        "--logfile",
                        f"{self.dir}/redis.log",
                    ],
                    stdin=subprocess.DEVNULL,
                )
                if self.wait_for_server():
                    self.port = port
                    break
        return self.port

    def wait_for_server(self):
        while self.server.poll() is None:
            try:
                subprocess.run(
                    ["redis-cli", "-s", f"{self.dir}/redis.sock", "ping"], check=True, capture_output=True, timeout=10
                )
                return True
            except (subprocess.SubprocessError, OSError):
                time.sleep(0.05)
        return False

    def environment(self):
        tree = {
            "PATH": f"{self.dir}/bin:{os.environ['PATH']}",
            "HOME": f"{self.dir}/home",
            "KVFERRY_QUIET": "1",
            "PYTHONPATH": str(Path(env("KVFERRY")).resolve().parent / "python"),
        }
        return {**{k: v for k, v in os.environ.items() if not k.startswith(("KVFERRY_", "XDG_"))}, **tree}

    def run(self, command, text):
        """Exit status and output."""
        if "cache:6379" in text:
            text = text.replace("cache:6379", f"127.0.0.1:{self.start_server()}")
        elif re.search(r"redis-cli|redis\.sock|redis\.Redis", text):
            self.start_server()
        text = text.replace("/run/redis.sock", f"{self.dir}/redis.sock").replace("build/minimal/kvferry", "kvferry")
        child = subprocess.Popen(
            command,
            cwd=self.dir / "work",
            env=self.environment(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return child.communicate(text, timeout=SECONDS)[0], child.returncode
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            return child.communicate()[0] + f"\n(ended after {SECONDS} s)", 124

    def close(self):
        if self.server is not None:
            self.server.kill()
            self.server.wait()
        shutil.rmtree(self.dir, ignore_errors=True)


def env(name):
    value = os.environ.get(name)
    if not value:
        sys.exit(f"check-docs: {name} is not set: run `make check-docs`")
    return value


def free_port():
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_sh(scratch, fence):
    text = "set -euo pipefail\n" + (fence.order("with") or "") + "\n" + fence.text()
    return scratch.run(["bash", "-s"], text)


def run_python(scratch, fence):
    return scratch.run([env("KVF_PYTHON"), "-"], (fence.order("with") or "") + "\n" + fence.text())


RUNNERS = {"sh": run_sh, "python": run_python}


def run_fences(doc, quick):
    """Executes the fences. Returns how many ran, and how many commands."""
    ran = commands = 0
    scratch = None
    for fence in doc.fences:
        runner = RUNNERS.get(fence.language)
        reason = fence.order("not run")
        if reason == "":
            doc.fault(fence.line, "`not run` without a reason")
        if runner is None or reason or (quick and fence.order("slow") is not None):
            continue
        scratch = scratch or Scratch()
        output, status = runner(scratch, fence)
        ran += 1
        commands += sum(1 for line in fence.text().split("\n") if line.strip()) if fence.language == "sh" else 1
        if status != 0:
            doc.fault(fence.line, f"exit status {status}:\n    " + "\n    ".join(output.strip().split("\n")[-12:]))
    if scratch is not None:
        scratch.close()
    return ran, commands


# --- all of it


def check(root, only, quick):
    files = git(root, "ls-files", "--cached", "--others", "--exclude-standard").split()
    files = [file for file in files if (root / file).exists()]
    known = identifiers(root, files)
    targets = set(re.findall(r"^([a-z0-9-]+):", (root / "Makefile").read_text(), re.M))
    paths = [root / file for file in files if file.endswith(".md")]
    docs = {path.resolve(): Document(root, path) for path in paths}
    faults, commands, links, names, excerpts, messages = [], 0, 0, 0, 0, 0
    for doc in docs.values():
        if only and doc.name not in only:
            continue
        check_lines(doc)
        links += check_links(doc, docs)
        names += check_names(doc, files, targets, known)
        excerpts += check_excerpts(doc, root)
        if doc.name == "docs/testing.md":
            check_checks(doc, targets)
        if doc.name == "docs/troubleshooting.md":
            messages += check_messages(doc, root)
        commands += run_fences(doc, quick)[1]
        faults += doc.faults
    header_faults, functions = check_headers(root)
    faults += header_faults + check_heads(root, files)
    for subject in subjects(root):
        print(f"warning: a subject of more than {LONGEST_SUBJECT} characters: {subject}")
    figure = (
        f"{commands} commands run, {links} links, {names} names, {excerpts} excerpts and {messages} messages found, "
        f"{functions} functions, {len(docs)} pages"
    )
    return faults, figure


def self_test():
    """The check finds every fault planted in a small tree, and none without it."""
    plants = {
        "nothing": (lambda t: t, None),
        "a link": (lambda t: t + "\n[gone](gone.md)\n", "gone.md, which is not there"),
        "an anchor": (lambda t: t + "\n[gone](#gone)\n", "#gone, which"),
        "a name": (lambda t: t + "\n`src/gone.c`\n", "is not in the tree"),
        "an identifier": (lambda t: t + "\n`kvf_gone`\n", "is no name of kvferry"),
        "a path": (lambda t: t + "\nsee (src/gone.c)\n", "is not in the tree"),
        "a target": (lambda t: t + "\n`make gone`\n", "no target"),
        "a command": (lambda t: t + "\n```sh\ntest -e gone\n```\n", "exit status 1"),
        "code of an example": (lambda t: t + "\n```c\nif (a) {\n    b();\n}\n/* ... */\nreturn c;\n```\n", None),
        "code of no example": (lambda t: t + "\n```c\nif (a) {\n    gone();\n}\n```\n", "no file of examples/"),
        "code with another indentation": (lambda t: t + "\n```c\nif (a) {\nb();\n}\n```\n", "no file of examples/"),
        "a command that is exempt": (lambda t: t + "\n<!-- not run: planted -->\n```sh\nfalse\n```\n", None),
        "an exemption without a reason": (lambda t: t + "\n<!-- not run: -->\n```sh\ntrue\n```\n", "without a reason"),
        "a long line": (lambda t: t + "x" * 121 + "\n", "121 characters"),
        "a fence without a language": (lambda t: t + "\n```\ntrue\n```\n", "no language"),
        "indented code": (lambda t: t + "\n    true\n", "indented code"),
    }
    wrong = []
    with tempfile.TemporaryDirectory(prefix="kvferry-docs-") as name:
        root = Path(name)
        (root / "include/kvferry").mkdir(parents=True)
        (root / "docs").mkdir()
        (root / "src").mkdir()
        (root / "examples").mkdir()
        head = "/* SPDX-License-Identifier: Apache-2.0\n *\n * Says what is said.\n */\n"
        (root / "examples/a.c").write_text(
            head + "int f(void) {\n    if (a) {\n        b();\n    }\n    return c;\n}\n"
        )
        header = root / "include/kvferry/a.h"
        good_header = head + "/* Says. */\nKVF_API void said(void);\n"
        (root / "Makefile").write_text("all:\ncheck-all:\n")
        (root / "src/a.c").write_text(head + 'const char *said = "the store " "%s is down";\n')
        trouble = root / "docs/troubleshooting.md"
        good_trouble = "# Trouble\n\n## `the store ... is down`\n"
        testing = root / "docs/testing.md"
        good_testing = "# Testing\n\n`make check-all`\n"
        subprocess.run(["git", "init", "-q", name], check=True)

        def expect(what, page, said, header_text=good_header, trouble_text=good_trouble, testing_text=good_testing):
            (root / "README.md").write_text(page)
            header.write_text(header_text)
            trouble.write_text(trouble_text)
            testing.write_text(testing_text)
            faults = check(root, [], quick=True)[0]
            if (said is None and faults) or (said is not None and not any(said in fault for fault in faults)):
                wrong.append(f"{what}: {faults}")

        good = "# A page\n\n[a](#a-page) `src/a.c` `make all`\n\n```sh\ntrue\n```\n"
        for what, (plant, said) in plants.items():
            expect(what, plant(good), said)
        expect("a function", good, "without a comment", header_text=good_header + "\nKVF_API void silent(void);\n")
        expect("a file", good, "does not begin", header_text=good_header[len(head) :])
        expect("a check", good, "is not described", testing_text="# Testing\n")
        expect("a message", good, "does not say", trouble_text=good_trouble + "\n## `it is up`\n")
    print("\n".join(wrong) if wrong else f"self-test: {len(plants) + 4} plants, each found")
    return not wrong


def main(words):
    ok = self_test() if "--self-test" in words else True
    faults, figure = check(ROOT, [word for word in words if not word.startswith("--")], "--quick" in words)
    print("\n".join(faults))
    print(f"check-docs: {'ok' if ok and not faults else 'FAILED'}: {len(faults)} faults; {figure}")
    return 0 if ok and not faults else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
