# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Train two steps with an installed ortrain and compare with PyTorch; print what is installed as JSON.

Run by tools/check_wheel.py in the environment that the wheel was installed into; imports nothing but
that environment's packages.
"""

import copy
import json
import platform
import sys
from pathlib import Path

import torch

import ortrain
from ortrain import ORTModule, _core

_TOLERANCE = 1e-5  # of losses and gradients in float32, both near 1


def train(model: torch.nn.Module, reference: torch.nn.Module) -> tuple[list[float], list[float]]:
    """Train two steps on both sides.

    Returns:
        The losses of the model, and the largest difference of each loss and gradient from the
        reference's.
    """
    torch.manual_seed(1)
    x, labels = torch.randn(8, 12), torch.randint(0, 5, (8,))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    losses: list[float] = []
    differences: list[float] = []
    for _ in range(2):
        pair = []
        for side, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(side(x), labels)
            loss.backward()
            pair.append(loss.item())
        for a, b in zip(model.parameters(), reference.parameters(), strict=True):
            differences.append((a.grad - b.grad).abs().max().item())
        differences.append(abs(pair[0] - pair[1]))
        losses.append(pair[0])
        for optimizer in optimizers:
            optimizer.step()
    return losses, differences


def mapped_libraries() -> set[str]:
    """Return the paths of the shared libraries in this process."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {line.split()[-1] for line in lines if ".so" in line}


def main() -> int:
    package = Path(ortrain.__file__).resolve()
    if Path(sys.prefix).resolve() not in package.parents:
        print(f"ortrain was imported from {package}, not from {sys.prefix}", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    reference = torch.nn.Sequential(
        torch.nn.Linear(12, 16),
        torch.nn.LayerNorm(16),
        torch.nn.GELU(),
        torch.nn.Linear(16, 5),
    )
    model = ORTModule(copy.deepcopy(reference))
    losses, differences = train(model, reference)
    libraries = mapped_libraries()
    pools = sorted(name for name in libraries if "libgomp" in name)
    print(
        json.dumps(
            {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "ortrain": ortrain.__version__,
                "module": Path(_core.__file__).name,
                "losses": losses,
                "largest difference": max(differences),
                "OpenMP libraries": pools,
            }
        )
    )
    errors = []
    # The other way round NaN would pass.
    wrong = [d for d in differences if not d <= _TOLERANCE]
    if wrong:
        errors.append(f"losses or gradients differ from PyTorch's by {wrong}, above {_TOLERANCE}")
    if not losses[1] < losses[0]:
        errors.append(f"the loss does not fall: {losses}")
    if model.report().native_share != 1:
        errors.append(f"not all of the model ran on the engine: {model.report()}")
    if len(pools) != 1:
        errors.append(f"expected one OpenMP library in the process, found {pools}")
    errors += [f"{name} is loaded" for name in sorted(libraries) if "libhwy" in name]
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
