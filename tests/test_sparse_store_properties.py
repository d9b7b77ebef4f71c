"""Random interleavings of store operations against a plain Python model of the contract.

A program is a list of operations of several owners on a small store, stale leases and plans
included. One compiled scan runs it on the device, and a dictionary per slot runs it here.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st

from sparse_loop_jax.models.config import OuroConfig
from sparse_loop_jax.sparse import store as rs

SLOTS, CAPACITY, BATCH, ROWS = 6, 2, 2, 2
LEASES, PLANS = 3, 2  # how many of each are remembered, the stale ones among them
LENGTH = 40  # operations of a program; shorter ones end in idle steps
MODEL = OuroConfig(
    vocab_size=4,
    hidden_size=4,
    intermediate_size=4,
    num_hidden_layers=2,
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=2,
)
IDLE, RESERVE, PLAN, CAPTURE, CONSUME, ACCEPT, RELEASE = range(7)


def rows_of(value):
    """What a capture of `value` writes for each row: counts, positions, mass, base."""
    number = value * 10 + jnp.arange(BATCH * ROWS).reshape(BATCH, ROWS)
    counts = 1 + number % CAPACITY
    positions = jnp.broadcast_to(number[..., None, None], (BATCH, ROWS, 1, CAPACITY))
    mass = number[..., None].astype(jnp.float32)
    base = jnp.broadcast_to(mass[..., None], (BATCH, ROWS, 1, 2))
    return counts.astype(jnp.int32), positions.astype(jnp.uint16), mass, base


def replace_at(stack, index, value):
    return jax.tree.map(lambda s, v: s.at[index].set(v), stack, value)


def device_step(state, operation):
    """One operation; emits what it gave and the store after it."""
    store, leases, plans = state
    code, lease_index, plan_index, layer, first, second, value = operation
    lease = jax.tree.map(lambda a: a[lease_index], leases)
    rows = jax.tree.map(lambda a: a[plan_index], plans)
    pair = jnp.stack([first, second])
    nothing = jnp.zeros((BATCH, ROWS), bool)
    unread = jnp.zeros((BATCH, ROWS), jnp.int32)

    def reserve():
        new, got = rs.reserve(store, pair, ROWS)
        return new, replace_at(leases, lease_index, got), plans, nothing, unread

    def plan():
        live = jnp.arange(ROWS)[None] < pair[:, None]
        made, refused = rs.plan(store, lease, live)
        return store, leases, replace_at(plans, plan_index, made), refused, unread

    def capture():
        results = [rs.capture(store, rows, i, *rows_of(value)) for i in range(2)]
        new, refused = jax.tree.map(lambda a, b: jnp.where(layer == 0, a, b), *results)
        return new, leases, plans, refused, unread

    def consume():
        reference, refused = rs.consume(store, rows, 1)
        seen = jnp.where(reference.count > 0, reference.base[..., 0, 0], -1)
        return store, leases, plans, refused, seen.astype(jnp.int32)

    def accept():
        return rs.accept(store, lease, pair), leases, plans, nothing, unread

    def release():
        new, refused = rs.release(store, lease)
        return new, leases, plans, refused, unread

    branches = [lambda: (store, leases, plans, nothing, unread)]
    branches += [reserve, plan, capture, consume, accept, release]
    store, leases, plans, refused, seen = jax.lax.switch(code, branches)
    lease = jax.tree.map(lambda a: a[lease_index], leases)
    rows = jax.tree.map(lambda a: a[plan_index], plans)
    return (store, leases, plans), (store, lease, rows, refused, seen)


def start():
    store = rs.create(MODEL, slots=SLOTS, capacity=CAPACITY)
    lease = rs.empty_lease(SLOTS, BATCH, ROWS)
    plan, _ = rs.plan(store, lease, jnp.zeros((BATCH, ROWS), bool))

    def repeat(tree, times):
        return jax.tree.map(lambda a: jnp.stack([a] * times), tree)

    return store, repeat(lease, LEASES), repeat(plan, PLANS)


@jax.jit
def run_on_device(program):
    return jax.lax.scan(device_step, start(), program)[1]


# The model -----------------------------------------------------------------------------


@dataclasses.dataclass
class Slot:
    version: int = 0
    held: bool = False
    count: int = 0
    payload: tuple[int, int] = (0, 0)  # what each layer holds


class Model:
    """The contract in plain Python. Which free slots a reservation takes is not part of it:
    the model learns that from the device, after checking that it may."""

    def __init__(self):
        self.slots = [Slot() for _ in range(SLOTS)]
        # By index: for each (request, row) the slot and version, or nothing.
        self.leases = [{} for _ in range(LEASES)]
        self.plans = [{} for _ in range(PLANS)]

    def owned(self, slot, version) -> bool:
        return self.slots[slot].held and self.slots[slot].version == version

    def step(self, operation, got_lease):
        """Returns refused and seen, as {(request, row): ...}."""
        code, lease_index, plan_index, layer, *pair, value = operation
        lease, plan = self.leases[lease_index], self.plans[plan_index]
        refused, seen = set(), {}
        if code == RESERVE:
            self.reserve(lease_index, pair, got_lease)
        elif code == PLAN:
            live = {(b, j) for b in range(BATCH) for j in range(ROWS) if j < pair[b]}
            owned = {row for row in live if row in lease and self.owned(*lease[row])}
            refused = live - owned
            self.plans[plan_index] = {row: lease[row] for row in owned}
        elif code == CAPTURE:
            refused = {row for row in plan if not self.owned(*plan[row])}
            for b, j in set(plan) - refused:
                slot, number = self.slots[plan[b, j][0]], value * 10 + b * ROWS + j
                payload = list(slot.payload)
                payload[layer] = number
                slot.payload = (payload[0], payload[1])
                if layer == 1:
                    slot.count = 1 + number % CAPACITY
        elif code == CONSUME:
            for row, (slot, version) in plan.items():
                if self.owned(slot, version) and self.slots[slot].count:
                    seen[row] = self.slots[slot].payload[1]
                else:
                    refused.add(row)
        elif code == ACCEPT:
            for (b, j), (slot, version) in lease.items():
                if j > max(pair[b], 0) and self.owned(slot, version):
                    self.slots[slot].count = 0
        elif code == RELEASE:
            refused = {row for row in lease if not self.owned(*lease[row])}
            for row in set(lease) - refused:
                self.slots[lease[row][0]].held = False
        return refused, seen

    def reserve(self, lease_index, wanted, got):
        free = [i for i, slot in enumerate(self.slots) if not slot.held]
        fits = all(0 <= w <= ROWS for w in wanted) and sum(wanted) <= len(free)
        assert bool(got.ok) == fits
        given = {
            (b, j): (int(got.slots[b, j]), int(got.versions[b, j]))
            for b in range(BATCH)
            for j in range(ROWS)
            if got.slots[b, j] != SLOTS
        }
        rows = (
            {(b, j) for b in range(BATCH) for j in range(max(wanted[b], 0))} if fits else set()
        )
        assert set(given) == rows
        taken = [slot for slot, _ in given.values()]
        assert len(set(taken)) == len(taken), "a slot was given to two rows"
        assert set(taken) <= set(free), "a slot was given while it was held"
        for slot, version in given.values():
            assert version == self.slots[slot].version + 1, "versions grow by reservation"
            self.slots[slot].version = version
            self.slots[slot].held = True
            self.slots[slot].count = 0
        self.leases[lease_index] = given


def check(program, trace) -> None:
    """Replays a program and compares every step with the device's."""
    store, leases, plans, refused, seen = trace
    model = Model()
    for t, operation in enumerate(program.tolist()):
        lease = jax.tree.map(lambda a, t=t: a[t], leases)
        expected, values = model.step(operation, lease)
        where = f"step {t} of {program[: t + 1].tolist()}"
        rows = {(int(b), int(j)) for b, j in np.argwhere(refused[t])}
        assert rows == expected, where
        if operation[0] == CONSUME:
            for row in np.ndindex(BATCH, ROWS):
                assert seen[t][row] == values.get(row, -1), where
        if operation[0] == PLAN:
            live = {(int(b), int(j)) for b, j in np.argwhere(plans.live[t])}
            assert live == set(model.plans[operation[2]]), where
        for name in ("version", "held", "count"):
            mine = [getattr(slot, name) for slot in model.slots]
            assert getattr(store, name)[t].tolist() == mine, f"{name} at {where}"
        for layer in range(2):
            mine = np.array([slot.payload[layer] for slot in model.slots])
            for field in (store.positions, store.mass, store.base):
                array = field[layer][t].reshape(SLOTS, -1)
                assert (array == mine[:, None]).all(), f"payload at {where}"


def random_programs(rng, count: int) -> np.ndarray:
    """int32 [count, LENGTH, 7]; as likely to use a stale lease or plan as a fresh one."""
    shape = (count, LENGTH)
    # Reservations and releases alternate often enough that slots change hands.
    codes = rng.choice(7, shape, p=[0.01, 0.2, 0.17, 0.2, 0.14, 0.1, 0.18])
    columns = [
        codes,
        rng.integers(0, LEASES, shape),
        rng.integers(0, PLANS, shape),
        rng.integers(0, 2, shape),
        rng.integers(0, ROWS + 1, shape),
        rng.integers(0, ROWS + 1, shape),
        rng.integers(1, 900, shape),
    ]
    return np.stack(columns, axis=-1).astype(np.int32)


def test_thousands_of_interleavings():
    """Vmapped as well, which every operation of the store has to bear."""
    rng = np.random.default_rng(0)
    programs = random_programs(rng, 2000)
    run = jax.jit(jax.vmap(run_on_device))
    traces = jax.tree.map(np.asarray, run(programs))
    for i, program in enumerate(programs):
        check(program, jax.tree.map(lambda a, i=i: a[i], traces))
    codes = programs[..., 0]
    refused = traces[3].any(axis=(-1, -2))
    outcomes = [refused[codes == code] for code in (PLAN, CAPTURE, CONSUME, RELEASE)]
    outcomes.append(traces[1].ok[codes == RESERVE])
    for outcome in outcomes:  # both ways, and often
        assert outcome.sum() > 200
        assert (~outcome).sum() > 200


lease_indices, plan_indices = st.integers(0, LEASES - 1), st.integers(0, PLANS - 1)
values = st.integers(1, 900)
operations = st.tuples(
    st.integers(RESERVE, RELEASE),
    lease_indices,
    plan_indices,
    st.integers(0, 1),
    st.integers(-1, ROWS + 1),
    st.integers(-1, ROWS + 1),
    values,
)


@st.composite
def parts_of_rounds(draw):
    """The operations of a round in their order, some of them left out."""
    lease, plan, value = draw(lease_indices), draw(plan_indices), draw(values)
    accepted = draw(st.integers(0, ROWS))
    steps = [
        (RESERVE, lease, plan, 0, ROWS, 1, value),
        (PLAN, lease, plan, 0, ROWS, ROWS, value),
        (CAPTURE, lease, plan, 0, 0, 0, value),
        (CAPTURE, lease, plan, 1, 0, 0, value),
        (ACCEPT, lease, plan, 0, accepted, 0, value),
        (CONSUME, lease, plan, 0, 0, 0, value),
        (RELEASE, lease, plan, 0, 0, 0, value),
    ]
    left_out = draw(st.sets(st.integers(0, 6), max_size=2))
    return [step for i, step in enumerate(steps) if i not in left_out]


programs = st.lists(operations.map(lambda one: [one]) | parts_of_rounds(), min_size=1).map(
    lambda parts: [step for part in parts for step in part][:LENGTH]
)


@given(program=programs)
@settings(max_examples=300, deadline=None, database=None)
def test_any_interleaving(program):
    """The same with out-of-range arguments, and shrunk to the shortest that fails."""
    padded = np.zeros((LENGTH, 7), np.int32)
    padded[: len(program)] = program
    trace = jax.tree.map(np.asarray, run_on_device(padded))
    check(padded[: len(program)], trace)


def test_the_model_sees_a_stale_version(monkeypatch):
    """The same comparison fails where ownership forgets the version."""
    monkeypatch.setattr(
        rs, "_owned", lambda s, slots, versions: (slots < s.slots) & s.held[slots % s.slots]
    )
    programs = random_programs(np.random.default_rng(1), 50)

    def forgetful_step(state, operation):  # another function, hence another trace
        return device_step(state, operation)

    run = jax.jit(jax.vmap(lambda program: jax.lax.scan(forgetful_step, start(), program)[1]))
    traces = jax.tree.map(np.asarray, run(programs))
    failures = 0
    for i, program in enumerate(programs):
        try:
            check(program, jax.tree.map(lambda a, i=i: a[i], traces))
        except AssertionError:
            failures += 1
    assert failures > 10
