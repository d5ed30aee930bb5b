# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Let cuDNN make plans for devices that are not there, and tell which problems it has one for.

    python tools/check_cudnn_plans.py ROOT [--architectures 80 90] [--all]

ROOT is a folder that `pip install --target` filled with the wheels nvidia-cudnn-frontend,
nvidia-cudnn-cu13, nvidia-cuda-nvrtc and nvidia-cublas. Compiles ortrain/gpu/cudnn_frontend.cpp as a
build does, which needs CUDA's headers; where there is no driver, a stand-in for it takes the kernels
that cuDNN compiles. Nothing is run on a GPU. Plans are printed where --all is given, else what has
none.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from check_device_code import ROOT, WARNINGS, cuda_include, cudnn_flags, find_tool

SOURCES = [
    "ortrain/gpu/cudnn_frontend.cpp",
    "tools/print_cudnn_plans.cpp",
    "ortrain/base/dim.cpp",
    "ortrain/base/dtype.cpp",
    "ortrain/base/error.cpp",
    "ortrain/base/printable.cpp",
]


def run(command: list[str]) -> None:
    launcher = [shutil.which("ccache")] if shutil.which("ccache") else []
    done = subprocess.run([*launcher, *command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def compile_printer(headers: Path, out: Path) -> Path:
    cuda = cuda_include(find_tool("nvcc", "NVCC", ["/usr/local/cuda/bin/nvcc"]))
    compiler = os.environ.get("CXX", "c++")
    objects = []
    for source in SOURCES:
        target = out / (Path(source).stem + ".o")
        flags = cudnn_flags(headers, cuda) if "cudnn_frontend" in source else []
        run([compiler, "-std=c++20", "-O1", "-fPIC", *WARNINGS, "-Werror", f"-I{ROOT}", *flags,
             "-c", source, "-o", str(target)])  # fmt: skip
        objects.append(str(target))
    printer = out / "print_cudnn_plans"
    run([compiler, *objects, "-ldl", "-o", str(printer)])
    return printer


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--architectures", nargs="+", default=["80", "90"])
    parser.add_argument("--all", action="store_true", help="print plans too")
    given = parser.parse_args()
    root = given.root.resolve()
    library = root / "nvidia/cudnn/lib/libcudnn.so.9"
    for needed in (library, root / "nvidia/cu13/lib/libcublasLt.so.13"):
        if not needed.exists():
            sys.exit(f"{needed} is not there")
    out = ROOT / "build/check-cudnn"
    out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    printer = compile_printer(root, out)
    print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    folders = [library.parent, root / "nvidia/cu13/lib"]
    if not has_driver():
        driver = out / "driver/libcuda.so.1"
        driver.parent.mkdir(exist_ok=True)
        run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1",
             "tools/driver_stand_in.c", "-o", str(driver)])  # fmt: skip
        folders.append(driver.parent)
    paths = ":".join(map(str, folders)) + ":" + os.environ.get("LD_LIBRARY_PATH", "")
    environment = {**os.environ, "LD_LIBRARY_PATH": paths}
    status = 0
    for architecture in given.architectures:
        process = subprocess.Popen(
            [printer, library, architecture], env=environment, stdout=subprocess.PIPE, text=True
        )
        lines = 0
        for line in process.stdout:
            lines += 1
            if given.all or " MiB " not in line:
                print(line, end="", flush=True)
        # Problems without a plan end it with 1, a crash with another status.
        status = max(status, 0 if process.wait() == 0 else 1)
        if process.returncode not in (0, 1):
            print(f"sm_{architecture}  ended with {process.returncode} after {lines} lines")
    return status


if __name__ == "__main__":
    sys.exit(main())
