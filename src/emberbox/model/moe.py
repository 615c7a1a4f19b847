"""Feed-forward sublayers: the dense SwiGLU and the mixture of experts (architecture.md 3.5)."""

from torch import Tensor

from emberbox.model.config import TextConfig
from emberbox.model.layers import Linear, Parameters, by_rows, plain
from emberbox.ops.table import OpTable


class FeedForward:
    """down(silu(min(gate x, limit)) * clamp(up x)): dense layers and the shared expert."""

    def __init__(self, ops: OpTable, params: Parameters, prefix: str, limit: float) -> None:
        """`prefix` ends in a dot; gate_proj, up_proj and down_proj lie under it."""
        self.swiglu, self.limit = ops.swiglu, limit
        self.gate = Linear.load(ops, params, f"{prefix}gate_proj")
        self.up = Linear.load(ops, params, f"{prefix}up_proj")
        self.down = Linear.load(ops, params, f"{prefix}down_proj")

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return by_rows(self._few, x)

    def _few(self, x: Tensor) -> Tensor:
        return self.down(self.swiglu(self.gate(x), self.up(x), self.limit))


class MixtureOfExperts:
    """Routed experts plus one shared expert that every token passes."""

    def __init__(
        self, config: TextConfig, ops: OpTable, params: Parameters, prefix: str, num_experts: int
    ) -> None:
        """`prefix` ends in "mlp."; the MTP layer may hold another number of experts."""
        self.config, self.ops = config, ops
        self.router = plain(params, f"{prefix}gate.weight")
        self.bias = plain(params, f"{prefix}gate.e_score_correction_bias")
        self.experts = ops.ready_for(
            "moe_experts",
            tuple(
                (
                    params[f"{prefix}experts.{e}.gate_proj.weight"],
                    params[f"{prefix}experts.{e}.up_proj.weight"],
                    params[f"{prefix}experts.{e}.down_proj.weight"],
                )
                for e in range(num_experts)
            ),
        )
        limit = config.swiglu_limit
        self.shared = FeedForward(ops, params, f"{prefix}shared_experts.", limit)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        config = self.config
        chosen, weights = self.ops.route_topk(
            x, self.router, self.bias, config.num_experts_per_tok, config.routed_scaling_factor
        )
        routed = self.ops.moe_experts(x, chosen, weights, self.experts, config.swiglu_limit)
        return routed + self.shared(x)
