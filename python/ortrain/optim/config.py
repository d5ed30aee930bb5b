# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Optimizers of ORTTrainer: which rule, with which numbers, for which parameters."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ortrain.errors import ArgumentTypeError, ArgumentValueError

Params = Sequence[Mapping[str, Any]]
Numbers = dict[str, Any]


class _OptimizerConfig:
    """An optimizer's rule and numbers.

    Args:
      name: The rule: SGDOptimizer, AdamOptimizer, LambOptimizer or AdagradOptimizer; numbers that ``defaults`` lacks are those
        of the rule's own class.
      params: Groups of parameters by name, as ``{"params": ["fc.weight"], "lambda_coef": 0.0}``;
        what a group does not say, and parameters in no group, are as in ``defaults``. ``lr`` of a
        group keeps its ratio to the common one when that changes.
      defaults: Numbers of all parameters, ``lr`` among them.

    Raises:
      ArgumentTypeError: An argument has another type.
      ArgumentValueError: There is no such rule, a number is out of range, a group has an unknown number, or names no parameter.

    Attributes:
      lr: The learning rate; schedules start from it.
      params: The groups, with all numbers.
    """

    # Name of a number -> of the attribute of the engine's operator.
    _attributes: ClassVar[dict[str, str]] = {}
    _step: ClassVar[str] = ""
    _at_least_zero: ClassVar[frozenset[str]] = frozenset(
        {"lr", "lambda_coef", "epsilon", "weight_decay", "momentum", "lr_decay", "max_norm_clip"}
    )

    def __init__(self, name: str, params: Params, defaults: Numbers) -> None:
        if not isinstance(name, str):
            raise ArgumentTypeError("name must be a string")
        if not isinstance(defaults, dict):
            raise ArgumentTypeError("defaults must be a dict")
        if "lr" not in defaults:
            raise ArgumentValueError("defaults must contain 'lr'")
        if isinstance(params, (str, bytes)) or not isinstance(params, Sequence):
            raise ArgumentTypeError("params must be a list of dicts")
        if type(self) is _OptimizerConfig and name not in _rules():
            raise ArgumentValueError(f"name is '{name}'; there are {', '.join(sorted(_rules()))}")
        self._check(defaults)
        self.name = name
        self.lr = float(defaults["lr"])
        self.defaults = defaults
        self.params = [{**defaults, **self._group(group)} for group in params]

    def __getattr__(self, name: str) -> Any:
        # The numbers of all parameters are attributes; they are not changed by being set.
        if name in self.__dict__.get("defaults", ()):
            return self.defaults[name]
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "lr" and name in self.__dict__.get("defaults", ()):
            raise AttributeError(f"{name} is decided when a {type(self).__name__} is made")
        super().__setattr__(name, value)

    def _group(self, group: Mapping[str, Any]) -> Numbers:
        if not isinstance(group, Mapping) or "params" not in group:
            raise ArgumentValueError(
                "each of params must be a dict with 'params', the names of parameters"
            )
        if "lambda" in group and "lambda_coef" in self.defaults:
            if "lambda_coef" in group:
                raise ArgumentValueError(
                    "a group has 'lambda' and 'lambda_coef', which are one number"
                )
            group = {"lambda_coef" if k == "lambda" else k: v for k, v in group.items()}
        names = group["params"]
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ArgumentTypeError("'params' of a group must be a list of names")
        unknown = sorted(set(group) - {"params"} - set(self.defaults))
        if unknown:
            raise ArgumentValueError(
                f"a group has {', '.join(map(repr, unknown))}; {type(self).__name__} knows "
                f"{', '.join(sorted(self.defaults))}"
            )
        self._check({**self.defaults, **group})
        lr = self.defaults["lr"]
        if lr == 0 and group.get("lr", lr) != lr:
            raise ArgumentValueError(
                "a group has an lr of its own, so the common one must not be 0"
            )
        return {**group, "params": list(names)}

    def _check(self, numbers: Mapping[str, Any]) -> None:
        for key, value in numbers.items():
            if key not in self._at_least_zero:
                continue
            if not isinstance(value, (int, float)):
                raise ArgumentTypeError(f"{key} is {value!r}, expected a number")
            if not value >= 0:
                raise ArgumentValueError(f"{key} is {value}, expected 0 or more")
        for key in ("alpha", "beta"):
            if key in numbers and not 0 <= numbers[key] < 1:
                raise ArgumentValueError(f"{key} is {numbers[key]}, expected 0 to 1")

    # --- for the engine

    def _engine_attributes(self, numbers: Mapping[str, Any]) -> Numbers:
        result: Numbers = {}
        for name, attribute in self._attributes.items():
            if name in numbers:
                value = numbers[name]
                result[attribute] = int(value) if isinstance(value, bool) else value
        return result

    def engine_options(self) -> Numbers:
        """Return the rule as the engine takes it.

        Raises:
          ArgumentValueError: The rule does not know one of the numbers.
        """
        if type(self) is _OptimizerConfig:
            rule = _rules()[self.name]
            try:
                return rule(self.params, **self.defaults).engine_options()
            except TypeError as error:
                known = ", ".join(sorted(rule().defaults))
                raise ArgumentValueError(f"defaults: {rule.__name__} knows {known}") from error
        groups = []
        for group in map(self._group, self.params):  # which the program may have changed
            numbers = {**self.defaults, **group}
            if numbers.get("max_norm_clip") != self.defaults.get("max_norm_clip"):
                raise ArgumentValueError(
                    "max_norm_clip is for all gradients together, not for a group"
                )
            lr = self.defaults["lr"]
            factor = 1.0 if numbers["lr"] == lr else numbers["lr"] / lr
            attributes = self._engine_attributes(numbers)
            groups.append(
                {"params": group["params"], "attributes": attributes, "rate_factor": factor}
            )
        return {
            "step": self._step,
            "attributes": self._engine_attributes(self.defaults),
            "groups": groups,
            "max_norm": float(self.defaults.get("max_norm_clip", 0.0)),
        }


class SGDConfig(_OptimizerConfig):
    """Gradient descent as torch.optim.SGD.

    Args:
      params: Groups of parameters.
      lr: Learning rate.
      momentum: Decay of the momentum buffer; 0 keeps none.
      dampening: Share of the gradient that does not enter the buffer after the first step.
      weight_decay: L2 penalty.
      nesterov: Nesterov's momentum; needs a momentum and no dampening.
    """

    _step = "SgdStep"
    _attributes = {n: n for n in ("momentum", "dampening", "weight_decay", "nesterov")}

    def __init__(
        self,
        params: Params = (),
        lr: float = 0.001,
        *,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ArgumentValueError("Nesterov momentum requires a momentum and zero dampening")
        defaults: Numbers = {
            "lr": lr,
            "momentum": float(momentum),
            "dampening": float(dampening),
            "weight_decay": float(weight_decay),
            "nesterov": nesterov,
        }
        super().__init__("SGDOptimizer", params, defaults)


# What Adam and LAMB share.
_MOMENTS = {
    "alpha": "beta1",
    "beta": "beta2",
    "lambda_coef": "weight_decay",
    "epsilon": "epsilon",
    "do_bias_correction": "bias_correction",
}


class AdamConfig(_OptimizerConfig):
    """Adam and AdamW.

    Args:
      params: Groups of parameters.
      lr: Learning rate.
      alpha: Decay of the average of gradients.
      beta: Decay of the average of their squares.
      lambda_coef: Weight decay.
      epsilon: Added to the divisor.
      max_norm_clip: Norm that all gradients together are clipped to, where the trainer clips.
      do_bias_correction: Correct the averages for their start at zero.
      weight_decay_mode: How parameters decay.
    """

    class DecayMode(enum.IntEnum):
        """BEFORE_WEIGHT_UPDATE is torch.optim.AdamW, AFTER_WEIGHT_UPDATE the former AdamW of Hugging
        Face, L2_PENALTY torch.optim.Adam.
        """

        BEFORE_WEIGHT_UPDATE = 0
        AFTER_WEIGHT_UPDATE = 1
        L2_PENALTY = 2

    _step = "AdamStep"
    _attributes = {
        **_MOMENTS,
        "weight_decay_mode": "decay_mode",
    }
    _MODES = ("decoupled", "after", "l2")

    def __init__(
        self,
        params: Params = (),
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        epsilon: float = 1e-8,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = True,
        weight_decay_mode: int = DecayMode.BEFORE_WEIGHT_UPDATE,
    ) -> None:
        defaults: Numbers = {
            "lr": lr,
            "alpha": float(alpha),
            "beta": float(beta),
            "lambda_coef": float(lambda_coef),
            "epsilon": float(epsilon),
            "max_norm_clip": float(max_norm_clip),
            "do_bias_correction": bool(do_bias_correction),
            "weight_decay_mode": self.DecayMode(weight_decay_mode),
        }
        super().__init__("AdamOptimizer", params, defaults)

    def _engine_attributes(self, numbers: Mapping[str, Any]) -> Numbers:
        result = super()._engine_attributes(numbers)
        result["decay_mode"] = self._MODES[self.DecayMode(numbers["weight_decay_mode"])]
        return result


class LambConfig(_OptimizerConfig):
    """LAMB (You et al. 2020).

    Args:
      params: Groups of parameters.
      lr: Learning rate.
      alpha: Decay of the average of gradients.
      beta: Decay of the average of their squares.
      lambda_coef: Weight decay.
      ratio_min: Lower bound of the ratio of a tensor's norm to that of its update.
      ratio_max: Upper bound of it.
      epsilon: Added to the divisor.
      max_norm_clip: Norm that all gradients together are clipped to, where the trainer clips.
      do_bias_correction: Correct the averages for their start at zero.
    """

    _step = "LambStep"
    _attributes = {
        **_MOMENTS,
        "ratio_min": "ratio_min",
        "ratio_max": "ratio_max",
    }

    def __init__(
        self,
        params: Params = (),
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        ratio_min: float = -math.inf,
        ratio_max: float = math.inf,
        epsilon: float = 1e-6,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = False,
    ) -> None:
        if not ratio_min <= ratio_max:
            raise ArgumentValueError(f"ratio_min {ratio_min} is greater than ratio_max {ratio_max}")
        defaults: Numbers = {
            "lr": lr,
            "alpha": float(alpha),
            "beta": float(beta),
            "lambda_coef": float(lambda_coef),
            "ratio_min": float(ratio_min),
            "ratio_max": float(ratio_max),
            "epsilon": float(epsilon),
            "max_norm_clip": float(max_norm_clip),
            "do_bias_correction": bool(do_bias_correction),
        }
        super().__init__("LambOptimizer", params, defaults)


class AdagradConfig(_OptimizerConfig):
    """Adagrad as torch.optim.Adagrad.

    Args:
      params: Groups of parameters.
      lr: Learning rate.
      lr_decay: The rate of step t is lr / (1 + (t - 1) lr_decay).
      weight_decay: L2 penalty.
      epsilon: Added to the divisor.
    """

    _step = "AdagradStep"
    _attributes = {"lr_decay": "rate_decay", "weight_decay": "weight_decay", "epsilon": "epsilon"}

    def __init__(
        self,
        params: Params = (),
        lr: float = 0.01,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        epsilon: float = 1e-10,
    ) -> None:
        defaults: Numbers = {
            "lr": lr,
            "lr_decay": float(lr_decay),
            "weight_decay": float(weight_decay),
            "epsilon": float(epsilon),
        }
        super().__init__("AdagradOptimizer", params, defaults)


def _rules() -> dict[str, type[Any]]:
    """Return the classes that have the numbers of a rule, by its name."""
    return {rule().name: rule for rule in (SGDConfig, AdamConfig, LambConfig, AdagradConfig)}
