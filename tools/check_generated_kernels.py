# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Compile generated kernels by NVRTC, which needs no GPU, and report how many failed.

    python tools/check_generated_kernels.py --nvrtc .../libnvrtc.so.13 \
        --printer build/ortrain_print_kernels [--arch sm_80,sm_90] [--threads 2]

The library is in the wheel nvidia-cuda-nvrtc; its neighbour libnvrtc-builtins has to lie beside it.
With --hiprtc (libamdhip64.so of ROCm 5) the same sources are compiled for AMD.
"""

import argparse
import ctypes
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


class Compiler:
    """NVRTC or hipRTC through ctypes; the functions differ in their prefix alone."""

    def __init__(self, library: str, prefix: str) -> None:
        # NVRTC opens it by name, and finds what is there already.
        for builtins in sorted(Path(library).parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(builtins))
        self._library = ctypes.CDLL(library)
        self._prefix = prefix
        self._function("GetErrorString").restype = ctypes.c_char_p

    def _function(self, name: str):
        return getattr(self._library, self._prefix + name)

    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._function("Version")(ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def compile(self, source: str, options: list[str]) -> tuple[int, str]:
        """Return the bytes of the code, and the log; no bytes if it failed."""
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        self._function("CreateProgram")(
            ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
        )
        words = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        result = self._function("CompileProgram")(program, len(options), words)
        self._function("GetProgramLogSize")(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value + 1)
        self._function("GetProgramLog")(program, log)
        length = 0
        if result == 0:
            kind = "CUBIN" if self._prefix == "nvrtc" else "Code"
            self._function(f"Get{kind}Size")(program, ctypes.byref(size))
            length = size.value
        self._function("DestroyProgram")(ctypes.byref(program))
        return length, log.value.decode(errors="replace")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvrtc", help="path of libnvrtc.so")
    parser.add_argument("--hiprtc", help="path of the library with hipRTC")
    parser.add_argument("--printer", required=True, help="path of ortrain_print_kernels")
    parser.add_argument("--arch", help="comma-separated; sm_80,sm_90 or gfx90a if not given")
    parser.add_argument("--rounds", type=int, default=2, help="random programs, 17 a round")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if (args.nvrtc is None) == (args.hiprtc is None):
        parser.error("give one of --nvrtc and --hiprtc")
    return args


def main() -> int:
    args = parse_args()
    prefix, library = ("nvrtc", args.nvrtc) if args.nvrtc else ("hiprtc", args.hiprtc)
    option = "--gpu-architecture=" if prefix == "nvrtc" else "--offload-arch="
    architectures = (args.arch or ("sm_80,sm_90" if prefix == "nvrtc" else "gfx90a")).split(",")
    compiler = Compiler(library, prefix)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([args.printer, folder, str(args.rounds)], check=True, capture_output=True)
        sources = {path.stem: path.read_text() for path in sorted(Path(folder).glob("*.cu"))}
        for architecture in architectures:
            options = [option + architecture, "-std=c++17"]
            options += (
                ["-default-device", "--fmad=false"]
                if prefix == "nvrtc"
                else ["-O3", "-ffp-contract=off"]
            )
            start = time.monotonic()

            def compile_one(name: str, options: list[str] = options) -> tuple[str, int, str]:
                return (name, *compiler.compile(sources[name], options))

            with ThreadPoolExecutor(args.threads) as pool:
                results = list(pool.map(compile_one, sources))
            seconds = time.monotonic() - start
            wrong = [(name, log) for name, size, log in results if size == 0]
            noisy = [name for name, size, log in results if size and log.strip()]
            print(
                f"{prefix} {compiler.version()} {architecture}: {len(results)} kernels, "
                f"{len(wrong)} failed, {len(noisy)} with warnings, {seconds:.1f} s, "
                f"{seconds / max(len(results), 1) * args.threads * 1000:.0f} ms each"
            )
            for name, log in wrong[:3]:
                print(f"--- {name}\n{log[:4000]}", file=sys.stderr)
            failed += len(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
