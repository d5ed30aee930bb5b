# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Results of a forward through which the gradient of another one goes, and that keep their gradient or have hooks.

To PyTorch all results of a graph come from one node: a gradient does not pass one on its way from another. Hooks would
see, and change, what comes from outside alone.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence

import torch

from ortrain.entry import Entry


class WatchedResults:
    """The results of one forward that want a gradient, as long as somebody holds them; views of them are not known.

    Args:
      entry: The captured graph.
      results: Those of the user.
    """

    def __init__(self, entry: Entry, results: Sequence[torch.Tensor]) -> None:
        self._entry = entry
        wanting = [i for i, yes in enumerate(entry.differentiable) if yes]
        self._results = {i: weakref.ref(results[i]) for i in wanting} if len(wanting) > 1 else {}

    def tell_lost_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Warn, once for each result, where a gradient will not pass a tensor on which somebody waits for it.

        Args:
          gradients: What comes in for each result.
        """
        for index, reference in self._results.items():
            result = reference()
            if result is None or not (result.retains_grad or result._backward_hooks):
                continue
            if index in self._entry.told_of_hooks:
                continue
            behind = self._entry.results_behind(index)
            other = next((other for other in behind if gradients[other] is not None), None)
            if other is None:
                continue
            outputs = [o["name"] for o in self._entry.captured.graph.outputs if o["role"] == "user"]
            text = (
                f"result '{outputs[other]}' is computed from '{outputs[index]}' inside of one graph, "
                "whose gradient passes neither hooks of that result nor its grad"
            )
            self._entry.told_of_hooks.add(index)
            text += "; call the module without ORTModule where they are needed"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
