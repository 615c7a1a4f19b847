"""Choose one implementation per op, once, when a network is built.

`bind_all` gives an OpTable: plain functions, one field per op. `OpTable.reference()` is the whole
network in plain torch, the form every kernel answers to.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from emberbox.formats.base import QuantTensor
from emberbox.ops import (
    conv_step,
    greedy_rows,
    hyper_close,
    hyper_mix,
    hyper_open,
    hyper_update,
    index_choose,
    index_pool,
    index_scores,
    index_select,
    kda_apply,
    kda_chunk,
    kda_commit,
    kda_decode,
    kda_inputs,
    kda_step,
    kda_verify,
    linear,
    linear_exl3,
    linear_quant,
    mla_attention,
    mla_decode,
    mla_open,
    moe_experts,
    moe_routed,
    rms_norm,
    rotated_linear,
    rotated_swiglu,
    route_topk,
    sample_rows,
    short_conv,
    small_linear,
    swiglu,
    swiglu_open,
    vision_attention,
)
from emberbox.ops.contract import Bound, Op

OPS: Mapping[str, Op[..., Any]] = {
    op.name: op
    for op in (
        rms_norm.OP,
        linear.OP,
        linear_quant.OP,
        linear_exl3.OP,
        swiglu.OP,
        hyper_mix.OP,
        hyper_update.OP,
        short_conv.OP,
        conv_step.OP,
        kda_inputs.OP,
        kda_chunk.OP,
        kda_step.OP,
        kda_verify.OP,
        kda_commit.OP,
        index_pool.OP,
        index_scores.OP,
        index_select.OP,
        mla_attention.OP,
        route_topk.OP,
        moe_experts.OP,
        vision_attention.OP,
        # Of a decode step (model/decode_step.py): what lies between two products, in one.
        hyper_open.OP,
        hyper_close.OP,
        rotated_linear.OP,
        rotated_swiglu.OP,
        small_linear.OP,
        swiglu_open.OP,
        kda_decode.OP,
        kda_apply.OP,
        mla_open.OP,
        index_choose.OP,
        mla_decode.OP,
        moe_routed.OP,
        greedy_rows.OP,
        sample_rows.OP,
    )
}

# Ops of one format: QuantTensor.format.name -> op. A format without an entry uses linear_quant.
LINEAR_BY_FORMAT: Mapping[str, str] = {
    "exl3": "linear_exl3",
    "exl3_prepared": "linear_exl3",
}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OpTable:
    """One function per op, signatures as in each op's contract; `names` says which were chosen."""

    rms_norm: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    linear_quant: Callable[..., Tensor]
    linear_exl3: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    hyper_mix: Callable[..., tuple[Tensor, Tensor, Tensor]]
    hyper_update: Callable[..., Tensor]
    short_conv: Callable[..., Tensor]
    conv_step: Callable[..., Tensor]
    kda_inputs: Callable[..., tuple[Tensor, Tensor, Tensor]]
    kda_chunk: Callable[..., tuple[Tensor, Tensor]]
    kda_step: Callable[..., Tensor]
    kda_verify: Callable[..., tuple[Tensor, Tensor]]
    kda_commit: Callable[..., Tensor]
    index_pool: Callable[..., Tensor]
    index_scores: Callable[..., Tensor]
    index_select: Callable[..., Tensor]
    mla_attention: Callable[..., Tensor]
    route_topk: Callable[..., tuple[Tensor, Tensor]]
    moe_experts: Callable[..., Tensor]
    vision_attention: Callable[..., Tensor]
    hyper_open: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    hyper_close: Callable[..., tuple[Tensor, Tensor]]
    rotated_linear: Callable[..., Tensor]
    rotated_swiglu: Callable[..., Tensor]
    small_linear: Callable[..., Tensor]
    swiglu_open: Callable[..., Tensor]
    kda_decode: Callable[..., Tensor]
    kda_apply: Callable[..., None]
    mla_open: Callable[..., tuple[Tensor, Tensor, Tensor]]
    index_choose: Callable[..., tuple[Tensor, Tensor]]
    mla_decode: Callable[..., Tensor]
    moe_routed: Callable[..., Tensor]
    greedy_rows: Callable[..., tuple[Tensor, Tensor]]
    sample_rows: Callable[..., Tensor]
    names: Mapping[str, str]
    readies: Mapping[str, Callable[[Any], Any]]

    @classmethod
    def reference(cls) -> "OpTable":
        """Every op bound to its plain reference."""
        return _table({name: Bound("reference", op.reference) for name, op in OPS.items()})

    def linear_for(self, weight: Tensor | QuantTensor) -> Callable[..., Tensor]:
        """The product to use with `weight`, by its format."""
        if not isinstance(weight, QuantTensor):
            return self.linear
        function: Callable[..., Tensor] = getattr(self, _linear_op(weight.format.name))
        return function

    def reads(self, format_name: str) -> bool:
        """Whether a kernel multiplies with weights of a format without decoding them as a whole."""
        return _linear_op(format_name) in self.readies

    def ready(self, weight: QuantTensor) -> QuantTensor:
        """The weight in the form in which its product reads it; for once, at load."""
        made: QuantTensor = self.readies.get(_linear_op(weight.format.name), _as_it_is)(weight)
        return made

    def ready_for(self, op: str, value: T) -> T:
        """What the op called so reads of weights (projections, a bank), likewise."""
        made: T = self.readies.get(op, _as_it_is)(value)
        return made

    def describe(self) -> list[tuple[str, str]]:
        """(op, implementation) in order, for logs, `doctor` and receipts."""
        return list(self.names.items())


def bind_all(device: torch.device, capability: tuple[int, int] = (0, 0)) -> OpTable:
    """The fastest implementation of each op that runs on `device`."""
    return _table({name: op.bind(device, capability) for name, op in OPS.items()})


def _table(bound: Mapping[str, Bound[..., Any]]) -> OpTable:
    functions = {name: choice.function for name, choice in bound.items()}
    names = {name: choice.name for name, choice in bound.items()}
    readies = {name: choice.ready for name, choice in bound.items() if choice.ready is not None}
    return OpTable(**functions, names=names, readies=readies)


def _linear_op(format_name: str) -> str:
    return LINEAR_BY_FORMAT.get(format_name, "linear_quant")


def _as_it_is(value: T) -> T:
    return value
