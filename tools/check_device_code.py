# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Compile every file of the GPU provider for real devices: by nvcc for NVIDIA's, by hipcc for AMD's.

Nothing is linked and nothing runs. Objects go to build/check-cuda and build/check-hip; ccache is
used where it is found. For CUDA what ptxas says of each kernel is read too: one without launch bounds
may be launched with 1024 threads, so it may use at most 64 registers; spills are listed.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WARNINGS = ["-Wall", "-Wextra", "-Wno-missing-field-initializers"]


def find_tool(name: str, variable: str, others: list[str]) -> str:
    for candidate in [os.environ.get(variable, ""), name, *others]:
        if candidate and shutil.which(candidate):
            return candidate
    sys.exit(f"{name} was not found: install it, or set {variable} to its path")


def cuda_include(nvcc: str) -> Path:
    """Return the folder of CUDA's headers; nvcc may be a script that calls another one."""
    command = [nvcc, "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull]
    text = subprocess.run(command, capture_output=True, text=True).stderr
    found = re.search(r'INCLUDES="-I(.*?)"', text)
    if not found:
        sys.exit(f"{nvcc} names no folder of headers:\n{text}")
    return Path(found[1].strip()).resolve()


def cudnn_flags(root: Path, cuda: Path) -> list[str]:
    """Return what compiles cuDNN in: headers of wheels below root, and those of CUDA."""
    folders = ["include", "nvidia/cudnn/include", "nvidia/cu13/include"]
    system = [str(root / folder) for folder in folders] + [str(cuda)]
    return ["-DORTRAIN_CUDNN_FRONTEND=1", *(f"-isystem{folder}" for folder in system)]


def cuda_commands(source: Path, target: Path, architectures: list[str]) -> list[str]:
    nvcc = find_tool("nvcc", "NVCC", ["/usr/local/cuda/bin/nvcc"])
    if source.suffix == ".cpp":
        include = cuda_include(nvcc)
        return [os.environ.get("CXX", "c++"), "-std=c++20", "-O2", "-fPIC", *WARNINGS, "-Werror",
                "-DORTRAIN_HAVE_GPU=1", f"-I{ROOT}", "-isystem", str(include),
                "-c", str(source), "-o", str(target)]  # fmt: skip
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    return [nvcc, "-std=c++20", "-O3", "--expt-relaxed-constexpr", *codes,
            "-Xcompiler=" + ",".join(["-fPIC", *WARNINGS]), "-Werror=all-warnings", "-Xptxas=-v",
            f"-I{ROOT}", "-c", str(source), "-o", str(target)]  # fmt: skip


def hip_commands(source: Path, target: Path, architectures: list[str]) -> list[str]:
    hipcc = find_tool("hipcc", "HIPCC", ["/opt/rocm/bin/hipcc"])
    codes = [f"--offload-arch={a}" for a in architectures]
    return [hipcc, *codes, "-std=c++20", "-O3", "-DNDEBUG", "-fPIC", *WARNINGS, "-Werror",
            "-x", "hip", f"-I{ROOT}", "-c", str(source), "-o", str(target)]  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """What ptxas says of one kernel on one architecture."""

    name: str  # mangled
    architecture: str
    registers: int
    shared_bytes: int
    spilled_bytes: int


_ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_BOUNDED = re.compile(r"__launch_bounds__\([^;{]*?\)\s+(\w+)\s*\(")
MOST_WITHOUT_BOUNDS = 65536 // 1024  # registers


def read_ptxas(text: str) -> tuple[list[Kernel], str]:
    """Return the kernels that ptxas tells of, and what is left of the text."""
    kernels, rest = [], []
    name = architecture = ""
    spilled = 0
    for line in text.splitlines():
        if found := _ENTRY.search(line):
            name, architecture, spilled = found[1], found[2], 0
        elif found := _SPILLS.search(line):
            spilled = int(found[1]) + int(found[2])
        elif name and (found := _USED.search(line)):
            shared = _SHARED.search(line)
            kernels.append(
                Kernel(name, architecture, int(found[1]), int(shared[1]) if shared else 0, spilled)
            )
            name = ""
        elif not line.startswith("ptxas info") and "Function properties for" not in line:
            rest.append(line)
    return kernels, "\n".join(rest)


def bounded_kernels() -> set[str]:
    """Return the names of kernels whose sources bound their launches."""
    files = [f for kind in ("cu", "cuh", "h") for f in ROOT.glob(f"ortrain/**/*.{kind}")]
    return {name for f in files for name in _BOUNDED.findall(f.read_text())}


def report_kernels(kernels: list[Kernel]) -> list[str]:
    """Print what kernels use; return what is wrong with them."""
    bounded = bounded_kernels()

    def has_bounds(kernel: Kernel) -> bool:
        # A mangled name holds the plain one behind its length.
        return any(f"{len(name)}{name}" in kernel.name for name in bounded)

    for kernel in sorted(kernels, key=lambda k: -k.spilled_bytes):
        if kernel.spilled_bytes:
            print(f"spills {kernel.spilled_bytes} bytes on {kernel.architecture}: {kernel.name}")
    if kernels:
        most = max(kernels, key=lambda k: k.shared_bytes)
        print(
            f"{len(kernels)} kernels; {sum(not has_bounds(k) for k in kernels)} without launch "
            f"bounds; most static shared memory {most.shared_bytes} bytes"
        )
    return [
        f"{k.registers} registers on {k.architecture} without launch bounds: {k.name}"
        for k in kernels
        if k.registers > MOST_WITHOUT_BOUNDS and not has_bounds(k)
    ]


def sources(platform: str) -> list[Path]:
    """Return what a build for the platform compiles of the provider."""
    device = [*ROOT.glob("ortrain/gpu/*.cu"), *ROOT.glob("ortrain/ops/*/*.cu")]
    host = [
        f
        for f in ROOT.glob("ortrain/gpu/*.cpp")
        if not f.stem.endswith(("_test", "_simulator")) and not f.stem.startswith("simulat")
    ]
    if platform == "cuda":
        return sorted(device) + sorted(host)
    return sorted(device)  # the host's files are the same for both


def compile_one(command: list[str], environment: dict[str, str]) -> tuple[bool, str]:
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode == 0, done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("platform", choices=["cuda", "hip"])
    parser.add_argument("--architectures", nargs="+", help="sm_80 and sm_90 as 80 90; gfx90a")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="files whose path holds this")
    given = parser.parse_args()
    architectures = given.architectures or (
        ["80", "90"] if given.platform == "cuda" else ["gfx90a"]
    )
    make = cuda_commands if given.platform == "cuda" else hip_commands
    # Where nvcc is installed too, hipcc would compile for NVIDIA.
    environment = {**os.environ, "HIP_PLATFORM": "amd"}
    launcher = [shutil.which("ccache")] if shutil.which("ccache") else []
    out = ROOT / "build" / f"check-{given.platform}"
    chosen = [f for f in sources(given.platform) if given.only in str(f.relative_to(ROOT))]
    start, failed = time.monotonic(), 0
    kernels: list[Kernel] = []
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        runs = {}
        for source in chosen:
            target = out / source.relative_to(ROOT).with_suffix(source.suffix + ".o")
            target.parent.mkdir(parents=True, exist_ok=True)
            command = [*launcher, *make(source, target, architectures)]
            runs[pool.submit(compile_one, command, environment)] = source
        for run in concurrent.futures.as_completed(runs):
            fine, text = run.result()
            failed += not fine
            if given.platform == "cuda":
                told, text = read_ptxas(text)
                kernels += told
            print(f"{'compiled' if fine else 'FAILED  '} {runs[run].relative_to(ROOT)}", flush=True)
            if text.strip():
                print(text, file=sys.stderr)
    print(
        f"{len(chosen) - failed} of {len(chosen)} files compile for {' '.join(architectures)} "
        f"in {time.monotonic() - start:.0f} s; nothing of it was run"
    )
    wrong = report_kernels(kernels)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if failed or wrong or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
