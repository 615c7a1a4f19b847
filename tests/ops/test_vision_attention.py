"""Properties of segment attention that hold by mathematics, for reference and fused form."""

import math

import pytest
import torch

from emberbox.errors import OpError
from emberbox.ops.numerics import relative_error
from emberbox.ops.vision_attention import OP
from emberbox.ops.vision_attention.reference import rotate

FORMS = pytest.mark.parametrize(
    "attend", [OP.reference, OP.load("sdpa_cpu")], ids=["plain", "sdpa"]
)
FP32 = OP.tolerance[torch.float32]


def inputs(dtype=torch.float32, **changes):
    return {**OP.make_inputs(first=20, second=7, H=3, D=12, dtype=dtype), **changes}


def test_rotation_turns_the_two_halves_against_each_other():
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])  # pairs (1, 3) and (2, 4)
    turned = rotate(x, torch.tensor([[math.pi / 2, math.pi]]))
    assert torch.allclose(turned, torch.tensor([[[-3.0, -2.0, 1.0, -4.0]]]), atol=1e-6)


@FORMS
def test_a_segment_of_one_patch_returns_its_value(attend):
    given = inputs(lengths=(1,) * 27)
    assert torch.equal(attend(**given), given["qkv"][:, 2])


@FORMS
def test_two_patches_give_the_weights_computed_by_hand(attend):
    # eps 0 and equal components: normalised q and k are the weights, 2 and 1 in each of the four,
    # so before rotation q.k = 8. Patch 1 is turned by pi, which flips the sign against patch 0.
    qkv = torch.ones(2, 3, 1, 4)
    qkv[:, 2] = torch.tensor([[[5.0]], [[9.0]]])
    angles = torch.tensor([[0.0, 0.0], [math.pi, math.pi]])
    out = attend(qkv, torch.full((4,), 2.0), torch.ones(4), angles, (2,), 0.0)
    far = 1 / (1 + math.exp(8.0))  # softmax of (8, -8) / sqrt(4)
    expected = torch.tensor([5 + 4 * far, 9 - 4 * far]).view(2, 1, 1).expand(2, 1, 4)
    assert torch.allclose(out, expected, rtol=1e-6)


@FORMS
def test_segments_are_independent(attend):
    given = inputs()
    whole = attend(**given)
    rows = slice(20, 27)
    alone = attend(**inputs(qkv=given["qkv"][rows], angles=given["angles"][rows], lengths=(7,)))
    assert relative_error(whole[rows], alone) <= FP32
    given["qkv"][:20] = float("nan")
    assert torch.equal(attend(**given)[rows], whole[rows])


@FORMS
def test_only_differences_of_angles_matter(attend):
    given = inputs(torch.float64)
    given["angles"] = given["angles"].double()
    shifted = attend(**{**given, "angles": given["angles"] + 1.25})
    assert relative_error(shifted, attend(**given)) < 1e-12
    doubled = attend(**{**given, "angles": given["angles"] * 2})
    assert relative_error(doubled, attend(**given)) > 1e-2


@FORMS
@pytest.mark.parametrize("name", ["q_weight", "k_weight", "eps", "lengths", "angles"])
def test_every_argument_matters(attend, name):
    given = inputs()
    changed = {
        "q_weight": given["q_weight"] * 1.1,
        "k_weight": given["k_weight"] * 1.1,
        "eps": 1e-6,
        "lengths": (27,),
        "angles": given["angles"].flip(0),
    }
    error = relative_error(attend(**{**given, name: changed[name]}), attend(**given))
    assert error > 100 * FP32


@FORMS
def test_gradients_agree_with_finite_differences(attend):
    given = OP.make_inputs(first=2, second=3, H=2, D=4, dtype=torch.float64)
    fixed = (given["angles"].double(), given["lengths"], given["eps"])
    leaves = [given[n].requires_grad_() for n in ("qkv", "q_weight", "k_weight")]
    leaves[0] = (leaves[0].detach() * 30).requires_grad_()  # small q, k make differences coarse
    assert torch.autograd.gradcheck(lambda *x: attend(*x, *fixed), leaves)


def test_the_fused_form_names_what_disagrees():
    attend = OP.load("sdpa_cpu")
    with pytest.raises(OpError, match="lengths sum to 26, qkv has 27 rows"):
        attend(**inputs(lengths=(20, 6)))
    with pytest.raises(OpError, match=r"angles \(27, 12\), expected \(27, 6\)"):
        attend(**inputs(angles=torch.zeros(27, 12)))
