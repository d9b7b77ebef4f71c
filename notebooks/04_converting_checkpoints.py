# %% [markdown]
# # Converting a Hugging Face checkpoint
#
# The library reads Hugging Face directories as they are published, and has a native format
# (Orbax), which loads without rearranging anything. This notebook converts the bundled model
# both ways, shows where the published tensors go, and what a damaged checkpoint is told.

# %%
# %matplotlib inline
import contextlib
import json
import shutil
import tempfile
from importlib.resources import as_file
from pathlib import Path

import jax
import matplotlib
import numpy as np

import sparse_loop_jax as slj
from sparse_loop_jax.checkpoint.huggingface import pieces
from sparse_loop_jax.cli import main
from sparse_loop_jax.data import tiny_ouro
from sparse_loop_jax.evaluate.drawing import COLOURS, INK, STYLE, new_figure

matplotlib.rcParams.update(STYLE)

stack = contextlib.ExitStack()
source = stack.enter_context(as_file(tiny_ouro()))
folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

# %% [markdown]
# ## Before loading
#
# `inspect` reads the configuration and the headers, no weights, and says what will fit:

# %%
assert main(["inspect", str(source), "--memory", "16GiB"]) == 0

# %% [markdown]
# ## There and back
#
# `convert` looks at what it is given and writes the other format, one tensor at a time. Without
# `dtype` every tensor keeps its bits.

# %%
slj.convert(source, folder / "native")
slj.convert(folder / "native", folder / "back")


def listing(directory: Path):
    files = [f for f in directory.rglob("*") if f.is_file()]
    tops = sorted({f.relative_to(directory).parts[0] for f in files})
    for top in tops:
        mine = [f for f in files if f.relative_to(directory).parts[0] == top]
        size = sum(f.stat().st_size for f in mine)
        print(
            f"  {top:24} {size:>12,} bytes"
            + (f" in {len(mine)} files" if len(mine) > 1 else "")
        )


for name in ("native", "back"):
    print(name)
    listing(folder / name)


def same_bits(one: slj.Ouro, other: slj.Ouro) -> bool:
    pairs = zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


original, native, back = (slj.load(p) for p in (source, folder / "native", folder / "back"))
for name, model in (("native", native), ("back", back)):
    print(name, "equals the original bit for bit:", same_bits(original, model))

# %% [markdown]
# The weights of a native directory are compressed arrays with a name each, the configuration is
# in `sparse_loop_jax.json`, and tokenizer and generation settings go along as they were.
#
# ## Where the tensors go
#
# The library multiplies query, key and value in one product, and gate and up in another. Their
# matrices are `[out, in]`, one above the other, so that a published tensor is a block of rows
# of one of ours, and conversion moves bytes without computing anything. The picture shows the
# weights of layer 0, each dot the root of the mean square of 8 x 8 of them, with the names that
# they are published under.

# %%
layer = jax.tree.map(lambda x: np.asarray(x, np.float32), original.params.layers[0])
leaves = {"qkv": layer.qkv, "out": layer.out, "gate_up": layer.gate_up, "down": layer.down}
blocks = [p for p in pieces(original.config) if p.leaf.startswith("layers.0.")]

figure, axes = new_figure((10, 4.4), 1, len(leaves))
for axis, (leaf, weights) in zip(axes[0], leaves.items(), strict=True):
    rows, columns = weights.shape
    tiles = np.sqrt((weights.reshape(rows // 8, 8, columns // 8, 8) ** 2).mean(axis=(1, 3)))
    axis.imshow(
        tiles, cmap="viridis", vmax=np.quantile(tiles, 0.99), aspect="auto",
        extent=(0, columns, rows, 0),
    )  # fmt: skip
    for piece in (p for p in blocks if p.leaf == f"layers.0.{leaf}"):
        axis.axhline(piece.row, color="white", linewidth=2)
        axis.text(
            columns / 2, piece.row + piece.shape[0] / 2,
            piece.tensor.removeprefix("model.layers.0.").removesuffix(".weight"),
            ha="center", va="center", bbox={"facecolor": "white", "edgecolor": "none"},
        )  # fmt: skip
    axis.set_title(f"{leaf}  [{rows}, {columns}]")
    axis.set_xticks([])
    axis.set_yticks([0, rows])
    axis.grid(False)
figure

# %% [markdown]
# What is stored and what is read differ in a looped model. Decoding one token reads every layer
# once a loop, the head once, and one row of the embedding:

# %%
config = original.config
kinds = {"embedding": "embed", "LM head": "head", "attention": ("qkv", "out"),
         "MLP": ("gate_up", "down")}  # fmt: skip
names, stored, read = [], [], []
for kind, wanted in kinds.items():
    leaf_bytes = sum(
        2 * int(np.prod(p.shape)) for p in pieces(config) if p.leaf.split(".")[-1] in wanted
    )  # of bfloat16
    names.append(kind)
    stored.append(leaf_bytes / 1e6)
    times = {"embedding": 1 / config.vocab_size, "LM head": 1}
    read.append(leaf_bytes / 1e6 * times.get(kind, config.total_ut_steps))

figure, axes = new_figure((6.6, 2.6))
axis = axes[0][0]
places = np.arange(len(names))
for shift, values, colour, label in (
    (-0.2, stored, INK, "stored"), (0.2, read, COLOURS[1], "read to decode a token"),
):  # fmt: skip
    axis.barh(places + shift, values, height=0.36, color=colour, label=label)
    for y, value in zip(places + shift, values, strict=True):
        axis.annotate(
            f"{value:.1f}", (value, y), (4, 0), textcoords="offset points", va="center"
        )
axis.set_yticks(places, names)
axis.invert_yaxis()
axis.grid(axis="y", visible=False)
axis.set_xlim(right=1.12 * max(read))
axis.set_xlabel("MB of weights, bfloat16")
axis.legend(loc="upper right")
figure

# %% [markdown]
# ## Another dtype
#
# `dtype` of `load` and `convert` rounds the weights. From bfloat16 to float32 is exact, and
# back is what was there before:

# %%
slj.convert(source, folder / "wide", dtype="float32")
slj.convert(folder / "wide", folder / "narrow", dtype="bfloat16")
print("there and back:", same_bits(original, slj.load(folder / "narrow")))

# %% [markdown]
# A converted model is the model. The same greedy text, from the published format and from the
# native one:

# %%
prompts = ["Our relations with Great Britain", "Jesus said to them,"]
texts = [
    slj.generate(slj.load(p, dtype="float32"), prompts, max_new_tokens=48).texts
    for p in (source, folder / "native")
]
print(prompts[0] + texts[1][0].replace("\n", " "))
print("equal:", texts[0] == texts[1])

# %% [markdown]
# ## What is refused
#
# A checkpoint is checked before its weights are read: every key of the configuration is used,
# known to be harmless, or refused with its name; every tensor is mapped, or refused, and the
# nearest expected name is suggested. Three damaged copies:


# %%
def damaged(name: str) -> Path:
    return Path(shutil.copytree(source, folder / name))


def try_to_load(title: str, directory: Path):
    try:
        slj.load(directory)
    except (ValueError, FileNotFoundError) as error:
        print(f"== {title}", str(error).replace(str(folder), "..."), sep="\n")


broken = damaged("setting")
settings = json.loads((broken / "config.json").read_text())
settings["attention_bias"] = True
(broken / "config.json").write_text(json.dumps(settings))
try_to_load("a setting that Ouro does not have", broken)

broken = damaged("name")
weights = broken / "model.safetensors"
content = weights.read_bytes()
weights.write_bytes(
    content.replace(b"layers.3.self_attn.q_proj", b"layers.3.self_attn.q_porj", 1)
)
try_to_load("a tensor under another name", broken)

broken = damaged("length")
(broken / "model.safetensors").write_bytes(content[:-1000])
try_to_load("a download that ended early", broken)

# %% [markdown]
# And nothing is written over: `convert` refuses a directory that has contents, and what it
# writes appears complete or not at all.

# %%
try:
    slj.convert(source, folder / "native")
except ValueError as error:
    print(str(error).replace(str(folder), "..."))

stack.close()  # removes the temporary directory

# %% [markdown]
# For a published checkpoint, from a shell:
#
# ```
# sparse-loop inspect path/to/Ouro-1.4B --memory 80GiB
# sparse-loop convert path/to/Ouro-1.4B ouro-1.4b
# sparse-loop generate "Once upon a time" --model ouro-1.4b
# ```
#
# `slj.load("ByteDance/Ouro-1.4B", revision="<commit hash>")` takes it from the Hub (extra
# `hub`).
