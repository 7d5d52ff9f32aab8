"""Names with arguments, and which part of a candidate gets which argument."""

import json
from dataclasses import asdict

import pytest

import broadsight
from broadsight.benchmark.candidates import Variant, create, name_and_arguments, name_and_size, variants
from broadsight.benchmark.run import Report, Settings, expand, measure
from broadsight.surgery.pooling import swap_pool
from tests.refusals import refused

ONCE = Settings(batch=1, size=(64, 64), rounds=1, warmup=0)
# Parameters in millions as the thesis prints them, in Tables 4.9 (rounded) and 3.9 (cut off).
PRINTED = {"mat_2:mixer=none": "5.699", "mat_2:mixer=window": "7.802", "mat_2": "10.767", "mat_2:embed=conv": "11.107"}
PRINTED |= {"mat_2:embed=merge": "10.892", "emsnet_xxtiny:mixer=baseline": "2.09", "emsnet_xxtiny:mixer=gated": "2.68"}
PRINTED |= {"emsnet_xxtiny:mixer=c_mhsa": "3.10", "emsnet_xxtiny": "2.56"}
PRINTED |= {"emsnet_xxtiny:mixer=no_split": "4.45"}


def size(model) -> int:
    return sum(p.numel() for p in model.parameters())


def test_names__values_as_yaml_reads_them_and_back():
    name = 'mat_2:mixer=window,mixer_stages=[3,4],drop_path_rate=1e-1,block={"a":[1,2],"b":null}@224x320'
    whole, pixels = name_and_size(name)
    model, given = name_and_arguments(whole)
    assert (model, pixels) == ("mat_2", (224, 320))
    assert given == dict(mixer="window", mixer_stages=[3, 4], drop_path_rate=0.1, block={"a": [1, 2], "b": None})
    assert str(Variant(model, size=pixels, args={"model": given})) == name.replace("1e-1", "0.1")
    assert name_and_arguments("hf-hub:timm/x") == ("hf-hub:timm/x", {})
    assert expand(["mat_?:mixer_stages=[4]@64"]) == [f"mat_{i}:mixer_stages=[4]@64" for i in (1, 2, 3, 4, 5)]


@pytest.mark.parametrize("name", PRINTED)
def test_rows_of_the_thesis__their_parameters(name):
    (variant,) = variants([name], ONCE)
    millions = size(create(variant, ONCE)) / 1e6
    shown = f"{millions:.3f}" if name.startswith("mat") else f"{millions:.6f}"[:4]
    assert shown == PRINTED[name]


def test_arguments__go_to_the_parts_that_have_them():
    given = dict(model_args=dict(mixer="window", drop_rate=0.1), pool_args=dict(groups=3, level=-1))
    settings = Settings(pools=("gap", "map"), broadcasts=("none", "cb"), broadcast_args=dict(branch="both"), **given)
    titles = [str(one) for one in variants(["mat_1:mixer=none", "mat_1", "test_vit@96"], settings)]
    pools = " + gap", " + map:groups=3,level=-1"
    models = "mat_1:mixer=none,drop_rate=0.1", "mat_1:mixer=window,drop_rate=0.1", "test_vit:drop_rate=0.1@96"
    assert titles == [m + p + b for m in models for p in pools for b in ("", " + cb:branch=both broadcast")]


def test_measure__rows_of_one_interleaved_run_say_their_arguments():
    names = ["test_resnet", "test_resnet:stem_width=16,in_chans=1"]
    settings = Settings(**asdict(ONCE) | dict(pools=("map",), pool_args=dict(groups=3, dim=96, mlp_dim=192)))
    report = measure(names, settings)
    assert [row.model for row in report.rows] == [f"{name} + map:groups=3,dim=96,mlp_dim=192" for name in names]
    pool = dict(groups=3, dim=96, mlp_dim=192, num_classes=1000)
    assert report.rows[0].params == size(swap_pool("test_resnet", "map", **pool))
    assert report.rows[1].params == size(swap_pool("test_resnet", "map", stem_width=16, in_chans=1, **pool))
    assert Report.from_dict(json.loads(json.dumps(asdict(report)))) == report


NO_MIXR = "gives the model mat_2 an argument 'mixr', which it has not; did you mean 'mixer'?"
WRONG = [
    (["mat_2:mixr=x"], {}, f"^its name {NO_MIXR}"),
    (["mat_2"], dict(model_args={"mixr": 1}), f"^--model-args {NO_MIXR}"),
    (["mat_2:mixer=x"], {}, "^mat_2:mixer=x: unknown mixer 'x'; expected one of mat, window, none"),
    (["mat_2:mixer=none,embed"], {}, "'embed'; expected key=value"),
    (["mat_2:num_classes=3"], {}, "its name gives num_classes=3; leave it out: every model has the same classes"),
    (["mat_2"], dict(model_args={"img_size": 64}), "leave it out: --size says it"),
    (["mat_2"], dict(pool_args={"groups": 3}), "--pool-args is for other pools .*; this has none; leave it out"),
    (["mat_2"], dict(pool=["map"], pool_args={"grops": 3}), "--pool-args grops: .* did you mean 'groups'?"),
    (["mat_2"], dict(pool=["gap", "dft"], pool_args={"groups": 3}), "--pool-args groups is for the pool map or"),
    (["mat_2"], dict(broadcast=["none"], broadcast_args={"branch": "both"}), "--broadcast-args is for context"),
    (["mat_2"], dict(broadcast=["cb"], broadcast_args={"brnch": 1}), "--broadcast-args brnch: .* mean 'branch'?"),
    (["mat_2"], dict(neck=["map"]), "--neck is for dense models .*; this has classifiers; leave it out"),
    (["mat_2"], dict(head="retinaet"), "unknown head 'retinaet'; did you mean 'retinanet'?"),
    (["mat_2"], dict(head="fcos", pool=["map"]), "--pool is for classifiers; --head fcos is dense; leave it out"),
    (["mat_2"], dict(head="fcos", scatter="x.png"), "--scatter is for classifiers; --head fcos is dense"),
    (["mat_2"], dict(head="fcos", runtime=["onnx"]), "onnx with head 'fcos'; dense models are timed eagerly"),
    (["mat_2"], dict(head="fcos", precision="bf16"), "bf16 with head 'fcos'; dense models are timed eagerly"),
    (["mat_2"], dict(head="fcos", neck=["mpa"]), "unknown neck 'mpa'; did you mean 'map'?"),
    (["mat_2"], dict(head="fcos", neck=["map"], neck_args={"dim": 8}), "--neck-args is for necks .*; this has none"),
    (["mat_2"], dict(head="fcos", neck=["tokens"], neck_args={"dm": 8}), "--neck-args dm: .* did you mean 'dim'?"),
    (["test_resnet"], dict(head="fcos", head_args={"topk": 8}), "fcos cannot be built: unexpected keyword .* 'topk'"),
]


@pytest.mark.parametrize(("names", "options", "words"), WRONG)
def test_bench__refuses(names, options, words):
    refused(words, broadsight.bench, names, size=64, error=broadsight.UsageError, **options)
