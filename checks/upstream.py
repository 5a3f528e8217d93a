# SPDX-License-Identifier: Apache-2.0
"""check-upstream: llama.cpp's own server tests, run against a local model.

They run on a plain llama-server, with the shim and an empty store, and again with what that has stored. Each test must
pass, or fail in the same line, with the shim as without. The model is the first layers of the local one: fast, and its
words are noise. Left out are files that need other models (drafts, LoRA, embeddings, images, the router), and files
that compute nothing (templates, security). A test that judges the words of upstream's model fails without the shim, and
must fail in the same place with it.

A test whose outcome differs runs twice more each way, since some depend on time. It counts if the shim twice has an
outcome that never occurs without it; flaky tests are reported. Sequences are unified in all runs, and batches are at
least as long as a block, because otherwise the shim has nothing to do. A test ends after LIMIT (60) seconds. FILES
names some of the files."""

import glob
import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as xml

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../test/server"))
import lab
import short_model

FILES = os.environ.get(
    "FILES",
    "basic completion chat_completion compat_anthropic ctx_shift ignore_eos infill kv_keep_only_active "
    "metrics slot_save stream tokenize",
).split()
LIMIT = int(os.environ.get("LIMIT", "60"))
CONFTEST = """
import os, signal, sys, types
import pytest
for name, attribute in (("wget", "download"), ("openai", "OpenAI")):
    # The tests that run here need neither, but import both. A test that uses one fails in both runs.
    module = types.ModuleType(name)
    setattr(module, attribute, None)
    sys.modules.setdefault(name, module)
import utils


def local(method):
    def preset():
        server = method()
        server.offline, server.model_hf_repo, server.model_hf_file = True, None, None
        server.model_file, server.kv_unified = os.environ["KVF_MODEL"], True
        server.server_port = int(os.environ["PORT"])
        server.n_batch = max(server.n_batch or 0, 64)
        return server
    return staticmethod(preset)


for name, method in list(vars(utils.ServerPreset).items()):
    if isinstance(method, staticmethod) and name != "load_all":
        setattr(utils.ServerPreset, name, local(method.__func__))


def too_long(*_):
    raise TimeoutError("the test takes too long")


@pytest.fixture(autouse=True)
def bounded():
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(int(os.environ["LIMIT"]))
    yield
    signal.alarm(0)
    for server in set(utils.server_instances):
        server.stop()
"""


def wrapper(folder, name, command):
    path = os.path.join(folder, name)
    with open(path, "w") as f:
        f.write(f'#!/bin/sh\nexec {command} "$@"\n')
    os.chmod(path, 0o755)
    return path


def outcome_of(case):
    """passed, skipped, or where it failed: of several lines the last one that names a file of upstream's."""
    for child in case:
        if child.tag in ("failure", "error"):
            places = re.findall(r"^(\S+\.py:\d+): ", child.text or "", re.M)
            return f"{child.tag} at {places[-1] if places else child.get('message')}"
        if child.tag == "skipped":
            return "skipped"
    return "passed"


def run(folder, name, command, tests):
    """{test: outcome}"""
    report, begin = os.path.join(folder, f"{name}.xml"), time.monotonic()
    env = {
        **os.environ,
        "LLAMA_SERVER_BIN_PATH": wrapper(folder, name, command),
        "PORT": str(lab.free_port()),
        "LIMIT": str(LIMIT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "KVF_MODEL": os.path.join(folder, "short.gguf"),
        "OMP_WAIT_POLICY": "passive",
        "LLAMA_CACHE": os.path.join(folder, "cache"),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "-o",
        "junit_family=xunit1",
        f"--junitxml={report}",
        *tests,
    ]
    with open(os.path.join(folder, f"{name}.log"), "w") as log:
        pytest = subprocess.Popen(
            command,
            cwd=os.path.join(folder, "tests"),
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        done = 0
        for line in pytest.stdout:
            log.write(line)
            done += bool(re.search(r"\[ *\d+%\]$", line.rstrip()))
            if done % 20 == 19 and line.rstrip().endswith("%]"):
                print(f"{name}: {line.rstrip()[-5:].strip(' []')} after {time.monotonic() - begin:.0f} s", flush=True)
        pytest.wait()
    return {f"{case.get('file')}::{case.get('name')}": outcome_of(case) for case in xml.parse(report).iter("testcase")}


def count(outcomes):
    kinds = [o.split()[0] for o in outcomes.values()]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))


def counted(folder, key):
    total = 0
    for path in glob.glob(os.path.join(folder, "stats", "*.json")):
        with open(path) as f:
            total += json.load(f)[key]
    return total


lab.need_all()
with lab.folder() as folder:
    source = os.path.join(os.path.dirname(os.path.dirname(lab.SERVER)), "share/server-tests")
    if not os.path.isdir(source):
        print(f"no server tests in {source}: they come with make setup", file=sys.stderr)
        sys.exit(77)
    shutil.copytree(source, os.path.join(folder, "tests"))
    os.mkdir(os.path.join(folder, "stats"))
    with open(os.path.join(folder, "tests/conftest.py"), "w") as f:
        f.write(CONFTEST)
    short_model.shorten(lab.MODEL, os.path.join(folder, "short.gguf"), 2)
    shim = f"{lab.KVFERRY} exec --store file:{folder}/store --block-tokens 64 "
    shim += f"--stats {folder}/stats/$$.json -- {lab.SERVER}"
    files = [f"unit/test_{f}.py" for f in FILES]
    runs = {}
    for name, command in (("plain", lab.SERVER), ("shim", shim), ("shim again", shim)):
        runs[name] = run(folder, name, command, files)
        print(f"{name}: {count(runs[name])}", flush=True)
    plain, shimmed = {t: [o] for t, o in runs["plain"].items()}, {t: [o] for t, o in runs["shim"].items()}
    for test, outcome in runs["shim again"].items():
        shimmed.setdefault(test, []).append(outcome)
    doubtful = [t for t in plain if any(o not in plain[t] for o in shimmed.get(t, ["not run"]))]
    for i in range(2 if doubtful else 0):
        for known, name, command in (
            (plain, f"plain, doubts {i + 1}", lab.SERVER),
            (shimmed, f"shim, doubts {i + 1}", shim),
        ):
            for test, outcome in run(folder, name, command, doubtful).items():
                known[test].append(outcome)
    for test in doubtful:
        print(f"doubtful: {test}: {', '.join(plain[test])} without, {', '.join(shimmed[test])} with the shim")
    differ = [t for t in doubtful if any(o not in plain[t] and shimmed[t].count(o) > 1 for o in shimmed[t])]
    if os.environ.get("KEEP"):
        shutil.copytree(folder, os.environ["KEEP"], dirs_exist_ok=True)
    loaded, written = counted(folder, "loaded_tokens"), counted(folder, "written_blocks")
    good = (
        not differ
        and plain.keys() == shimmed.keys()
        and "passed" in runs["plain"].values()
        and loaded > 0
        and written > 0
    )
    print(
        f"check-upstream: {'ok' if good else 'FAILED'}: {len(plain)} of llama.cpp's server tests, "
        f"without the shim {count(runs['plain'])}; "
        f"{len(differ)} differ with it ({len(doubtful) - len(differ)} flaky); {written} blocks were written and "
        f"{loaded} tokens loaded"
    )
    sys.exit(0 if good else 1)
