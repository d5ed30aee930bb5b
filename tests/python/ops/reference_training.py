# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps as torch.optim makes them; where it has none, by their formulas in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.python.ops.registry import reference

Arrays = list[np.ndarray]
# Parameter, gradient and states of one tensor, rate, step -> parameter and states.
Update = Callable[[Arrays, float, int], Arrays]


def _step(inputs: list[Any], update: Update, states: int) -> Arrays:
    rate, step, factor, skip = inputs[:4]
    tensors = [np.array(x, dtype=np.float64) for x in inputs[4:]]
    count = len(tensors) // (2 + states)
    kinds = [tensors[k * count : (k + 1) * count] for k in range(2 + states)]
    results: list[Arrays] = []
    for group in zip(*kinds, strict=True):
        param, grad, *kept = group
        if skip is not None and skip:
            results.append([param, *kept])
            continue
        scaled = grad * (1.0 if factor is None else float(factor))
        results.append(update([param, scaled, *kept], float(rate), int(step)))
    return [result[kind] for kind in range(1 + states) for result in results]


def _by_torch(
    make: Callable[..., torch.optim.Optimizer], names: tuple[str, ...], counts: bool
) -> Update:
    """Return an update that loads the states into an optimizer of PyTorch and steps once."""

    def update(arrays: Arrays, rate: float, step: int) -> Arrays:
        param, grad, *states = (torch.tensor(a) for a in arrays)
        param.requires_grad_()
        optimizer = make([param], lr=rate)
        # A buffer is made by the first step.
        held = (
            {}
            if names == ("momentum_buffer",) and step == 1
            else dict(zip(names, states, strict=True))
        )
        if counts:
            held["step"] = torch.tensor(float(step - 1))
        optimizer.state[param] = held
        param.grad = grad
        optimizer.step()
        after = optimizer.state[param]
        return [param.detach().numpy(), *(after[name].numpy() for name in names)]

    return update


@reference("ortrain::SgdStep")
def sgd_step(inputs: list[Any], attrs: dict) -> Arrays:
    momentum = attrs.get("momentum", 0.0)

    def make(params: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            params,
            lr,
            momentum=momentum,
            dampening=attrs.get("dampening", 0.0),
            weight_decay=attrs.get("weight_decay", 0.0),
            nesterov=bool(attrs.get("nesterov", 0)),
        )

    names = ("momentum_buffer",) if momentum else ()
    return _step(inputs, _by_torch(make, names, counts=False), len(names))


@reference("ortrain::AdamStep")
def adam_step(inputs: list[Any], attrs: dict) -> Arrays:
    mode, corrected = attrs.get("decay_mode", "decoupled"), attrs.get("bias_correction", 1)
    decay, epsilon = attrs.get("weight_decay", 0.0), attrs.get("epsilon", 1e-8)
    betas = (attrs.get("beta1", 0.9), attrs.get("beta2", 0.999))
    cls = torch.optim.Adam if mode == "l2" else torch.optim.AdamW

    def make(params: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
        return cls(params, lr, betas=betas, eps=epsilon, weight_decay=decay)

    def by_formula(arrays: Arrays, rate: float, step: int) -> Arrays:
        param, grad, mean, square = arrays
        mean = betas[0] * mean + (1 - betas[0]) * grad
        square = betas[1] * square + (1 - betas[1]) * grad**2
        size = rate
        if corrected:
            size *= np.sqrt(1 - betas[1] ** step) / (1 - betas[0] ** step)
        param = param - size * mean / (np.sqrt(square) + epsilon)
        return [param - rate * decay * param, mean, square]

    if mode == "after" or not corrected:
        return _step(inputs, by_formula, 2)
    return _step(inputs, _by_torch(make, ("exp_avg", "exp_avg_sq"), counts=True), 2)


def _lamb_moments(arrays: Arrays, attrs: dict) -> Arrays:
    """Return the next mean and square of a gradient, second in ``arrays``."""
    beta1, beta2 = attrs.get("beta1", 0.9), attrs.get("beta2", 0.999)
    _, grad, mean, square = arrays
    return [beta1 * mean + (1 - beta1) * grad, beta2 * square + (1 - beta2) * grad**2]


def _lamb_direction(param: np.ndarray, moments: Arrays, step: int, attrs: dict) -> np.ndarray:
    m, v = moments
    if attrs.get("bias_correction", 1):
        m = m / (1 - attrs.get("beta1", 0.9) ** step)
        v = v / (1 - attrs.get("beta2", 0.999) ** step)
    return m / (np.sqrt(v) + attrs.get("epsilon", 1e-6)) + attrs.get("weight_decay", 0.0) * param


def _lamb_ratio(squares: np.ndarray, attrs: dict) -> float:
    low, high = attrs.get("ratio_min", -np.inf), attrs.get("ratio_max", np.inf)
    norms = np.sqrt(squares)
    return float(np.clip(norms[0] / norms[1], low, high)) if all(norms) else 1.0


@reference("ortrain::LambStep")
def lamb_step(inputs: list[Any], attrs: dict) -> Arrays:
    def update(arrays: Arrays, rate: float, step: int) -> Arrays:
        param, moments = arrays[0], _lamb_moments(arrays, attrs)
        direction = _lamb_direction(param, moments, step, attrs)
        squares = np.array([np.sum(param**2), np.sum(direction**2)])
        return [param - rate * _lamb_ratio(squares, attrs) * direction, *moments]

    return _step(inputs, update, 2)


@reference("ortrain::LambMoments")
def lamb_moments(inputs: list[Any], attrs: dict) -> Arrays:
    squares: Arrays = []

    def update(arrays: Arrays, rate: float, step: int) -> Arrays:
        del rate
        param, moments = arrays[0], _lamb_moments(arrays, attrs)
        direction = _lamb_direction(param, moments, step, attrs)
        squares.append(np.array([np.sum(param**2), np.sum(direction**2)]))
        return [param, *moments]

    results = _step(inputs, update, 2)
    count = len(results) // 3
    norms = np.array(squares) if squares else np.zeros((count, 2))
    return [norms, *results[count:]]


@reference("ortrain::LambUpdate")
def lamb_update(inputs: list[Any], attrs: dict) -> Arrays:
    rate, step, norms, skip = inputs[:4]
    tensors = [np.array(x, dtype=np.float64) for x in inputs[4:]]
    count = len(tensors) // 3
    params, means, squares = (tensors[k * count : (k + 1) * count] for k in range(3))
    if skip is not None and skip:
        return params
    result = []
    for param, mean, square, norm in zip(params, means, squares, np.array(norms), strict=True):
        direction = _lamb_direction(param, [mean, square], int(step), attrs)
        result.append(param - float(rate) * _lamb_ratio(norm, attrs) * direction)
    return result


@reference("ortrain::AdagradStep")
def adagrad_step(inputs: list[Any], attrs: dict) -> Arrays:
    def make(params: list[torch.Tensor], lr: float) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(
            params,
            lr,
            lr_decay=attrs.get("rate_decay", 0.0),
            weight_decay=attrs.get("weight_decay", 0.0),
            eps=attrs.get("epsilon", 1e-10),
        )

    return _step(inputs, _by_torch(make, ("sum",), counts=True), 1)


@reference("ortrain::GradientNorm")
def gradient_norm(inputs: list[Any], attrs: dict) -> Arrays:
    del attrs
    return [np.sqrt(np.sum([np.sum(np.asarray(x, np.float64) ** 2) for x in inputs]))]


@reference("ortrain::ClipFactor")
def clip_factor(inputs: list[Any], attrs: dict) -> Arrays:
    scale = float(inputs[1]) if len(inputs) > 1 else 1.0
    norm, limit = float(inputs[0]) / scale, attrs.get("max_norm", 0.0)
    clipped = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
    return [np.float64(clipped / scale), np.float64(norm), np.bool_(np.isfinite(norm))]
