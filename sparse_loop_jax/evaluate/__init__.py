"""What retention costs: quality, attention and acceptance of any loaded model.

from sparse_loop_jax.evaluate import evaluate
result = evaluate(slj.load(), text=open("heldout.txt").read())
print(result.markdown("text"))
"""

from sparse_loop_jax.evaluate.forcing import Forced, ForcedRun, force
from sparse_loop_jax.evaluate.inputs import (
    Question,
    read_questions,
    text_prompts,
    text_windows,
)
from sparse_loop_jax.evaluate.inside import LayerView, look_inside
from sparse_loop_jax.evaluate.report import Evaluation, read_json
from sparse_loop_jax.evaluate.run import RETENTIONS, evaluate

__all__ = [
    "RETENTIONS",
    "Evaluation",
    "Forced",
    "ForcedRun",
    "LayerView",
    "Question",
    "evaluate",
    "force",
    "look_inside",
    "read_json",
    "read_questions",
    "text_prompts",
    "text_windows",
]
