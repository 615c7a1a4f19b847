"""Two ways to run a checkpoint for a measurement, which are never mixed in one receipt.

`weights`: every weight decoded to float32, the network in its plain references, whole windows
without a cache. What differs between two artifacts is then their weights and nothing else.
`served`: the engine's own prefill, with its kernels, its activation type and its cache, in chunks.

Windows are text. The MTP layer and the vision tower are loaded, so that a damaged one is refused,
but nothing here runs them: no figure says how good they are. Knows no panel and no receipt.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from emberbox.device import Device
from emberbox.engine.decode_once import decode_once, prepare_once
from emberbox.engine.llm import LLM
from emberbox.engine.request import Prompt
from emberbox.errors import MemoryRefused
from emberbox.formats.base import QuantTensor
from emberbox.formats.dtypes import TORCH_DTYPES
from emberbox.model.batch import Batch, Span
from emberbox.model.config import Glm5NextConfig
from emberbox.model.layers import Linear, Parameters
from emberbox.model.network import Network
from emberbox.model.weights import assign, load_parameters
from emberbox.ops.table import OpTable, bind_all
from emberbox.settings import EngineSettings
from emberbox.store.checkpoint import open_checkpoint

LANES = ("weights", "served")
HEAD = "lm_head.weight"
# Rows of the head at once: 16,384 x 4,096 in float32 are 256 MiB, if they have to be widened.
HEAD_ROWS = 16384

# T tokens, n <= T of them, H hidden, V vocabulary


@dataclass(frozen=True, slots=True)
class Head:
    """The output matrix [V, H] of one artifact, and the product its lane takes with it."""

    linear: Linear

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, H] -> float32 [n, V]; a plain head is read some rows at a time."""
        weight = self.linear.weight
        if isinstance(weight, QuantTensor):
            return self.linear(hidden).float()
        out = torch.empty(len(hidden), len(weight), device=hidden.device)
        for start in range(0, len(weight), HEAD_ROWS):
            rows = weight[start : start + HEAD_ROWS]
            out[:, start : start + len(rows)] = self.linear.apply(hidden, rows, None)
        return out


@dataclass(frozen=True, slots=True)
class Runner:
    """A loaded checkpoint. `hidden`: ids of a whole window -> states after the final norm [T, H].

    ops: op -> implementation.
    """

    hidden: Callable[[Sequence[int]], Tensor]
    head: Head
    ops: Mapping[str, str]


def plain_network(
    config: Glm5NextConfig, params: Parameters, ops: OpTable | None = None
) -> Network:
    """The network of the lane `weights` from operands in memory; `params` is left as it is.

    Weights are decoded to float32 where they are. ops: the references, unless another is given.
    """
    decoded = {
        name: value.decode() if isinstance(value, QuantTensor) else value.float()
        for name, value in params.items()
    }
    return Network(config, decoded, ops or OpTable.reference())


def load_plain(folder: Path, device: torch.device | str, ops: OpTable | None = None) -> Network:
    """The same from a checkpoint folder. Raises CheckpointError."""
    checkpoint = open_checkpoint(folder)
    config = Glm5NextConfig.from_dict(checkpoint.config, checkpoint.mtp_config)
    assignment = assign(config, checkpoint.tensors)
    params = load_parameters(checkpoint, assignment, device=device, dtype=torch.float32)
    params = decode_once(params, torch.float32, assignment.where)
    return Network(config, params, ops or OpTable.reference())


def runner_of(network: Network) -> Runner:
    """Windows through a network as it is, without a cache."""

    def hidden(token_ids: Sequence[int]) -> Tensor:
        ids = torch.tensor(token_ids, dtype=torch.int64, device=network.embedding.device)
        return network.forward(Batch(ids, (Span(0, len(token_ids), 0, 0, ()),)), None)

    return Runner(hidden, Head(network.lm_head), dict(network.ops.describe()))


@dataclass(frozen=True, slots=True)
class Lane:
    """How checkpoints are run. name: one of LANES. chunk: tokens of a step of prefill, of the lane
    `served` alone. max_tokens: of the longest window."""

    name: str
    device: Device
    chunk: int
    max_tokens: int

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and captured states."""
        is_wide = self.name == "weights" or self.device.kind == "cpu"
        return torch.float32 if is_wide else torch.bfloat16

    def describe(self) -> dict[str, object]:
        """What of it makes figures differ, for a receipt."""
        dtype = str(self.dtype).removeprefix("torch.")
        own = {} if self.name == "weights" else {"cache_dtype": dtype, "chunk": self.chunk}
        return {
            "dtype": dtype,
            "matmul_precision": torch.get_float32_matmul_precision(),
            "max_tokens": self.max_tokens,
            **own,
        }

    def open(self, folder: Path) -> Runner:
        """Load the checkpoint in `folder`, cold. Raises CheckpointError or MemoryRefused."""
        if self.name == "weights":
            return runner_of(load_plain(folder, self.device.torch_name))
        settings = EngineSettings(
            device=self.device.torch_name,
            max_model_len=self.max_tokens,
            max_running=1,
            snapshot_bytes=0,
            prefill_tokens=self.chunk,
        )
        llm = LLM(folder, settings)

        def hidden(token_ids: Sequence[int]) -> Tensor:
            return torch.cat(list(llm.hidden(Prompt(tuple(token_ids)), chunk=self.chunk)))

        return Runner(hidden, Head(llm.network.lm_head), dict(llm.network.ops.describe()))

    def load_head(self, folder: Path) -> Head:
        """The head of the checkpoint in `folder` alone; its products have the bits of `open`'s."""
        checkpoint = open_checkpoint(folder)
        config = Glm5NextConfig.from_dict(checkpoint.config, checkpoint.mtp_config)
        found = assign(config, checkpoint.tensors)
        found = replace(
            found, placements=tuple(p for p in found.placements if p.target.name == HEAD)
        )
        device, is_plain = torch.device(self.device.torch_name), self.name == "weights"
        (info, *_) = found.placements[0].infos()
        # As stored: products widen some rows at a time, and a float32 copy of all is not needed.
        dtype = TORCH_DTYPES[info.dtype] if is_plain and not found.has_quantised else self.dtype
        params = load_parameters(checkpoint, found, device=device, dtype=dtype)
        if is_plain or device.type == "cpu":
            params = decode_once(params, dtype, found.where)
        ops = bind_all(device, self.device.capability or (0, 0))
        params = params if is_plain else prepare_once(params, ops)
        return Head(Linear.load(OpTable.reference() if is_plain else ops, params, "lm_head"))

    def require_memory(self, folder: Path) -> None:
        """Raises MemoryRefused if the decoded weights do not fit; the engine plans for itself."""
        if self.name != "weights":
            return
        checkpoint = open_checkpoint(folder)
        config = Glm5NextConfig.from_dict(checkpoint.config, checkpoint.mtp_config)
        found = assign(config, checkpoint.tensors).loaded_bytes(4, decoded=True)
        free = self.device.free_memory_bytes()
        if found > free:
            raise MemoryRefused(
                f"{folder}: decoded to float32 it takes {found:,} bytes, of which "
                f"{self.device.torch_name} has {free:,}",
                hint="the lane `served` keeps weights as they are stored",
            )
