"""The table of measures: what it says of each is true of its functions, and refusals say what would work."""

import inspect

import pytest
import timm
import torch

import broadsight
from broadsight import analysis
from broadsight.analysis.measures import MEASURES, entropy, find_measure, front, logits, refuse_unsuited, suiting

# As the documentation has them.
FEATURES, ATTENTION, TOKENS = ["variance", "dead", "spectrum"], ["entropy", "similarity"], ["tokens", "logits"]
NAMES = [*FEATURES, *ATTENTION, *TOKENS, "interaction", "receptive-field", "removal", "front"]


@pytest.fixture(scope="module")
def models():
    pooled = broadsight.swap_pool("test_resnet", "map", groups=2, tokens=2, dim=24, num_classes=3)
    return {"resnet": timm.create_model("test_resnet"), "vit": timm.create_model("test_vit"), "pooled": pooled}


def test_names():
    assert list(MEASURES) == NAMES
    for name in NAMES:
        measure = find_measure(name)
        assert (measure.name, bool(measure.about), bool(measure.source)) == (name, True, True)
        assert 1 <= measure.least <= measure.samples


@pytest.mark.parametrize("name", NAMES)
def test_options_are_arguments(name):
    measure = MEASURES[name]
    taken = {*inspect.signature(measure.run).parameters, *inspect.signature(measure.plot).parameters}
    assert set(measure.options) <= taken
    usual = measure.settings({})
    assert set(usual) == set(measure.options)
    run, plot = measure.of_run(usual), measure.of_plot(usual)
    assert {**run, **plot} == usual
    if name != "front":
        assert {"batch_size", "seen"} <= set(inspect.signature(measure.run).parameters)


def test_public_functions_are_exported():
    for measure in MEASURES.values():
        for function in (getattr(measure.run, "func", measure.run), measure.plot):
            if function.__name__ not in ("fronts_over", "<lambda>"):
                assert getattr(analysis, function.__name__) is function
    for name in ("plot_spectrum", "find_blocks", "fronts", "read_points"):
        assert callable(getattr(analysis, name))


def test_suiting(models):
    anything = ["variance", "dead", "spectrum", "interaction", "receptive-field", "removal", "front"]
    assert suiting(models["resnet"]) == anything
    assert set(suiting(models["vit"])) == {*anything, "entropy", "similarity"}
    # the pooling has attention of its own: that of its learned tokens
    assert set(suiting(models["pooled"])) == set(NAMES)
    assert suiting(models["resnet"], dense=True) == ["variance", "dead", "spectrum", "receptive-field"]


def test_refusal_names_what_would_work(models):
    with pytest.raises(ValueError) as error:
        refuse_unsuited(MEASURES["entropy"], models["resnet"], "mine")
    said = str(error.value)
    assert said.startswith("mine has no attention; entropy needs attention, as in vit_small_patch16_224")
    assert said.endswith("of mine there are variance, dead, spectrum, interaction, receptive-field, removal, front")
    with pytest.raises(
        ValueError, match=r"^mine is a dense run.* there are variance, dead, spectrum, receptive-field$"
    ):
        refuse_unsuited(MEASURES["removal"], models["resnet"], "mine", dense=True)


def test_unknown_names():
    with pytest.raises(
        ValueError, match=r"unknown measure 'entropi'; did you mean 'entropy'\? expected one of variance, dead"
    ):
        find_measure("entropi")
    with pytest.raises(ValueError, match="unknown measure 'q'; expected one of"):
        find_measure("q")
    with pytest.raises(ValueError, match=r"no option 'pair'; did you mean 'pairs'\? it has grid, orders, pairs"):
        MEASURES["interaction"].settings({"pair": 3})
    with pytest.raises(ValueError, match="entropy has no option 'x'; it has none"):
        MEASURES["entropy"].settings({"x": 3})


@pytest.mark.parametrize(
    ("name", "given", "fine"),
    [
        ("interaction", {"pairs": 3}, True),
        ("interaction", {"pairs": "many"}, False),
        ("interaction", {"pairs": True}, False),
        ("interaction", {"baseline": 1}, True),
        ("interaction", {"target": 5}, True),
        ("similarity", {"with_itself": 1}, False),
        ("logits", {"view": 3}, False),
        ("logits", {"classes": (1, 2)}, True),
    ],
)
def test_kinds_of_options(name, given, fine):
    if fine:
        assert MEASURES[name].settings(given).items() >= given.items()
    else:
        with pytest.raises(ValueError, match="expected a value like"):
            MEASURES[name].settings(given)


def test_labels_are_needed_for_a_target():
    measure = MEASURES["interaction"]
    assert (measure.labels_for({"target": None}), measure.labels_for({"target": "label"})) == ("no", "needed")


def test_rows_of_entropy():
    result = {"a": analysis.LayerEntropy(1.0, (0.5, 1.5), 8)}
    columns, rows = entropy.rows(result)
    (row,) = rows
    assert len(columns) == len(row)
    assert row[:4] == ("a", 8, 2, 1.0)
    assert row[5] == pytest.approx(100 / 2.0794415)
    record = MEASURES["entropy"].record(result)
    assert record["layers"][0]["name"] == "a" and record["layers"][0]["heads"] == [0.5, 1.5]


def test_rows_of_logits():
    # two groups at (1, 0) and (-1, 0); tokens of the first 3 above and below it, of the second at it
    tokens = torch.tensor([[[[1.0, 3.0], [1.0, -3.0]], [[-1.0, 0.0], [-1.0, 0.0]]]])
    groups, middle = tokens.mean(2), torch.zeros(1, 2)
    result = analysis.TokenLogits("pca", tokens, groups, middle, None, None, torch.zeros(1))
    _, rows = logits.rows(result)
    assert rows == [("group 1", 2, 3.0, 1.0), ("group 2", 2, 0.0, 1.0)]


def test_fronts_over_all_that_is_known():
    def points(axis):
        return [analysis.Point("a", None if axis == "latency_ms" else 2e9, 70.0), analysis.Point("b", 4e9, 60.0)]

    found = front.fronts_over(points)
    assert list(found) == ["latency_ms", "macs", "parameters"]
    _, rows = front.rows(found["macs"])
    assert [row[:4] for row in rows] == [("a", 2.0, 70.0, "yes"), ("b", 4.0, 60.0, "no")]
    nothing = [analysis.Point("a", None, 70.0)]
    with pytest.raises(ValueError, match="no model has both"):
        front.fronts_over(lambda axis: nothing)
