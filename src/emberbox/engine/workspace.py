"""How much memory one step needs besides weights and cache: an estimate, from above.

Counted are the largest tensors that live at the same time, by the ops a device without kernels of
its own runs (`ops/*/reference.py`, and for attention the absorbed form of `kernel_cpu.py`), and by
what `Kernels` says takes their place. A long step is computed in pieces (model/pieces.py): only the
streams, and rows on their way through the experts, exist for all of it.
"""

from dataclasses import dataclass

from emberbox.model.batch import MAX_VERIFY_TOKENS
from emberbox.model.config import TextConfig, VisionConfig
from emberbox.model.layers import ROWS
from emberbox.ops.index_choose import MAX_SCORES
from emberbox.ops.mla_decode import MAX_QUERIES
from emberbox.ops.moe_experts import PREFILL_TOKENS
from emberbox.settings import EngineSettings

# R rows of the step, n of one piece, L tokens of a sequence, P = L / pool its pools; B bytes of an
# activation, W of a float32 or wider; S streams, C latent width, Di indexer head width
ATTENTION_BLOCK_BYTES = 3 * 16 * 1024**2  # gathered latents, their logits and softmax
CHUNK, GPU_CHUNK = 16, 64  # tokens of one solve in ops/kda_chunk


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a device has in place of references: `products` read EXL3 weights; with `graphs`,
    decode steps are CUDA graphs and attention reads the cache where it lies."""

    products: bool = False
    graphs: bool = False


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes of the largest step and what they are made of; `kept`: what kernels keep beside."""

    num_bytes: int
    kept: int
    note: str

    @staticmethod
    def of(
        text: TextConfig,
        item: int,
        settings: EngineSettings,
        length: int,
        kernels: Kernels = Kernels(),
    ) -> "Workspace":
        """R = prefill_tokens + 8 max_running rows; one of the sequences has `length` tokens.

        Streams live all the time, and the embedding: R (S + 1) hidden B. Beside them the largest of
        the parts.
        """
        rows = settings.prefill_tokens + MAX_VERIFY_TOKENS * settings.max_running
        piece = min(rows, max(ROWS, settings.max_running))
        longest = min(piece, max(settings.prefill_tokens, MAX_VERIFY_TOKENS))
        sampling = MAX_VERIFY_TOKENS * settings.max_running
        parts = {
            "hyper-connections": _hyper(text, item, rows, piece),
            "KDA": _kda(text, item, piece, GPU_CHUNK if kernels.graphs else CHUNK),
            "feed-forward": _feed_forward(text, item, rows, piece, kernels),
            "logits": sampling * text.vocab_size * (item + 2 * max(item, 4)),
        }
        if kernels.graphs:
            parts["attention"] = _attention_in_pages(text, item, piece)
        else:
            parts["indexer"] = _indexer(text, item, longest, length)
            parts["attention"] = _attention(text, item, piece, length)
        largest = max(parts, key=lambda name: parts[name])
        note = f"{rows:,} rows, {largest} the largest part"
        kept = _kept(text, item, min(rows, PREFILL_TOKENS), piece, length, kernels)
        if kept:
            note = f"{note}, and {kept:,} that kernels keep"
        streams = rows * (text.hc_mult + 1) * text.hidden_size * item
        return Workspace(streams + parts[largest], kept, note)


def _hyper(text: TextConfig, B: int, R: int, n: int) -> int:
    """A piece's streams in wide, scaled and squared, or what replaces them; x and results of all.

    n S hidden (B + 4 W) + R hidden 3 B
    """
    hidden = text.hidden_size
    return n * text.hc_mult * hidden * (B + 4 * max(B, 4)) + R * hidden * 3 * B


def _kda(text: TextConfig, B: int, n: int, chunk: int) -> int:
    """The larger of the convolution of q, k, v and of the rule, whose chunk has a decay for each
    pair of its tokens: twice.

    n 3 H D (3 B + 4 W); n H D (7 B + 7 W) + 2 chunk^2 H D W; besides n hidden 2 B
    """
    W, width = max(B, 4), text.kda_heads * text.kda_head_dim
    convolution = n * 3 * width * (3 * B + 4 * W)
    rule = n * width * 7 * (B + W) + 2 * chunk**2 * width * W
    return n * text.hidden_size * 2 * B + max(convolution, rule)


def _rows_read(text: TextConfig, B: int, length: int) -> int:
    """A sequence's rows out of its pages, joined with the new ones.

    (L C + P Di) 2 B
    """
    return (length * text.kv_lora_rank + _pools(text, length) * text.index_head_dim) * 2 * B


def _indexer(text: TextConfig, B: int, n: int, length: int) -> int:
    """The match of every indexer head with every pool, three times; scores; the chosen tokens.

    rows read + P Di W + n P (3 Hi + 3) W + 3 n (topk + pool) 8
    """
    W, P = max(B, 4), _pools(text, length)
    match = n * P * (3 * text.index_n_heads + 3) * W
    chosen = 3 * n * (text.index_topk + text.index_kpool) * 8
    return _rows_read(text, B, length) + P * text.index_head_dim * W + match + chosen


def _attention(text: TextConfig, B: int, n: int, length: int) -> int:
    """Rows in wide, W_K and W_V in wide, queries, absorbed queries and what they gather.

    rows read + L C W + H (Dk + Dv) C W + n H ((Dk + Dv) (2 B + W) + 3 C W) + blocks
    """
    W, H, C = max(B, 4), text.num_attention_heads, text.kv_lora_rank
    both = text.qk_head_dim + text.v_head_dim
    weights, queries = H * both * C * W, n * H * (both * (2 * B + W) + 3 * C * W)
    rows = _rows_read(text, B, length) + length * C * W
    return rows + weights + queries + ATTENTION_BLOCK_BYTES


def _attention_in_pages(text: TextConfig, B: int, n: int) -> int:
    """Queries and results of attention and indexer, x in wide, the chosen rows.

    n (H (Dk + Dv) 2 B + 2 Hi Di W + hidden (2 B + W) + 2 (topk + pool) 4)
    """
    W, heads = max(B, 4), text.num_attention_heads * (text.qk_head_dim + text.v_head_dim)
    index = 2 * text.index_n_heads * text.index_head_dim * W
    chosen = 2 * (text.index_topk + text.index_kpool) * 4
    return n * (heads * 2 * B + index + text.hidden_size * (2 * B + W) + chosen)


def _feed_forward(text: TextConfig, B: int, R: int, n: int, kernels: Kernels) -> int:
    """All rows, in wide for the router; and of a piece the dense layer, or, without kernels, all
    rows through one expert that is decoded first.

    R hidden (4 B + W) + the larger of n I_dense (3 B + 3 W) and R (I + hidden) (3 B + 3 W)
    + 3 I hidden (B + W)
    """
    W, hidden, expert = max(B, 4), text.hidden_size, text.moe_intermediate_size
    dense = n * text.intermediate_size * 3 * (B + W)
    routed = R * (expert + hidden) * 3 * (B + W) + 3 * expert * hidden * (B + W)
    return R * hidden * (4 * B + W) + (dense if kernels.products else max(dense, routed))


def _kept(text: TextConfig, B: int, T: int, n: int, length: int, kernels: Kernels) -> int:
    """What kernels keep from one call to the next, T tokens of experts and n rows of others."""
    kept = _rotated(text, n) + _routed(text, T) if kernels.products else 0
    return kept + (_absorbed(text, B, n, length) if kernels.graphs else 0)


def _rotated(text: TextConfig, n: int) -> int:
    """Rows of the widest input of a product, in float16: n I 2."""
    widths = (
        text.hidden_size,
        text.intermediate_size,
        text.kda_heads * text.kda_head_dim,
        text.num_attention_heads * text.v_head_dim,
        text.q_lora_rank,
    )
    return n * max(widths) * 2


def _routed(text: TextConfig, T: int) -> int:
    """Sorted rows of the chosen experts, R = T k and 7 for each expert.

    rotated for gate and up, R hidden 2 2; inner, R I 2; the larger of R I 2 4 and T k hidden 4
    """
    slots = T * text.num_experts_per_tok
    rows = slots + min(slots, text.n_routed_experts) * 7
    inner, hidden = text.moe_intermediate_size, text.hidden_size
    return rows * (4 * hidden + 2 * inner) + max(8 * rows * inner, 4 * slots * hidden)


def _absorbed(text: TextConfig, B: int, n: int, length: int) -> int:
    """Absorbed queries and their sums of latents; scores of pools, 4 bytes each.

    min(n, 1,024) H (C (B + 4) + 8) + the smaller of n P and 2^24, but P at least, 4
    """
    P = _pools(text, length)
    latents = text.num_attention_heads * (text.kv_lora_rank * (B + 4) + 8)
    return min(n, MAX_QUERIES) * latents + max(P, min(n * P, MAX_SCORES)) * 4


def _pools(text: TextConfig, length: int) -> int:
    return length // text.index_kpool


def vision_bytes(vision: VisionConfig | None, item: int, max_image_tokens: int) -> int:
    """The tower on one picture of that many tokens; 0 without a tower.

    With P patches of width V, pixels of width X, I the inner width, n rows of a piece and O the
    text's width: P (X (B + 4) + 2 V B + 2 V + 3 V (2 B + 2 W)) + n I (3 B + 3 W) + tokens O 2 B
    """
    if vision is None:
        return 0
    B, W = item, max(item, 4)
    patches = max_image_tokens * vision.spatial_merge_size**2
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2 * (B + 4)
    width = vision.hidden_size
    inner = max(vision.intermediate_size, vision.projection_intermediate_size)
    block = 3 * width * 2 * (B + W)
    return (
        patches * (pixels + 2 * width * B + 2 * width + block)
        + min(patches, ROWS) * inner * 3 * (B + W)
        + max_image_tokens * vision.out_hidden_size * 2 * B
    )
