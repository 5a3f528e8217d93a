#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The list of docs/llama.md ("Every setting of llama.cpp") beside llama.h.

No setting or function that can change what a context computes or holds is missing, none is listed that llama.h no longer
has, and each is tested, or hooked by the shim, as the list says.

usage: settings_test.py LLAMA_H"""
import glob, os, re, sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "../..")
STRUCTS = ("llama_model_params", "llama_context_params")
# What a function takes that can change the state of a model, an adapter, a context or its memory.
STATE = re.compile(r"(?<!const )struct llama_(context|model|adapter_lora|batch_ext) ?\*|llama_memory_t|struct llama_(model|context)_params")
GLOBAL = re.compile(r"llama_\w*(_set_|attach|detach|backend|numa)\w*$")
VERDICTS = ("in the space", "numbers", "no influence", "refused", "followed", "reads", "makes")


def read(*path):
    with open(os.path.join(ROOT, *path)) as f:
        return f.read()


def settings_of(header):
    """Names of fields and functions, as the header has them."""
    text = re.sub(r"//[^\n]*", "", re.sub(r"/\*.*?\*/", "", header, flags=re.S))
    names = []
    for struct in STRUCTS:
        body = re.search(rf"struct {struct} \{{(.*?)\n    \}};", text, re.S).group(1)
        names += [re.search(r"(\w+)\s*$", field).group(1) for field in body.split(";") if field.strip()]
    text = text.replace("DEPRECATED(", "")
    functions = re.findall(r"LLAMA_API[^;{]*?\b(llama_\w+)\s*\(([^;]*?)\)\s*[,;]", text, re.S)
    return names + [name for name, args in functions if STATE.search(" ".join(args.split())) or GLOBAL.match(name)]


def table_of(page):
    """name -> verdict, of list items such as "- `name`, `name`: **verdict**; why"."""
    rows = {}
    section = page.split("## Every setting of llama.cpp", 1)[1].split("\n## ", 1)[0]
    for item in re.findall(r"^- (`.*?)(?=^- |^$|\Z)", section, re.S | re.M):
        names, verdict = re.fullmatch(r"(.*?): \*\*(.*?)\*\*.*", " ".join(item.split())).groups()
        for name in re.findall(r"`(\w+)`", names):
            if name in rows:
                fail(f"{name} is in the list twice")
            rows[name] = verdict
    return rows


failures = []


def fail(what):
    failures.append(what)


def main():
    with open(sys.argv[1]) as f:
        names = settings_of(f.read())
    rows = table_of(read("docs/llama.md"))
    tests = "".join(read(p) for p in glob.glob(f"{HERE}/*_test.c") + glob.glob(f"{HERE}/*_peer.c") + glob.glob(f"{HERE}/../server/*_test.py"))
    hooks = "".join(read(p) for p in glob.glob(f"{ROOT}/engines/llama/shim/*.c"))
    for name in names:
        if name not in rows:
            fail(f"{name}: new in llama.h; find out what it does to KV, and add it to the list and to identity_test.c")
    for name, verdict in rows.items():
        if name not in names:
            fail(f"{name} is in the list, and not in llama.h")
        elif verdict not in VERDICTS:
            fail(f"{name}: \"{verdict}\" is none of: {', '.join(VERDICTS)}")
        elif verdict in VERDICTS[:4] and not re.search(rf"\b{name}\b", tests):
            fail(f"{name} is \"{verdict}\", and no test shows it")
        elif verdict == "followed" and not re.search(rf"HOOK [^;]*?\b{name}\(", hooks):
            fail(f"{name} is \"followed\", and the shim has no hook for it")
    for what in failures:
        print(what)
    count = {v: sum(1 for x in rows.values() if x == v) for v in VERDICTS}
    print(f"{len(names)} settings and functions of llama.h, {len(failures)} wrong: " + ", ".join(f"{n} {v}" for v, n in count.items()))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
