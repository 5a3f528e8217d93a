#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""check-mutants: changes the library in one place at a time, and checks that a test fails.

usage: checks/mutants.py [--self-test | --list | --map]

A mutant is the library with one change: a comparison, a logical or arithmetic operator, a constant, a returned value, a
condition, or a statement that is left out. A constant changes boldly: a wait of 1001 ms is as good as one of 1000, so
what is larger than 8 becomes half, double or 0. The tests that execute its line run on it until one fails: the mutant
is killed. Those that have killed mutants of the same function run first, then those of the same file, then the others,
each time the fastest first. One that hangs a test is killed, too. Tests run under AddressSanitizer and
UndefinedBehaviorSanitizer, as in `make test`. What the compiler refuses, and what it makes the same machine code of,
does not count. Locks and the wiping of keys stay as they are: no test of this kind can miss them. The exit status is 0
where at least FLOOR % of the others are killed.

Which test executes which line is measured once, by gcov, for each single test, and again for those of a program that
has changed; that takes minutes. For a source file that has changed since, the tests that execute the function are
taken; --map measures all anew.

Environment: SEED=n          which mutants are drawn (1) MUTANTS=n       how many (200) PORTION=i/n     only each n-th
of them, from the i-th on (1/1) ONLY=TEXT       only those of files whose path contains it JOBS=n          at once (half
of the processors) SECONDS=n       of tests for one mutant at most; the slowest tests of a line that most tests execute
are left out (120) FLOOR=n         percent (85) A change of the sources changes what is drawn of its own lines only.
checks/mutants.same lists those that a person has found to mean the same, with the reason; they do not count. Results
are kept in build/mutants/results.tsv: what is done for the same text of the file is not done again."""

import concurrent.futures
import contextlib
import hashlib
import json
import os
import pathlib
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "mutants"
TREE = WORK / "tree"  # a copy of the sources: they may be edited meanwhile
AREAS = ("record", "resp", "redis", "tier", "mem", "file", "store", "prefix", "session")
KINDS = ("unit", "live")


def number(name, default):
    return int(os.environ.get(name) or default)


# ---- C, as far as it is needed ------------------------------------------------------------------------------------

TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/|^[ \t]*\#(?:[^\n\\]|\\.|\\\n)*)
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<op><<=|>>=|\.\.\.|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|.)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


class Token:
    __slots__ = ("end", "kind", "line", "start", "text")

    def __init__(self, kind, text, start, end, line):
        self.kind, self.text, self.start, self.end, self.line = kind, text, start, end, line


def tokens_of(source):
    out, line = [], 1
    for m in TOKEN.finditer(source):
        if m.lastgroup != "skip":
            out.append(Token(m.lastgroup, m.group(), m.start(), m.end(), line))
        line += m.group().count("\n")
    return out


def partner(tokens, at):
    """The index of what closes the bracket at that index."""
    pairs = {"(": ")", "[": "]", "{": "}"}
    depth = 0
    for i in range(at, len(tokens)):
        depth += tokens[i].text in pairs
        depth -= tokens[i].text in pairs.values()
        if depth == 0:
            return i
    return len(tokens) - 1


def bodies(tokens):
    """(name, first, last) of each function: the indices of its braces."""
    out, i = [], 0
    while i < len(tokens):
        if tokens[i].text != "{":
            i += 1
            continue
        close = partner(tokens, i)
        if i > 0 and tokens[i - 1].text == ")":
            depth, j = 0, i - 1
            while True:
                depth += (tokens[j].text == ")") - (tokens[j].text == "(")
                if depth == 0:
                    break
                j -= 1
            out.append((tokens[j - 1].text, i, close))
        i = close + 1
    return out


# Locks, the initialisers of mutexes (zeroed memory is one on Linux), what the system does not keep, the wiping of keys.
UNSEEN = {
    "pthread_mutex_init",
    "pthread_mutex_lock",
    "pthread_mutex_unlock",
    "pthread_mutex_destroy",
    "pthread_cond_destroy",
    "explicit_bzero",
}
MESSAGES = {"kvfi_fail", "kvfi_log", "_Static_assert"}


def is_message(tokens, at):
    """A call whose arguments are words for people."""
    if tokens[at].kind != "name" or at + 1 >= len(tokens) or tokens[at + 1].text != "(":
        return False
    if tokens[at].text in MESSAGES:
        return True
    close = partner(tokens, at + 1)
    return any(t.kind == "string" and " " in t.text for t in tokens[at + 2 : close])


def silent(tokens):
    """The indices of tokens within such calls."""
    out = set()
    for i in range(len(tokens)):
        if i not in out and is_message(tokens, i):
            out.update(range(i + 2, partner(tokens, i + 1)))
    return out


SWAPS = {
    "==": ("!=",),
    "!=": ("==",),
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "&&": ("||",),
    "||": ("&&",),
    "+": ("-",),
    "-": ("+",),
    "*": ("/",),
    "/": ("*",),
    "%": ("/",),
    "&": ("|",),
    "|": ("&",),
    "<<": (">>",),
    ">>": ("<<",),
    "+=": ("-=",),
    "-=": ("+=",),
    "|=": ("&=",),
    "&=": ("|=",),
    "++": ("--",),
    "--": ("++",),
}
KIND_OF = dict.fromkeys(("==", "!=", "<", "<=", ">", ">="), "comparison") | {"&&": "logic", "||": "logic"}
WORDS = {"true": "false", "false": "true"}
KEYWORDS = {
    "if",
    "while",
    "for",
    "switch",
    "return",
    "sizeof",
    "do",
    "else",
    "goto",
    "case",
    "default",
    "break",
    "continue",
}


class Mutant:
    def __init__(self, path, kind, token, start, end, text, function):
        self.path, self.kind, self.line = path, kind, token.line
        self.start, self.end, self.text, self.function = start, end, text, function

    def apply(self, source):
        # A statement of several lines keeps them: the lines behind it keep their numbers, and __LINE__ its value.
        lines = source[self.start : self.end].count("\n") - self.text.count("\n")
        return source[: self.start] + self.text + "\n" * lines + source[self.end :]

    def describe(self, source):
        def short(text):
            text = " ".join(text.split())
            return text if len(text) <= 70 else text[:67] + "..."

        return f"{self.kind}: {short(source[self.start : self.end])} -> {short(self.text) or '(nothing)'}"


def is_binary(source, token):
    """As clang-format writes it: a blank on both sides."""
    return source[token.start - 1] in " \n" and source[token.end : token.end + 1] in (" ", "\n")


def digest_of(*words):
    return hashlib.sha256("\0".join(map(str, words)).encode()).hexdigest()


def is_array_size(tokens, i):
    """Of a declaration. A larger array means the same."""
    return tokens[i - 1].text == "[" and tokens[i + 1].text == "]" and tokens[i + 2].text in (";", ",", "=")


def other_constant(tokens, i, place):
    """A number that the tests ought to notice in its place; which one, the place decides."""
    text = tokens[i].text
    whole = re.fullmatch(r"(0[xX][0-9a-fA-F]+|\d+)[uUlL]*", text)
    value = int(whole[1], 16 if text[1:2] in ("x", "X") else 8 if text[0] == "0" else 10) if whole else None
    if value in (0, 1):
        return str(1 - value)
    if value is None or value > 8:
        choices = [f"({text} / 2)"] if is_array_size(tokens, i) else [f"({text} / 2)", f"({text} * 2)", "0"]
    else:
        choices = [f"({text} + 1)", f"({text} - 1)"]
    return choices[int(digest_of(*place), 16) % len(choices)]


def operators(path, source, tokens, i, function):
    t = tokens[i]
    if t.kind == "op" and t.text in SWAPS and (t.text in ("++", "--") or is_binary(source, t)):
        for text in SWAPS[t.text]:
            yield Mutant(path, KIND_OF.get(t.text, "arithmetic"), t, t.start, t.end, text, function)
    elif t.kind == "number":
        line = source[source.rfind("\n", 0, t.start) + 1 : t.end]
        yield Mutant(path, "constant", t, t.start, t.end, other_constant(tokens, i, (path, function, line)), function)
    elif t.text in WORDS:
        yield Mutant(path, "constant", t, t.start, t.end, WORDS[t.text], function)


def conditions(path, source, tokens, i, function):
    t = tokens[i]
    if t.text in ("if", "while") and tokens[i + 1].text == "(":
        inner = tokens[i + 1], tokens[partner(tokens, i + 1)]
        start, end = inner[0].end, inner[1].start
        yield Mutant(path, "condition", t, start, end, f"!({source[start:end]})", function)


def end_of_statement(tokens, i):
    """The index of its semicolon, or None where braces come first."""
    while tokens[i].text not in (";", "{", "}"):
        i = partner(tokens, i) + 1 if tokens[i].text in ("(", "[") else i + 1
        if tokens[i - 1].text == "=" and tokens[i].text == "{":
            return None
    return i if tokens[i].text == ";" else None


def statements(path, source, tokens, i, function):
    t, before = tokens[i], tokens[i - 1].text
    if before not in (";", "{", "}", ":"):
        return
    semicolon = end_of_statement(tokens, i)
    if semicolon is None or semicolon == i:
        return
    start, end = t.start, tokens[semicolon].end
    if t.text == "return":
        if semicolon == i + 1:
            yield Mutant(path, "statement", t, start, end, ";", function)
        elif tokens[i + 1].text not in WORDS and tokens[i + 1].text != "0":
            yield Mutant(path, "return", t, start, end, "return 0;", function)
        return
    if t.text in ("break", "continue"):
        yield Mutant(path, "statement", t, start, end, ";", function)
        return
    first = i + 3 if [x.text for x in tokens[i : i + 3]] == ["(", "void", ")"] else i
    head, then = tokens[first], tokens[first + 1].text
    if head.text in KEYWORDS or is_message(tokens, first) or first == semicolon - 1 or tokens[first + 1].kind == "name":
        return  # among others `(void)name;`, and a declaration
    if head.text in UNSEEN or (head.kind == "name" and then == "*"):
        return  # the latter is a declaration
    if head.kind == "name" or head.text in ("*", "++", "--"):
        assigns = any(
            x.text in ("=", "++", "--") or (x.text in SWAPS and x.text[-1:] == "=") for x in tokens[i:semicolon]
        )
        yield Mutant(path, "statement" if assigns else "call", t, start, end, ";", function)


def mutants_of(path, source):
    tokens = tokens_of(source)
    quiet = silent(tokens)
    for function, first, last in bodies(tokens):
        for i in range(first + 1, last):
            if i not in quiet:
                for make in (operators, conditions, statements):
                    yield from make(path, source, tokens, i, function)


def function_at(source, line):
    tokens = tokens_of(source)
    for name, first, last in bodies(tokens):
        if tokens[first].line <= line <= tokens[last].line:
            return name
    return ""


# ---- building and running -----------------------------------------------------------------------------------------


def must(command, **more):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)
    if done.returncode != 0:
        sys.exit(f"{shlex.join(map(str, command))}\n{done.stdout[-4000:]}\nmutants: it does not build")
    return done.stdout


def copy_tree():
    """Brings the copy up to date; what has not changed keeps its time."""
    tops = ("src", "include", "engines", "cli", "test", "checks", "bench", "examples")
    paths = [ROOT / "CMakeLists.txt", *ROOT.glob("*.in"), *(p for top in tops for p in (ROOT / top).rglob("*"))]
    wanted = {str(p.relative_to(ROOT)) for p in paths if p.is_file()}
    for path in [p for p in TREE.rglob("*") if p.is_file()]:
        if str(path.relative_to(TREE)) not in wanted:
            path.unlink()
    for name in wanted:
        here, there = ROOT / name, TREE / name
        if not there.exists() or there.read_bytes() != here.read_bytes():
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(here, there)


def build(name, flags, jobs):
    folder = WORK / name
    must(
        [
            "cmake",
            "-S",
            TREE,
            "-B",
            folder,
            "-G",
            "Ninja",
            "-DCMAKE_BUILD_TYPE=None",
            f"-DCMAKE_C_FLAGS={flags}",
            "-DKVF_LLAMA=OFF",
            "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
        ]
    )
    programs = [f"{kind}_{p.stem}" for kind in KINDS for p in sorted((TREE / "test" / kind).glob("*_test.c"))]
    known = set(must(["ninja", "-C", folder, "-t", "targets", "all"]).replace(":", " ").split())
    programs = [p for p in programs if p in known]
    must(["ninja", "-C", folder, f"-j{jobs}", "kvferry-cli", *programs])
    return folder, programs


def limits():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def end_group(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_test(program, test, timeout, cli, more=None):
    """One test of a program: its exit status, or None when it took too long; and the seconds it took."""
    temp = tempfile.mkdtemp(prefix="kvfm-", dir="/tmp")
    os.chmod(temp, 0o755)  # some tests become another user
    env = dict(
        os.environ, TMPDIR=temp, KVFT_ONLY=test, KVFT_SKIP="", KVFT_SEEDS="400", KVFERRY=str(cli), **(more or {})
    )
    env.pop("MAKEFLAGS", None)
    begin = time.monotonic()
    process = subprocess.Popen(
        [program],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        cwd=temp,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=limits,
    )
    try:
        status = process.wait(timeout)
    except subprocess.TimeoutExpired:
        status = None
    end_group(process)
    shutil.rmtree(temp, ignore_errors=True)
    return status, time.monotonic() - begin


# ---- which test executes which line -------------------------------------------------------------------------------


def digest(*paths):
    h = hashlib.sha256()
    for path in sorted(p for top in paths for p in ([top] if top.is_file() else top.rglob("*"))):
        if path.suffix in (".c", ".h"):
            h.update(str(path.relative_to(TREE)).encode() + b"\0" + path.read_bytes())
    return h.hexdigest()[:16]


def tests_of(program):
    env = dict(os.environ, KVFT_LIST="1")
    done = subprocess.run([program], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    return re.findall(r"^\w+$", done.stdout, re.MULTILINE)


def lines_run(folder):
    """What gcov has seen: {path: {line: function}}."""
    seen = {}
    data = [str(p) for p in folder.rglob("*.gcda")]
    if not data:
        return seen
    text = subprocess.run(
        ["gcov", "--json-format", "--stdout", *data], cwd=folder, capture_output=True, text=True
    ).stdout
    for line in text.splitlines():
        unit = json.loads(line) if line.startswith("{") else {"files": ()}
        for entry in unit["files"]:
            path = os.path.relpath(os.path.join(unit["current_working_directory"], entry["file"]), TREE)
            if path.startswith("src/") and path.endswith(".c"):
                lines = seen.setdefault(path, {})
                for at in entry["lines"]:
                    if at["count"] > 0:
                        lines[at["line_number"]] = at.get("function_name", "")
    return seen


def measure_one(cover, program, kind, test, cli):
    """Runs it with counters in a folder of its own, beside links to the compiler's notes."""
    with tempfile.TemporaryDirectory(prefix="kvfm-", dir="/tmp") as top:
        objects = cover / "CMakeFiles" / "kvferry_objects.dir"
        inside = pathlib.Path(top + str(objects))
        for note in objects.rglob("*.gcno"):
            link = inside / note.relative_to(objects)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(note)
        status, seconds = run_test(cover / "test" / program, test, 300, cli, {"GCOV_PREFIX": top})
        if status != 0:
            return None
        return {"program": program, "kind": kind, "test": test, "seconds": seconds}, lines_run(inside)


def source_of(program):
    kind, _, name = program.partition("_")
    return TREE / "test" / kind / f"{name}.c"


def note(found, test, seen):
    """Adds what a test has executed. Lines of a file that has changed since
    the first were measured have other numbers, and
    of its new functions the older tests would not be known."""
    at = len(found["tests"])
    found["tests"].append(test)
    for path, lines in seen.items():
        same = found["sources"].get(path) == digest(TREE / path)
        of_lines, of_functions = found["lines"].setdefault(path, {}), found["functions"].setdefault(path, {})
        for line, function in lines.items():
            if same:
                of_lines.setdefault(str(line), []).append(at)
            if same or function in of_functions:
                users = of_functions.setdefault(function, [])
                if not users or users[-1] != at:
                    users.append(at)


def measure(found, jobs):
    """Runs each test by itself that is new, or whose program has changed, and notes what it executes."""
    # A child process of a test notes its lines by __gcov_dump (kvft_exit), which is only linked when it is asked for.
    cover, programs = build("cover", "-O0 --coverage -Wl,-u,__gcov_dump", jobs)
    if not found:
        found |= {"tests": [], "programs": {}, "lines": {}, "functions": {}, "sources": {}}
        for path in sorted((TREE / "src").rglob("*.c")):
            found["sources"][str(path.relative_to(TREE))] = digest(path)
    todo = []
    for program in programs:
        if found["programs"].get(program) != digest(source_of(program)):
            found["programs"][program] = digest(source_of(program))
            found["tests"] = [None if t is not None and t["program"] == program else t for t in found["tests"]]
            kind = program.split("_")[0]
            todo += [(cover, program, kind, test, cover / "kvferry") for test in tests_of(cover / "test" / program)]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for job, result in zip(todo, pool.map(lambda job: measure_one(*job), todo), strict=True):
            if result is None:
                print(f"mutants: {job[1]} {job[3]} fails or is slow without a mutation: it is left out", flush=True)
            else:
                note(found, *result)


def tests_map(jobs, anew=False):
    path = WORK / "map.json"
    key = digest(TREE / "test" / "unit", TREE / "test" / "live", TREE / "test" / "support")
    found = json.loads(path.read_text()) if path.exists() and not anew else {}
    if not found or found["key"] != key:
        begin = time.monotonic()
        print("mutants: new tests are run one by one, to see which lines they execute: minutes", flush=True)
        measure(found, jobs)
        found["key"] = key
        path.write_text(json.dumps(found))
        num = sum(test is not None for test in found["tests"])
        print(f"mutants: {num} tests are known after {time.monotonic() - begin:.0f} s", flush=True)
    return found


def tests_for(found, mutant, nearness):
    """Tests that execute the line, the nearest first, then units, then the fastest. Where none is seen to, or the file
    has changed, those of the function (gcov does not see what a child process does that ends by _exit); for a new one
    those of the file, or all."""
    functions = found["functions"].get(mutant.path, {})
    same = found["sources"].get(mutant.path) == digest(TREE / mutant.path)
    for numbers in (
        found["lines"].get(mutant.path, {}).get(str(mutant.line), []) if same else [],
        functions.get(mutant.function, []),
        [] if same else sorted({n for users in functions.values() for n in users}),
        [] if same else range(len(found["tests"])),
    ):
        tests = [found["tests"][n] for n in numbers if found["tests"][n] is not None]
        if tests:
            return sorted(tests, key=lambda t: (nearness(mutant, t), t["kind"] != "unit", t["seconds"]))
    return []


# ---- one mutant ---------------------------------------------------------------------------------------------------


SANITIZED = "-O1 -fsanitize=address,undefined -fno-omit-frame-pointer -fno-sanitize-recover=undefined"
ASAN = {"ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1"}


class Bench:
    """Compiles one file and links one test program, beside what is built already."""

    def __init__(self, jobs):
        self.folder, self.programs = build("base", SANITIZED, jobs)
        self.compile = {}
        for entry in json.loads((self.folder / "compile_commands.json").read_text()):
            path = os.path.relpath(entry["file"], TREE)
            words = shlex.split(entry["command"])
            words = [w for w in words if not w.startswith(("-W", "-g")) and w not in ("-c", entry["file"])]
            del words[words.index("-o") : words.index("-o") + 2]
            self.compile[path] = words + ["-w", "-g0"]
        self.links = {}
        self.original = {}
        self.soundness = {}
        self.lock = threading.Lock()

    def object_of(self, path, source, out, *flags):
        """Compiles the text as that file; the bytes of the object, or None."""
        c = out.with_suffix(".c")
        c.write_text(f'#line 1 "{path}"\n' + source)
        words = [*self.compile[path], *flags, "-c", str(c), "-o", str(out)]
        done = subprocess.run(words, cwd=self.folder, capture_output=True)
        return out.read_bytes() if done.returncode == 0 else None

    def plain(self, path, source, folder):
        """The machine code by which two sources are compared."""
        return self.object_of(path, source, folder / "mutant.o", "-O2", "-fno-sanitize=all")

    def plain_original(self, path, source, folder):
        with self.lock:
            if path not in self.original:
                self.original[path] = self.plain(path, source, folder)
            return self.original[path]

    def is_sound(self, test):
        """Whether the test passes on the library as it is."""
        key = (test["program"], test["test"])
        with self.lock:
            if key not in self.soundness:
                self.soundness[key] = fails(self, test, self.folder / "test" / test["program"]) == ""
                if not self.soundness[key]:
                    print(f"mutants: {key[0]} {key[1]} fails without a mutation: it is left out", flush=True)
            return self.soundness[key]

    def link_words(self, program):
        with self.lock:
            if program not in self.links:
                last = must(["ninja", "-C", self.folder, "-t", "commands", f"test/{program}"]).strip().splitlines()[-1]
                self.links[program] = shlex.split(last.replace(": && ", "").replace(" && :", ""))
            words = list(self.links[program])
        return words

    def link(self, program, mutant_object, out):
        words = self.link_words(program)
        at = words.index("-o")
        words[at : at + 2] = [str(mutant_object), "-o", str(out)]
        return subprocess.run(words, cwd=self.folder, capture_output=True).returncode == 0


def fails(bench, found_test, program):
    """Whether it fails on the mutant. A live test must do so twice: the machine may be busy."""
    timeout = 10 + 6 * found_test["seconds"]
    for _ in range(2 if found_test["kind"] == "live" else 1):
        status, _ = run_test(program, found_test["test"], timeout, bench.folder / "kvferry", ASAN)
        if status is None:
            return "hangs"
        if status == 0:
            return ""
    return "fails"


def judge(bench, found, mutant, source, nearness):
    """(verdict, by): killed, survived, same, refused, unrun."""
    with tempfile.TemporaryDirectory(prefix="kvfm-", dir="/tmp") as name:
        folder = pathlib.Path(name)
        original = bench.plain_original(mutant.path, source, folder)
        changed = bench.plain(mutant.path, mutant.apply(source), folder)
        if changed is None:
            return "refused", ""
        if changed == original:
            return "same", ""
        bench.object_of(mutant.path, mutant.apply(source), folder / "mutant.o")
        tests = tests_for(found, mutant, nearness)
        if not tests:
            return "survived", "no test executes it"
        left, ran, linked = number("SECONDS", 120), 0, set()
        for test in tests:
            if test["seconds"] > left:
                continue
            left -= test["seconds"]
            program = folder / test["program"]
            if program not in linked:
                if not bench.link(test["program"], folder / "mutant.o", program):
                    return "refused", "it does not link"
                linked.add(program)
            how = fails(bench, test, program)
            ran += 1
            if how and bench.is_sound(test):
                return "killed", f"{test['program']} {test['test']} {how}"
        return "survived", f"{ran} of {len(tests)} tests of its line ran"


# ---- many ---------------------------------------------------------------------------------------------------------


def sources():
    only = os.environ.get("ONLY", "")
    for area in AREAS:
        for path in sorted((TREE / "src" / area).rglob("*.c")):
            if only in str(path.relative_to(TREE)):
                yield str(path.relative_to(TREE)), path.read_text()


def ranked(seed, path, source):
    """(rank, mutant) of each of the file: a rank by chance, which stays when other lines change, or the file moves."""
    seen = {}
    for mutant in mutants_of(path, source):
        place = mutant.function, *place_of(mutant, source)[1:]
        seen[place] = seen.get(place, 0) + 1
        yield digest_of(seed, *place, seen[place]), mutant


def draw(seed, num):
    """The seed's mutants: of each area by its size, but no fewer than a twentieth."""
    texts = dict(sources())
    by_area = {}
    for path, source in texts.items():
        by_area.setdefault(path.split("/")[1], []).extend(ranked(seed, path, source))
    total = sum(map(len, by_area.values()))
    drawn = []
    for area in sorted(by_area):
        all_of_it = [mutant for _, mutant in sorted(by_area[area], key=lambda pair: pair[0])]
        # More than wanted: not all of them compile, or change anything.
        share = max(round(num * len(all_of_it) / total), num // 20)
        drawn.append((all_of_it, share))
    return texts, drawn


def listed_as_same():
    """{(path, text of the line, mutation)} of checks/mutants.same: a fourth field says why."""
    rows = (ROOT / "checks" / "mutants.same").read_text().splitlines()
    return {tuple(row.split("\t")[:3]) for row in rows if row and not row.startswith("#")}


def place_of(mutant, source):
    line = source.splitlines()[mutant.line - 1].strip()
    return mutant.path, line, mutant.describe(source)


def key_of(mutant, source):
    return digest_of(mutant.path, mutant.start, mutant.end, mutant.text, source)[:20]


class Results:
    def __init__(self, key):
        self.path = WORK / "results.tsv"
        self.key = key
        self.lock = threading.Lock()
        self.done = {}
        self.killers = set()  # (path or function of a file, program and test)
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                fields = line.split("\t")
                if len(fields) == 6:
                    self.note(*fields)

    def note(self, mutant_key, verdict, by, key, path, function):
        self.done[mutant_key] = verdict, by, key
        if verdict == "killed":
            killer = by.rpartition(" ")[0]
            self.killers |= {(path, killer), (f"{path} {function}", killer)}

    def nearness(self, mutant, test):
        """0 where it has killed a mutant of the same function, 1 of the same file, 2 otherwise."""
        killer = f"{test['program']} {test['test']}"
        near = f"{mutant.path} {mutant.function}", mutant.path
        return next((i for i, place in enumerate(near) if (place, killer) in self.killers), len(near))

    def get(self, mutant, source):
        """A survivor counts as done for the same tests only."""
        verdict = self.done.get(key_of(mutant, source))
        return verdict if verdict is not None and (verdict[0] != "survived" or verdict[2] == self.key) else None

    def put(self, mutant, source, verdict, by):
        fields = key_of(mutant, source), verdict, by, self.key, mutant.path, mutant.function
        with self.lock:
            self.note(*fields)
            with open(self.path, "a", encoding="utf-8") as out:
                out.write("\t".join(fields) + "\n")


def hunt(seed, num, portion, jobs):
    bench = Bench(jobs)
    found = tests_map(jobs)
    results = Results(found["key"])
    texts, drawn = draw(seed, num)
    counts = {"killed": 0, "survived": 0, "same": 0, "refused": 0}
    listed = listed_as_same()
    survivors = []

    def one(mutant):
        source = texts[mutant.path]
        if place_of(mutant, source) in listed:
            return mutant, "same", ""
        done = results.get(mutant, source)
        if done is None:
            verdict, by = judge(bench, found, mutant, source, results.nearness)
            results.put(mutant, source, verdict, by)
            print(f"{verdict:8} {mutant.path}:{mutant.line} {mutant.describe(source)} [{by}]", flush=True)
        else:
            verdict, by = done[0], done[1]
        return mutant, verdict, by

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for all_of_it, share in drawn:
            at, counted = 0, 0
            while counted < share and at < len(all_of_it):
                batch = all_of_it[at : at + share - counted]
                mine = [m for i, m in enumerate(batch, at) if i % portion[1] == portion[0]]
                at += len(batch)
                verdicts = list(pool.map(one, mine))
                for mutant, verdict, by in verdicts:
                    counts[verdict] += 1
                    if verdict == "survived":
                        survivors.append((mutant, by))
                # Those of other portions are not known here; they count as if they compiled.
                counted += sum(v in ("killed", "survived") for _, v, _ in verdicts) + len(batch) - len(mine)
    return texts, counts, survivors


def report(seed, texts, counts, survivors):
    floor = number("FLOOR", 85)
    for mutant, by in sorted(survivors, key=lambda s: (s[0].path, s[0].line)):
        print(f"survivor {mutant.path}:{mutant.line} {mutant.describe(texts[mutant.path])} [{by}]")
    counted = counts["killed"] + counts["survived"]
    percent = 100 * counts["killed"] / counted if counted else 0
    print(
        f"check-mutants: {counts['killed']} of {counted} mutants killed ({percent:.1f} %, at least {floor}), "
        f"seed {seed}; "
        f"{counts['same']} changed nothing, {counts['refused']} do not compile"
    )
    return 0 if counted and percent >= floor else 1


# ---- of itself ----------------------------------------------------------------------------------------------------

SAMPLE = """/* a == b */
#define TWICE(x) ((x) + \\
                  (x))
static const int table[] = {1, 2};
static kvf_status f(struct s *s, size_t num) {
    size_t left = num * 2;
    if (s->num < left && !s->over) {
        (void)kvfi_fail(NULL, KVF_LIMIT, "%zu == 3 of them", num + 1);
        s->num = left;
        wake(s, 1000);
        return s->status;
    }
    (void)num;
    return KVF_OK;
}
"""

EXPECTED = {
    (6, "*", "/"),
    (6, "2", "(2 - 1)"),
    (7, "<", "<="),
    (7, "<", ">="),
    (7, "&&", "||"),
    (7, "s->num < left && !s->over", "!(s->num < left && !s->over)"),
    (9, "s->num = left;", ";"),
    (10, "1000", "(1000 / 2)"),
    (10, "wake(s, 1000);", ";"),
    (11, "return s->status;", "return 0;"),
    (14, "return KVF_OK;", "return 0;"),
}


def self_test():
    """What is made of a sample, and that each mutant of the tree is text with one change on the line it names."""
    made = {(m.line, SAMPLE[m.start : m.end], m.text) for m in mutants_of("sample.c", SAMPLE)}
    assert made == EXPECTED, made ^ EXPECTED
    assert function_at(SAMPLE, 9) == "f" and function_at(SAMPLE, 4) == ""
    total, areas = 0, set()
    for path, source in sources():
        for m in mutants_of(path, source):
            changed = m.apply(source)
            assert changed != source and changed.count("\n") == source.count("\n"), (path, m.line)
            assert source.count("\n", 0, m.start) + 1 in range(m.line, m.line + 20), (path, m.line)
            total += 1
        areas.add(path.split("/")[1])
    assert areas == set(AREAS), areas
    assert all(len(row) == 3 for row in listed_as_same())
    first = [[(m.path, m.start, m.text) for m in ms[:20]] for ms, _ in draw(1, 100)[1]]
    again = [[(m.path, m.start, m.text) for m in ms[:20]] for ms, _ in draw(1, 100)[1]]
    other = [[(m.path, m.start, m.text) for m in ms[:20]] for ms, _ in draw(2, 100)[1]]
    assert first == again and first != other
    print(f"mutants: {total} possible in {len(areas)} areas; the generator does what it should")
    return 0


def main():
    global TREE
    if sys.argv[1:] in (["--self-test"], ["--list"]):
        TREE = ROOT
    else:
        copy_tree()
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    if sys.argv[1:] == ["--list"]:
        for path, source in sources():
            for m in mutants_of(path, source):
                print(f"{m.path}:{m.line} {m.describe(source)}")
        return 0
    jobs = number("JOBS", max(1, (os.cpu_count() or 2) // 2))
    if sys.argv[1:] == ["--map"]:
        tests_map(jobs, anew=True)
        return 0
    if sys.argv[1:]:
        sys.exit(__doc__)
    index, _, of = (os.environ.get("PORTION") or "1/1").partition("/")
    portion = (int(index) - 1, int(of))
    seed = number("SEED", 1)
    return report(seed, *hunt(seed, number("MUTANTS", 200), portion, jobs))


if __name__ == "__main__":
    sys.exit(main())
