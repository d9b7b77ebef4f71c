"""Selection of the k largest scores of a row by one program, in Triton.

The algorithm and the layout are those of `pallas_kernel`: keys in registers, a search for
the threshold along a line through the ends of the bracket, a second search among equal keys
for the position up to which they stay, and kept positions written in order.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

GUESSES = tl.constexpr(16)
GROUP = tl.constexpr(128)  # scores of one warp in one group: 32 threads times 4
REST_GROUPS = tl.constexpr(4)  # read at a time of what does not fit into registers

# Keys are unsigned: padding, NaN, -inf, the other numbers with both zeros at ZERO, +inf.
PADDING = tl.constexpr(0)
NAN = tl.constexpr(1)
LOWEST = tl.constexpr(2)
ZERO = tl.constexpr(0x7F800002)
HIGHEST = tl.constexpr(0xFF000002)


@triton.jit
def select_kernel(
    scores_ptr,  # float32 [R, SPAN]
    lengths_ptr,  # int32 [R / SHARE]
    counts_ptr,  # int32 [R / SHARE]
    out_ptr,  # uint16 or uint32 [R, CAPACITY]
    SPAN: tl.constexpr,
    UNIT: tl.constexpr,  # greatest common divisor of SPAN and GROUP
    CAPACITY: tl.constexpr,
    SHARE: tl.constexpr,  # rows that share a length and a count
    WARPS: tl.constexpr,
    GROUPS: tl.constexpr,  # of WARPS * GROUP scores that stay in registers
):
    """Grid (R,)."""
    row = tl.program_id(0)
    length = tl.minimum(tl.maximum(tl.load(lengths_ptr + row // SHARE), 0), SPAN)
    count = tl.load(counts_ptr + row // SHARE)
    count = tl.minimum(tl.maximum(count, 0), tl.minimum(length, CAPACITY))
    scores_ptr += row.to(tl.int64) * SPAN
    out_ptr += row.to(tl.int64) * CAPACITY
    RESIDENT: tl.constexpr = GROUPS * WARPS * GROUP
    STRETCH: tl.constexpr = REST_GROUPS * WARPS * GROUP
    # Where what has to be read again for each step ends; nothing where a row fits.
    rest = length if SPAN > RESIDENT else 0

    keys, positions = _read(scores_ptr, 0, length, UNIT, WARPS, GROUPS)

    # On which side of zero the threshold lies. Keys of the other side are pulled up to zero:
    # then no difference of keys takes more than 31 bits, and its sign compares them.
    zero = tl.full((), ZERO, tl.uint32)
    not_negative = _count_from(keys, zero)
    for start in range(RESIDENT, rest, STRETCH):
        further, _ = _read(scores_ptr, start, length, UNIT, WARPS, REST_GROUPS)
        not_negative += _count_from(further, zero)
    upper = not_negative >= count
    floor = tl.where(upper, zero - 1, PADDING)
    ceiling = tl.where(upper, tl.full((), HIGHEST, tl.uint32), zero)

    # One past the largest key, or the smallest that is not padding.
    far = _far_end(keys, upper)
    for start in range(RESIDENT, rest, STRETCH):
        further, _ = _read(scores_ptr, start, length, UNIT, WARPS, REST_GROUPS)
        end = _far_end(further, upper)
        far = tl.where(upper, tl.maximum(far, end), tl.minimum(far - 1, end - 1) + 1)
    keys = tl.minimum(tl.maximum(keys, floor), ceiling)

    low = tl.where(upper, zero, far)
    n_low = tl.where(upper, not_negative, length)
    high = tl.where(upper, far, zero)
    n_high = tl.where(upper, 0, not_negative)
    # Narrows low <= threshold < high, with n_low >= count > n_high keys that reach either
    # end, until `count` keys reach `low` or no key value lies between.
    w_low, w_high = _weight(n_low, count), _weight(n_high, count)
    side = count * 0
    step = count * 0
    while (n_low != count) & (high - low > 1) & (count > 0):
        from_, to = _value(low), _value(high)
        guess = from_ + (to - from_) * (w_low / (w_low - w_high))
        # An infinite or undefined end fails these comparisons too.
        good = (step < GUESSES) & (guess > from_) & (guess < to)
        halved = low + ((high - low) >> 1)
        threshold = tl.where(good, _ordered_keys(guess.to(tl.int32, bitcast=True)), halved)
        n = _count_from(keys, threshold)
        for start in range(RESIDENT, rest, STRETCH):
            further, _ = _read(scores_ptr, start, length, UNIT, WARPS, REST_GROUPS)
            n += _count_from(tl.minimum(tl.maximum(further, floor), ceiling), threshold)
        w = _weight(n, count)
        up = n >= count
        # The Illinois rule: an end that stays a second time counts half, or it would stay.
        w_low = tl.where(up, w, tl.where(side < 0, w_low * 0.5, w_low))
        w_high = tl.where(up, tl.where(side > 0, w_high * 0.5, w_high), w)
        low = tl.where(up, threshold, low)
        n_low = tl.where(up, n, n_low)
        high = tl.where(up, high, threshold)
        n_high = tl.where(up, n_high, n)
        side = tl.where(up, 1, -1)
        step += 1

    exact = n_low == count
    # What reaches `top` is kept, and of the keys that equal `low` those in the first positions.
    # Where the count is 0, that is one past the largest key, or `low` with no key there.
    top = tl.where(exact, low, high)
    # Without ties the cut means nothing: `top` equals `low`.
    cut = length
    if (n_low != count) & (count > 0):
        # The largest position before which what ties fits into the room that is left.
        room = count - n_high
        cut = length * 0
        beyond = length + 1
        while beyond - cut > 1:
            middle = (cut + beyond) >> 1
            n = _tied_before(keys, positions, low, middle)
            for start in range(RESIDENT, rest, STRETCH):
                further, where = _read(scores_ptr, start, length, UNIT, WARPS, REST_GROUPS)
                further = tl.minimum(tl.maximum(further, floor), ceiling)
                n += _tied_before(further, where, low, middle)
            over = n > room
            cut = tl.where(over, cut, middle)
            beyond = tl.where(over, middle, beyond)
        keys = tl.where((keys == low) & (positions < cut), top, keys)

    done = _write(out_ptr, length * 0, keys, top, positions, WARPS, GROUPS)
    for start in range(RESIDENT, rest, STRETCH):
        further, where = _read(scores_ptr, start, length, UNIT, WARPS, REST_GROUPS)
        further = tl.minimum(tl.maximum(further, floor), ceiling)
        further = tl.where((further == low) & (where < cut), top, further)
        done = _write(out_ptr, done, further, top, where, WARPS, REST_GROUPS)

    # Zeros from entry `count` on.
    WIDTH: tl.constexpr = WARPS * GROUP
    nothing = tl.zeros((WIDTH,), out_ptr.dtype.element_ty)
    for start in range(count, CAPACITY, WIDTH):
        entry = start + tl.arange(0, WIDTH)
        tl.store(out_ptr + entry, nothing, mask=entry < CAPACITY)


@triton.jit
def _ordered_keys(bits):
    """uint32 keys of the bits of float32 scores, in the order that the constants describe."""
    sign = bits >> 31
    key = (((bits & 0x7FFFFFFF) ^ sign) - sign).to(tl.uint32, bitcast=True) + ZERO
    # NaN of either sign lies beyond the infinities, which without wrapping are ends.
    return tl.where(key - LOWEST > HIGHEST - LOWEST, NAN, key)


@triton.jit
def _value(key):
    """The score of a key, inverse of `_ordered_keys`."""
    signed = (key - ZERO).to(tl.int32, bitcast=True)
    sign = signed >> 31
    return (((signed + sign) ^ sign) | (sign << 31)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(n, count):
    """log2(n) - log2(count), roughly: the bits of a float are its logarithm, piecewise."""
    bits = (n.to(tl.float32) + 0.5).to(tl.int32, bitcast=True)
    return (bits - (count.to(tl.float32) + 0.5).to(tl.int32, bitcast=True)).to(tl.float32)


@triton.jit
def _read(
    row_ptr, start, length, UNIT: tl.constexpr, WARPS: tl.constexpr, GROUPS: tl.constexpr
):
    """Keys and positions of a stretch of the row, `[GROUPS, WARPS * GROUP]`."""
    column = tl.arange(0, WARPS * GROUP)
    group = start + tl.arange(0, GROUPS) * GROUP
    # Each warp has GROUPS * GROUP neighbouring scores.
    spread = column // GROUP * (GROUPS * GROUP) + column % GROUP
    positions = group[:, None] + spread[None, :]
    # The mask is equal within whole vectors, or they would be loaded one by one. A row ends
    # at a multiple of UNIT, so that this reads nothing beyond it.
    unit = column // UNIT * UNIT
    unit = unit // GROUP * (GROUPS * GROUP) + unit % GROUP
    scores = tl.load(
        row_ptr + positions, mask=group[:, None] + unit[None, :] < length, other=0.0
    )
    keys = _ordered_keys(scores.to(tl.int32, bitcast=True))
    return tl.where(spread[None, :] < (length - group)[:, None], keys, PADDING), positions


@triton.jit
def _count_from(keys, threshold):
    """How many keys reach the threshold; their differences must fit 31 bits and a sign."""
    reached = (threshold - 1 - keys) >> 31
    return tl.sum(tl.sum(reached.to(tl.int32), axis=0), axis=0)


@triton.jit
def _tied_before(keys, positions, low, position):
    """How many keys before a position equal `low`."""
    tied = (keys == low) & (positions < position)
    return tl.sum(tl.sum(tied.to(tl.int32), axis=0), axis=0)


@triton.jit
def _far_end(keys, upper):
    """One past the largest key; the smallest that is not padding where not `upper`."""
    if upper:
        end = tl.max(tl.max(keys, axis=0), axis=0) + 1
    else:
        # Padding becomes the largest.
        end = tl.min(tl.min(keys - 1, axis=0), axis=0) + 1
    return end


@triton.jit
def _write(out_ptr, done, keys, top, positions, WARPS: tl.constexpr, GROUPS: tl.constexpr):
    """Stores where keys of a stretch reach `top`, at `done` and on; returns the new `done`."""
    THREADS: tl.constexpr = WARPS * 32
    PACKED: tl.constexpr = GROUPS if GROUPS < 4 else 4
    WORDS: tl.constexpr = GROUPS // PACKED
    key_0, key_1, key_2, key_3 = _columns(keys, GROUPS * THREADS)
    kept_0, kept_1 = (key_0 >= top).to(tl.int32), (key_1 >= top).to(tl.int32)
    kept_2, kept_3 = (key_2 >= top).to(tl.int32), (key_3 >= top).to(tl.int32)
    four = kept_0 + kept_1 + kept_2 + kept_3  # of each thread in each group
    # A group has at most 128 kept keys of one warp: four groups share the bytes of a word.
    shift = (tl.arange(0, PACKED) * 8)[None, :, None]
    words = tl.sum(tl.reshape(four, (WORDS, PACKED, THREADS)) << shift, axis=1)
    words = tl.reshape(words, (WORDS, WARPS, 32))
    words = tl.reshape(tl.cumsum(words, axis=2) - words, (WORDS, 1, THREADS))
    before = (words.to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)) & 0xFF
    before = tl.reshape(before.to(tl.int32), (GROUPS, WARPS, 32))
    in_group = tl.sum(tl.reshape(four, (GROUPS, WARPS, 32)), axis=2)
    in_warp = tl.sum(in_group, axis=0)
    start = tl.cumsum(in_group, axis=0) - in_group + (tl.cumsum(in_warp) - in_warp)[None, :]
    place = tl.reshape(before + (start + done)[:, :, None], (GROUPS * THREADS,))

    position_0, position_1, position_2, position_3 = _columns(positions, GROUPS * THREADS)
    place = _store(out_ptr, place, kept_0, position_0)
    place = _store(out_ptr, place, kept_1, position_1)
    place = _store(out_ptr, place, kept_2, position_2)
    _store(out_ptr, place, kept_3, position_3)
    return done + tl.sum(in_warp)


@triton.jit
def _columns(x, FLAT: tl.constexpr):
    """The first to fourth of each thread's neighbours, `[FLAT]`.

    Of one axis: Triton would spread two over the threads in another way than they lie.
    """
    x_02, x_13 = tl.split(tl.reshape(x, (FLAT, 2, 2)))
    x_0, x_2 = tl.split(x_02)
    x_1, x_3 = tl.split(x_13)
    return x_0, x_1, x_2, x_3


@triton.jit
def _store(out_ptr, place, kept, position):
    tl.store(out_ptr + place, position.to(out_ptr.dtype.element_ty), mask=kept > 0)
    return place + kept
