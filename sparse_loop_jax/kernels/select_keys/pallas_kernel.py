"""Selection of the k largest scores of a row by one program.

The program keeps the row's scores in registers, as integers that order alike, and looks for
a threshold that exactly k of them reach. Each step counts the keys at or above a guess; the
guess is where a line through the ends of the bracket meets k, drawn with the logarithm of
the counts because the upper tail of attention scores is near exponential. About ten steps
do for smooth scores. After `GUESSES` steps the bracket is halved instead, so that no input
takes more than 32 further ones. If several keys equal the last one kept, a second search
finds the position up to which they stay. The kept positions are then written in order.

A row lies in the program as `[groups, num_warps * GROUP]`: each warp has a stretch of
`groups * GROUP` consecutive scores, each thread 4 neighbours of every group. So loads are
whole vectors, ranks are exchanged within warps only, and the 4 keys of a thread can be split
up without moving anything. Another layout gives the same result at several times the
instructions.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from sparse_loop_jax.kernels.pallas_triton import load, store
from sparse_loop_jax.kernels.select_keys.layout import GROUP, SelectConfig

GUESSES = 16
REST_GROUPS = 4  # read at a time of what does not fit into registers

# Keys are unsigned: padding, NaN, -inf, the other numbers with both zeros at ZERO, +inf.
PADDING, NAN, LOWEST, ZERO, HIGHEST = 0, 1, 2, 0x7F800002, 0xFF000002

# Constants in kernels have a dtype: a choice between two bare Python numbers lowers wrongly.
_i32, _u32 = jnp.int32, jnp.uint32


def select_kernel(
    scores_ref,  # float32 [R, span]
    lengths_ref,  # int32 [R / rows that share one]
    counts_ref,  # int32, as lengths
    *refs,  # out uint16 or uint32 [R, capacity]; or slots int32, as lengths, and the array
    #   [slots * rows that share one, capacity] to be updated, as input and as output
    config: SelectConfig,
    interpret: bool,
):
    """Grid (R,)."""
    row = pl.program_id(0)
    out_ref = refs[-1]
    span, capacity = scores_ref.shape[1], out_ref.shape[1]
    sharing = scores_ref.shape[0] // lengths_ref.shape[0]
    share = jax.lax.div(row, _i32(sharing))
    length = jnp.clip(lengths_ref[share], 0, span)
    count = jnp.clip(counts_ref[share], 0, jnp.minimum(length, capacity))
    out_row, end_of_row = row, _i32(capacity)
    if len(refs) > 1:
        slot = refs[0][share]
        out_row = slot * sharing + jax.lax.rem(row, _i32(sharing))
        inside = (slot >= 0) & (out_row < out_ref.shape[0])
        # Nothing is kept of a row without a slot, and nothing cleared.
        count, end_of_row = jnp.where(inside, count, 0), jnp.where(inside, end_of_row, 0)
        out_row = jnp.where(inside, out_row, 0)
    select = functools.partial(
        _select,
        scores_ref,
        out_ref,
        row,
        out_row,
        length=length,
        count=count,
        end_of_row=end_of_row,
        interpret=interpret,
    )
    if config.short:
        short = dataclasses.replace(config, groups=config.short, short=0)
        fits = length <= short.reach
        pl.when(fits)(lambda: select(span=short.reach, config=short))
        pl.when(~fits)(lambda: select(span=span, config=config))
    else:
        select(span=span, config=config)


def _select(
    scores_ref, out_ref, row, out_row, *, span, length, count, end_of_row, config, interpret
):
    """Writes the kept positions of a row, whose length is at most `span`."""
    warps = config.num_warps
    keys, positions = _read(scores_ref, row, 0, length, warps, config.groups)
    head = config.resident
    if span > head and config.tail:
        tail = _read(scores_ref, row, head, length, warps, config.tail)
        head += config.tail * warps * GROUP
    else:
        tail = None
    stretch = REST_GROUPS * warps * GROUP
    rest = jax.lax.div(length - head + (stretch - 1), _i32(stretch))

    def read_rest(step):
        return _read(scores_ref, row, head + step * stretch, length, warps, REST_GROUPS)

    def over_rest(function, carry):
        """`carry = function(carry, keys, positions)` for each further stretch."""
        if tail is not None:
            carry = function(carry, *tail)
        if span <= head:
            return carry
        return jax.lax.fori_loop(0, rest, lambda i, c: function(c, *read_rest(i)), carry)

    # On which side of zero the threshold lies. Keys of the other side are pulled up to zero:
    # then no difference of keys takes more than 31 bits, and its sign compares them.
    not_negative = _count_from(keys, _u32(ZERO))
    not_negative = over_rest(lambda n, k, _: n + _count_from(k, _u32(ZERO)), not_negative)
    upper = not_negative >= count
    floor = jnp.where(upper, _u32(ZERO - 1), _u32(PADDING))
    ceiling = jnp.where(upper, _u32(HIGHEST), _u32(ZERO))

    def clamp(k):
        return jnp.minimum(jnp.maximum(k, floor), ceiling)

    def end(k):
        """One past the largest key, or the smallest that is not padding."""
        return jax.lax.cond(
            upper,
            lambda k: _reduce(jnp.max, k) + _u32(1),
            lambda k: _reduce(jnp.min, k - _u32(1)) + _u32(1),  # padding becomes the largest
            k,
        )

    def further_end(a, k, _):
        b = end(k)
        return jnp.where(
            upper, jnp.maximum(a, b), jnp.minimum(a - _u32(1), b - _u32(1)) + _u32(1)
        )

    far = over_rest(further_end, end(keys))
    keys = clamp(keys)

    def count_from(threshold):
        return over_rest(
            lambda n, k, _: n + _count_from(clamp(k), threshold), _count_from(keys, threshold)
        )

    low, n_low, high, n_high = _bracket(
        count_from,
        count,
        low=jnp.where(upper, _u32(ZERO), far),
        n_low=jnp.where(upper, not_negative, length),
        high=jnp.where(upper, far, _u32(ZERO)),
        n_high=jnp.where(upper, _i32(0), not_negative),
    )
    exact = n_low == count
    # What reaches `top` is kept, and of the keys that equal `low` those in the first positions.
    # Where the count is 0, that is one past the largest key, or `low` with no key there.
    top = jnp.where(exact, low, high)

    def raise_ties(k, positions, cut):
        return jnp.where((k == low) & (positions < cut), top, k)

    def break_ties(keys):
        def tied_before(position):
            def add(n, k, positions):
                tied = (k == low) & (positions < position)
                return n + _reduce(jnp.sum, tied.astype(_i32))

            return over_rest(lambda n, k, p: add(n, clamp(k), p), add(0, keys, positions))

        cut = _last_fitting(tied_before, length, count - n_high)
        return raise_ties(keys, positions, cut), cut

    # Without ties the cut means nothing: `top` equals `low`.
    keys, cut = jax.lax.cond(exact | (count == 0), lambda k: (k, length), break_ties, keys)

    def write(done, k, positions):
        return _write(out_ref, out_row, done, k >= top, positions, warps, interpret)

    done = write(_i32(0), keys, positions)
    over_rest(lambda done, k, p: write(done, raise_ties(clamp(k), p, cut), p), done)
    _clear(out_ref, out_row, count, end_of_row, warps * GROUP)


def ordered_keys(bits):
    """uint32 keys of the bits of float32 scores, in the order that the constants describe."""
    sign = bits >> 31
    key = jax.lax.bitcast_convert_type(((bits & 0x7FFFFFFF) ^ sign) - sign + ZERO, _u32)
    # NaN of either sign lies beyond the infinities, which without wrapping are ends.
    return jnp.where(key - _u32(LOWEST) > _u32(HIGHEST - LOWEST), _u32(NAN), key)


def _value(key):
    """The score of a key, inverse of `ordered_keys`."""
    signed = jax.lax.bitcast_convert_type(key - _u32(ZERO), _i32)
    sign = signed >> 31
    return jax.lax.bitcast_convert_type(((signed + sign) ^ sign) | (sign << 31), jnp.float32)


def _read(scores_ref, row, start, length, warps: int, groups: int):
    """Keys and positions of a stretch of the row, `[groups, warps * GROUP]`."""
    span = scores_ref.shape[1]

    def spread(column):
        """Where in the stretch the columns of the first group lie."""
        warp, within = jax.lax.div(column, _i32(GROUP)), jax.lax.rem(column, _i32(GROUP))
        return warp * (groups * GROUP) + within

    column = jax.lax.iota(_i32, warps * GROUP)
    group = start + jax.lax.iota(_i32, groups) * GROUP
    positions = group[:, None] + spread(column)[None, :]
    # The mask is equal within whole vectors, or they would be loaded one by one. A row ends
    # at a multiple of `unit`, so that this reads nothing beyond it.
    unit = math.gcd(span, GROUP)
    unit_start = spread(jax.lax.div(column, _i32(unit)) * unit)
    mask = group[:, None] + unit_start[None, :] < length
    scores = load(scores_ref.at[row, positions], mask=mask, other=0.0)
    keys = ordered_keys(jax.lax.bitcast_convert_type(scores, _i32))
    inside = spread(column)[None, :] < (length - group)[:, None]
    return jnp.where(inside, keys, _u32(PADDING)), positions


def _reduce(function, x):
    return function(function(x, axis=0), axis=0)


def _count_from(keys, threshold):
    """How many keys reach the threshold; their differences must fit 31 bits and a sign."""
    below = threshold - _u32(1) - keys
    reached = jax.lax.shift_right_logical(below, jnp.full(below.shape, 31, _u32))
    return _reduce(jnp.sum, jax.lax.bitcast_convert_type(reached, _i32))


def _bracket(count_from, count, low, n_low, high, n_high):
    """Narrows `low` <= threshold < `high` until `count` keys reach `low` or none is between.

    `n_low` >= count > `n_high` are the numbers of keys that reach either end.
    """

    def weight(n):
        """log2(n) - log2(count), roughly: the bits of a float are its logarithm, piecewise."""

        def bits(n):
            return jax.lax.bitcast_convert_type(n.astype(jnp.float32) + 0.5, _i32)

        return (bits(n) - bits(count)).astype(jnp.float32)

    def open_(carry):
        _, low, n_low, high, *_ = carry
        return (n_low != count) & (high - low > _u32(1)) & (count > 0)

    def step(carry):
        step, low, n_low, high, n_high, w_low, w_high, side = carry
        from_, to = _value(low), _value(high)
        guess = from_ + (to - from_) * (w_low / (w_low - w_high))
        # An infinite or undefined end fails these comparisons too.
        good = (step < GUESSES) & (guess > from_) & (guess < to)
        halved = low + ((high - low) >> 1)
        guess = jnp.where(good, ordered_keys(jax.lax.bitcast_convert_type(guess, _i32)), halved)
        n = count_from(guess)
        w = weight(n)
        up = n >= count
        # The Illinois rule: an end that stays a second time counts half, or it would stay.
        w_low = jnp.where(up, w, jnp.where(side < 0, w_low * 0.5, w_low))
        w_high = jnp.where(up, jnp.where(side > 0, w_high * 0.5, w_high), w)
        return (
            step + 1,
            jnp.where(up, guess, low),
            jnp.where(up, n, n_low),
            jnp.where(up, high, guess),
            jnp.where(up, n_high, n),
            w_low,
            w_high,
            jnp.where(up, _i32(1), _i32(-1)),
        )

    carry = (_i32(0), low, n_low, high, n_high, weight(n_low), weight(n_high), _i32(0))
    _, low, n_low, high, n_high, *_ = jax.lax.while_loop(open_, step, carry)
    return low, n_low, high, n_high


def _last_fitting(count_before, length, room):
    """The largest position in [0, length] before which `count_before` is at most `room`."""

    def step(ends):
        fits, exceeds = ends
        middle = (fits + exceeds) >> 1
        over = count_before(middle) > room
        return jnp.where(over, fits, middle), jnp.where(over, middle, exceeds)

    ends = (_i32(0), length + 1)
    return jax.lax.while_loop(lambda ends: ends[1] - ends[0] > 1, step, ends)[0]


def _write(out_ref, row, done, kept, positions, warps: int, interpret: bool):
    """Stores the kept positions of a stretch at `done` and on; returns the new `done`."""
    groups, lanes = positions.shape[0], GROUP // 4
    threads = warps * lanes
    kept = kept.astype(_i32).reshape(groups, threads, 4)
    four = jnp.sum(kept, axis=2)  # of each thread in each group
    # A group has at most 128 kept keys of one warp: four groups share the bytes of a word.
    shape = (pl.cdiv(groups, 4), min(groups, 4), threads)
    shift = jnp.broadcast_to(jax.lax.broadcasted_iota(_i32, (1, shape[1], 1), 1) * 8, shape)
    words = jnp.sum(four.reshape(shape) << shift, axis=1).reshape(-1, warps, lanes)
    words = (jnp.cumsum(words, axis=2) - words).reshape(-1, 1, threads)
    before = jax.lax.shift_right_logical(jnp.broadcast_to(words, shape), shift) & 0xFF
    in_group = jnp.sum(four.reshape(groups, warps, lanes), axis=2)
    in_warp = jnp.sum(in_group, axis=0)
    start = jnp.cumsum(in_group, axis=0) - in_group + (jnp.cumsum(in_warp) - in_warp)[None]
    start = jnp.broadcast_to((start + done)[:, :, None], (groups, warps, lanes))
    place = before.reshape(groups, threads) + start.reshape(groups, threads)
    fours = (groups, threads, 4)
    for flag, position in zip(_split(kept), _split(positions.reshape(fours)), strict=True):
        # The interpreter writes masked lanes too, unless their index is past the end.
        index = jnp.where(flag > 0, place, out_ref.shape[1]) if interpret else place
        store(out_ref.at[row, index], position.astype(out_ref.dtype), mask=flag > 0)
        place = place + flag
    return done + jnp.sum(in_warp)


def _split(x):
    """The 4 columns of `[groups, threads, 4]`."""
    return [column.reshape(x.shape[:2]) for column in jnp.split(x, 4, axis=2)]


def _clear(out_ref, row, count, end, block: int):
    """Zeros from entry `count` to `end`."""

    def body(step, _):
        index = count + step * block + jax.lax.iota(_i32, block)
        store(out_ref.at[row, index], jnp.zeros((block,), out_ref.dtype), mask=index < end)

    jax.lax.fori_loop(0, jax.lax.div(end - count + (block - 1), _i32(block)), body, None)
