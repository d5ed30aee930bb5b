# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Run the fuzz targets, several at a time; print a table, and end with status 1 on a finding.

Needs ``cmake --preset fuzz`` and its build, which ``make fuzz`` makes. Inputs that reach code of
their own stay in ``build-fuzz/corpus/<target>`` for the next run; an input that shows a mistake lies
in ``build-fuzz/findings``, and the target goes on from there.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from run_tests import ROOT

BUILD = ROOT / "build-fuzz"
FINDINGS = BUILD / "findings"
TARGETS = ("onnx", "text", "checkpoint", "extension", "sizes")
# Read in Python: a program of its own.
GRAPH_CACHE = "graph_cache"
_WITH_WORDS = ("onnx", "text")
_MOST_BYTES = {"onnx": 4096, "text": 4096, "checkpoint": 16384, "extension": 256, "sizes": 128}
# One mistake can be met again and again: who mends the first sees the rest.
_MOST_FINDINGS = 20


@dataclasses.dataclass
class Outcome:
    executions: int = 0
    findings: int = 0
    ran: bool = True


def environment() -> dict[str, str]:
    """Return the environment in which an allocation beyond all memory is refused, not reported."""
    return {
        **os.environ,
        "ASAN_OPTIONS": "allocator_may_return_null=1:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",  # threads that wait for tiny kernels take most of the time
    }


def run_target(name: str, seconds: float, runs: int) -> Outcome:
    """Run a target of libFuzzer until its time or its executions are used up."""
    corpus = BUILD / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    seeds = [path for path in (ROOT / "fuzz/seeds" / name, BUILD / "seeds" / name) if path.is_dir()]
    outcome, end = Outcome(), time.monotonic() + seconds
    while outcome.findings < _MOST_FINDINGS:
        left = int(end - time.monotonic())
        runs_left = runs - outcome.executions if runs > 0 else -1
        if left <= 0 or runs_left == 0:
            break
        before = set(FINDINGS.glob(f"{name}-*"))
        command = [
            str(BUILD / f"ortrain_fuzz_{name}"),
            *map(str, [corpus, *seeds]),
            "-timeout=10",
            "-entropic=0",  # choosing by rare features takes nine tenths of the time of small inputs
            "-rss_limit_mb=2048",
            f"-max_len={_MOST_BYTES[name]}",
            f"-max_total_time={left}",
            f"-runs={runs_left}",
            f"-artifact_prefix={FINDINGS}/{name}-",
            "-print_final_stats=1",
            *([f"-dict={ROOT / 'fuzz/onnx.dict'}"] if name in _WITH_WORDS else []),
        ]
        log = BUILD / f"{name}.log"
        with log.open("w") as file:
            done = subprocess.run(command, stderr=file, env=environment(), check=False)
        text = log.read_text(errors="replace")
        count = re.findall(r"stat::number_of_executed_units:\s*(\d+)", text)
        outcome.executions += int(count[-1]) if count else 0
        if done.returncode == 0:
            break
        outcome.findings += 1
        kept = sorted(str(path) for path in set(FINDINGS.glob(f"{name}-*")) - before)
        print(f"{name}: finding {outcome.findings}: {' '.join(kept) or 'an input seen before'}")
        print("\n".join(text.splitlines()[-60:]), flush=True)
        if not count:
            break  # it could not begin
    return outcome


def run_graph_cache(seconds: float, runs: int) -> Outcome:
    """Run the program that reads kept graphs, where the extension is built."""
    if not list((ROOT / "python/ortrain").glob("_core*.so")):
        print(f"{GRAPH_CACHE}: not run, there is no extension; 'make build' makes it")
        return Outcome(ran=False)
    command = [sys.executable, str(ROOT / "fuzz/graph_cache.py"), f"--seconds={seconds}"]
    done = subprocess.run(
        [*command, f"--runs={runs}"], cwd=FINDINGS, capture_output=True, text=True, check=False
    )
    print(done.stderr, end="")
    found = re.search(r"(\d+) executions, \d+ taken, (\d+) findings", done.stdout)
    if found is None:
        return Outcome(0, 1)
    return Outcome(int(found[1]), int(found[2]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of each target")
    parser.add_argument("--runs", type=int, default=-1, help="at most, of each target; -1: any")
    parser.add_argument("--jobs", type=int, default=1, help="targets at a time")
    parser.add_argument("--targets", default="", help="comma-separated; all without it")
    options = parser.parse_args()
    every = (*TARGETS, GRAPH_CACHE)
    wanted = [name for name in options.targets.split(",") if name] or list(every)
    if unknown := set(wanted) - set(every):
        parser.error(
            f"there is no target {', '.join(sorted(unknown))}; there are {' '.join(every)}"
        )
    FINDINGS.mkdir(parents=True, exist_ok=True)
    subprocess.run([str(BUILD / "ortrain_fuzz_seeds"), str(BUILD / "seeds")], check=True)

    def outcome_of(name: str) -> Outcome:
        if name == GRAPH_CACHE:
            return run_graph_cache(options.seconds, options.runs)
        return run_target(name, options.seconds, options.runs)

    with ThreadPoolExecutor(max_workers=options.jobs) as threads:
        outcomes = dict(zip(wanted, threads.map(outcome_of, wanted), strict=True))
    print(f"{'target':<12} {'executions':>12} {'findings':>9}")
    for name, outcome in outcomes.items():
        executions = f"{outcome.executions:,}" if outcome.ran else "not run"
        print(f"{name:<12} {executions:>12} {outcome.findings:>9}")
    return int(any(outcome.findings for outcome in outcomes.values()))


if __name__ == "__main__":
    raise SystemExit(main())
