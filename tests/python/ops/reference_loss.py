# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Classification losses as PyTorch and its autograd compute them."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from tests.python.ops.registry import reference


def tensors(inputs: list[np.ndarray | None], count: int) -> list[torch.Tensor | None]:
    given = []
    for x in inputs:
        t = None if x is None else torch.from_numpy(np.array(x))
        given.append(t.double() if t is not None and t.is_floating_point() else t)
    return given + [None] * (count - len(given))


def class_axis(x: torch.Tensor) -> int:
    return 0 if x.dim() == 1 else 1


def cross_entropy_of(
    x: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor | None, attrs: dict, ignored: int
) -> torch.Tensor:
    return F.cross_entropy(
        x,
        labels.long(),
        weight,
        ignore_index=attrs.get("ignore_index", ignored),
        reduction=attrs.get("reduction", "mean"),
        label_smoothing=attrs.get("label_smoothing", 0.0),
    )


@reference("ortrain::CrossEntropy")
def cross_entropy(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    x, labels, weight = tensors(inputs, 3)
    logsumexp = torch.logsumexp(x, class_axis(x))
    logsumexp[labels == attrs.get("ignore_index", -100)] = 0.0
    return [cross_entropy_of(x, labels, weight, attrs, -100).numpy(), logsumexp.numpy()]


@reference("ortrain::CrossEntropyGrad")
def cross_entropy_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    dloss, x, labels, logsumexp, weight = tensors(inputs, 5)
    x = x.requires_grad_()
    loss = cross_entropy_of(x, labels, weight, attrs, -100)
    if logsumexp is None:
        return [torch.autograd.grad(loss, x, dloss)[0].numpy()]
    # Any number may stand for the log-sum-exp: softmax then is not normalized. The gradient is
    # linear in it, so autograd through log-probabilities that are made with it gives the truth.
    axis = class_axis(x)
    p = torch.exp(x.detach() - logsumexp.unsqueeze(axis))
    log_p = torch.zeros_like(p, requires_grad=True)
    classes = x.shape[axis]
    smoothing = attrs.get("label_smoothing", 0.0)
    ignored = attrs.get("ignore_index", -100)
    options = {"ignore_index": ignored, "reduction": attrs.get("reduction", "mean")}
    loss = (1 - smoothing) * F.nll_loss(log_p, labels.long(), weight, **options)
    if smoothing:
        w = torch.ones(classes, dtype=p.dtype) if weight is None else weight
        each = -(log_p.movedim(axis, -1) @ w) * smoothing / classes
        counts = labels != ignored
        each = each * counts
        if options["reduction"] == "mean":
            loss = loss + each.sum() / w[labels[counts].long()].sum()
        else:
            loss = loss + (each.sum() if options["reduction"] == "sum" else each)
    dlog_p = torch.autograd.grad(loss, log_p, dloss)[0]
    return [(dlog_p - p * dlog_p.sum(axis, keepdim=True)).numpy()]


@reference("ortrain::ClassifierLossGrad")
def classifier_loss_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    dlogits = cross_entropy_grad(inputs[:4], attrs)[0]
    x, weight, base = tensors(inputs[4:], 3)
    rows = x.reshape(-1, x.shape[-1]).numpy()
    dweight = dlogits.T @ rows + (0 if base is None else base.numpy())
    return [(dlogits @ weight.numpy()).reshape(x.shape), dweight, dlogits.sum(0)]


@reference("SoftmaxCrossEntropyLoss")
def softmax_cross_entropy(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    x, labels, weight = tensors(inputs, 3)
    loss = cross_entropy_of(x, labels, weight, attrs, -(2**31))
    return [loss.numpy(), torch.log_softmax(x, class_axis(x)).numpy()]


def nll(
    x: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor | None, attrs: dict
) -> torch.Tensor:
    return F.nll_loss(
        x,
        labels.long(),
        weight,
        ignore_index=attrs.get("ignore_index", -(2**31)),
        reduction=attrs.get("reduction", "mean"),
    )


@reference("NegativeLogLikelihoodLoss")
def nll_loss(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    x, labels, weight = tensors(inputs, 3)
    return [nll(x, labels, weight, attrs).numpy()]


@reference("ortrain::NegativeLogLikelihoodLossGrad")
def nll_loss_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    dloss, labels, shape, weight = tensors(inputs, 4)
    x = torch.zeros(shape.tolist(), dtype=torch.float64, requires_grad=True)
    return [torch.autograd.grad(nll(x, labels, weight, attrs), x, dloss)[0].numpy()]
