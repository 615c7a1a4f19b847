"""Whether a tuning run fits into memory, from shapes alone. Knows no weights."""

from rich.filesize import decimal

from emberbox.device import Device
from emberbox.errors import MemoryRefused
from emberbox.model.config import TextConfig
from emberbox.model.weights import Assignment
from emberbox.ops.kda_chunk.kernel_torch import CHUNK, GPU_CHUNK

ITEM = 4  # bytes of a float32


def require_memory(
    reference: Assignment, candidate: Assignment, config: TextConfig, tokens: int, device: Device
) -> None:
    """Raises MemoryRefused if a model in float32 and what a step of `tokens` keeps do not fit.

    One model at a time is there: the reference is gone, but for its head, before the candidate is
    loaded. A quantised weight is decoded to float32.
    """
    head = config.vocab_size * config.hidden_size * ITEM
    weights = max(
        reference.loaded_bytes(ITEM, decoded=True),
        candidate.loaded_bytes(ITEM, decoded=True) + head,
    )
    step = tokens * token_bytes(config, GPU_CHUNK if device.kind == "cuda" else CHUNK)
    free = device.free_memory_bytes()
    if weights + step > free:
        raise MemoryRefused(
            f"tuning: {decimal(weights)} for the larger model in float32 and {decimal(step)} for "
            f"a step of {tokens:,} tokens; {device.torch_name} has {decimal(free)} free",
            hint="lower --step-rows or --cols; the whole network has to fit, decoded",
        )


def token_bytes(config: TextConfig, chunk: int) -> int:
    """Of memory for a token of a step, from its way there to the end of its way back."""
    H, streams = config.hidden_size, config.hc_mult
    num_sparse = sum(config.layer_is_sparse)
    num_kda = config.num_hidden_layers - num_sparse
    width = config.kda_heads * config.kda_head_dim
    hyper = 10 * streams * H + 6 * config.hc_sinkhorn_iters * streams**2
    kda = width * (7 * chunk + 40)
    heads = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
    sparse = 12 * heads + 8 * config.index_n_heads * config.index_head_dim
    experts = config.num_experts_per_tok + config.n_shared_experts
    moe = experts * (6 * H + 10 * config.moe_intermediate_size)
    feed = max(moe, 10 * config.intermediate_size)
    layers = config.num_hidden_layers * (2 * hyper + feed) + num_kda * kda + num_sparse * sparse
    return ITEM * (layers + 8 * config.vocab_size)
