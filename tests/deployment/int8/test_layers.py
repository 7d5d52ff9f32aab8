"""What quantisers share: names of layers, patterns of them, how far one moves the logits, what stays in float."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from broadsight.deployment import FORMATS, need, open_artefact
from broadsight.deployment.int8.layers import COMPUTED, ENDLESS, SHALLOW, Calibrated, matching, moved, unique_names
from tests.deployment.int8.models import LAYERS, Colours, Odd, noise, written
from tests.refusals import refused

INT8 = [name for name, form in FORMATS.items() if form.int8 and form.suffix]
# OpenVINO takes long for some
INT8_LATER = [pytest.param(name, marks=pytest.mark.slow) if name == "openvino" else name for name in INT8]


@pytest.fixture(scope="module", params=INT8)
def form(request):
    try:
        return need(request.param, int8=True)
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def source(form, tmp_path_factory) -> Path:
    return written(Colours(), tmp_path_factory.mktemp("float") / f"colours{form.suffix}")


@pytest.fixture(scope="module")
def calibrated(form, source) -> Calibrated:
    return form.calibrated(source, noise(), threads=1)


def test_names_of_layers__unique_and_matching():
    found = [("stem", "conv2d"), ("attn", "linear"), ("attn", "matmul"), ("attn", "matmul"), ("", "node_7")]
    assert unique_names(found) == ["stem", "attn.linear", "attn.matmul", "attn.matmul_1", "node_7"]
    assert unique_names([("fc", "linear"), ("fc", "linear")]) == ["fc.linear", "fc.linear_1"]
    # By patterns and whole modules, in the order of the names
    names = ["stages.0.conv", "stages.0.mlp.fc1", "stages.1.conv", "head.fc"]
    assert matching(["head", "stages.0.*"], names) == ["stages.0.conv", "stages.0.mlp.fc1", "head.fc"]
    assert matching(["*.conv"], names) == ["stages.0.conv", "stages.1.conv"]
    assert matching([], names) == []
    words = r"--keep-float 'layer\*' matches no layer; there are 2, such as stem, fc"
    refused(words, matching, ["stem", "layer*"], ["stem", "fc"])


def test_moved__by_hand():
    expected = np.array([[3.0, 1.0], [0.0, 4.0]])  # centred: 1 -1, -2 2
    assert moved(expected + 7, expected) == 0
    assert moved(np.array([[3.0, 1.0], [1.0, 3.0]]), expected) == pytest.approx((2 / 10) ** 0.5)
    assert moved(np.full((2, 2), np.nan), expected) == float("inf")


def test_layers__what_gains_nothing_is_passed_over_and_something_must_be_left(form, calibrated, source, tmp_path):
    assert tuple(calibrated.layers) == LAYERS  # dw lies between two that are int8, lone does not
    assert calibrated.passed_over == {"stem": SHALLOW, "lone": SHALLOW}
    refused("no layer is left", calibrated.write, tmp_path / f"none{form.suffix}", LAYERS)
    refused("no images to calibrate with", form.calibrated, source, noise()[:0])
    assert not list(tmp_path.iterdir())


def test_write__smaller_near_and_of_the_same_description_until_it_is_replaced(form, calibrated, source, tmp_path):
    target = tmp_path / f"small{form.suffix}"
    calibrated.write(target)
    session, before = open_artefact(target, 1), open_artefact(source, 1)
    said = before.description
    one = {**said.image, "any_batch": form.int8_batches}  # more than one at a time OpenVINO gets wrong in int8
    assert session.description == replace(said, image=one)
    assert 0 < moved(session(noise(20))["logits"], before(noise(20))["logits"]) < 0.08
    sizes = [sum(path.with_suffix(suffix).stat().st_size for suffix in form.files) for path in (target, source)]
    assert sizes[0] < (0.4 if form.name == "onnx" else 0.75) * sizes[1]  # the .xml file is no smaller
    form.describe(target, replace(session.description, quantised={"layers": 6}))
    other = open_artefact(target, 1)
    assert other.description.quantised == {"layers": 6}
    np.testing.assert_array_equal(other(noise())["logits"], session(noise())["logits"])
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(f"small{suffix}" for suffix in form.files)


@pytest.mark.parametrize("form", INT8_LATER, indirect=True)
def test_alone__finds_the_layers_that_an_outlier_destroys(form, tmp_path):
    path = written(Colours(outlier=1e5), tmp_path / f"hostile{form.suffix}")
    hostile, expected = form.calibrated(path, noise(), threads=1), open_artefact(path, 1)(noise())["logits"]

    def loss(*kept: str) -> float:
        hostile.write(tmp_path / f"small{form.suffix}", kept)
        return moved(open_artefact(tmp_path / f"small{form.suffix}", 1)(noise())["logits"], expected)

    costs = {name: moved(hostile.alone(name)(noise()), expected) for name in hostile.layers}
    assert costs["conv2"] > 0.5 > 0.1 > max(costs[name] for name in ("conv3", "conv4", "fc"))
    assert loss(*(name for name in LAYERS if costs[name] > 0.2)) < 0.1
    if form.name == "onnx":  # OpenVINO also loses what conv1 gives
        assert sorted(costs, key=lambda name: -costs[name])[:2] == ["conv1", "conv2"]
        assert costs["conv1"] > 0.5 > 0.1 > costs["dw"] and loss() > 0.5


@pytest.mark.parametrize("form", INT8_LATER, indirect=True)
def test_write__products_of_every_kind(form, tmp_path):
    """One image at a time in ONNX, for any number in OpenVINO, which repeats the stack for every image."""
    path = written(Odd(), tmp_path / f"odd{form.suffix}", any_batch=form.name != "onnx")
    calibrated = form.calibrated(path, noise())
    computed = 2 if form.name == "onnx" else 3
    reasons = calibrated.passed_over
    assert sorted(reasons.values()) == sorted([COMPUTED] * computed + [ENDLESS]) and reasons["mix"] == ENDLESS
    assert "head" in calibrated.layers and len(calibrated.layers) == 5 - computed
    calibrated.write(tmp_path / f"small{form.suffix}")
    before, after = (open_artefact(one, 1)(noise(5))["logits"] for one in (path, tmp_path / f"small{form.suffix}"))
    assert moved(after, before) < 0.1
    if form.name == "openvino":
        assert {"matmul", "matmul_1", "matmul_2"} < calibrated.passed_over.keys()
    else:
        import onnx

        constants = onnx.load(tmp_path / "small.onnx").graph.initializer
        largest = max(int(np.prod(one.dims)) for one in constants if one.data_type == onnx.TensorProto.FLOAT)
        assert largest <= 16 * 16  # all weights are int8, but for mix
