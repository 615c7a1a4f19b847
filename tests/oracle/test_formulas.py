"""Single formulas against transformers' modules, on inputs where a neighbouring formula differs."""

import pytest
import torch
from transformers.models.glm5_next import modeling_glm5_next as modeling

from emberbox.ops.hyper_mix.reference import hyper_mix
from emberbox.ops.hyper_update.reference import hyper_update
from emberbox.ops.kda_inputs.reference import kda_inputs, l2_norm
from tests.oracle import checkpoints
from tests.oracle.harness import difference

TEXT = checkpoints.config().text_config
EPS = (TEXT.rms_norm_eps, TEXT.hc_eps)


def connection(seed, spread):
    """A hyper-connection of transformers whose mixing logits are `spread` wide."""
    generator = torch.Generator().manual_seed(seed)
    module = modeling.Glm5NextTextHyperConnection(TEXT)
    module.fn.data = torch.randn(24, 4 * TEXT.hidden_size, generator=generator) / 16
    module.base.data = torch.randn(24, generator=generator) * spread
    module.scale.data = torch.rand(3, generator=generator) + 0.5
    return module


@pytest.mark.parametrize("rms", [3e-3, 1.0], ids="rms{}".format)
@pytest.mark.parametrize("spread", [1.0, 9.0], ids="spread{}".format)
def test_stream_coefficients_agree_before_sinkhorn_has_converged(spread, rms):
    """Logits 9 wide need far more than 20 rounds: the order and number of half steps shows."""
    module = connection(7, spread)
    streams = torch.randn(33, 4, TEXT.hidden_size, generator=torch.Generator().manual_seed(8)) * rms
    post, mix, collapsed = (x[0] for x in module(streams[None]))
    weights = module.fn.data, module.base.data, module.scale.data
    ours = hyper_mix(streams, *weights, EPS, TEXT.hc_sinkhorn_iters)
    assert difference(ours[0] / rms, collapsed / rms) < 1e-5
    assert difference(ours[1], post) < 1e-6
    assert difference(ours[2], mix) < 2e-6
    assert float((ours[2].sum(1) - 1).abs().max()) < 1e-5  # columns, the last step
    rows_off = float((ours[2].sum(2) - 1).abs().max())
    assert rows_off > 1e-3 if spread == 9.0 else rows_off < 1e-3


def test_streams_are_mixed_by_source_and_destination():
    """Source 0 goes to destination 1 alone."""
    streams = torch.eye(4).unsqueeze(0) + 1  # [1, 4, 4]
    mix = torch.zeros(1, 4, 4)
    mix[0, 0, 1] = 1.0
    out = hyper_update(streams, torch.zeros(1, 4), torch.ones(1, 4), mix)
    assert torch.equal(out[0, 1], streams[0, 0])
    assert not out[0, [0, 2, 3]].any()


def test_gate_is_a_scaled_sigmoid():
    """At zero input the gate is half the bound; a clamp would be 0, a softplus -0.69."""
    H, D = 3, 24
    q = torch.ones(1, H, D)
    zero = torch.zeros(1, H, D), torch.zeros(H), torch.zeros(H * D)
    assert difference(kda_inputs((q, q), *zero, -5.0)[2], torch.full((1, H, D), -2.5)) < 1e-6
    module = modeling.Glm5NextTextForgetGate(TEXT)
    for name, parameter in module.named_parameters():
        parameter.data = checkpoints.value("sharp", 1, name, parameter.shape)
    x = torch.randn(1, 40, TEXT.hidden_size, generator=torch.Generator().manual_seed(9))
    forget = module.f_b_proj(module.f_a_proj(x))[0].unflatten(-1, (H, D))
    gate = kda_inputs(
        (forget, forget), forget, module.A_log.data, module.dt_bias.data, TEXT.linear_lower_bound
    )[2]
    assert difference(gate, module(x)[0]) < 1e-5
    assert float(gate.max()) < 0
    assert float(gate.min()) < -3


def test_l2_norm_adds_its_epsilon_to_the_sum_of_squares():
    x = torch.full((1, 128), 1e-4)  # the sum of squares is 1.28e-6, as large as the epsilon
    expected = 1e-4 / (1.28e-6 + 1e-6) ** 0.5
    assert difference(l2_norm(x), torch.full((1, 128), expected)) < 1e-6 * expected
    noise = torch.randn(20, 128, generator=torch.Generator().manual_seed(10)) * 1e-4
    assert difference(l2_norm(noise), modeling.l2norm(noise)) < 1e-7
