# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's own server tests, run twice against a local model: by a plain llama-server, and with the shim and a store. Passes and failures must be
the same. The model is the first layers of the local one: fast, and its words are noise. Left out are files that need other models (drafts, LoRA, embeddings, images, the router) or whose tests judge the model's words; a
test of the others that fails without the shim because of this model must fail with it too. Sequences are unified in both
runs, since otherwise there is nothing for the shim to do. FILES names some of them."""
import os, shutil, subprocess, sys, xml.etree.ElementTree as xml
import lab, short_model

FILES = os.environ.get("FILES", "basic completion chat_completion compat_anthropic ctx_shift ignore_eos infill kv_keep_only_active "
                                "metrics security slot_save stream template tokenize").split()
CONFTEST = '''
import os, sys, types
import pytest
for name, attribute in (("wget", "download"), ("openai", "OpenAI")):
    # Neither is needed by what we run, but both are imported; who uses one all the same fails in both runs.
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
        return server
    return staticmethod(preset)


for name, method in list(vars(utils.ServerPreset).items()):
    if isinstance(method, staticmethod) and name != "load_all":
        setattr(utils.ServerPreset, name, local(method.__func__))


@pytest.fixture(autouse=True)
def stop_server_after_each_test():
    yield
    for server in set(utils.server_instances):
        server.stop()
'''


def wrapper(folder, name, command):
    path = os.path.join(folder, name)
    with open(path, "w") as f:
        f.write(f"#!/bin/sh\nexec {command} \"$@\"\n")
    os.chmod(path, 0o755)
    return path


def run(folder, name, command):
    """{test: outcome}"""
    report = os.path.join(folder, f"{name}.xml")
    env = {**os.environ, "LLAMA_SERVER_BIN_PATH": wrapper(folder, name, command), "PORT": str(lab.free_port()),
           "PYTHONDONTWRITEBYTECODE": "1", "KVF_MODEL": os.path.join(folder, "short.gguf"), "OMP_WAIT_POLICY": "passive", "LLAMA_CACHE": os.path.join(folder, "cache")}
    files = [f"unit/test_{f}.py" for f in FILES]
    with open(os.path.join(folder, f"{name}.log"), "w") as log:
        subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", f"--junitxml={report}", *files],
                       cwd=os.path.join(folder, "tests"), env=env, stdout=log, stderr=log)
    outcomes = {}
    for case in xml.parse(report).iter("testcase"):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = kinds.pop() if kinds else "passed"
    return outcomes


def count(outcomes):
    return ", ".join(f"{sum(1 for o in outcomes.values() if o == kind)} {kind}" for kind in sorted(set(outcomes.values())))


lab.need_all()
with lab.folder() as folder:
    source = os.path.join(os.path.dirname(os.path.dirname(lab.SERVER)), "share/server-tests")
    if not os.path.isdir(source):
        print(f"no server tests in {source}: they come with make setup", file=sys.stderr)
        sys.exit(77)
    shutil.copytree(source, os.path.join(folder, "tests"))
    with open(os.path.join(folder, "tests/conftest.py"), "w") as f:
        f.write(CONFTEST)
    short_model.shorten(lab.MODEL, os.path.join(folder, "short.gguf"), 2)
    runs = {}
    for name, command in (("plain", lab.SERVER),
                          ("shim", f"{lab.KVFERRY} exec --store file:{folder}/store --stats {folder}/stats.json -- {lab.SERVER}")):
        runs[name] = run(folder, name, command)
        print(f"{name}: {count(runs[name])}", flush=True)
    differ = [t for t in runs["plain"] if runs["plain"][t] != runs["shim"].get(t)]
    for test in differ:
        print(f"differs: {test}: {runs['plain'][test]} without, {runs['shim'].get(test)} with the shim")
    if os.environ.get("KEEP"):
        shutil.copytree(folder, os.environ["KEEP"], dirs_exist_ok=True)
    records = sum(len(f) for _, _, f in os.walk(os.path.join(folder, "store")))
    good = not differ and runs["plain"].keys() == runs["shim"].keys() and "passed" in runs["plain"].values() and records > 0
    print(f"check-upstream: {'ok' if good else 'FAILED'}: {len(runs['plain'])} of llama.cpp's server tests, without the shim "
          f"{count(runs['plain'])}; {len(differ)} differ with it; {records} files in its store")
    sys.exit(0 if good else 1)
