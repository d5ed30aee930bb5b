# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Fail when a file includes, or imports, a layer that it may not know. See HACKING.md."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Folder under ortrain/ -> folders it may include besides itself.
CPP = {
    "base": set(),
    "ir": {"base"},
    "plan": {"ir", "base"},
    "passes": {"ir", "base"},
    "autodiff": {"ir", "base"},
    "runtime": {"plan", "ir", "base"},
    "cpu": {"runtime", "plan", "ir", "base"},
    "gpu": {"runtime", "plan", "ir", "base"},
    "onednn": {"cpu", "base"},
    "training": {"runtime", "plan", "passes", "autodiff", "ir", "base"},
    "extension": {"cpu", "runtime", "plan", "ir", "base"},
    "capi": {"training", "extension", "cpu", "runtime", "plan", "passes", "autodiff", "ir", "base"},
    "testing": {"runtime", "plan", "passes", "autodiff", "ir", "base", "cpu"},
}
# Files under ortrain/ops, by suffix; the layer is spelled ops:<kind>.
OPS = {
    "ops:rule": {"ops", "autodiff", "ir", "base"},
    "ops:_cpu": {"ops", "cpu", "runtime", "plan", "ir", "base"},
    "ops:_gpu": {"ops", "gpu", "runtime", "plan", "ir", "base"},
    "ops:_impl": {"ops", "cpu", "runtime", "plan", "ir", "base"},
    "ops:_cases": {"ops", "testing", "runtime", "ir", "base"},
}
# Headers of other projects that only these folders see.
FENCED = {"nlohmann/": ("training/",), "xxhash.h": ("training/",)}
FENCED |= {"hwy/": ("cpu/",), "dnnl": ("onednn/",), "onnx/onnx-ml.pb.h": ("ir/onnx_",)}
FENCED |= {"cuda": ("gpu/",), "hip/": ("gpu/",), "cudnn_frontend": ("gpu/cudnn_frontend",)}
FENCED |= {"nanobind/": ("../python/src/",), "Python.h": ("../python/src/",)}
# Module under python/ortrain -> modules that it may not import at any level.
PYTHON = {
    "launchers": {"*"},
    "logs": {"*"},
    "progress": {"module", "capture", "engine", "trainer", "hf", "tools", "optim", "distributed"},
    "capture": {"module", "trainer", "hf", "tools", "optim", "distributed"},
    "module": {"trainer", "hf", "tools", "distributed"},
}
# Modules that import nothing of the package, and that all of it may import.
LOWEST = {"launchers"}
INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]', re.M)
IMPORT = re.compile(
    r"^\s*(?:from|import)\s+ortrain\.(\w+)|^\s*from\s+ortrain\s+import\s+(\w+)", re.M
)


def layer_of(path: str, rule_headers: set[str]) -> str:
    folder, _, rest = path.partition("/")
    if folder != "ops":
        return folder
    if rest.endswith((".cu", ".cuh")):
        return "ops:_gpu"
    suffix = re.search(r"_(cpu|impl|cases)\.\w+$", rest)
    if suffix:
        return f"ops:{suffix.group(0).split('.')[0]}"
    return "ops:rule" if rest.endswith(".cpp") or path in rule_headers else "ops:_cpu"


def headers_of_rules(root: Path) -> set[str]:
    """Return the headers below ops that a rule (ops/*/<stem>.cpp) includes, also through others."""
    files = [f for f in (root / "ortrain/ops").rglob("*.cpp") if is_rule(f)]
    found: set[str] = set()
    while files:
        for header in INCLUDE.findall(files.pop().read_text(encoding="utf-8")):
            name = header.removeprefix("ortrain/")
            if name.startswith("ops/") and name not in found and (root / header).exists():
                found.add(name)
                files.append(root / header)
    return found


def is_rule(path: Path) -> bool:
    return not path.stem.endswith(("_cpu", "_impl", "_cases", "_test"))


def cpp_errors(root: Path) -> list[str]:
    """Return one line per forbidden #include below root/ortrain."""
    errors, allowed, rule_headers = [], {**CPP, **OPS}, headers_of_rules(root)
    for path in sorted((root / "ortrain").rglob("*")):
        if path.suffix not in (".h", ".cpp", ".cu", ".cuh") or path.stem.endswith("_test"):
            continue
        name = path.relative_to(root / "ortrain").as_posix()
        text = path.read_text(encoding="utf-8")
        layer = layer_of(name, rule_headers)
        # Headers of kernels are the CPU's, or a GPU's where they see its folder.
        if layer == "ops:_cpu" and path.suffix == ".h" and '"ortrain/gpu/' in text:
            layer = "ops:_gpu"
        if layer not in allowed:
            errors.append(f"ortrain/{name}: the folder '{layer}' has no row in check_layers.py")
            continue
        for header in INCLUDE.findall(text):
            target = header.split("/")[1] if header.startswith("ortrain/") else None
            if target and target != layer and target not in allowed[layer]:
                errors.append(f"ortrain/{name}: {layer} may not include {header}")
            for fence, inside in FENCED.items():
                if header.startswith(fence) and not name.startswith(inside):
                    errors.append(f"ortrain/{name}: only {inside[0]} may include {header}")
    return errors


def python_errors(root: Path) -> list[str]:
    """Return one line per forbidden import below root/python/ortrain."""
    errors, package = [], root / "python" / "ortrain"
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).parts[0].removesuffix(".py")
        forbidden = PYTHON.get(module, set())
        for names in IMPORT.findall(path.read_text(encoding="utf-8")):
            target = names[0] or names[1]
            if target == module or target in LOWEST:
                continue
            if target in forbidden or "*" in forbidden:
                errors.append(f"{path.relative_to(root)}: {module} may not import ortrain.{target}")
    return errors


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    errors = cpp_errors(root) + python_errors(root)
    print("\n".join(errors), end="\n" if errors else "", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
