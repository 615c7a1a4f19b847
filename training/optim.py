"""Muon for matrices and AdamW for the rest, on flat buffers: a step is a fixed list of kernels.

Parameters and gradients are views of two buffers. Every one begins at a multiple of 64 elements,
because compiled kernels assume aligned pointers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from training.parameters import ROUTER_BIAS, ROUTER_BIAS_CENTRE, is_state, matrix_shape
from training.recipe import Recipe

ALIGNMENT = 64
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic of Muon: slope at 0 over convergence to 1
EPS = 1e-8


def orthogonal(x: Tensor, steps: int = 5) -> Tensor:
    """x [n, r, c] -> matrices with singular values near 1, bfloat16."""
    a, b, c = NEWTON_SCHULZ
    x = x.to(torch.bfloat16)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


@dataclass(frozen=True, slots=True)
class Place:
    """Elements start .. start + numel of the flat buffers."""

    name: str
    start: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.shape)


class Optimiser:
    """Owns the parameters: `params` are leaves whose gradients accumulate until `step`."""

    def __init__(self, start: Mapping[str, Tensor], device: torch.device, recipe: Recipe) -> None:
        self.recipe = recipe
        # Sorted: the layout of the buffers, which are saved whole, follows from the names alone.
        trained = {name: start[name] for name in sorted(start) if not is_state(name)}
        shapes = {name: matrix_shape(name, t) for name, t in trained.items()}
        adam = [name for name, shape in shapes.items() if shape is None]
        muon = [(shape, name) for name, shape in shapes.items() if shape is not None]
        order = adam + [name for _, name in sorted(muon, key=lambda pair: pair[0])]
        self.places, self.num_adam, total = [], 0, 0
        for name in order:
            self.places.append(Place(name, total, trained[name].shape))
            total += -(-trained[name].numel() // ALIGNMENT) * ALIGNMENT
            self.num_adam = total if shapes[name] is None else self.num_adam
        self.matrices = _matrices(self.places, shapes)

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, device=device)

        self.flat, self.grad, self.momentum = zeros(total), zeros(total), zeros(total)
        self.variance, self.decay = zeros(self.num_adam), zeros(self.num_adam)
        self.count, self.rate, self.grad_norm, self.num_bad = (zeros() for _ in range(4))
        self.params: dict[str, Tensor] = {}
        for place in self.places:
            place.view(self.flat).copy_(trained[place.name])
            leaf = place.view(self.flat).detach().requires_grad_()
            leaf.grad = place.view(self.grad)
            self.params[place.name] = leaf
            if place.name.endswith(("embed_tokens.weight", "lm_head.weight")):
                place.view(self.decay).fill_(recipe.adam_decay)
        biases = {name: t.to(device).clone() for name, t in start.items() if is_state(name)}
        self.params |= biases
        self.loads = {n.removesuffix(ROUTER_BIAS): torch.zeros_like(b) for n, b in biases.items()}

    @torch.no_grad()
    def step(self) -> None:
        """One update from the sum of `recipe.micro_batches` gradients, and balance; clears both.

        A gradient that is not finite counts in `num_bad` and becomes zero.
        """
        grad = self.grad.mul_(1.0 / self.recipe.micro_batches)
        norm = grad.norm()
        finite = torch.isfinite(norm)
        self.num_bad.add_((~finite).float())
        grad.masked_fill_(~finite, 0.0)
        self.grad_norm.copy_(norm)
        clip = (self.recipe.clip / (norm + 1e-6)).clamp(max=1.0).nan_to_num(0.0)
        grad.mul_(clip)
        self.count.add_(1)
        self._adam(grad[: self.num_adam])
        self._muon(grad[self.num_adam :])
        grad.zero_()
        self._balance()

    def _adam(self, grad: Tensor) -> None:
        recipe, n = self.recipe, self.num_adam
        beta1, beta2 = recipe.adam_betas
        mean, flat = self.momentum[:n], self.flat[:n]
        mean.lerp_(grad, 1 - beta1)
        self.variance.lerp_(grad.square(), 1 - beta2)
        spread = (self.variance / (1 - beta2**self.count)).sqrt() + EPS
        update = mean / (1 - beta1**self.count) / spread
        flat.sub_((update + self.decay * flat) * (self.rate * recipe.adam_rate))

    def _muon(self, grad: Tensor) -> None:
        recipe, n = self.recipe, self.num_adam
        rate = self.rate * recipe.muon_rate
        momentum = self.momentum[n:].mul_(recipe.muon_momentum).add_(grad)
        update = grad + recipe.muon_momentum * momentum
        self.flat[n:].mul_(1 - rate * recipe.muon_decay)
        for start, stop, r, c in self.matrices:
            step = orthogonal(update[start - n : stop - n].view(-1, r, c)).float()
            # Times 0.2 sqrt(max side): the size of an Adam update, so that one rate suits both.
            self.flat[start:stop].view(-1, r, c).sub_(step * (0.2 * math.sqrt(max(r, c))) * rate)

    def _balance(self) -> None:
        """Move router biases towards equal load; their mean stays where it is."""
        for prefix, load in self.loads.items():
            bias = self.params[prefix + ROUTER_BIAS]
            push = torch.sign(load.mean() - load) * (load.sum() > 0)
            bias.add_(push * (self.recipe.balance_rate * self.rate))
            bias.sub_(bias.mean() - ROUTER_BIAS_CENTRE)
            load.zero_()

    def state(self) -> dict[str, Tensor]:
        """What, with the parameters, a resumed run needs."""
        return {
            "momentum": self.momentum,
            "variance": self.variance,
            "count": self.count,
            "num_bad": self.num_bad,
        }

    @torch.no_grad()
    def reset(self) -> None:
        """As new, but for the parameters."""
        for tensor in (self.grad, *self.state().values(), *self.loads.values()):
            tensor.zero_()


def _matrices(
    places: list[Place], shapes: Mapping[str, tuple[int, int] | None]
) -> list[tuple[int, int, int, int]]:
    """(start, stop, rows, columns): neighbours of one shape, with no gap, go together."""
    runs: list[tuple[int, int, int, int]] = []
    for place in places:
        shape = shapes[place.name]
        if shape is None:
            continue
        if runs and runs[-1][1:] == (place.start, *shape):
            runs[-1] = (runs[-1][0], place.stop, *shape)
        else:
            runs.append((place.start, place.stop, *shape))
    return runs
