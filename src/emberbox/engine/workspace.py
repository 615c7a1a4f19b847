"""How much memory one step needs besides weights and cache: an estimate, from above.

Counted are the largest tensors that live at the same time, by the ops a device without kernels of
its own runs (`ops/*/reference.py`, and for attention the absorbed form of `kernel_cpu.py`).
"""

from dataclasses import dataclass, replace

from emberbox.model.batch import MAX_VERIFY_TOKENS
from emberbox.model.config import TextConfig, VisionConfig
from emberbox.ops.moe_experts import PREFILL_TOKENS
from emberbox.settings import EngineSettings

# T rows of the step, n rows of one sequence, L its tokens, P = L / pool its pools; B bytes of an
# activation, W of a float32 or wider; C latent width, Di indexer head width
ATTENTION_BLOCK_BYTES = 3 * 16 * 1024**2  # gathered latents, their logits and softmax


@dataclass(frozen=True, slots=True)
class Workspace:
    """Bytes of the largest step, and what they are made of."""

    num_bytes: int
    note: str

    @staticmethod
    def of(text: TextConfig, item: int, settings: EngineSettings, length: int) -> "Workspace":
        """T = prefill_tokens + 8 max_running rows; one of the sequences has `length` tokens.

        Streams live all the time: T S hidden (2 B + 3 W). Beside them the largest of the parts.
        """
        rows = settings.prefill_tokens + MAX_VERIFY_TOKENS * settings.max_running
        longest = max(settings.prefill_tokens, MAX_VERIFY_TOKENS)
        streams = rows * text.hc_mult * text.hidden_size * (2 * item + 3 * max(item, 4))
        parts = {
            "KDA": _kda(text, item, rows),
            "indexer": _indexer(text, item, longest, length),
            "attention": _attention(text, item, rows, length),
            "feed-forward": _feed_forward(text, item, rows),
            "logits": rows * text.vocab_size * (item + max(item, 4)),
        }
        largest = max(parts, key=lambda name: parts[name])
        note = f"{rows:,} rows, {largest} the largest part"
        return Workspace(streams + parts[largest], note)

    def with_kernels(self, text: TextConfig, settings: EngineSettings) -> "Workspace":
        """The same, with what the kernels of EXL3 weights keep from one call to the next."""
        rows = settings.prefill_tokens + MAX_VERIFY_TOKENS * settings.max_running
        kept = _rotated(text, rows) + _routed(text, min(rows, PREFILL_TOKENS))
        return replace(self, num_bytes=self.num_bytes + kept, note=f"{self.note}, EXL3 kernels")


def _kda(text: TextConfig, B: int, T: int) -> int:
    """q, k, v joined, in the convolution (one copy per tap, twice) and in the rule.

    T 3 H D (3 B + (2 taps + 5) W)
    """
    W = max(B, 4)
    return T * 3 * text.kda_heads * text.kda_head_dim * (3 * B + (2 * text.conv_width + 5) * W)


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


def _attention(text: TextConfig, B: int, T: int, length: int) -> int:
    """Rows in wide, W_K and W_V in wide, queries, absorbed queries and what they gather.

    rows read + L C W + H (Dk + Dv) C W + T H ((Dk + Dv) (2 B + W) + 3 C W) + blocks
    """
    W, H, C = max(B, 4), text.num_attention_heads, text.kv_lora_rank
    both = text.qk_head_dim + text.v_head_dim
    weights, queries = H * both * C * W, T * H * (both * (2 * B + W) + 3 * C * W)
    rows = _rows_read(text, B, length) + length * C * W
    return rows + weights + queries + ATTENTION_BLOCK_BYTES


def _feed_forward(text: TextConfig, B: int, T: int) -> int:
    """All rows through one expert that is decoded first, or through the dense layer.

    T hidden (3 B + 3 W) + the larger of T I (3 B + 3 W) + 3 I hidden (B + W) and T I_dense (3 B +
    3 W)
    """
    W = max(B, 4)
    expert = text.moe_intermediate_size
    routed = T * expert * 3 * (B + W) + 3 * expert * text.hidden_size * (B + W)
    dense = T * text.intermediate_size * 3 * (B + W)
    return T * text.hidden_size * 3 * (B + W) + max(routed, dense)


def _rotated(text: TextConfig, T: int) -> int:
    """Rows of the widest input of a product, in float16: T I 2."""
    widths = (
        text.hidden_size,
        text.intermediate_size,
        text.kda_heads * text.kda_head_dim,
        text.num_attention_heads * text.v_head_dim,
        text.q_lora_rank,
    )
    return T * max(widths) * 2


def _routed(text: TextConfig, T: int) -> int:
    """Sorted rows of the chosen experts, R = T k and 7 for each expert.

    rotated for gate and up, R hidden 2 2; inner, R I 2; the larger of R I 2 4 and T k hidden 4
    """
    slots = T * text.num_experts_per_tok
    rows = slots + min(slots, text.n_routed_experts) * 7
    inner, hidden = text.moe_intermediate_size, text.hidden_size
    return rows * (4 * hidden + 2 * inner) + max(8 * rows * inner, 4 * slots * hidden)


def _pools(text: TextConfig, length: int) -> int:
    return length // text.index_kpool


def vision_bytes(vision: VisionConfig | None, item: int, max_image_tokens: int) -> int:
    """The tower on one picture of that many tokens; 0 without a tower.

    With P patches of width V, pixels of width X, I the inner width and O the text's:
    P (X (B + 4) + 2 V B + the larger of 3 V (2 B + 2 W) and I (3 B + 3 W)) + tokens O 2 B
    """
    if vision is None:
        return 0
    B, W = item, max(item, 4)
    patches = max_image_tokens * vision.spatial_merge_size**2
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2 * (B + 4)
    width = vision.hidden_size
    block = max(3 * width * 2 * (B + W), vision.intermediate_size * 3 * (B + W))
    return patches * (pixels + 2 * width * B + block) + max_image_tokens * (
        vision.out_hidden_size * 2 * B
    )
