"""The trellis search compiled for a CPU; imported only where it is called, by trellis_search_cpu.

float16 arithmetic in float32 lanes, bit-equal to trellis_search_numpy. A cost in float32 leaves 13
bits of its fraction free: the candidate stands there, so one integer minimum finds the lowest cost
and, among equals, the smaller candidate.
"""

import numpy as np
from numba import njit, prange

# d bits that a position owns, e bits that the next one owns; a node after a step has 16 - e bits.
# H high, L low parts of a node: node = high * L + low, L = 2^d. Rows of history and of `best` are
# [L, H]: for fixed low bits the costs before a step are contiguous in the high bits.
POSITIONS = 256
WINDOW_BITS = 16
FIRST_START = 128
# From this many own bits on, the values of one predecessor alone fill a vector.
MIN_BITS_BY_LOW = 6

EXPONENT = np.int32(0x7F80_0000)
# Exponent up by the 24 - 11 bits that float16 lacks; times 1.5, so that adding a negative number
# does not leave the binade and its step.
TO_ANCHOR = np.int32((13 << 23) | (1 << 22))
SMALLEST_ANCHOR = np.float32(0.75)  # its step is 2^-24, that of float16's smallest numbers
CHOICE_MASK = np.int32(0x1FFF)
FARTHEST = np.int32(0x7F7F_FFFF)
# Above every cost that can be reached, and all that is added to it does not leave float32.
UNREACHABLE = np.float32(131072.0)


@njit
def _anchor(x):
    """A number whose float32 step is the float16 step of x: adding it rounds x."""
    return np.int32((np.float32(x).view(np.int32) & EXPONENT) + TO_ANCHOR).view(np.float32)


@njit
def _key(value, target, cost, choice):
    """Bits of the float16 fma((value - target), (value - target), cost), with `choice` below."""
    difference = value - target
    anchor = _anchor(difference)  # small ones are exact, whatever the anchor
    difference = (difference + anchor) - anchor
    square = difference * difference  # exact
    high = square if square > cost else cost
    low = cost if square > cost else square
    # high + low rounded to float32 and then to float16 would be rounded twice. `high` is cut at
    # the step of the sum first; the rest of it and `low` add exactly (targets are bounded).
    anchor = _anchor(high + low)
    anchor = anchor if anchor > SMALLEST_ANCHOR else SMALLEST_ANCHOR
    cut = high + anchor
    rest = high - (cut - anchor)
    total = (cut + (rest + low)) - anchor
    return np.int32(np.float32(total).view(np.int32) | choice)


@njit
def _relax(values, costs, target, choice, best):
    for i in range(best.size):
        key = _key(values[i], target, costs[i], choice)
        best[i] = min(best[i], key)


@njit
def _relax_same(values, cost, target, choice, best):
    for i in range(best.size):
        key = _key(values[i], target, cost, choice)
        best[i] = min(best[i], key)


@njit
def _step_high(values, cost, target, best):
    """Few own bits: vectors run over the high bits. values [C, L, H], best [L, H]."""
    num_choices, num_low, num_high = values.shape
    for low in range(num_low):
        best[low, :] = FARTHEST
        for choice in range(num_choices):
            costs = cost[choice * num_high : (choice + 1) * num_high]
            _relax(values[choice, low], costs, target, np.int32(choice), best[low])


@njit
def _step_low(values, cost, target, best):
    """Many own bits: vectors run over the low bits. values [C, H, L], best [H, L]."""
    num_choices, num_high = values.shape[:2]
    for high in range(num_high):
        best[high, :] = FARTHEST
        for choice in range(num_choices):
            before = cost[choice * num_high + high]
            _relax_same(values[choice, high], before, target, np.int32(choice), best[high])


@njit
def _settle(best, d, cost, choices):
    """Costs of the nodes in their own order; the candidate that each node took, in `best`'s."""
    for i in range(best.size):
        choices[i] = np.uint8(best[i] & CHOICE_MASK)
        best[i] = np.int32(best[i] & ~CHOICE_MASK)
    costs = best.view(np.float32)
    if d >= MIN_BITS_BY_LOW:
        cost[: best.size] = costs
        return
    num_high = best.size >> d
    if d == 1:
        for high in range(num_high):
            cost[2 * high] = costs[high]
            cost[2 * high + 1] = costs[num_high + high]
    elif d == 2:
        for high in range(num_high):
            cost[4 * high] = costs[high]
            cost[4 * high + 1] = costs[num_high + high]
            cost[4 * high + 2] = costs[2 * num_high + high]
            cost[4 * high + 3] = costs[3 * num_high + high]
    else:
        for low in range(1 << d):
            for high in range(num_high):
                cost[(high << d) + low] = costs[low * num_high + high]


@njit
def _at(book, position):
    """Values of a position in the order of its step, and the bits it owns."""
    even, odd, own_bits = book
    return (even, own_bits[0]) if position % 2 == 0 else (odd, own_bits[1])


@njit
def _forward(book, target, first, cost, best, history):
    """One pass over the ring from position `first`; `cost` before it and after it."""
    for i in range(POSITIONS):
        position = (first + i) % POSITIONS
        values, d = _at(book, position)
        size = values.shape[1] * values.shape[2]
        row = best[:size]
        if d < MIN_BITS_BY_LOW:
            _step_high(values, cost, target[position], row.reshape(values.shape[1:]))
        else:
            _step_low(values, cost, target[position], row.reshape(values.shape[1:]))
        _settle(row, d, cost, history[position])


@njit
def _backward(book, node, first, history, windows):
    """The windows of the path that ends in `node` after a pass from position `first`."""
    for i in range(POSITIONS - 1, -1, -1):
        position = (first + i) % POSITIONS
        values, d = _at(book, position)
        size = values.shape[1] * values.shape[2]
        at = node
        if d < MIN_BITS_BY_LOW:
            at = (node & ((1 << d) - 1)) * (size >> d) + (node >> d)
        window = np.int64(history[position, at]) * size + node
        windows[position] = window
        node = window >> d


@njit
def _search_one(book, target, scratch, windows):
    cost, best, history = scratch
    bits = book[2][0]
    num_nodes = 1 << (WINDOW_BITS - bits)
    cost[:] = 0
    _forward(book, target, FIRST_START, cost, best, history)
    node = np.argmin(cost[:num_nodes])
    _backward(book, node, FIRST_START, history, windows)

    crossing = np.int64(windows[0]) >> bits
    cost[:] = UNREACHABLE
    cost[crossing] = 0
    _forward(book, target, 0, cost, best, history)
    _backward(book, crossing, 0, history, windows)
    return cost[crossing]


@njit(parallel=True, cache=True)
def search(even, odd, own_bits, targets, found, num_threads):
    """targets [N, 256] by position -> windows [N, 256], costs [N]; a thread takes every T-th.

    even, odd: values of all windows, [C, L, H] or from MIN_BITS_BY_LOW own bits on [C, H, L].
    """
    windows, costs = found
    for thread in prange(num_threads):
        num_nodes = 1 << (WINDOW_BITS - 1)
        scratch = (
            np.empty(num_nodes, np.float32),
            np.empty(num_nodes, np.int32),
            np.empty((POSITIONS, num_nodes), np.uint8),
        )
        book = (even, odd, own_bits)
        for tile in range(thread, targets.shape[0], num_threads):
            costs[tile] = _search_one(book, targets[tile], scratch, windows[tile])
