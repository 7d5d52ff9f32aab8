"""The registry of measures: what an entry says is true of its functions, and refusals say what would work."""

import inspect
import json
import re
import sys

import pytest
import timm
import torch

import broadsight
from broadsight import analysis
from broadsight.analysis.measures import MEASURES, check_suits, find_measure, front, logits, suiting
from broadsight.analysis.measures.base import taken
from tests.evaluation.test_robustness import bright, finds_bright
from tests.refusals import refused
from tests.training.small_runs import refusal

# As the documentation has them.
FEATURES, ATTENTION, TOKENS = ["variance", "dead", "spectrum"], ["entropy", "similarity"], ["tokens", "logits"]
NAMES = [*FEATURES, *ATTENTION, *TOKENS, "interaction", "receptive-field", "removal", "front"]
PAIR = dict(grid=(2, 2), orders=(0.5,), pairs=1, contexts=1)


@pytest.fixture(scope="module")
def models():
    pooled = broadsight.swap_pool("test_resnet", "map", groups=2, tokens=2, dim=24, num_classes=3)
    return {"resnet": timm.create_model("test_resnet"), "vit": timm.create_model("test_vit"), "pooled": pooled}


def ours(names):
    """Those of the documented measures: there may be more in the folder."""
    return [name for name in names if name in NAMES]


def result_of(name, models):
    """What a measure gives of a model that has everything; the sum of a measure's images."""
    measure, counts = MEASURES[name], []
    if measure.takes == "files":
        return measure.run(lambda axis: [analysis.Point("a", 1.0, 60.0), analysis.Point("b", 2.0, 55.0)], x="macs")
    if measure.takes == "classifier":
        saliency = dict(saliency=lambda images, batch: images.sum(1), fractions=(0.5,))
        return {"x": measure.run(finds_bright(4), bright(4, (0, 0)), batch_size=2, seen=counts.append, **saliency)}
    options = PAIR if name == "interaction" else {}
    batch = torch.randn(3, 3, 64, 64), torch.tensor([0, 1, 2])
    result = measure.run(models["pooled"], [batch], batch_size=2, seen=counts.append, **options)
    assert counts == sorted(counts) and counts[-1] == 3
    return {"x": result}


@pytest.mark.parametrize("name", MEASURES)
def test_every_measure__is_run_written_and_drawn(name, models, tmp_path, monkeypatch):
    measure, results = MEASURES[name], result_of(name, models)
    for result in results.values():
        record = json.loads(json.dumps(measure.record(result)))
        assert isinstance(record, dict) and record
        columns, rows = measure.rows(result)
        assert rows and all(len(row) == len(columns) and isinstance(row[0], str) for row in rows)
    for kind in ("png", "svg"):
        assert measure.plot(results, tmp_path / f"plot.{kind}").axes
        assert (tmp_path / f"plot.{kind}").stat().st_size > 5000
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    assert "nothing to draw; expected {label: result of " in refusal(lambda: measure.plot({}))
    assert re.match(r"'y' is no result of \w+ but a int; pass {label: result}", refusal(lambda: measure.plot({"y": 3})))
    assert "expected a name ending in png, svg, pdf" in refusal(lambda: measure.plot(results, tmp_path / "plot.jpg"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert 'pip install "broadsight[plot]"' in refusal(lambda: measure.plot(results))


def test_measures_of_users_are_registered():
    mine = analysis.Measure("mine", "counts", "nobody", lambda model, images: 1, lambda results: None, lambda one: None)
    try:
        assert analysis.register_measure(mine) is find_measure("mine") is mine
        assert list(MEASURES)[-1] == "mine" and "mine" in suiting(torch.nn.Identity())
        with pytest.raises(ValueError, match="there is a measure 'mine' already"):
            analysis.register_measure(mine)
    finally:
        del MEASURES["mine"]


@pytest.mark.parametrize("name", MEASURES)
def test_options_are_arguments(name):
    measure = find_measure(name)
    assert (measure.name, bool(measure.about), bool(measure.source)) == (name, True, True)
    assert 1 <= measure.least <= measure.samples
    usual = measure.settings({})
    assert set(usual) == set(measure.options)
    run, plot = measure.of_run(usual), taken(measure.plot, usual)
    assert {**run, **plot} == usual
    if name != "front":
        assert {"batch_size", "seen"} <= set(inspect.signature(measure.run).parameters)


def test_names_and_public_functions():
    assert ours(MEASURES) == NAMES
    for measure in MEASURES.values():
        for function in (measure.run, measure.plot):
            if function.__name__ != "fronts_over":
                assert getattr(analysis, function.__name__) is function
    for name in ("plot_spectrum", "find_blocks", "fronts", "read_points"):
        assert callable(getattr(analysis, name))


def test_suiting(models):
    anything = ["variance", "dead", "spectrum", "interaction", "receptive-field", "removal", "front"]
    assert ours(suiting(models["resnet"])) == anything
    assert set(ours(suiting(models["vit"]))) == {*anything, "entropy", "similarity"}
    # the pooling has attention of its own: that of its learned tokens
    assert ours(suiting(models["pooled"])) == NAMES
    assert ours(suiting(models["resnet"], dense=True)) == ["variance", "dead", "spectrum", "receptive-field"]


def test_refusals_name_what_would_work(models):
    said = refusal(lambda: check_suits(MEASURES["entropy"], models["resnet"], "mine"))
    assert said.startswith("mine has no attention; entropy needs attention, as in vit_small_patch16_224")
    assert said.endswith("of mine there are variance, dead, spectrum, interaction, receptive-field, removal, front")
    said = refusal(lambda: check_suits(MEASURES["removal"], models["resnet"], "mine", dense=True))
    assert said.startswith("mine is a dense run") and said.endswith("variance, dead, spectrum, receptive-field")
    said = refusal(lambda: find_measure("entropi"))
    assert "unknown measure 'entropi'; did you mean 'entropy'? expected one of variance, dead" in said
    assert "unknown measure 'q'; expected one of" in refusal(lambda: find_measure("q"))
    said = refusal(lambda: MEASURES["interaction"].settings({"pair": 3}))
    assert "no option 'pair'; did you mean 'pairs'? it has grid, orders, pairs" in said
    assert "entropy has no option 'x'; it has none" in refusal(lambda: MEASURES["entropy"].settings({"x": 3}))


def test_kinds_of_options():
    for name, given in (("interaction", {"pairs": 3, "baseline": 1, "target": 5}), ("logits", {"classes": (1, 2)})):
        assert MEASURES[name].settings(given).items() >= given.items()
    wrong = [("interaction", "pairs", "many"), ("interaction", "pairs", True), ("interaction", "baseline", True)]
    for name, option, value in (*wrong, ("similarity", "with_itself", 1), ("logits", "view", 3)):
        refused(f"{option}={value}; expected a value like", MEASURES[name].settings, {option: value})


def test_rows_of_entropy_logits_and_fronts_over_all_that_is_known():
    rows = MEASURES["entropy"].rows({"a": analysis.LayerEntropy(1.0, (0.5, 1.5), 8)})[1]
    assert rows == [("a", 8, 2, 1.0, pytest.approx(2.0794415), pytest.approx(100 / 2.0794415))]
    # two groups at (1, 0) and (-1, 0); tokens of the first 3 above and below it, of the second at it
    tokens = torch.tensor([[[[1.0, 3.0], [1.0, -3.0]], [[-1.0, 0.0], [-1.0, 0.0]]]])
    groups, middle = tokens.mean(2), torch.zeros(1, 2)
    result = analysis.TokenLogits("pca", tokens, groups, middle, None, None, torch.zeros(1))
    assert logits.rows(result)[1] == [("group 1", 2, 3.0, 1.0), ("group 2", 2, 0.0, 1.0)]

    def points(axis):
        return [analysis.Point("a", None if axis == "latency_ms" else 2e9, 70.0), analysis.Point("b", 4e9, 60.0)]

    found = front.fronts_over(points)
    assert list(found) == ["latency_ms", "macs", "parameters"]
    _, rows = front.rows(found["macs"])
    assert [row[:4] for row in rows] == [("a", 2.0, 70.0, "yes"), ("b", 4.0, 60.0, "no")]
    nothing = [analysis.Point("a", None, 70.0)]
    assert "no model has both" in refusal(lambda: front.fronts_over(lambda axis: nothing))
