# %% [markdown]
# # Inside the reference store
#
# In sparse decoding, loop 1 leaves a *reference* for loops 2 and 3: which keys each head kept,
# their attention mass, and what the other keys contributed. With speculation every row of every
# round that is in flight has one, and acceptance decides which of them were worth keeping. All
# of this is a pytree that goes through a jitted step, so that it can be looked at after any of
# its operations. The pictures below are drawn from its arrays and from nothing else.

# %%
# %matplotlib inline
import collections
import dataclasses

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.patches import Patch, Rectangle

import sparse_loop_jax as slj
from sparse_loop_jax.evaluate.drawing import COLOURS, STYLE, new_figure
from sparse_loop_jax.sparse import store as references

matplotlib.rcParams.update(STYLE)

model = slj.load(dtype="float32")

# %% [markdown]
# ## What belongs to whom
#
# The store has a fixed number of slots. A slot has a `version`, which grows by one each time
# that it is reserved, and is `held` until it is released; `count` says how many keys its
# reference has, 0 where there is nothing valid to read. A *lease* is a list of slots with the
# versions that it got, `[requests, rows]`. A slot belongs to the lease that has its present
# version, as long as it is held. That rule, in NumPy:


# %%
@dataclasses.dataclass(frozen=True)
class Snapshot:
    label: str
    version: np.ndarray
    held: np.ndarray
    count: np.ndarray
    owner: dict[int, tuple[str, int]]  # slot: name of the lease, request


def look(label: str, store, leases: dict) -> Snapshot:
    version, held, count = jax.device_get((store.version, store.held, store.count))
    owner = {}
    for name, lease in leases.items():
        slots, versions = np.asarray(lease.slots), np.asarray(lease.versions)
        for (request, row), slot in np.ndenumerate(slots):
            if slot < len(held) and held[slot] and version[slot] == versions[request, row]:
                owner[int(slot)] = (name, request)
    return Snapshot(label, version, held, count, owner)


def draw(history: list[Snapshot], requests: int):
    """A line for each snapshot, a column for each slot."""
    slots = len(history[0].held)
    figure, axes = new_figure((2.4 + 0.36 * slots, 0.34 * len(history) + 1.1))
    axis = axes[0][0]
    for y, seen in enumerate(history):
        for slot in range(slots):
            face, edge, ink = "#f3f3f3", "white", "#999999"
            text = str(seen.version[slot])
            if slot in seen.owner:
                name, request = seen.owner[slot]
                edge = COLOURS[request]
                readable = seen.count[slot] > 0
                face, ink = (edge, "white") if readable else ("white", edge)
                text = f"{name}{seen.version[slot]}"
            elif seen.held[slot]:
                face, text = "red", "?"  # held by nobody: would be a leak
            axis.add_patch(
                Rectangle((slot + 0.06, y + 0.08), 0.88, 0.84, facecolor=face, edgecolor=edge)
            )
            axis.text(
                slot + 0.5, y + 0.52, text, color=ink, ha="center", va="center", fontsize=7.5
            )
    axis.set_xlim(0, slots)
    axis.set_ylim(len(history), 0)
    axis.set_yticks([y + 0.5 for y in range(len(history))], [s.label for s in history])
    axis.set_xticks([x + 0.5 for x in range(slots)], range(slots))
    axis.xaxis.tick_top()
    axis.set_title("slots of the store")
    axis.tick_params(length=0)
    axis.grid(False)
    axis.spines[:].set_visible(False)
    handles = [Patch(color=COLOURS[i], label=f"request {i}") for i in range(requests)]
    handles += [
        Patch(facecolor="#777777", edgecolor="#777777", label="has a reference"),
        Patch(facecolor="white", edgecolor="#777777", label="held, nothing to read"),
        Patch(facecolor="#f3f3f3", label="free"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=6)
    return figure


# %% [markdown]
# ## By hand
#
# Three requests, each of which verifies four rows a round, and room for two rounds: 24 slots.
# The references are of one layer and random here, because it is their life that matters. Every
# function takes a store and returns another one.

# %%
one_layer = dataclasses.replace(model.config, num_hidden_layers=1)
store = references.create(one_layer, slots=24, capacity=4)
ROWS = 4  # K + 1, with K = 3 drafted tokens
leases: dict = {}
history: list[Snapshot] = []
rng = np.random.default_rng(0)


def note(label: str) -> None:
    history.append(look(label, store, leases))


def capture_anything(store, lease):
    """Writes random references for all rows of a lease."""
    plan, _ = references.plan(store, lease, lease.slots < store.slots)
    shape = (*lease.slots.shape, one_layer.num_attention_heads)
    positions = rng.integers(0, 99, (*shape, store.capacity))
    store, _ = references.capture(
        store,
        plan,
        layer=0,
        counts=jnp.full(lease.slots.shape, store.capacity, jnp.int32),
        positions=jnp.asarray(positions, store.index_dtype),
        mass=jnp.asarray(rng.random(shape), jnp.float32),
        base=jnp.asarray(rng.random((*shape, one_layer.head_dim)), jnp.float32),
    )
    return store, plan


note("an empty store")
store, leases["A"] = references.reserve(store, jnp.array([4, 4, 4]), ROWS)
note("reserve A: [4, 4, 4]")
store, plan_a = capture_anything(store, leases["A"])
note("capture A")
store = references.accept(store, leases["A"], jnp.array([0, 1, 2]))
note("accept A: [0, 1, 2]")
store, leases["B"] = references.reserve(store, jnp.array([4, 2, 3]), ROWS)
note("reserve B: [4, 2, 3]")
store, _ = capture_anything(store, leases["B"])
note("capture B")
store = references.accept(store, leases["B"], jnp.array([3, 0, 1]))
note("accept B: [3, 0, 1]")
store, _ = references.release(store, leases["A"])
note("release A")
store, leases["C"] = references.reserve(store, jnp.array([1, 4, 4]), ROWS)
note("reserve C: [1, 4, 4]")
store, leases["D"] = references.reserve(store, jnp.array([2, 2, 2]), ROWS)
note("reserve D: [2, 2, 2]")
draw(history, requests=3)

# %% [markdown]
# A letter is a lease, the number behind it the slot's version. Line by line:
#
# - **reserve A** takes a slot for each row and counts its version up. There is nothing to read.
# - **capture A** writes references. In a real round loops 2 and 3 consume them now.
# - **accept A** is told that 0, 1 and 2 of the three drafted tokens stood. Row 0 is no draft
#   and always survives; the references of what was rejected have a count of 0 from here on. The
#   slots stay held: the host may not have read the round yet.
# - **reserve B** is the next round, submitted while A is still out. Requests 1 and 2 are close
#   to their limits and want fewer rows.
# - **release A** frees A's slots once its output has been read. What was in them is still
#   there; nobody can see it.
# - **reserve C** takes the first free slots, under version 2. Counts are cleared, so that
#   nothing of A shows through.
# - **reserve D** takes what is left over. Slots of a lease need not be neighbours.
#
# ## What is refused
#
# Lease A is stale now: its slots belong to C and D, under other versions. It can neither read,
# nor write, nor release. Nothing raises inside a step; refusals come out as arrays. A
# reservation is for all rows of a batch or for none: where there is no room, the lease that
# comes back owns nothing and says so, and a round under it emits nothing.

# %%
before, history = store, []
note("after reserve D")
found, refused = references.consume(store, plan_a, layer=0)
note(f"consume under A: {int(refused.sum())} refused, {int((found.count > 0).sum())} read")
store, refused_too = references.release(store, leases["A"])
note(f"release A again: {int(refused_too.sum())} refused")
store, leases["E"] = references.reserve(store, jnp.array([4, 4, 4]), ROWS)
note(f"reserve E: [4, 4, 4]; ok: {bool(leases['E'].ok)}")
draw(history, requests=3)

# %% [markdown]
# Nothing has changed, bit for bit. On the host, `check` turns refusals into an error:

# %%
pairs = zip(jax.tree.leaves(before), jax.tree.leaves(store), strict=True)
print("the store is as it was:", all(np.array_equal(a, b) for a, b in pairs))
print("slots of lease E:", np.unique(leases["E"].slots), "- the store ends before", store.slots)
try:
    references.check(consume=refused)
except slj.StaleLeaseError as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# ## In real rounds
#
# Now the model. `start` prefills two prompts and sizes the store for two outstanding rounds of
# K + 1 = 4 rows each: 16 slots. Each `speculative_step` gets the lease of the round before last
# to retire, as if the host read every round one round late.

# %%
params, state, first = slj.start(
    model,
    ["Our relations with Great Britain", "Jesus said to them,"],
    max_new_tokens=48,
    sparse=slj.SparseDecodeConfig(key_retention=0.25),
    speculative=slj.SpeculativeConfig(num_speculative_tokens=3, draft_loops=2),
    outstanding_rounds=2,
)
LAYER = model.config.num_hidden_layers - 1
out = collections.deque([("", slj.no_lease(state))] * 2)  # outstanding leases, oldest first
history, kept = [], []
for letter in "ABCDEFGHJKLMNP":
    at = np.asarray(state.position)  # the state is donated: read before the step
    retired, lease = out.popleft()
    state, output = slj.speculative_step(params, state, lease)
    out.append((letter, output.lease))
    stood = [max(int(n) - 1, 0) for n in output.count]
    label = f"round {letter}: {stood} stood"
    history.append(look(label, state.store, dict(out)))

    # The references of request 0's emitted rows, for the next picture.
    count, positions = jax.device_get((state.store.count, state.store.positions[LAYER]))
    for row, slot in enumerate(np.asarray(output.lease.slots)[0]):
        if slot < len(count) and count[slot]:
            kept.append((at[0] + row, positions[slot, :, : count[slot]]))

draw(history[:9], requests=2)

# %% [markdown]
# Filled slots are as many as the tokens that a round emitted: the drafts that stood, and the
# root. Two rounds are out at any time, in disjoint slots; the older one's slots go to the next
# round, under the next version, without the host having done anything.
#
# ## What a slot holds
#
# Collected from the slots of all those rounds: the keys that each head of the last layer kept
# for request 0. A line is a decoded token, a dot a kept key. Everything right of the diagonal
# does not exist yet for that token.

# %%
heads = model.config.num_attention_heads
figure, axes = new_figure((2.6 * heads, 3.1), 1, heads, sharey=True)
last = kept[-1][0]
for head, axis in enumerate(axes[0]):
    for place, positions in kept:
        axis.plot(positions[head], [place] * positions.shape[1], ".", color=COLOURS[0], ms=3.5)
    axis.plot([kept[0][0], last], [kept[0][0], last], color="#bbbbbb", linewidth=0.8)
    axis.set_title(f"head {head}")
    axis.set_xlabel("position of the key")
    axis.set_xlim(-1, last + 1)
axes[0][0].set_ylabel("position of the token")
axes[0][0].invert_yaxis()
figure

# %% [markdown]
# ## What it costs
#
# Bytes are known before anything is allocated, and do not grow with the number of requests that
# have passed. A slot of this store, over all layers and heads:

# %%
sparse = slj.SparseDecodeConfig(key_retention=0.25)
store = state.store
predicted = references.nbytes_for(
    sparse,
    model.config,
    store.slots,
    store.capacity,
    max_tokens=model.config.max_position_embeddings,
)
print(f"{store.slots} slots for {store.capacity} keys a head: {store.nbytes:,} bytes")
print(f"as predicted: {predicted == store.nbytes}; {predicted // store.slots:,} bytes a slot")

# %% [markdown]
# The contract of every function is in the docstrings of `sparse_loop_jax.sparse.store`, and how
# references are computed in [docs/sparse-attention.md](../docs/sparse-attention.md).
