"""Tables as JSON, Markdown and pandas, and pictures of them."""

from __future__ import annotations

import json

import pytest

from sparse_loop_jax.evaluate import Evaluation, plots, read_json
from sparse_loop_jax.evaluate.progress import Steps
from sparse_loop_jax.evaluate.report import cell


def _text(retention, **changes):
    row = {
        "retention": retention, "perplexity": 40.0 + 1 / retention, "nll": 3.7,
        "nll change": 0.01 / retention, "standard error": 0.002, "KL": 1 / 32 / retention,
        "KL p99": 0.2 / retention, "agreement": 0.95,
    }  # fmt: skip
    return row | changes


@pytest.fixture
def result():
    retentions = (0.5, 0.125)
    inside = {"mass": 0.9, "mass in loop 2": 0.8, "mass in loop 3": 0.7}
    return Evaluation(
        {
            "text": [
                _text(1.0, **{"nll change": 0.0, "KL": 0.0, "KL p99": 0.0}),
                *(_text(r, **inside) for r in retentions),
            ],
            "answers": [
                {"retention": r, "accuracy": a, "questions": 8}
                for r, a in ((1.0, 1.0), (0.5, 1.0), (0.125, 0.875))
            ],
            "attention": [
                {"retention": r, "loop": loop, "layer": layer, "head": head,
                 "mass": 1 - 0.1 * loop - 0.01 * layer + 0.02 * head}
                for r in retentions for loop in (1, 2, 3) for layer in (0, 1) for head in (0, 1)
            ],
            "positions": [
                {"retention": r, "from": start, "to": start + 9, "KL": 0.01, "mass": 0.9,
                 "error": None if start == 20 else 0.1}
                for r in (1.0, *retentions) for start in (10, 20, 30)
            ],
        },
        {"model": "a", "dtype": "float32", "windows": 2, "window": 40},
    )  # fmt: skip


BENCH = {
    "decode": {
        "setup": {"device": "a GPU", "shape": "small"},
        "rows": [
            {"batch": b, "context": c, "retention": r, "ms/step": b * r * c / 100,
             "of roofline": 0.5}
            for b in (1, 8) for c in (2048, 1024) for r in (1.0, 0.1)
        ],
    }
}  # fmt: skip


def test_json_there_and_back(result, tmp_path):
    result.write_json(tmp_path / "a.json")
    assert read_json(tmp_path / "a.json") == result


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is no JSON"), ("[]", "is no file of `sparse-loop evaluate --json`"),
     (json.dumps(BENCH), "is no file of `sparse-loop evaluate"),
     ('{"format": "sparse-loop evaluation"}', "is no file of `sparse-loop evaluate"),
     ('{"format": "sparse-loop evaluation", "tables": [], "setup": {}}', "is no file of")],
)  # fmt: skip
def test_other_files_are_refused(tmp_path, content, message):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_json(tmp_path / "a.json")


def test_a_table_that_was_not_measured(result):
    with pytest.raises(KeyError, match=r"no table 'acceptance'; there are \['answers'"):
        result["acceptance"]


def test_a_frame(result):
    frame = pytest.importorskip("pandas") and result.frame("text")
    assert frame["retention"].tolist() == [1.0, 0.5, 0.125]
    assert frame["mass"].isna().tolist() == [True, False, False]


def test_markdown(result):
    lines = result.markdown("text", ["retention", "perplexity", "mass"]).splitlines()
    assert lines[0] == "| retention | perplexity | mass |"
    assert lines[2:] == ["| 1 | 41 | - |", "| 0.5 | 42 | 0.9 |", "| 0.125 | 48 | 0.9 |"]
    assert "mass in loop 3" in result.markdown("text")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (0.123456, "0.1235"), (12.0, "12"), (123456.7, "123,457"),
     (0.000123, "1.2e-04"), (7, "7"), ("x", "x"), ([1.0, None], "1, -")],
)  # fmt: skip
def test_cells(value, text):
    assert cell(value) == text


def _lines(axis):
    return {line.get_label(): line.get_xydata().tolist() for line in axis.lines}


def test_the_picture_of_quality_shows_the_tables(result, tmp_path):
    figure = plots.plot_quality(result, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    perplexity, divergence, shares, mass = figure.axes
    assert [[1.0, 41.0], [0.5, 42.0], [0.125, 48.0]] in _lines(perplexity).values()
    assert _lines(divergence)["mean"] == [[0.5, 1 / 16], [0.125, 0.25]]
    assert _lines(shares)["right answers of 8"] == [[1.0, 1.0], [0.5, 1.0], [0.125, 0.875]]
    assert _lines(mass)["in loop 3"] == [[1.0, 1.0], [0.5, 0.7], [0.125, 0.7]]
    # More keys on the left.
    left, right = perplexity.get_xlim()
    assert left > right


def test_a_picture_of_text_or_of_answers_alone(result, tmp_path):
    for name in ("text", "answers"):
        alone = Evaluation({name: result[name]}, {})
        figure = plots.plot_quality(alone, tmp_path / f"{name}.svg")
        assert sum(axis.has_data() for axis in figure.axes) == (4 if name == "text" else 1)
    with pytest.raises(ValueError, match="there is nothing to draw"):
        plots.plot_quality(Evaluation({}, {}), tmp_path / "a.png")


def test_the_picture_of_mass_averages_the_heads(result, tmp_path):
    figure = plots.plot_mass(result, tmp_path / "a.png")
    for axis in figure.axes[:2]:
        image = axis.images[0].get_array()
        assert image.tolist() == [
            pytest.approx([0.91, 0.81, 0.71]),
            pytest.approx([0.9, 0.8, 0.7]),
        ]
    assert [axis.get_title(loc="left") for axis in figure.axes[:2]] == [
        "50 % of keys",
        "12.5 % of keys",
    ]


def test_a_picture_without_a_path_is_handed_out_alone(result, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert plots.plot_mass(result).axes[0].images
    assert list(tmp_path.iterdir()) == []


def test_a_picture_without_matplotlib_is_refused(result, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="plots need matplotlib"):
        plots.plot_mass(result)


def test_the_picture_by_position(result, tmp_path):
    figure = plots.plot_positions(result, tmp_path / "a.png")
    divergence, mass, error = figure.axes
    assert set(_lines(divergence)) == {"50 %", "12.5 %"}  # and not dense
    assert _lines(mass)["12.5 %"] == [[14.5, 0.9], [24.5, 0.9], [34.5, 0.9]]
    assert _lines(error)["12.5 %"] == [[14.5, 0.1], [34.5, 0.1]]


def test_the_picture_of_speed_has_its_roofline(tmp_path):
    figure = plots.plot_speed(BENCH, tmp_path / "a.png")
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["batch 1", "batch 8"]
    lines = _lines(figure.axes[1])
    assert figure.axes[0].get_ylabel() == "ms a step"
    assert lines["10 % of keys"] == [[1024, 8 * 0.1 * 10.24], [2048, 8 * 0.1 * 20.48]]
    assert [[1024, 4 * 10.24], [2048, 4 * 20.48]] in lines.values()


def test_a_batch_at_one_context_is_left_out(tmp_path):
    rows = [*BENCH["decode"]["rows"], BENCH["decode"]["rows"][0] | {"batch": 32}]
    figure = plots.plot_speed({"decode": {"rows": rows}}, tmp_path / "a.png")
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["batch 1", "batch 8"]


@pytest.mark.parametrize("bench", [{}, {"prefill": {}}, {"decode": {"rows": []}}])
def test_other_benchmarks_have_no_speed(bench, tmp_path):
    with pytest.raises(ValueError, match="no rows of `sparse-loop bench decode`"):
        plots.plot_speed(bench, tmp_path / "a.png")


def test_one_command_draws_them_all(result, tmp_path):
    result.write_json(tmp_path / "a.json")
    (tmp_path / "b.json").write_text(json.dumps(BENCH))
    plots.main(
        [str(tmp_path / "a.json"), "--bench", str(tmp_path / "b.json"), "--out", str(tmp_path)]
    )
    names = ("retention-quality", "retained-mass", "error-by-position", "speed-by-context")
    for name in names:
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    before = (tmp_path / "retained-mass.png").read_bytes()
    plots.main([str(tmp_path / "a.json"), "--out", str(tmp_path)])
    assert (tmp_path / "retained-mass.png").read_bytes() == before


def test_progress_counts_parts_and_is_silent_off_a_terminal(capsys):
    with Steps(3, shown=True) as steps:
        steps.begin("text, dense")
        steps.done()
        (task,) = steps._bar.tasks
        assert (task.description, task.completed, task.total) == ("text, dense", 1, 3)
    capsys.readouterr()
    with Steps(3) as steps:
        steps.begin("text, dense")
        steps.done()
    assert capsys.readouterr() == ("", "")
