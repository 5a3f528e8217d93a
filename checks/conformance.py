# SPDX-License-Identifier: Apache-2.0
"""check-conformance: the conformance set (python/test/conformance.py) for the adapters of all engines, as a table.

A cell is "ok"; "refused" (the test shows it); "-" where the engine can't have the case; "skipped" where its test can't
run here; "missing" where it has no test; or "FAIL". The reasons are below the table. The exit status is 0 if no cell is
"FAIL" or "missing". Arguments or ADAPTERS name some adapters, such as "HF,SGLang". SHORT=1 skips the cases that
start more engines than two. Needs KVF_ENGINES (make setup-engines)."""

import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../python/test"))
import conformance
from conformance import ADAPTERS, CASES

TESTS = Path(conformance.__file__).parent
GOOD, BAD = ("ok", "refused", "-", "skipped"), ("FAIL", "missing")


def chosen():
    names = sys.argv[1:] or [name for name in os.environ.get("ADAPTERS", "").split(",") if name]
    unknown = set(names) - {adapter.name for adapter in ADAPTERS}
    if unknown:
        sys.exit(f"check-conformance: no adapter {', '.join(unknown)}; there are {', '.join(a.name for a in ADAPTERS)}")
    return [adapter for adapter in ADAPTERS if not names or adapter.name in names]


def names_of(adapter, case):
    """The names of a case's tests, without parameters."""
    return {f"test_conformance_{case}", *adapter.tests.get(case, "").split()}


def run(adapter):
    """Runs the tests of an adapter. Returns pytest's results: (name without parameters, outcome, reason)."""
    files = [str(TESTS / file) for file in adapter.files if (TESTS / file).exists()]
    if not files:
        return []
    names = sorted(set().union(*(names_of(adapter, case) for case in CASES)))
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-rs", f"--junit-xml={report.name}",
                   "-k", " or ".join(names), *files]  # fmt: skip
        subprocess.run(command, stdout=sys.stderr)
        return [result_of(case) for case in ElementTree.parse(report.name).iter("testcase")]


def result_of(element):
    name = re.sub(r"\[.*", "", element.get("name", ""))
    for child in element:
        if child.tag in ("failure", "error"):
            return name, "FAIL", (child.get("message") or "").splitlines()[0][:200]
        if child.tag == "skipped":
            return name, "skipped", child.get("message") or ""
    return name, "ok", ""


def cell_of(adapter, case, results):
    """What the table says of a case, and why."""
    if case in adapter.without:
        return "-", adapter.without[case]
    mine = [(outcome, why) for name, outcome, why in results if name in names_of(adapter, case)]
    modules = [(outcome, why) for name, outcome, why in results if outcome == "skipped" and "test_" not in name]
    for outcome in ("FAIL", "skipped"):
        reasons = [why for what, why in mine or modules if what == outcome]
        if reasons:
            return outcome, reasons[0]
    if not mine:
        return "missing", f"there is no test_conformance_{case} in {', '.join(adapter.files)}"
    return ("refused", adapter.refuses[case]) if case in adapter.refuses else ("ok", "")


def show(adapters, cells):
    width = max(map(len, CASES))
    print(" " * width + "".join(f"  {a.name:>14}" for a in adapters))
    for case in CASES:
        print(f"{case:{width}}" + "".join(f"  {cells[a.name][case][0]:>14}" for a in adapters))
    for adapter in adapters:
        for case, (outcome, why) in cells[adapter.name].items():
            if why:
                print(f"  {adapter.name}: {case}: {outcome}: {why}")


def main():
    adapters = chosen()
    cells = {}
    for adapter in adapters:
        results = run(adapter)
        cells[adapter.name] = {case: cell_of(adapter, case, results) for case in CASES}
    show(adapters, cells)
    outcomes = [outcome for of_adapter in cells.values() for outcome, _ in of_adapter.values()]
    counts = ", ".join(f"{outcomes.count(o)} {o}" for o in (*GOOD, *BAD) if outcomes.count(o))
    is_good = not any(outcome in BAD for outcome in outcomes) and "ok" in outcomes
    print(f"check-conformance: {'ok' if is_good else 'FAILED'}: {len(CASES)} cases, {len(adapters)} adapters: {counts}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
