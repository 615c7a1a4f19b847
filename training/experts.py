"""Feed-forward parts of the training graph (architecture.md 3.5).

Every expert runs on every token and the unchosen ones are weighted by zero: at this width that is
cheaper than routing, and nothing waits for the device.
"""

from torch import Tensor
from torch.nn import functional

from training.context import Context, Rows

# T tokens, E experts, I their width


def feed_forward(ctx: Context, prefix: str, x: Tensor, limit: float, *, bias: bool) -> Tensor:
    """x [..., K] -> [..., N]; gate_proj, up_proj and down_proj lie under `prefix`."""
    gate, up = (ctx.linear(x, f"{prefix}{name}_proj", bias=bias) for name in ("gate", "up"))
    return ctx.linear(ctx.fused.swiglu(gate, up, limit), f"{prefix}down_proj", bias=bias)


def mixture(ctx: Context, prefix: str, x: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """x [T, hidden] -> [T, hidden], and the number of valid tokens per expert [E]."""
    params, text = ctx.params, ctx.text
    weights, load = ctx.fused.route(
        functional.linear(x.float(), params[f"{prefix}gate.weight"]),
        params[f"{prefix}gate.e_score_correction_bias"],
        rows.valid,
        text.num_experts_per_tok,
        text.routed_scaling_factor,
    )
    gate_up = params[f"{prefix}experts.gate_up"].to(x.dtype)  # [E, 2I, hidden]
    down = params[f"{prefix}experts.down"].to(x.dtype)  # [E, hidden, I]
    both = functional.linear(x, gate_up.flatten(0, 1)).view(-1, *gate_up.shape[:2])
    act = ctx.fused.expert_act(both, weights, text.swiglu_limit).flatten(1)
    routed = functional.linear(act, down.permute(1, 0, 2).reshape(x.shape[-1], -1))
    shared = feed_forward(ctx, f"{prefix}shared_experts.", x, text.swiglu_limit, bias=False)
    return routed + shared, load.detach()
