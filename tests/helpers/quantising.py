"""Weights and Hessians for tests of the quantiser. O outputs, I inputs."""

from functools import cache

import torch

from emberbox.compress.hessian import HessianSum
from emberbox.compress.quantize_exl3 import quantize
from emberbox.compress.trellis_plan import TrellisPlan
from tests.helpers.quick_search import quick_search

PLAN = TrellisPlan(bits=2)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@cache
def correlated(num_inputs=128, seed=1):
    """Inputs that are a mix of few: eigenvalues of the Hessian span four decades."""
    mix = normal(num_inputs, num_inputs, seed=seed) * torch.logspace(-2, 0, num_inputs)
    total = HessianSum(num_inputs)
    total.add(normal(4 * num_inputs, num_inputs, seed=2) @ mix.T)
    return total.mean()


def unknown(num_inputs=128):
    return HessianSum(num_inputs).mean()


def weight(out_features=128, in_features=128, seed=3):
    return 0.02 * normal(out_features, in_features, seed=seed)


def quantize_one(source, hessian, plan=PLAN, search=quick_search):
    (made,) = quantize([source], [hessian], [plan], search, device="cpu")
    return made


def assert_same(one, other):
    assert one.report == other.report
    assert one.tensor.parts.keys() == other.tensor.parts.keys()
    for part, tensor in one.tensor.parts.items():
        assert torch.equal(tensor, other.tensor.parts[part])
