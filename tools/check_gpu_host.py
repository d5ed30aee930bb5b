# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Run the host's part of a build for CUDA where no GPU is, and hold what it does against the rules of the runtime.

    python tools/check_gpu_host.py BUILD --libraries ROOT [--seconds 300] [--only TEXT] [--models NAME,...]
        [--pytorch PYTHON]

BUILD is the folder of a build for CUDA, such as the wheel's; its objects are linked once more, with
tools/gpu_host in place of the CUDA runtime and of cuBLASLt. ROOT is a folder that `pip install
--target` filled with nvidia-cuda-nvrtc and nvidia-cuda-cuobjdump. Fused nodes are compiled by NVRTC.
Kernels do nothing, so no value is judged: what is, are launches (limits, registers, shared memory,
addresses among their arguments that are alive), captures, handles and frees. Runs

- the cases of all operators, and those of their gradients, each once;
- small models, trained until their steps are recorded, at several sizes, with a fault on the way;
  they are captured by the package of the tree, on the CPU;
- with --pytorch, an interpreter that has PyTorch for CUDA: modules on the device through PyTorch
  itself (tools/gpu_host/train_modules.py).
"""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Words of errors; of values that differ no message has any of them.
FAILURES = (
    "cuda",
    "CUDA",
    "NVRTC",
    "compiling",
    "internal error",
    "launching",
    "allocating",
    "recording",
)
# Of these programs something is not there: a driver for PyTorch's own products, values, packages.
INCOMPLETE = {
    "generated",
    "checkpointed",
    "twice_differentiated",
    "rounded_products",
    "one_process_group",
    "fused_optimizers",
    "lightning",
    "images_of_timm",
}
# Calls of which one fails in training small models, each time another one.
FAILING = (
    "cudaMalloc:3",
    "cudaMalloc:40",
    "cudaStreamEndCapture:2",
    "cudaGraphInstantiate:3",
    "cudaLaunchKernel:500",
)
MODELS = ("mlp", "encoder", "bert", "gpt2", "llama", "vit", "t5", "convnet")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one process.

    Attributes:
      title: What it was.
      status: Of its exit.
      broken: What broke a rule: "rule", "what", "where".
      counts: Of calls, by what they were.
      seconds: It took.
      printed: What it printed.
    """

    title: str
    status: int
    broken: list[dict[str, str]]
    counts: dict[str, int]
    seconds: float
    printed: str


def run_recorded(title: str, command: Sequence[str], environment: dict[str, str]) -> Outcome:
    """Run a program that is linked with the stand-in."""
    with tempfile.TemporaryDirectory(prefix="ortrain-host-") as folder:
        report = Path(folder) / "report"
        start = time.monotonic()
        done = subprocess.run(
            command,
            env={**environment, "ORTRAIN_STAND_IN_REPORT": str(report)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        seconds = time.monotonic() - start
        lines = report.read_text(encoding="utf-8").splitlines() if report.exists() else []
    broken: list[dict[str, str]] = []
    counts: dict[str, int] = {}
    for line in lines:
        read: dict[str, Any] = json.loads(line)
        if "rule" in read:
            broken.append(read)
        else:
            for what, times in read["counts"].items():
                counts[what] = counts.get(what, 0) + times
    return Outcome(title, done.returncode, broken, counts, seconds, done.stdout)


def extract_code(program: Path, folder: Path, cuobjdump: Path) -> None:
    """Write the device code in a program to files of its own."""
    subprocess.run(
        [cuobjdump, "-xelf", "sm_90", program], cwd=folder, check=True, stdout=subprocess.DEVNULL
    )


def write_models(names: Sequence[str], folder: Path) -> None:
    """Write models as ortrain_train_models reads them, captured with their losses."""
    sys.path.insert(0, str(ROOT / "python"))
    import torch

    from ortrain import ORTTrainer, optim
    from ortrain.capture.signature import CallSignature
    from ortrain.testing.models import CASES

    for name in names:
        case = CASES[name]
        torch.manual_seed(0)
        module = case.build()
        batches = []
        for size, length in (case.sample, case.other):
            call = CallSignature(module.forward).flatten((), case.batch(size, length, 0))
            batches.append(dict(zip(call.names, call.tensors, strict=True)))
        shapes = [(n, [f"{n}.{i}" for i in range(t.dim())]) for n, t in batches[0].items()]
        description = {"inputs": shapes, "outputs": [("loss", [], True)]}
        trainer = ORTTrainer(module, description, optim.SGDConfig())
        source, _ = trainer.engine.training_program(batches[0])
        sizes = [
            " ".join(",".join(map(str, t.shape)) or "-" for t in source.given(batch))
            for batch in batches
            if source.fits(batch)
        ]
        (folder / f"{name}.graph").write_text(source.graph.text(), encoding="utf-8")
        (folder / f"{name}.sizes").write_text("\n".join(sizes), encoding="utf-8")


def make_site(site: Path, core: Path) -> None:
    """Put the package of the tree there, with another extension module."""
    leave = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "python/ortrain", site / "ortrain", ignore=leave)
    shutil.copy(core, site / "ortrain")


def train_modules(
    command: Sequence[str], environment: dict[str, str], caching: bool
) -> tuple[Outcome, list[dict[str, Any]]]:
    """Run tools/gpu_host/train_modules.py; with caching addresses come again, else every tensor has a block of its own."""
    if not caching:
        environment = {**environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    outcome = run_recorded(f"modules, {'' if caching else 'not '}caching", command, environment)
    printed = outcome.printed.splitlines()
    return outcome, [json.loads(line) for line in printed if line.startswith('{"name"')]


def judge_programs(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return what is wrong with what train_modules.py printed."""
    return [
        f"{line['name']}: {line['wrong'] or line['not there']}"
        for line in lines
        if line["wrong"] or (line["not there"] and line["name"] not in INCOMPLETE)
    ]


def find_planted(program: Path, environment: dict[str, str]) -> bool:
    """Make each planted mistake, and tell of those that are not found."""
    listed = subprocess.run([program], capture_output=True, text=True, check=True, env=environment)
    mistakes = [line.split("\t") for line in listed.stdout.splitlines()]
    found = 0
    for name, expected in mistakes:
        broken = run_recorded(name, [str(program), name], environment).broken
        rule, _, words = expected.partition(": ")
        if any(each["rule"] == rule and words in each["what"] for each in broken) or (
            not broken and not expected
        ):
            found += 1
        else:
            print(f"planted: {name} gives {broken}, expected {expected or 'nothing'}")
    print(f"planted mistakes: {found} of {len(mistakes)} found, one of which is none")
    return found == len(mistakes)


def judge_cases(outcome: Outcome) -> list[str]:
    """Return what is wrong with a run of operators' cases beside broken rules: kernels do nothing, so values may differ."""
    wrong = []
    for line in outcome.printed.splitlines():
        read: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
        if read.get("left_out"):
            wrong.append(f"{read['left_out']} cases are left out: give it more --seconds")
        message = read.get("message", "")
        if "failed" in read and any(word in message for word in FAILURES):
            wrong.append(f"{read['case']}: {message[:300]}")
    return wrong


def judge_counts(outcome: Outcome, needed: Sequence[str]) -> list[str]:
    """Return which kinds of calls a program of ours did not make, and what it left behind."""
    wrong = [f"no {what}" for what in needed if not outcome.counts.get(what)]
    if outcome.counts.get("launches of others' kernels"):
        wrong.append("kernels of which nothing is known were launched")
    alive = ("streams alive", "events alive", "graphs alive", "recordings alive")
    return wrong + [f"{outcome.counts[what]} {what}" for what in alive if outcome.counts.get(what)]


def tell(outcome: Outcome, *, may_fail: bool = False) -> bool:
    """Print what came of a process; return whether all of it is right."""
    print(f"{outcome.title}: status {outcome.status}, {outcome.seconds:.0f} s, {outcome.counts}")
    for each in outcome.broken:
        print(f"  {each['rule']}: {each['what']}\n    at {each['where']}")
    if outcome.status != 0 and not may_fail:
        print(outcome.printed[-2000:])
    return outcome.status == 0 and not outcome.broken


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path)
    parser.add_argument("--libraries", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="for each of values, gradients"
    )
    parser.add_argument("--only", default="", help="cases whose name contains it")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--pytorch", help="an interpreter with PyTorch for CUDA")
    parser.add_argument("--programs", default="", help="with --pytorch: these alone, by commas")
    given = parser.parse_args()
    jobs = str(os.cpu_count() or 1)
    programs = [
        "ortrain_host_check_kernels",
        "ortrain_host_train_models",
        "ortrain_planted_mistakes",
    ]
    others = ["cublaslt_stand_in", "driver_stand_in"]
    if given.pytorch:
        others.append("ortrain_host_core")
    subprocess.run(
        ["cmake", "--build", given.build, "-j", jobs, "--target", *programs, *others],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    cuobjdump = next(given.libraries.resolve().rglob("cuobjdump"), None)
    if cuobjdump is None:
        sys.exit(f"{given.libraries} has no cuobjdump")
    cuobjdump.chmod(0o755)
    nvrtc = next(given.libraries.resolve().rglob("libnvrtc.so.13"))
    work = ROOT / "build/check-gpu-host"
    shutil.rmtree(work, ignore_errors=True)
    (work / "code").mkdir(parents=True)
    (work / "models").mkdir()
    stand_ins = (given.build / "gpu_host").resolve()
    for program in (programs[0], programs[2]):
        extract_code((given.build / program).resolve(), work / "code", cuobjdump)
    write_models(given.models.split(","), work / "models")
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": f"{stand_ins}:{nvrtc.parent}",
        "ORTRAIN_STAND_IN_CUBINS": str(work / "code"),
        "ORTRAIN_KERNEL_CACHE_DIR": str(work / "kernels"),
        "ORTRAIN_CUDNN": "off",
    }
    planted = find_planted(given.build / programs[2], environment)
    check = str(given.build / programs[0])
    outcomes = []
    for what in ("values", "gradients"):
        command = [check, what, "--seconds", str(given.seconds)]
        if given.only:
            command += ["--only", given.only]
        outcomes.append(run_recorded(f"operators' {what}", command, environment))
    train = [str(given.build / programs[1]), str(work / "models")]
    outcomes.append(run_recorded("models", train, environment))
    right = [planted, *map(tell, outcomes)]
    wrong = [text for outcome in outcomes[:2] for text in judge_cases(outcome)]
    calls = ["launches", "compiled libraries", "calls of libraries"]
    recordings = ["captures", "recordings", "launches of recordings"]
    for outcome, needed in zip(outcomes, (calls, calls, calls + recordings), strict=True):
        wrong += judge_counts(outcome, needed)
    for call in FAILING:
        failed = run_recorded(
            f"models, where {call} fails", train, {**environment, "ORTRAIN_STAND_IN_FAIL": call}
        )
        tell(failed, may_fail=True)
        wrong += [f"{failed.title}: {each['rule']}" for each in failed.broken]
        if failed.status not in (0, 1):
            wrong.append(f"{failed.title}: status {failed.status}")
    if given.pytorch:
        make_site(work / "site", stand_ins / "_core.abi3.so")
        environment |= {
            "LD_PRELOAD": str(stand_ins / "libcudart.so.13"),
            "ORTRAIN_STAND_IN_CUBLASLT": str(stand_ins / "libcublasLt.so.13"),
            "PYTHONPATH": f"{work / 'site'}:{ROOT}",
        }
        names = given.programs.split(",") if given.programs else []
        command = [given.pytorch, str(ROOT / "tools/gpu_host/train_modules.py"), *names]
        for caching in (False, True):
            modules, lines = train_modules(command, environment, caching)
            right.append(tell(modules))
            wrong += judge_programs(lines)
            missing = [line["name"] for line in lines if line["not there"]]
            print(f"  {len(lines)} programs, something is not there for: {', '.join(missing)}")
    for text in wrong:
        print(f"  {text}")
    right.append(not wrong)
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
