"""The element-wise and small reducing parts of the graph, as functions to run plain or compiled.

Nearly all of them see [tokens, ...] with the same number of tokens in every bucket, so that one
compilation serves all. Parameters arrive in float32, activations in the type they leave in.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional

# T tokens, S streams, H heads, D head width, N chunks of CHUNK tokens, E experts, P pools
CHUNK = 32  # of KDA; a chunk's decays, at most 5 per token, stay within float32 from its middle


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    return (weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps))).to(x.dtype)


def hyper_logits(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """streams [T, 4, h] -> pre, post [T, 4], logits of the mixing matrix [T, 4, 4]; float32."""
    flat = streams.flatten(1).float()
    flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)
    z = functional.linear(flat, fn)
    pre = torch.sigmoid(z[:, :4] * scale[0] + base[:4])
    post = 2 * torch.sigmoid(z[:, 4:8] * scale[1] + base[4:8])
    return pre, post, (z[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4)


def hyper_collapse(
    streams: Tensor, pre: Tensor, hc_eps: float, weight: Tensor, eps: float
) -> Tensor:
    """The weighted sum of the streams, normed: [T, h]."""
    summed = ((pre + hc_eps).unsqueeze(-1) * streams.float()).sum(1)
    return rms_norm(summed.to(streams.dtype), weight, eps)


def hyper_update(streams: Tensor, y: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """Spread y [T, h] over the streams; mix [T, source, destination]."""
    wide = streams.float()
    out = post.unsqueeze(-1) * y.float().unsqueeze(1)
    for i in range(4):
        out = out + mix[:, i, :].unsqueeze(-1) * wide[:, i].unsqueeze(1)
    return out.to(streams.dtype)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def expert_act(gate_up: Tensor, weights: Tensor, limit: float) -> Tensor:
    """gate_up [T, E, 2I], weights [T, E], zero where an expert was not chosen -> [T, E, I]."""
    gate, up = gate_up.chunk(2, -1)
    act = functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return act * weights.to(gate_up.dtype).unsqueeze(-1)


def route(
    logits: Tensor, bias: Tensor, valid: Tensor, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Weights [T, E] of the chosen experts, zero elsewhere, and their load [E] over valid rows."""
    scores = torch.sigmoid(logits)
    chosen = torch.topk(scores + bias, top_k, -1).indices
    mask = torch.zeros_like(scores).scatter(1, chosen, 1.0)
    weights = scores * mask
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale
    return weights, (mask * valid.unsqueeze(-1)).sum(0)


def kda_inputs(
    qkv: Tensor,
    position: Tensor,
    conv: Tensor,
    forget: Tensor,
    gates: tuple[Tensor, Tensor, Tensor],
    lower: float,
) -> tuple[Tensor, ...]:
    """Operands of the chunked delta rule, each [N, H, CHUNK, D] float32 but the last.

    qkv [T, 3HD], position [T] in its row, conv [3HD, 4], forget [T, HD], gates = (dt_bias [HD],
    A_log [H], beta logits [T, H]). Decays are relative to the middle of a chunk, which keeps every
    factor finite. The last output is the decay of a whole chunk, [N, H, D, 1].
    """
    x = qkv.float()
    y = x * conv[:, 3]
    for j in (1, 2, 3):
        shifted = functional.pad(x, (0, 0, j, 0))[:-j]
        y = y + shifted * (position >= j).unsqueeze(-1) * conv[:, 3 - j]
    y = functional.silu(y).to(qkv.dtype).float()
    dt_bias, A_log, b = gates
    heads = A_log.shape[0]
    D = y.shape[1] // (3 * heads)
    q, k, v = (t.reshape(-1, CHUNK, heads, D).transpose(1, 2) for t in y.chunk(3, -1))
    q = q / torch.sqrt(q.square().sum(-1, keepdim=True) + 1e-6) * D**-0.5
    k = k / torch.sqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    g = (forget.float() + dt_bias).view(-1, CHUNK, heads, D).transpose(1, 2)
    g = lower * torch.sigmoid(A_log.exp().view(1, heads, 1, 1) * g)
    beta = torch.sigmoid(b.float()).view(-1, CHUNK, heads).transpose(1, 2).unsqueeze(-1)
    total = g.cumsum(2)
    middle, last = total[:, :, CHUNK // 2 - 1 : CHUNK // 2], total[:, :, -1:]
    start, up, down = total.exp(), (total - middle).exp(), (middle - total).exp()
    return (
        q * up,
        k * beta * up,
        k * down,
        v * beta,
        k * beta * start,
        q * start,
        k * (last - total).exp(),
        last.exp().transpose(-1, -2),
    )


def kda_output(out: Tensor, gate: Tensor, weight: Tensor, eps: float, heads: int) -> Tensor:
    """out [N, H, CHUNK, D] float32, gate [T, HD] -> gated norm [T, HD] in gate's dtype."""
    D = out.shape[-1]
    y = out.transpose(1, 2).reshape(-1, heads, D).to(gate.dtype).float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight
    return (y * torch.sigmoid(gate.float().view(-1, heads, D))).to(gate.dtype).flatten(1)


def below(a: Tensor) -> Tensor:
    """The strictly lower triangle of [..., CHUNK, CHUNK]; where() also drops infinities."""
    i = torch.arange(CHUNK, device=a.device)
    return torch.where(i[:, None] > i[None, :], a, 0.0)


def at_or_below(a: Tensor) -> Tensor:
    """The lower triangle with the diagonal."""
    i = torch.arange(CHUNK, device=a.device)
    return torch.where(i[:, None] >= i[None, :], a, 0.0)


def pool_keys(keys: Tensor, gates: Tensor, ape: Tensor) -> Tensor:
    """keys float32, gates [P, 4, D] -> [P, D] in gates' dtype."""
    share = torch.softmax(gates.float() + ape, 1)
    return (share * keys).sum(1).to(gates.dtype)


def score_heads(match: Tensor, weights: Tensor, scale: float) -> Tensor:
    """match [T, heads, P], weights [T, heads] float32 -> scores [T, P] float32."""
    return (functional.relu(match.float() * scale) * weights.unsqueeze(-1)).sum(1)


def cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean over tokens, nats."""
    each = functional.cross_entropy(logits.float(), labels, reduction="none")
    return (each * weights).sum() / (weights.sum() + 1e-6)


@dataclass(frozen=True, slots=True)
class Pointwise:
    """The functions above, chosen once: plain, or each by torch.compile."""

    rms_norm: Callable[..., Tensor] = rms_norm
    hyper_logits: Callable[..., tuple[Tensor, Tensor, Tensor]] = hyper_logits
    hyper_collapse: Callable[..., Tensor] = hyper_collapse
    hyper_update: Callable[..., Tensor] = hyper_update
    swiglu: Callable[..., Tensor] = swiglu
    expert_act: Callable[..., Tensor] = expert_act
    route: Callable[..., tuple[Tensor, Tensor]] = route
    kda_inputs: Callable[..., tuple[Tensor, ...]] = kda_inputs
    kda_output: Callable[..., Tensor] = kda_output
    below: Callable[..., Tensor] = below
    at_or_below: Callable[..., Tensor] = at_or_below
    pool_keys: Callable[..., Tensor] = pool_keys
    score_heads: Callable[..., Tensor] = score_heads
    cross_entropy: Callable[..., Tensor] = cross_entropy

    @classmethod
    def compiled(cls, backend: str = "inductor") -> "Pointwise":
        """Each function as one fused kernel or a few. Compilation happens at the first calls."""
        torch._dynamo.config.recompile_limit = 64
        plain = cls()
        chosen = {}
        for field in fields(cls):
            function = getattr(plain, field.name)
            # The number of pools differs by bucket: one dynamic kernel instead of one each.
            dynamic = field.name == "score_heads"
            chosen[field.name] = torch.compile(
                function, fullgraph=True, dynamic=dynamic, backend=backend
            )
        return cls(**chosen)
