# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Compare what ortrain/gpu declares of cuBLASLt with the real library and its header. No GPU needed.

    python tools/check_gpu_libraries.py nvidia_cublas-13.1.1.3-py3-none-manylinux_2_27_x86_64.whl

The argument is a wheel of nvidia-cublas (13) or nvidia-cublas-cu12, or the folder of one that is
installed or unpacked. With a wheel, the library is unpacked to a temporary folder.
"""

import argparse
import ctypes
import re
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ABI = ROOT / "ortrain/gpu/cublaslt_abi.h"
LOADER = ROOT / "ortrain/gpu/cublaslt.cpp"

# Our name of a constant -> the library's.
CONSTANTS = {
    "kSuccess": "CUBLAS_STATUS_SUCCESS",
    "kNotSupported": "CUBLAS_STATUS_NOT_SUPPORTED",
    "kCompute32F": "CUBLAS_COMPUTE_32F",
    "kCompute64F": "CUBLAS_COMPUTE_64F",
    "kComputeFastTF32": "CUBLAS_COMPUTE_32F_FAST_TF32",
    "kPlain": "CUBLAS_OP_N",
    "kTransposed": "CUBLAS_OP_T",
    "kTransA": "CUBLASLT_MATMUL_DESC_TRANSA",
    "kTransB": "CUBLASLT_MATMUL_DESC_TRANSB",
    "kEpilogue": "CUBLASLT_MATMUL_DESC_EPILOGUE",
    "kBiasPointer": "CUBLASLT_MATMUL_DESC_BIAS_POINTER",
    "kAuxPointer": "CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER",
    "kAuxLd": "CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD",
    "kAuxBatchStride": "CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE",
    "kBatchCount": "CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT",
    "kBatchStride": "CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET",
    "kMaxWorkspaceBytes": "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES",
    "kReductionSchemeMask": "CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK",
    "kMinAlignmentA": "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES",
    "kMinAlignmentB": "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES",
    "kMinAlignmentC": "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES",
    "kMinAlignmentD": "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES",
    "kEpilogueNone": "CUBLASLT_EPILOGUE_DEFAULT",
    "kEpilogueRelu": "CUBLASLT_EPILOGUE_RELU",
    "kEpilogueBias": "CUBLASLT_EPILOGUE_BIAS",
    "kEpilogueGelu": "CUBLASLT_EPILOGUE_GELU",
    "kEpilogueGeluGradient": "CUBLASLT_EPILOGUE_DGELU",
    "kReduceInComputeType": "CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE",
}
# Sums of our bits -> the library's name.
COMBINED = {
    ("kEpilogueGelu", "kEpilogueAux"): "CUBLASLT_EPILOGUE_GELU_AUX",
    ("kEpilogueGelu", "kEpilogueBias"): "CUBLASLT_EPILOGUE_GELU_BIAS",
    ("kEpilogueGelu", "kEpilogueAux", "kEpilogueBias"): "CUBLASLT_EPILOGUE_GELU_AUX_BIAS",
    ("kEpilogueRelu", "kEpilogueBias"): "CUBLASLT_EPILOGUE_RELU_BIAS",
    ("kEpilogueGeluGradient", "kEpilogueBiasGradient"): "CUBLASLT_EPILOGUE_DGELU_BGRAD",
}
ASSIGNMENT = re.compile(r"\b(\w+)\s*=\s*((?:\(?[\w ]+(?:\|[\w ]+)*\)?))\s*[,;}\n]")


def constants_of(*texts: str) -> dict[str, int]:
    """Return the values of `NAME = 1` and `NAME = (OTHER | 2)` in C source."""
    found: dict[str, int] = {}
    for text in texts:
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
        for name, expression in ASSIGNMENT.findall(text):
            value = 0
            for term in expression.strip("() ").split("|"):
                term = term.strip()
                known = int(term) if term.isdigit() else found.get(term)
                if known is None:
                    break
                value |= known
            else:
                found[name] = value
    return found


def only_file(folder: Path, pattern: str) -> Path:
    """Return the one file below the folder; exit with an error when there is none."""
    files = sorted(folder.rglob(pattern))
    if not files:
        sys.exit(f"{folder} has no {pattern}")
    return files[0]


def errors_of(folder: Path) -> list[str]:
    """Return one line per difference from the library unpacked in the folder."""
    errors = []
    ours = constants_of(ABI.read_text(encoding="utf-8"))
    header = only_file(folder, "cublasLt.h")
    theirs = constants_of(
        (header.parent / "cublas_api.h").read_text(encoding="utf-8"),
        header.read_text(encoding="utf-8"),
    )
    for names, theirs_name in [((own,), name) for own, name in CONSTANTS.items()] + list(
        COMBINED.items()
    ):
        missing = [name for name in names if name not in ours]
        if missing or theirs_name not in theirs:
            errors.append(f"{' | '.join(missing) or theirs_name} is not declared")
            continue
        value = 0
        for name in names:
            value |= ours[name]
        if value != theirs[theirs_name]:
            errors.append(f"{' | '.join(names)} is {value}, {theirs_name} is {theirs[theirs_name]}")
    library = ctypes.CDLL(str(only_file(folder, "libcublasLt.so.1[0-9]")))
    symbols = re.findall(r'"(cublasLt\w+)"', LOADER.read_text(encoding="utf-8"))
    if not symbols:
        errors.append(f"{LOADER.name} names no functions")
    errors += [f"the library has no {name}" for name in symbols if not hasattr(library, name)]
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    print(
        f"cuBLASLt {library.cublasLtGetVersion()}: {len(symbols)} functions, "
        f"{len(CONSTANTS) + len(COMBINED)} constants, {len(errors)} differences"
    )
    return errors


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path, help="wheel of nvidia-cublas, or a folder with it")
    path = parser.parse_args().library
    if path.is_dir():
        errors = errors_of(path)
    else:
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as wheel:
            wheel.extractall(
                folder, [n for n in wheel.namelist() if "/include/" in n or "libcublasLt.so" in n]
            )
            errors = errors_of(Path(folder))
    for line in errors:
        print(line, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
