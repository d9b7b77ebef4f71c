# %% [markdown]
# # Quick start
#
# A looped language model runs one stack of layers several times over each token. The small
# model that comes with this package has 5 layers and runs them 4 times, so that a token goes
# through 20 layers, of which 5 are stored. This notebook loads it, looks at what each loop
# knows, and writes with it: as usual, and with the two methods that make a looped model
# cheaper. It runs on a CPU.

# %%
# %matplotlib inline
import json

import matplotlib
import numpy as np
from matplotlib.patches import Rectangle

import sparse_loop_jax as slj
from sparse_loop_jax.data import tiny_ouro
from sparse_loop_jax.evaluate.drawing import COLOURS, STYLE, new_figure

matplotlib.rcParams.update(STYLE)

model = slj.load(dtype="float32")  # the bundled model; or a directory, or a Hub id
print(f"{model.config.num_parameters:,} parameters in {model.config.num_hidden_layers} layers")
print(f"run {model.config.total_ut_steps} times over each token")

# %% [markdown]
# ## What each loop knows
#
# Ouro was trained to be read after every loop: the same LM head turns the state after any of
# them into a guess at the next token. `forward` gives them all. Here are the guesses along a
# sentence that the model has not seen. A guess is blue where the last loop agrees with it; the
# colour's depth is the probability that the loop gives it.

# %%
text = (tiny_ouro() / "heldout.txt").read_text()
ids = np.array(model.tokenizer.encode(text).ids[:256])
out = slj.forward(model, ids)
logits = np.asarray(out.logits[:, 0])  # [loops, tokens, vocabulary]
probabilities = np.exp(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
guesses = logits.argmax(axis=-1)


def piece(token: int) -> str:
    return repr(model.tokenizer.decode([token]))[1:-1].replace(" ", "·")


def draw_guesses(first: int, count: int):
    loops = len(guesses)
    figure, axes = new_figure((11, 2.6))
    axis = axes[0][0]
    for x, place in enumerate(range(first, first + count)):
        for loop in range(loops):
            guess = guesses[loop, place]
            colour = COLOURS[0] if guess == guesses[-1, place] else COLOURS[1]
            depth = 0.12 + 0.75 * float(probabilities[loop, place, guess])
            axis.add_patch(
                Rectangle((x - 0.48, loop - 0.46), 0.96, 0.92, color=colour, alpha=depth, lw=0)
            )
            axis.text(
                x, loop, piece(guess), ha="center", va="center", fontsize=8,
                color="white" if depth > 0.55 else "black",
            )  # fmt: skip
    axis.set_xlim(-0.5, count - 0.5)
    axis.set_ylim(loops - 0.5, -0.5)
    axis.set_yticks(range(loops), [f"after loop {i}" for i in range(loops)])
    axis.set_xticks(range(count), [piece(t) for t in ids[first : first + count]])
    axis.xaxis.tick_top()
    axis.set_title("the text so far, and what each loop would write next", pad=24)
    axis.tick_params(length=0)
    axis.grid(False)
    axis.spines[:].set_visible(False)
    return figure


draw_guesses(first=97, count=14)

# %% [markdown]
# Loops are counted from 0. The first one often has the right idea already, and the second
# usually says what the fourth will. That is what the library lives on:
#
# - **self-speculation** lets the first loops write ahead and the others check several tokens at
#   once;
# - **cross-loop sparse attention** lets loops 2 and 3 read only those keys that loop 1 found
#   important.
#
# Over 256 tokens:

# %%
agreement = (guesses == guesses[-1]).mean(axis=1)
place = np.arange(len(ids) - 1)
loss = -np.log(probabilities[:, place, ids[1:]]).mean(axis=1)
loops = np.arange(len(loss))

figure, axes = new_figure((8, 2.8), 1, 2)
left, right = axes[0]
left.bar(loops, agreement, color=COLOURS[0], width=0.6)
left.set_title("guesses equal to the last loop's")
right.plot(loops, loss, marker="o", color=COLOURS[1])
right.set_title("nats per token of the text")
for axis, values in ((left, agreement), (right, loss)):
    axis.set_xticks(loops, [f"loop {i}" for i in loops])
    axis.set_xlim(-0.5, len(loops) - 0.5)
    for x, value in zip(loops, values, strict=True):
        axis.annotate(f"{value:.2f}", (x, value), (3, 5), textcoords="offset points")
left.set_ylim(0, 1.12)
right.margins(y=0.25)
figure

# %% [markdown]
# Text does not need this model's later loops. Some questions do: it follows one pointer through
# records in each loop. Here is one of its tasks, three pointers away, and what each loop would
# answer:

# %%
tasks = (tiny_ouro() / "hops.jsonl").read_text().splitlines()
task = next(t for t in map(json.loads, tasks) if t["hops"] == 3 and t["tokens"] < 256)
print("...", task["prompt"][-60:], "->", task["answer"])
asked = model.tokenizer.encode(task["prompt"] + task["answer"]).ids
said = slj.forward(model, np.asarray(asked)).logits[:, 0, -2].argmax(axis=-1)
for loop, token in enumerate(said):
    print(f"loop {loop}:", model.tokenizer.decode([int(token)]))

# %% [markdown]
# ## Writing
#
# `generate` continues prompts of any lengths. Greedy decoding is the default; `temperature`,
# `top_k`, `top_p` and `seed` sample. `sparse` and `speculative` switch the two methods on, each
# by itself or, as in the last of these ways, together.

# %%
prompts = ["Our relations with Great Britain", "Jesus said to them,"]
sparse = slj.SparseDecodeConfig(key_retention=0.25)
speculative = slj.SpeculativeConfig(num_speculative_tokens=3, draft_loops=2)
ways = {
    "plain": {},
    "speculative": {"speculative": speculative},
    "both": {"sparse": sparse, "speculative": speculative},
}
results = {
    name: slj.generate(model, prompts, max_new_tokens=48, **options)
    for name, options in ways.items()
}
for name in ("plain", "both"):
    print(f"== {name}")
    for prompt, continuation in zip(prompts, results[name].texts or [], strict=True):
        print(prompt + continuation.replace("\n", " "))

# %% [markdown]
# The texts begin alike and part where two tokens were nearly equally likely: sparse attention
# is an approximation, and [the next notebook](02_comparing_retention.ipynb) measures what it
# costs. Speculation alone changes nothing of a greedy text:

# %%
print("speculative text is the plain text:", end=" ")
print(results["speculative"].token_ids == results["plain"].token_ids)

# %% [markdown]
# ## What was saved
#
# `stats` counts what a call did. What matters on a GPU, where reading memory is what takes the
# time: how often the weights were read, and how many keys. A plain step reads the weights once
# in each of 4 loops. A round of speculation drafts three tokens with 2 loops each and checks
# them in one pass of the other 2: 2.5 passes over all loops, for up to four tokens.

# %%
loops = model.config.total_ut_steps
names = list(results)
passes, share = [], []
for name, result in results.items():
    stats = result.stats
    cost = 1.0
    if "speculative" in ways[name]:
        cost += speculative.num_speculative_tokens * speculative.draft_loops / loops
    decoded = (stats.generated_tokens - len(prompts)) / len(prompts)  # of each prompt
    passes.append(stats.rounds * cost / decoded)
    share.append(stats.keys_read / stats.keys_dense if stats.keys_dense else 1.0)
    drafts = [f"{a:.2f}" for a in stats.acceptance_by_position]
    print(f"{name:12} {stats.rounds:3} rounds; drafts that stood, by place: {drafts or '-'}")

figure, axes = new_figure((8, 2.3), 1, 2, sharey=True)
for axis, values, title in zip(
    axes[0], (passes, share), ("passes over the weights a token", "share of the keys read"),
    strict=True,
):  # fmt: skip
    axis.barh(names, values, color=[COLOURS[0] if v < 0.995 else "#bbbbbb" for v in values])
    for y, value in enumerate(values):
        axis.annotate(
            f"{value:.2f}", (value, y), (4, 0), textcoords="offset points", va="center"
        )
    axis.set_xlim(0, 1.15)
    axis.set_title(title)
    axis.grid(axis="y", visible=False)
axes[0][0].invert_yaxis()
figure

# %% [markdown]
# A batch takes as many rounds as its slowest prompt. Loops 0 and 1 stay dense, so that at least
# half of the keys is read whatever is kept; with r = 0.25 it is 0.5 + 0.5 * 0.25, and a little
# more, because the number of kept keys is rounded up.
#
# These are counts, not times: a CPU with a model this small has other things to wait for than
# memory. Times on a GPU are in [the notebook on benchmarks](06_reading_benchmarks.ipynb).
#
# ## From here
#
# - [Comparing retentions](02_comparing_retention.ipynb): what sparse attention costs.
# - [Inside the reference store](03_inside_the_store.ipynb): how the two methods work together.
# - [Converting a checkpoint](04_converting_checkpoints.ipynb): a model of your own.
# - [Self-speculation](05_self_speculation.ipynb): how often drafts stand.
# - `slj.stream` yields tokens as they come, and `slj.Engine` serves requests that come and go:
#   see the [README](../README.md) and [docs/engine.md](../docs/engine.md).
