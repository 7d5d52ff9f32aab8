"""The arithmetic and the manners of the benchmark. How fast anything is, no test may say."""

import dataclasses
import json
from pathlib import Path

import pytest
import timm
import torch

from broadsight.benchmark import run as benchmark
from broadsight.benchmark.candidates import Variant, build
from broadsight.benchmark.report import render
from broadsight.benchmark.run import Report, Settings, Summary, measure
from broadsight.losses import MultiTokenLoss
from broadsight.surgery.pooling import POOLS, swap_pool
from tests.refusals import refused

TINY = Settings(batch=2, size=(64, 64), rounds=3, warmup=1)
ONCE = dataclasses.replace(TINY, rounds=1, warmup=0)
PER_GROUP = str(Path(__file__).parents[2] / "benchmarks" / "per_group_map.py")
OTHER = Path(PER_GROUP).read_text().replace("attn.softmax(-1)", "attn.sigmoid()")
RIVALS = {"x = 1": "defines no module class PerGroupPool", "import no_such": "cannot be imported: ModuleNotFoundError"}
RIVALS[OTHER] = r"test_resnet \+ map failed .* outputs differ by up to"
AGAINST = [{"runtimes": ("eager",) * 2}, {"fuse": True}]
AGAINST += [pytest.param({name: True}, marks=pytest.mark.slow) for name in ("light", "train")]


@pytest.fixture(scope="module")
def inference() -> Report:
    return measure(["test_resnet", "test_vit"], TINY)


@pytest.fixture(scope="module")
def training() -> Report:
    return measure(["test_resnet", "test_vit"], dataclasses.replace(TINY, train=True))


def test_expand__wildcards_add_what_is_missing_and_names_may_repeat_with_sizes():
    every = timm.list_models("test_resnet*")
    assert benchmark.expand(["test_resnet", "test_resnet*", "test_resnet"]) == [*every, "test_resnet"]
    sized = [f"test_vit{n}@64x96" for n in (2, 3, 4)]
    assert benchmark.expand(["test_resnet@64", "test_vit?@64x96"]) == ["test_resnet@64", *sized]


def test_measure__a_model_at_a_size_of_its_own():
    names = ["test_resnet", "test_resnet@96x64", "test_resnet"]
    first, second, third = measure(names, dataclasses.replace(TINY, rounds=1)).rows
    assert (first.model, second.model) == ("test_resnet", "test_resnet@96x64")
    assert (first.size, second.size, third.size) == ([64, 64], [96, 64], [64, 64])
    assert first.macs == third.macs < second.macs
    words = "test_resnet@96x64 has a size of its own beside several sizes"
    refused(words, benchmark.measure_sizes, ["test_resnet@96x64"], TINY, [(32, 32), (64, 64)])


def test_measure__rows_agree_with_their_samples_and_name_the_machine(inference):
    first, second = inference.rows
    assert (first.model, second.model) == ("test_resnet", "test_vit")
    for row in inference.rows:
        assert len(row.wall_samples_ms) == len(row.cpu_samples_ms) == TINY.rounds
        assert row.wall_ms == benchmark.summarize(row.wall_samples_ms)
        assert row.throughput == pytest.approx(1e3 * TINY.batch / row.wall_ms.median)
        seconds = row.wall_ms.minimum / 1e3
        peak = inference.machine["gemm_flops"]["fp32"]
        assert row.peak_fraction == pytest.approx(2 * row.macs * TINY.batch / seconds / peak)
        assert row.macs > 1e6 and row.peak_bytes > 0 and row.saved_bytes is None
    assert first.params == sum(p.numel() for p in timm.create_model("test_resnet").parameters())
    assert first.ratio == first.cpu_ratio == Summary(1.0, 1.0, 0.0)
    pairs = zip(second.wall_samples_ms, first.wall_samples_ms, strict=True)
    assert second.ratio.median == pytest.approx(sorted(mine / base for mine, base in pairs)[1])
    machine = inference.machine
    assert machine["versions"]["torch"] == torch.__version__ and machine["versions"]["timm"] == timm.__version__
    assert machine["threads"] == TINY.threads
    assert machine["gemm_flops"].keys() == {"fp32", "bf16"} and machine["cpu"]
    assert {"commit", "load_before", "load_after", "memory_variables", "device"} <= machine.keys()


def test_measure__options_run_and_leave_threads_and_random_state_alone():
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    settings = dataclasses.replace(TINY, channels_last=True, fuse=True, rounds=1, threads=threads + 1)
    (row,) = measure(["test_resnet"], settings).rows
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)
    assert row.params <= sum(p.numel() for p in timm.create_model("test_resnet").parameters())
    assert measure(["test_vit"], dataclasses.replace(TINY, size=(64, 96), rounds=1)).rows[0].macs > 0
    with pytest.raises(ValueError, match="nest_tiny cannot be built for 64x96; it is made for 224x224"):
        measure(["nest_tiny"], dataclasses.replace(TINY, size=(64, 96)))
    with pytest.raises(RuntimeError, match=r"test_resnet \(eager\) failed while running a batch of 1 at 32x32: Value"):
        measure(["test_vit", "test_resnet"], Settings(batch=1, size=(32, 32), train=True, rounds=1, warmup=1))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["test_resne"], "unknown model 'test_resne'; nearest: test_resnet"),
        (["no_such_family_*"], "no timm model matches 'no_such_family_*'"),
        ([], "no model named; expected at least one"),
        (["test_resnet@"], "'test_resnet@' has no size behind its @; expected pixels, such as test_resnet@256 or"),
        (["test_resnet@0"], "'test_resnet@0' has no size behind its @"),
        (["test_resne@64"], "unknown model 'test_resne'; nearest: test_resnet"),
    ],
)
def test_expand__refuses(names, message):
    assert refused("", benchmark.expand, names).startswith(message)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"runtimes": ("egaer",)}, "unknown runtime 'egaer'; did you mean 'eager'? expected one of eager, compile"),
        ({"runtimes": ()}, "runtimes is empty; expected some of eager, compile"),
        ({"precisions": ("int8",)}, "unknown precision 'int8'; expected one of auto, fp32, bf16, fp16"),
        ({"device": "tpu"}, "unknown device 'tpu'; did you mean 'cpu'? expected one of cpu, cuda"),
        ({"size": (0, 8)}, "size=(0, 8); expected two positive numbers"),
        ({"pools": ("map", "gab")}, "unknown pool 'gab'; did you mean 'ga'? expected one of map, map-light, ga, cap, "),
        ({"train": True, "light": True}, "a light pool with train=True"),
        ({"broadcasts": ("none", "gat")}, "unknown broadcast 'gat'; did you mean 'gate'? expected one of none, cb"),
        ({"against": "x.py"}, "against a file without head_only"),
        ({"train": True, "fuse": True}, "fuse=True with train=True; fusing is for inference"),
        ({"runtimes": ("onxn",)}, "unknown runtime 'onxn'; did you mean 'onnx'? expected one of eager, compile"),
        ({"runtimes": ("eager", "onnx"), "train": True}, "train with runtime 'onnx'; exported models are timed whole"),
        ({"runtimes": ("int8",), "head_only": True, "against": "x.py"}, "head_only with runtime 'int8'"),
        ({"runtimes": ("openvino",), "device": "cuda"}, "device='cuda' with runtime 'openvino'"),
        ({"runtimes": ("pt2",), "channels_last": True}, "channels_last with runtime 'pt2'"),
    ],
)
def test_settings__refuse(wrong, message):
    assert refused("", Settings, **wrong).startswith(message)


def test_precisions__every_runtime_in_those_that_it_has_and_each_beside_its_own_peak(monkeypatch):
    report = measure(["test_vit"], dataclasses.replace(ONCE, precisions=("fp32", "bf16", "fp32"), train=True))
    assert [row.precision for row in report.rows] == ["fp32", "bf16"]
    single, half = report.rows
    assert half.peak_fraction == pytest.approx(
        6 * half.macs * 2 / (half.wall_ms.minimum / 1e3) / report.machine["gemm_flops"]["bf16"]
    )
    assert half.saved_bytes < 0.7 * single.saved_bytes and "eager bf16" in str(render(report).columns[1]._cells)
    both = Settings(runtimes=("eager", "pt2", "executorch", "pt2"), precisions=("auto", "bf16"))
    for able, auto in ({"avx512_bf16": True}, ["bf16"]), ({}, ["fp32", "bf16"]):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda able=able: able)
        each = {name: [one for runtime, one in both.lineup() if runtime == name] for name in ("eager", "executorch")}
        assert each == {"eager": auto, "executorch": ["fp32"]} and len(both.lineup()) == 3 * len(auto) + 1
    words = "--precision bf16, but ONNX Runtime has fp32 and fp16 on this CPU"
    for runtimes in (("onnx",), ("eager", "onnx")):
        refused(words, Settings(runtimes=runtimes, precisions=("bf16",)).lineup)
    assert refused("ExecuTorch has fp32 and fp16", Settings(runtimes=("executorch",), precisions=("bf16",)).lineup)


def test_settings__one_number_is_a_square_and_reports_survive_json(inference, training, monkeypatch):
    assert Settings(size=96).size == (96, 96)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused("^device='cuda', but torch finds no CUDA device here; use device='cpu'", Settings, device="cuda")
    for report in (inference, training):
        assert Report.from_dict(json.loads(json.dumps(dataclasses.asdict(report)))) == report


@pytest.mark.parametrize("file", ["bench-inference.json", "pools.json"])
def test_report__older_files_are_read_and_new_ones_whole(file, tmp_path):
    data = json.loads((Path(__file__).parents[2] / "results" / file).read_text("utf-8"))
    data.pop("command", None)
    report = Report.from_dict(data)
    first, *others = report.rows
    assert report.settings.precisions == ("fp32",) and [*report.machine.get("gemm_flops", {"fp32": 1})] == ["fp32"]
    assert first.start_up_s is None and first.wall_ms.median > 0 and first.speedup.median == 1
    for row in others:
        assert 1 / row.speedup.median == pytest.approx(row.cpu_ratio.median, rel=0.1)
    benchmark.write_json({"a": [1]}, tmp_path / "a.json")
    with pytest.raises(TypeError):
        benchmark.write_json({"a": object()}, tmp_path / "b.json")
    assert [(p.name, json.loads(p.read_text())) for p in tmp_path.iterdir()] == [("a.json", {"a": [1]})]


def test_pools_and_broadcasts__every_model_with_each():
    report = measure(["test_resnet"], dataclasses.replace(ONCE, pools=POOLS))
    assert [row.model for row in report.rows] == [f"test_resnet + {pool}" for pool in POOLS]
    rows = {row.model: row for row in report.rows}
    swapped = swap_pool("test_resnet", "map", num_classes=1000)
    assert rows["test_resnet + map"].params == sum(p.numel() for p in swapped.parameters())
    assert rows["test_resnet + map-light"].params < rows["test_resnet + map"].params
    assert Report.from_dict(json.loads(json.dumps(dataclasses.asdict(report)))) == report
    report = measure(["test_vit"], dataclasses.replace(ONCE, size=(160, 160), broadcasts=("none", "cb", "scaled")))
    names = ["test_vit", "test_vit + cb broadcast", "test_vit + scaled broadcast"]
    assert [row.model for row in report.rows] == names
    plain, cb, scaled = (row.params for row in report.rows)
    model = timm.create_model("test_vit")
    assert (cb - plain, scaled - plain) == (0, len(model.blocks) * model.embed_dim)
    assert report.rows[0].cpu_ratio.median == 1


def test_pools__training_takes_the_groups(monkeypatch):
    asked = []
    original = MultiTokenLoss.forward

    def forward(self, group_logits, target):
        asked.append((group_logits.tokens.shape, self.criterion))
        return original(self, group_logits, target)

    monkeypatch.setattr(MultiTokenLoss, "forward", forward)
    rows = measure(["test_resnet"], dataclasses.replace(ONCE, pools=("gap", "map"), train=True)).rows
    assert set(asked) == {((2, 2, 1000), "bce")}
    assert rows[0].saved_ratio == 1 and rows[1].saved_ratio == rows[1].saved_bytes / rows[0].saved_bytes


def test_head_only__maps_of_the_backbone_and_none_of_its_costs():
    settings = dataclasses.replace(ONCE, head_only=True, size=(64, 96), train=True)
    (candidate,) = build(Variant("test_resnet", "map"), settings)
    maps = []
    candidate.model.register_forward_pre_hook(lambda module, inputs: maps.extend(inputs))
    candidate.call()
    model = swap_pool("test_resnet", "map")
    expected = model.pyramid(model.backbone, torch.randn(2, 3, 64, 96))
    assert [x.shape for x in maps] == [x.shape for x in expected]
    assert all(x.grad is not None for x in maps)
    own = list(candidate.model.parameters())
    assert sum(p.numel() for p in own) == sum(p.numel() for p in model.head.parameters())
    assert all(p.grad is not None for p in own)
    pooled = dataclasses.replace(ONCE, pools=("map",))
    (whole,) = measure(["test_resnet"], pooled).rows
    (alone,) = measure(["test_resnet"], dataclasses.replace(pooled, head_only=True)).rows
    assert alone.params < whole.params and alone.macs < whole.macs
    assert alone.launches > 10 and whole.launches is None


@pytest.mark.parametrize("options", AGAINST)
def test_against__same_weights_first_and_the_yardstick_of_its_pool(options):
    settings = dataclasses.replace(ONCE, pools=("map",), head_only=True, against=PER_GROUP, rounds=2, **options)
    report = measure(["test_resnet", "test_vit"], settings)
    times = len(settings.runtimes)
    names = [f"{name} + map{form}" for name in ("test_resnet", "test_vit") for form in (", per_group_map", "")]
    assert [row.model for row in report.rows] == [name for name in names for _ in range(times)]
    for theirs, ours in zip(report.rows[:: 2 * times], report.rows[times :: 2 * times], strict=True):
        assert theirs.speedup == theirs.cpu_ratio == Summary(1.0, 1.0, 0.0)
        pairs = zip(theirs.cpu_samples_ms, ours.cpu_samples_ms, strict=True)
        assert ours.speedup.median == pytest.approx(sum(base / mine for base, mine in pairs) / 2)  # two rounds
        assert ours.macs < theirs.macs and ours.launches < theirs.launches
        assert (ours.params == theirs.params) or settings.fuse
        assert ours.saved_ratio == (ours.saved_bytes / theirs.saved_bytes if settings.train else None)


@pytest.mark.parametrize("source", RIVALS, ids=["nothing", "broken", "other"])
def test_against__refuses_other_files_and_results(source, tmp_path):
    file = tmp_path / "rival.py"
    file.write_text(source)
    settings = dataclasses.replace(ONCE, pools=("map",), head_only=True, against=str(file))
    refused(RIVALS[source], measure, ["test_resnet"], settings, error=RuntimeError if source == OTHER else ValueError)


def test_against_and_light__refuse_pools_without_groups():
    settings = dataclasses.replace(ONCE, pools=("gap",), head_only=True, against=PER_GROUP)
    refused(r"test_resnet \+ gap has no groups of tokens to compare", measure, ["test_resnet"], settings)
    for pools in ((), ("gap",), ("ga",)):
        refused("light form", measure, ["test_resnet"], dataclasses.replace(ONCE, pools=pools, light=True))


@pytest.mark.slow
def test_measure__compile():
    settings = dataclasses.replace(TINY, runtimes=("eager", "compile"))
    rows = measure(["test_resnet"], settings).rows
    assert [row.runtime for row in rows] == ["eager", "compile"] and rows[0].macs == rows[1].macs
    rows = measure(["test_resnet"], dataclasses.replace(settings, train=True)).rows
    assert all(row.saved_bytes for row in rows)


@pytest.mark.slow
def test_measure__many_models_of_one_class_are_all_compiled(monkeypatch):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **_: compile_(model, backend=backend))
    names = ["test_resnet", *(f"resnet{n}" for n in ("10t", "14t", "18", "18d", "26", "26d", "26t", "34", "34d"))]
    measure(names, dataclasses.replace(TINY, size=(32, 32), runtimes=("compile",), rounds=1))
    assert len(compiled) == len(names)  # torch's own limit is 8, past which it would quietly run in eager mode
