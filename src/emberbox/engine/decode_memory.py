"""What decode steps of fixed shape hold on a GPU: buffers, exactly; graphs, as an estimate.

The buffers are those of `DecodeRunner`. Knows no tensors: it computes with the shapes of a config.
"""

from emberbox.engine.decode_runner import HEAD, shapes_for
from emberbox.model.config import PAGE_TOKENS, TextConfig
from emberbox.model.decode_step import MAX_ROWS

CONTEXT_BYTES = 600 * 10**6  # the driver's context, loaded kernels, workspaces of matrix products
GRAPH_BYTES = 4 * 10**6  # of the driver, each
DRAW_BYTES = 40  # of each token: score, weight, distance, lists (ops/sample_rows), and the row
TABLE_BYTES = 18  # of each token: bias, counts, seen, banned (sampler.py)


def buffer_bytes(text: TextConfig, item: int, max_running: int, max_model_len: int) -> int:
    """Drafts, logits, choices, and the numbers of a step on device and host.

    r (KDA layers (3 H D B + 3 H D W) + V W + 2 8) + 2 (4 32 + 32 pages) 4 + 32 4, for r rows
    """
    width, W = text.kda_heads * text.kda_head_dim, max(item, 4)
    num_kda = text.num_hidden_layers - sum(text.layer_is_sparse)
    numbers = HEAD + MAX_ROWS * -(-max_model_len // PAGE_TOKENS)
    rows = _most_rows(max_running)
    drafts = rows * num_kda * 3 * width * (item + W)
    return drafts + rows * (text.vocab_size * W + 16) + 2 * numbers * 4 + MAX_ROWS * 4


def graph_bytes(text: TextConfig, item: int, max_running: int) -> int:
    """The context, the graphs, the activations that the largest shape holds at a time; what a draw
    needs, and the tables of requests with penalties (n of them).

    r (V (B + 2 W) + 3 H D 2 B + H (Dk + Dv) B + hidden (S + 8) B + 2 (topk + pool) 4)
    + V (DRAW + n TABLES)
    """
    rows, W = _most_rows(max_running), max(item, 4)
    widths = 3 * text.kda_heads * text.kda_head_dim * 2
    widths += text.num_attention_heads * (text.qk_head_dim + text.v_head_dim)
    widths += text.hidden_size * (text.hc_mult + 8)
    chosen = 2 * (text.index_topk + text.index_kpool) * 4
    row = text.vocab_size * (item + 2 * W) + widths * item + chosen
    draws = text.vocab_size * (DRAW_BYTES + max_running * TABLE_BYTES)
    graphs = len(shapes_for(max_running)) * GRAPH_BYTES
    return CONTEXT_BYTES + graphs + rows * row + draws


def _most_rows(max_running: int) -> int:
    return max(shape.num_rows for shape in shapes_for(max_running))
