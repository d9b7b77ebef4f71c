# %% [markdown]
# # Comparing retentions
#
# Cross-loop sparse attention has one number to choose: the retention r. A decoded token that
# sees N keys reads all of them in loops 0 and 1. In loops 2 and 3 it reads the k = ceil(N r)
# keys of each head that had most of the attention in loop 1. This notebook measures what that
# costs the bundled model, shows how far a small measurement can be trusted, and ends with a way
# to choose. The method is FlashLoop's (Yang and Liu, 2026, [arXiv
# 2609.29812](https://arxiv.org/abs/2609.29812)).

# %%
# %matplotlib inline
import math

import matplotlib

import sparse_loop_jax as slj
from sparse_loop_jax.data import tiny_ouro
from sparse_loop_jax.evaluate import evaluate, read_json
from sparse_loop_jax.evaluate.drawing import COLOURS, INK, STYLE, new_figure, percent
from sparse_loop_jax.evaluate.plots import plot_mass, plot_positions, plot_quality

matplotlib.rcParams.update(STYLE)

model = slj.load(dtype="float32")
text = (tiny_ouro() / "heldout.txt").read_text()

# %% [markdown]
# ## Measuring
#
# `evaluate` runs a text through the model as decoding would: of each window the first `prefix`
# tokens are prefilled, the others are fed one by one as decoded rows. Each row's prediction of
# the next token is compared with the dense model's on the same input. Four windows of 128
# tokens are far too few for a verdict, and take seconds.

# %%
small = evaluate(
    model,
    text=text,
    retentions=(1.0, 0.25, 0.05),
    window=128,
    prefix=64,
    windows=4,
    inside_windows=0,  # the attention itself is looked at below
)
columns = ["retention", "tokens", "keys read", "perplexity", "KL", "agreement"]
small.frame("text")[columns].round(4)

# %% [markdown]
# `KL` is the divergence of the sparse model's prediction from the dense one's, in nats;
# `agreement` is how often both find the same token likeliest.
#
# The documentation's own measurement is the same call with more of everything: 32 windows of
# 512 tokens, six retentions, 48 questions that follow 1 to 8 pointers through records, 16
# continuations, and a look at the attention of 8 windows. It takes minutes, and its result is a
# file of this repository:

# %%
full = read_json("../docs/figures/tiny-ouro.json")
plot_quality(full)

# %% [markdown]
# Fewer keys are to the right. Perplexity rises slowly at first; the band is two standard errors
# of the difference from dense decoding. The answers are lost much sooner. This model follows
# a pointer in each loop, so that loops 2 and 3 have to read records that loop 1 had no use
# for, and loop 1 chooses what they may read. It is the worst case of the method, and the reason
# to measure with a task like yours: text alone says that a tenth of the keys costs 1 % of
# perplexity. Attention mass is the share of a loop's own dense attention that the kept keys
# have.
#
# ## How much text is enough
#
# The loss of likelihood against dense decoding, with two standard errors over windows, from
# both runs. Differences are taken token by token on the same text, which makes their errors
# small, and yet those of a few hundred tokens overlap. The windows differ in length too, and
# [short contexts pay more](../docs/sparse-attention.md#what-retention-costs).

# %%
figure, axes = new_figure((6.4, 3.2))
axis = axes[0][0]
for run, colour, shift in ((small, COLOURS[1], 1.04), (full, COLOURS[0], 0.96)):
    rows = [r for r in run["text"] if r["retention"] < 1]
    axis.errorbar(
        [r["retention"] * shift for r in rows],
        [r["nll change"] for r in rows],
        yerr=[2 * r["standard error"] for r in rows],
        marker="o", linestyle="none", capsize=3, color=colour,
        label=f"{rows[0]['tokens']:,} tokens in windows of {run.setup['window']}",
    )  # fmt: skip
ticks = [r["retention"] for r in full["text"]]
axis.set_xscale("log")
axis.set_xticks(ticks, [percent(r) for r in ticks])
axis.minorticks_off()
axis.set_xlim(1.2, 0.016)
axis.axhline(0, color=INK, linewidth=0.8)
axis.set_xlabel("keys kept")
axis.set_title("nats a token more than dense")
axis.legend(loc="upper left")
figure

# %% [markdown]
# ## Where the mass goes
#
# Loop 1 chooses the keys; loops 2 and 3 use them with their own queries and keys. The share of
# attention that the chosen keys have there is what the approximation stands on. It falls from
# loop to loop, more in some layers than in others:

# %%
plot_mass(full)

# %% [markdown]
# A retention is a share, so that longer contexts keep more keys and bear it better:

# %%
plot_positions(full)

# %% [markdown]
# ## What is paid, and what for
#
# Two of four loops stay dense, so that the share of keys read is (2 + 2 r) / 4 and never below
# a half. Savings run out before costs do:

# %%
rows = full["text"]
figure, axes = new_figure((6.4, 3.4))
axis = axes[0][0]
read = [r["keys read"] for r in rows]
lost = [100 * (r["perplexity"] / rows[0]["perplexity"] - 1) for r in rows]
axis.axvspan(0, 0.5, color="#eeeeee", linewidth=0)
axis.annotate(
    "loops 0 and 1\nare dense", (0.445, max(lost)), ha="center", va="top", color="#777777"
)
axis.plot(read, lost, marker="o", color=COLOURS[0])
for x, y, row in zip(read, lost, rows, strict=True):
    axis.annotate(
        f"r = {row['retention']:g}", (x, y), (7, 5), textcoords="offset points", color=INK
    )
axis.set_xlim(0.39, 1.08)
axis.set_ylim(-0.4, max(lost) * 1.1)
axis.set_xlabel("keys read, of those of dense attention")
axis.set_title("% of perplexity more than dense")
figure

# %% [markdown]
# ## Choosing
#
# Say what you would pay, in perplexity on text like yours, and take the smallest measured
# retention that stays within it, its error bar included. Then look at what it does to a task,
# which here vetoes them all:

# %%
right = {row["retention"]: row["right"] for row in full["answers"]}
for budget in (0.005, 0.01, 0.03):
    fitting = [
        r["retention"] for r in rows
        if math.expm1(r["nll change"] + 2 * r["standard error"]) <= budget
    ]  # fmt: skip
    r = min(fitting)
    saved = 1 - next(row["keys read"] for row in rows if row["retention"] == r)
    print(
        f"at most {budget:.1%} more: r = {r:g}, which leaves {saved:.0%} of the keys unread, "
        f"and {right[r]} of {right[1.0]} answers right"
    )

# %% [markdown]
# For a model of your own the same from the command line, with a picture:
#
# ```
# sparse-loop evaluate --model path/to/checkpoint --text long-text.txt --plot out.png
# ```
#
# Use text that the model did not train on, windows as long as the contexts you serve, and a
# task that needs all loops. What these measurements mean, number by number, is in
# [docs/sparse-attention.md](../docs/sparse-attention.md#what-retention-costs); the plan for the
# published checkpoints is in [docs/evaluating-ouro.md](../docs/evaluating-ouro.md).
