# %% [markdown]
# # Reading the GPU benchmarks
#
# Every number here is read from `benchmarks/results/h200.json`, which `sparse-loop bench` wrote
# on a GPU; nothing is measured in this notebook, and it follows the file when that is made
# again. The tables are in [docs/benchmarks.md](../docs/benchmarks.md). This is how to read
# them.

# %%
# %matplotlib inline
import json
from pathlib import Path

import matplotlib

from sparse_loop_jax.evaluate import read_json
from sparse_loop_jax.evaluate.drawing import COLOURS, INK, STYLE, new_figure, percent
from sparse_loop_jax.evaluate.plots import plot_speed

matplotlib.rcParams.update(STYLE)

bench = json.loads(Path("../benchmarks/results/h200.json").read_text())
for name, part in bench.items():
    setup = part["setup"]
    made_on = f"{setup['device']}, {setup['shape']}, jax {setup['jax']}"
    print(f"{name}: {len(part['rows'])} rows; {made_on}")

# %% [markdown]
# ## One step of decoding
#
# Decoding one token for each of a few requests does little arithmetic on many bytes: the
# weights, once a loop, and K and V, once a loop and request. The least time that a step can
# take is the time of reading those bytes at the memory's bandwidth, its roofline. The dotted
# lines are these least times.

# %%
plot_speed(bench)

# %% [markdown]
# Dense and sparse lines cross: at short contexts K and V are few against the weights, there is
# little to save, and choosing keys costs something in every layer. The longer the context, the
# more of a step is K and V, of which sparse attention leaves nearly half unread.
#
# ## Bytes against time
#
# The same steps, and those at other batches, by what they read. A step on the line would do
# nothing but read. Its height above the line is everything else: launching kernels, filling and
# draining them, choosing keys. An arrow leads from a dense step to the sparse one of the same
# requests, and the labels of dense steps that lie side by side are in the order of their
# height.

# %%
rows = bench["decode"]["rows"]
steps = {(r["batch"], r["context"], r["retention"]): r for r in rows}
bandwidth = rows[0]["GB"] / (rows[0]["ms/step"] * rows[0]["of roofline"])  # GB a millisecond
cases = sorted({key[:2] for key in steps})
retentions = sorted({key[2] for key in steps if key[2] < 1}, reverse=True)

figure, axes = new_figure((7.4, 4.2))
axis = axes[0][0]
most = max(r["GB"] for r in rows)
axis.plot([0, most * 1.18], [0, most * 1.18 / bandwidth], color="#999999", linestyle=":")
axis.annotate(
    f"reading at {bandwidth:.1f} TB/s", (0.8 * most, 0.8 * most / bandwidth), (4, -14),
    textcoords="offset points", color="#777777",
)  # fmt: skip
near: list[list] = []  # dense steps that share a label
for batch, context in cases:
    dense = steps.get((batch, context, 1.0))
    if dense is None:
        continue
    axis.plot(dense["GB"], dense["ms/step"], "o", color=INK)
    groups = [g for g in near if abs(g[0]["GB"] - dense["GB"]) < 0.03 * most]
    groups[0].append(dense) if groups else near.append([dense])
    for colour, retention in zip(COLOURS[1:], retentions, strict=False):
        sparse = steps.get((batch, context, retention))
        if sparse is None:
            continue
        axis.annotate(
            "", (sparse["GB"], sparse["ms/step"]), (dense["GB"], dense["ms/step"]),
            arrowprops={"arrowstyle": "->", "color": colour, "shrinkA": 4, "shrinkB": 2},
        )  # fmt: skip
        axis.plot(sparse["GB"], sparse["ms/step"], "o", color=colour)
for group in near:
    group.sort(key=lambda r: -r["ms/step"])
    axis.annotate(
        "\n".join(f"{r['batch']} x {r['context']:,}" for r in group),
        (max(r["GB"] for r in group), group[0]["ms/step"]), (8, -4),
        textcoords="offset points", va="bottom",
    )  # fmt: skip
axis.plot([], [], "o", color=INK, label="dense")
for colour, retention in zip(COLOURS[1:], retentions, strict=False):
    axis.plot([], [], "o", color=colour, label=f"{percent(retention)} of keys")
axis.set_xlim(0, most * 1.18)
axis.set_ylim(0, 1.12 * max(r["ms/step"] for r in rows))
axis.set_xlabel("GB that a step has to read")
axis.set_title("ms a step; requests x context")
axis.legend(loc="upper left")
figure

# %% [markdown]
# In numbers: what the bytes of a step would take, and what is on top of it.

# %%
print(f"{'requests x context':>19}     r   ms  bytes alone  on top  times dense")
for (batch, context, retention), r in sorted(steps.items()):
    least = r["ms/step"] * r["of roofline"]
    print(
        f"{batch:>8} x {context:<8,} {retention:>5g} {r['ms/step']:>5.2f} {least:>10.2f} "
        f"{r['ms/step'] - least:>9.2f} {r['vs dense']:>10.2f}"
    )

# %% [markdown]
# A sparse step has fewer bytes, and more on top: its fraction of its own, lower roofline is
# therefore smaller even where it is faster. Both columns belong to a claim of speed, which is
# why the tables have them side by side. `times dense` is the time of a dense step over that of
# this one.
#
# ## Rounds of speculation
#
# Here every draft was accepted by force. A round's time does not depend on what it accepts, so
# this gives the time of a round and the most that speculation can yield, not what a model will.

# %%
rounds = bench["speculative"]["rows"]
places = sorted({(r["batch"], r["context"]) for r in rounds})
figure, axes = new_figure((2.6 * len(places) + 1.2, 3.0), 1, len(places), sharey=True)
for axis, (batch, context) in zip(axes[0], places, strict=True):
    mine = [r for r in rounds if (r["batch"], r["context"]) == (batch, context)]
    mine.sort(key=lambda r: (-r["retention"], r["draft loops"]))
    names = [
        ("plain" if not r["draft loops"] else f"d = {r['draft loops']}")
        + ("" if r["retention"] == 1 else f"\n{percent(r['retention'])}")
        for r in mine
    ]
    colours = [INK if r["retention"] == 1 else COLOURS[1] for r in mine]
    axis.bar(range(len(mine)), [r["vs plain"] for r in mine], color=colours, width=0.65)
    for x, r in enumerate(mine):
        axis.annotate(
            f"{r['vs plain']:.2f}", (x, r["vs plain"]), (0, 3), textcoords="offset points",
            ha="center",
        )  # fmt: skip
    axis.axhline(1, color="#999999", linewidth=1, linestyle=":")
    axis.set_xticks(range(len(mine)), names)
    axis.tick_params(axis="x", length=0)
    axis.set_title(f"{batch} x {context:,}")
    axis.grid(axis="x", visible=False)
axes[0][0].set_ylim(0, 1.15 * max(r["vs plain"] for r in rounds))
axes[0][0].set_ylabel("tokens/s over plain decoding's")
figure.suptitle("every draft accepted: the most that rounds can give", x=0.01, ha="left")
figure

# %% [markdown]
# ## How often drafts have to stand
#
# With a the probability that a draft stands, a round of K = 3 drafts emits 1 + a + a^2 + a^3
# tokens. Over the measured time of a round, and over plain decoding of the same run, that is
# the speed to expect. Where a line crosses 1, speculation begins to pay.

# %%
K = 3
chances = [i / 200 for i in range(201)]


def emitted(a: float) -> float:
    return sum(a**i for i in range(K + 1))


figure, axes = new_figure((2.9 * len(places) + 0.6, 3.1), 1, len(places), sharey=True)
for axis, (batch, context) in zip(axes[0], places, strict=True):
    mine = {
        r["draft loops"]: r for r in rounds
        if (r["batch"], r["context"], r["retention"]) == (batch, context, 1.0)
    }  # fmt: skip
    plain = mine.pop(0)
    for colour, (drafting, r) in zip(COLOURS, sorted(mine.items()), strict=False):
        cost = r["ms/round"] / plain["ms/round"]
        speed = [emitted(a) / cost for a in chances]
        axis.plot(chances, speed, color=colour, label=f"d = {drafting}")
        even = next((a for a, s in zip(chances, speed, strict=True) if s >= 1), None)
        if even is not None:
            axis.plot([even], [1], marker="o", color=colour)
            print(f"{batch} x {context:,}, d = {drafting}: pays from a = {even:.2f} on")
    axis.axhline(1, color="#999999", linewidth=1, linestyle=":")
    axis.set_title(f"{batch} x {context:,}")
    axis.set_xlabel("a: chance that a draft stands")
axes[0][0].set_ylabel("speed over plain decoding")
axes[0][0].legend(loc="upper left")
figure

# %% [markdown]
# What a is belongs to the model and the text. The bundled model, on held-out text with all keys
# kept, had the following shares of drafts that stood at the first place. Whether the published
# checkpoints draft as well has not been measured here.

# %%
for r in read_json("../docs/figures/tiny-ouro.json")["acceptance"]:
    if r["retention"] == 1.0:
        print(f"{r['draft loops']} draft loops: {r['token 1']:.2f}")

# %% [markdown]
# To measure again, on your GPU and your shapes: `sparse-loop bench decode --help`. The commands
# behind the file, and what each column means, are in
# [docs/benchmarks.md](../docs/benchmarks.md).
