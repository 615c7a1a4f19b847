"""Which networks the kernels of decode steps and of attention in pages are written for.

One predicate, asked of a config by the plan before there is a network, and by the network.
"""

from emberbox.model.cache import ring_tokens
from emberbox.model.config import PAGE_TOKENS, TextConfig
from emberbox.ops.mla_open.reference import RING
from emberbox.ops.table import OpTable

BLOCK = 128  # channels; widths are whole blocks of a Hadamard rotation
MAX_QUERY, MAX_LATENT, MAX_KEY = 2048, 512, 512


def can_step(text: TextConfig) -> bool:
    """Whether the kernels take a network of these sizes: what each of them checks, in one place."""
    pool, heads = text.index_kpool, text.num_attention_heads
    blocks = (text.hidden_size, text.q_lora_rank, text.kv_lora_rank, heads * text.v_head_dim)
    return (
        text.hc_mult == 4
        and text.conv_width == 4
        and text.kda_head_dim == text.index_head_dim == BLOCK
        and not any(width % BLOCK for width in blocks)
        and text.q_lora_rank <= MAX_QUERY
        and text.kv_lora_rank <= MAX_LATENT
        and text.qk_head_dim % 8 == 0
        and text.qk_head_dim <= MAX_KEY
        and (text.v_head_dim == BLOCK // 2 or text.v_head_dim % BLOCK == 0)
        and text.index_n_heads in range(16, 65, 16)
        and ring_tokens(pool) == RING
        and PAGE_TOKENS % pool == 0
    )


def reads_pages(text: TextConfig, ops: OpTable) -> bool:
    """Whether attention reads the cache where it lies: by kernels, which gather in bounded memory.

    References are for small shapes.
    """
    return "reference" not in (ops.names["mla_decode"], ops.names["index_choose"]) and can_step(
        text
    )
