# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Reading checkpoints: damaged ones are passed over, and that is said."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from ortrain import _core


def read_checkpoint(folder: Path, *, stacklevel: int = 2) -> Any:
    """Return the newest complete checkpoint of a folder, or the one that it is.

    Warns where newer ones are damaged.

    Args:
      folder: Of checkpoints, or of one.
      stacklevel: Of the warning, seen from the caller of this.

    Raises:
      FileError: None is complete.
    """
    checkpoint = _core.load_checkpoint(folder)
    tell_of_damage(checkpoint, stacklevel=stacklevel + 1)
    return checkpoint


def tell_of_damage(checkpoint: Any, *, stacklevel: int = 2) -> None:
    """Warn where newer checkpoints than this one are damaged."""
    if checkpoint.passed_over:
        warnings.warn(
            f"checkpoint '{checkpoint.path}' is loaded, since newer ones are damaged: "
            f"{'; '.join(checkpoint.passed_over)}",
            stacklevel=stacklevel + 1,
        )
