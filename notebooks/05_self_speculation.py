# %% [markdown]
# # Self-speculation
#
# A looped model drafts for itself. Its first loops, read with the same LM head, propose a few
# tokens; the remaining loops check all of them in one batch. A greedy text comes out as it
# would have, in fewer passes over the weights. How many fewer depends on how often the drafts
# stand, and that is what this notebook looks at: round by round, then by draft loops and by
# place, and finally what it is worth. How a round works is in
# [docs/speculation.md](../docs/speculation.md).

# %%
# %matplotlib inline
import matplotlib
import numpy as np
from matplotlib.patches import Patch, Rectangle

import sparse_loop_jax as slj
from sparse_loop_jax.evaluate import read_json
from sparse_loop_jax.evaluate.drawing import COLOURS, INK, STYLE, new_figure, percent

matplotlib.rcParams.update(STYLE)

model = slj.load(dtype="float32")
loops = model.config.total_ut_steps
prompts = ["Our relations with Great Britain", "Jesus said to them,"]
K = 3

# %% [markdown]
# ## Round by round
#
# `stream` yields a chunk a round: the drafted tokens that stood, and one more. Here loops 2 and
# 3 also read only a quarter of the keys, which changes nothing of how a round goes. Each line
# is a round. Blue tokens were drafted and stood. The orange one came from the verification: in
# place of the first wrong draft, or behind three right ones. An empty box is a draft that was
# thrown away because it followed a wrong one.

# %%
chunks = slj.stream(
    model,
    prompts,
    max_new_tokens=48,
    sparse=slj.SparseDecodeConfig(key_retention=0.25),
    speculative=slj.SpeculativeConfig(num_speculative_tokens=K, draft_loops=2),
)
first, *rounds = [chunk.token_ids for chunk in chunks if chunk.index == 0]
# The first chunk is the prefill's token.


def draw_rounds(rounds: list[list[int]], left: int):
    """`left` tokens may be emitted, which bounds what the last rounds draft."""
    figure, axes = new_figure((7.5, 0.27 * len(rounds) + 0.9))
    axis = axes[0][0]
    for y, tokens in enumerate(rounds):
        drafted = min(K, left - 1)
        left -= len(tokens)
        for x in range(max(drafted, len(tokens))):
            stood, corrected = x < len(tokens) - 1, x == len(tokens) - 1
            colour = COLOURS[0] if stood else COLOURS[1] if corrected else "white"
            edge = "white" if stood or corrected else "#bbbbbb"
            axis.add_patch(
                Rectangle((x + 0.02, y + 0.06), 0.96, 0.88, facecolor=colour, edgecolor=edge)
            )
            if x < len(tokens):
                piece = repr(model.tokenizer.decode([tokens[x]]))[1:-1]
                axis.text(x + 0.5, y + 0.5, piece, color="white", ha="center", va="center")
    axis.set_xlim(0, K + 1)
    axis.set_ylim(len(rounds), 0)
    axis.set_xticks([i + 0.5 for i in range(K + 1)], [f"place {i + 1}" for i in range(K + 1)])
    axis.xaxis.tick_top()
    axis.set_yticks([y + 0.5 for y in range(len(rounds))], range(1, len(rounds) + 1))
    axis.set_ylabel("round")
    axis.tick_params(length=0)
    axis.grid(False)
    axis.spines[:].set_visible(False)
    names = {"drafted, and stood": COLOURS[0], "from the verification": COLOURS[1]}
    handles: list = [Patch(color=c, label=n) for n, c in names.items()]
    handles.append(Patch(facecolor="white", edgecolor="#bbbbbb", label="thrown away"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


draw_rounds(rounds, left=48 - len(first))

# %% [markdown]
# ## By draft loops and by place
#
# The same two prompts, all keys, and one, two or three draft loops. A draft is only judged if
# those before it in its round stood, so acceptance at place j is the share of drafted tokens at
# place j that were emitted.

# %%
plain = slj.generate(model, prompts, max_new_tokens=48)
acceptance = {}
for drafting in range(1, loops):
    config = slj.SpeculativeConfig(num_speculative_tokens=K, draft_loops=drafting)
    out = slj.generate(model, prompts, max_new_tokens=48, speculative=config)
    acceptance[drafting] = out.stats.acceptance_by_position
    same = out.token_ids == plain.token_ids
    print(
        f"{drafting} draft loops: {out.stats.drafted} drafted, {out.stats.accepted} stood; "
        f"the plain text: {same}"
    )

# %% [markdown]
# Greedy text is the plain text whatever drafts it. Two prompts are an anecdote, though. The
# documentation's measurement has 16 prompts of held-out text, at several retentions of sparse
# attention too:

# %%
full = read_json("../docs/figures/tiny-ouro.json")
table = {(r["draft loops"], r["retention"]): r for r in full["acceptance"]}
retentions = sorted({r for _, r in table}, reverse=True)
places = [f"token {i + 1}" for i in range(full.setup["speculative tokens"])]

figure, axes = new_figure((9, 2.9), 1, loops - 1)
images = []
for axis, drafting in zip(axes[0], range(1, loops), strict=True):
    grid = np.array([[table[drafting, r][place] for place in places] for r in retentions])
    images.append(axis.imshow(grid, cmap="viridis", vmin=0, vmax=1, aspect="auto"))
    for (y, x), value in np.ndenumerate(grid):
        colour = "white" if value < 0.6 else INK
        axis.text(x, y, f"{value:.2f}", ha="center", va="center", color=colour)
    axis.set_title(f"{drafting} draft loop{'s' if drafting > 1 else ''}")
    axis.set_xticks(range(len(places)), [f"place {i + 1}" for i in range(len(places))])
    axis.set_yticks(range(len(retentions)), [percent(r) for r in retentions])
    axis.grid(False)
    axis.tick_params(length=0)
axes[0][0].set_ylabel("keys kept")
bar = figure.colorbar(images[-1], ax=axes[0].tolist(), pad=0.01, fraction=0.03)
bar.outline.set_visible(False)
figure.suptitle("drafts that stood", x=0.01, ha="left")
figure

# %% [markdown]
# Down a column the keys get fewer. The first two loops attend densely where the loops that
# judge do not, which is one more way to differ: with two draft loops acceptance falls steadily,
# with one the noise of 16 prompts is larger.
# Along a row it falls because a round goes wrong once and stays wrong.
#
# ## What it is worth
#
# Where reading the weights is what takes the time, a round costs 1 + K d / D passes over all D
# loops: K + 1 rows run d loops one after the other, and the others run once. If each draft
# stands with probability a, independently, a round emits (1 - a^(K+1)) / (1 - a) tokens. The
# lines are that formula, with the a that gives the measured number of tokens a round; the dots
# are what was measured, at K = 3 with all keys kept.

# %%
K = full.setup["speculative tokens"]


def tokens_a_round(a, k):
    return sum(a**i for i in range(k + 1))


def probability(emitted: float, k: int) -> float:
    """The a of which `tokens_a_round(a, k)` is `emitted`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_a_round(middle, k) < emitted else (low, middle)
    return low


figure, axes = new_figure((6.6, 3.3))
axis = axes[0][0]
lengths = range(1, 9)
for colour, drafting in zip(COLOURS, range(1, loops), strict=False):
    row = table[drafting, 1.0]
    a = probability(row["tokens a round"], K)
    curve = [tokens_a_round(a, k) / (1 + k * drafting / loops) for k in lengths]
    axis.plot(lengths, curve, color=colour, label=f"d = {drafting}, a = {a:.2f}")
    axis.plot([K], [row["yield"]], marker="o", markersize=7, color=colour)
    best = int(np.argmax(curve)) + 1
    print(f"{drafting} draft loops: best with K = {best}, {max(curve):.2f} tokens a pass")
axis.axhline(1, color=INK, linewidth=0.8)
axis.annotate("plain decoding", (1, 1), (0, -12), textcoords="offset points")
axis.set_xlabel("K, drafted tokens a round")
axis.set_title("tokens per pass over the weights")
axis.set_ylim(0.5, 2.1)
axis.legend(loc="upper right", ncols=3)
figure

# %% [markdown]
# One loop serves this model best: it is cheap, and right often enough. Three are right and cost
# nearly as much as the whole model. That is a matter of training; another model may want two,
# which is the default. With `adaptive=True` each request chooses its own K from its history by
# this formula, on the device, up to the K that was given.
#
# The formula leaves out the LM head, K and V, and arithmetic. What rounds take on a GPU is in
# [the notebook on benchmarks](06_reading_benchmarks.ipynb), and what a round does to the
# references of sparse attention in [the one on the store](03_inside_the_store.ipynb).
