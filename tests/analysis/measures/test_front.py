"""Fronts of points that are given, and points from files as other commands write them."""

import itertools
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.text import Text

from broadsight.analysis import AXES, Point, fronts, paper_points, pareto_front, plot_fronts, read_points
from broadsight.benchmark import run as benchmark
from broadsight.benchmark.candidates import Settings
from broadsight.benchmark.timing import Summary
from tests.training.small_runs import refusal

ROWS = [  # as broadsight.papers.verify.catalogue gives them
    {"model": "small", "params": 1, "macs": 2, "paper_params_m": 5.4, "paper_macs_g": 0.5, "paper_top1": 73.1},
    {"model": "large", "params": 1, "macs": 2, "paper_params_m": 50.0, "paper_macs_g": None, "paper_top1": 81.0},
    {"model": "unknown", "params": 1, "macs": 2, "paper_params_m": 9.0, "paper_macs_g": 1.0, "paper_top1": None},
]
MINE = dict(title="mine", parameters=510230, macs=15105024, input_size=[3, 96, 96])
EVALUATION = {
    "kind": "evaluation",
    "model": MINE | dict(latency_ms={"median": 10.0, "minimum": 9.5, "spread": 0.4}),
    "figures": {"top1": 56.0, "top5": 93.0},
    "beside": [{"title": "other", "parameters": 3, "macs": None, "latency_ms": 7.0, "figures": {"top1": 53.0}}],
    "data": {"kind": "scenes", "data": "scenes:60", "part": "val"},
    "asked": {"data": None, "samples": None},
    "how": {"device": "cpu", "threads": 1},
}


def row(name: str, median: float) -> dict[str, Any]:
    samples = [median - 4, median - 2, median, median + 2, median + 8]
    times = dict(wall_ms={"median": median, "minimum": 1.0, "spread": 0.1}, wall_samples_ms=samples)
    return dict(model=name, runtime="eager", params=7, macs=8, **times)


BENCH = {
    "settings": {"batch": 2, "size": [224, 224], "threads": 1, "device": "cpu", "dtype": "float32", "train": False},
    "rows": [row("small", 20.0), row("mine", 30.0), row("stranger", 40.0)],
}


def points(*places: tuple[float | None, float | None], source: str = "ours") -> list[Point]:
    return [Point(f"net{i}", x, accuracy, source) for i, (x, accuracy) in enumerate(places)]


def best(*places: tuple[float | None, float | None]) -> list[str]:
    return [point.label for point in pareto_front(points(*places))]


def written(path, record) -> str:
    path.write_text(json.dumps(record))
    return str(path)


def test_by_hand():
    assert best((1, 60), (2, 70), (3, 65), (4, 80), (5, 80)) == ["net0", "net1", "net3"]
    assert best((4, 80), (2, 70), (1, 60)) == ["net2", "net1", "net0"]  # by cost
    assert best((1, 60), (1, 70)) == ["net1"]  # as cheap and better
    assert best((1, 70), (2, 70)) == ["net0"]  # as good and cheaper
    assert best((1, 70), (1, 70), (1, 60), (2, 70)) == ["net0", "net1"]  # equals do not beat each other
    assert best((2, 50)) == ["net0"] and best() == []
    assert best((1, None), (None, 60), (3, 60), (2, math.nan)) == ["net2"]
    # against the definition
    torch.manual_seed(0)
    for _ in range(20):
        some = points(*torch.randint(0, 6, (12, 2)).double().tolist())

        def beats(a: Point, b: Point) -> bool:
            return a.x <= b.x and a.accuracy >= b.accuracy and (a.x < b.x or a.accuracy > b.accuracy)

        found = pareto_front(some)
        assert {point.label for point in found} == {b.label for b in some if not any(beats(a, b) for a in some)}
        assert all(a.x <= b.x for a, b in itertools.pairwise(found))


def test_sources_and_data_never_share_a_front_and_conditions_are_noted():
    ours, theirs = Point("a", 5, 60, data="scenes"), Point("b", 1, 90, "paper", "ImageNet-1K")
    other = Point("c", 4, 70, data="flowers")
    found = fronts([ours, theirs, other])
    best_of = {(one.source, one.data): [point.label for point in one.best] for one in found.fronts}
    assert best_of == {("ours", "scenes"): ["a"], ("paper", "ImageNet-1K"): ["b"], ("ours", "flowers"): ["c"]}
    assert "expected 'ours' or 'paper'" in refusal(lambda: Point("a", 1, 1, "theirs"))
    found = fronts([Point("a", 1, 60, conditions="cpu"), Point("b", 2, 50, conditions="cuda")])
    assert found.notes == ("our accuracy: costs were measured under different conditions: cpu; cuda",)
    record = found.record()
    assert json.loads(json.dumps(record)) == record
    (front,) = record["fronts"]
    assert [(p["label"], p["on_front"]) for p in front["points"]] == [("a", True), ("b", False)]
    assert record["x"] == "latency_ms" and record["notes"] == list(found.notes)


def test_what_is_not_known_is_left_out_with_a_note():
    found = fronts([*points((1, 60), (2, None), (None, 70), (None, None), (math.nan, 1), (9, None))])
    assert [point.label for point in found.fronts[0].points] == ["net0"]
    assert found.notes == (
        "left out, latency unknown: net2",
        "left out, accuracy and latency unknown (not run): net3",
        "left out, a number not finite: net4",
        "left out, accuracy unknown (not run): net1, net5",
    )
    said = refusal(lambda: fronts(points((2, None), (None, 3)), "macs"))
    assert said.startswith("no model has both accuracy and MACs; left out, MACs unknown: net1; left out")
    assert "no model" in refusal(lambda: fronts([]))
    assert "choose latency_ms, macs, parameters" in refusal(lambda: fronts(points((1, 60)), "flops"))


def test_a_benchmark_lends_its_latency(tmp_path):
    bench = read_points(written(tmp_path / "bench.json", BENCH))
    own = Point("mine", None, 55.0, data="scenes")
    found = fronts([*bench, *paper_points(ROWS), own])
    ours, paper = sorted(found.fronts, key=lambda front: front.source)
    assert [(p.label, p.x, p.accuracy, p.source) for p in paper.points] == [("small", 10.0, 73.1, "paper")]
    assert [(p.label, p.x, p.low, p.high) for p in ours.points] == [("mine", 15.0, 14.0, 16.0)]
    assert found.notes == (
        "left out, latency unknown: large",
        "left out, published accuracy and latency unknown: unknown",
        "left out, accuracy unknown (not run): stranger",
    )
    timed = Point("mine", 3.0, 55.0)
    assert "left out, latency came with the accuracy: mine" in fronts([*bench, timed]).notes


def test_an_evaluation(tmp_path):
    path = written(tmp_path / "evaluation.json", EVALUATION)
    mine, other = read_points(path)
    conditions = "cpu, 1 threads, batch 1, 96x96"
    assert mine == Point("mine", 10.0, 56.0, "ours", "scenes:60, val", 9.5, 12.0, conditions)  # none below the fastest
    assert (other.label, other.x, other.low, other.accuracy) == ("other", 7.0, None, 53.0)
    assert read_points(tmp_path, "macs")[0].x == 15105024 and read_points(tmp_path, "macs")[1].x is None
    assert [point.x for point in read_points(path, "parameters")] == [510230, 3]
    unasked = {**EVALUATION, "figures": {"loss": 1.0}, "asked": {"data": "flowers", "samples": 100}}
    found = read_points(written(tmp_path / "evaluation.json", unasked))[0]
    assert found.accuracy is None and found.data == "flowers, val, 100 images"


def test_a_benchmark(tmp_path):
    small, *_ = read_points(written(tmp_path / "bench.json", BENCH))
    conditions = "cpu, 1 threads, batch 2, 224x224, float32"
    # a batch of two takes 16, 18, 20, 22, 28: quartiles 18 and 22
    assert small == Point("small", 10.0, None, "ours", "", 9.0, 11.0, conditions, "small")
    assert read_points(tmp_path / "bench.json", "macs")[0].x == 8
    assert read_points(tmp_path / "bench.json", "parameters")[0].low is None
    other = {**BENCH, "settings": BENCH["settings"] | {"size": [64, 32]}}
    sizes = {"growth_from": 512, "rows": [], "reports": [BENCH, other]}
    found = read_points(written(tmp_path / "sizes.json", sizes))
    assert [point.label for point in found][::3] == ["small at 224x224", "small at 64x32"]
    assert {point.name for point in found} == {"small", "mine", "stranger"}
    runtimes = {**BENCH, "rows": [row | {"runtime": r} for row in BENCH["rows"] for r in ("eager", "compile")]}
    labels = [point.label for point in read_points(written(tmp_path / "two.json", runtimes))]
    assert labels[:2] == ["small, eager", "small, compile"]
    both = fronts([*read_points(tmp_path / "two.json"), *paper_points(ROWS)]).fronts[0]
    assert sorted(point.label for point in both.points) == ["small, compile", "small, eager"]
    pools = {**BENCH, "rows": [BENCH["rows"][0] | {"model": "resnet50 + map"}]}
    (pool,) = read_points(written(tmp_path / "pools.json", pools))
    assert fronts([pool, Point("resnet50-map", None, 70.0)]).fronts[0].points[0].x == 10.0  # as a run is called
    for setting, said in (("head_only", "pools alone"), ("train", "training steps")):
        other = written(tmp_path / "other.json", {**BENCH, "settings": BENCH["settings"] | {setting: True}})
        assert said in refusal(lambda other=other: read_points(other))
    before = read_points(Path(__file__).parents[3] / "results" / "bench-inference.json")
    small = next(point for point in before if point.label == "stvit_small")
    assert small.x == pytest.approx(1101.95 / 8, rel=1e-4) and small.low < small.x < small.high


@pytest.mark.slow
def test_a_real_benchmark(tmp_path):
    report = benchmark.measure(["test_resnet"], Settings(batch=1, size=(32, 32), threads=1, rounds=2, warmup=0))
    path = written(tmp_path / "bench.json", {"command": "", **asdict(report)})
    (found,) = read_points(path)
    assert found.x == pytest.approx(report.rows[0].wall_ms.median) and found.low <= found.x <= found.high


def test_a_run(tmp_path):
    run = {"task": "classify", "parameters": 1000, "settings": {"data": "flowers"}}
    written(tmp_path / "config.json", {"architecture": "test_resnet", "broadsight": run})
    lines = [{"kind": "updates", "loss": 1.0}, {"kind": "epoch", "val_top1": 60.0}, {"kind": "epoch", "val_top1": 58.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = read_points(tmp_path, "parameters")
    assert found == Point(tmp_path.name, 1000.0, 60.0, "ours", "flowers, val")
    assert read_points(tmp_path)[0].x is None
    measured = {"title": "resnet-map", "macs": 5, "latency_ms": Summary(10.0, 1.0, 0.2), "parameters": None}
    (found,) = read_points(tmp_path, measured=measured)
    assert (found.label, found.x, found.low, found.high) == ("resnet-map", 10.0, 9.0, 11.0)
    assert read_points(tmp_path, "macs", measured)[0].x == 5
    (tmp_path / "metrics.jsonl").unlink()
    assert read_points(tmp_path, "parameters")[0].accuracy is None  # not evaluated yet
    written(tmp_path / "evaluation.json", EVALUATION)
    assert read_points(tmp_path)[0].label == "mine"


def test_published_figures(tmp_path):
    small, large, unknown = paper_points(ROWS, "macs")
    assert small == Point("small", 0.5e9, 73.1, "paper", "ImageNet-1K", conditions="as published")
    assert large.x is None and unknown.accuracy is None
    assert [point.x for point in paper_points(ROWS, "parameters")] == pytest.approx([5.4e6, 50e6, 9e6])
    assert read_points(written(tmp_path / "list.json", ROWS), "macs") == [small, large, unknown]
    found = fronts(paper_points(ROWS, "parameters"), "parameters")
    assert [point.label for point in found.fronts[0].best] == ["small", "large"]
    assert found.notes == ("left out, published accuracy unknown: unknown",)


def test_files_that_tell_of_nothing_are_refused(tmp_path):
    damaged, dense = {"rows": [{}], "settings": {}}, {**EVALUATION, "data": {"task": "detect"}}
    nothing = [(record, "holds no accuracy") for record in ({"a": 1}, [], [1, 2], 3)]
    for record, said in (*nothing, (damaged, "damaged or of another version"), (dense, "for detect")):
        path = written(tmp_path / "bad.json", record)
        assert said in refusal(lambda path=path: read_points(path)), record
    (tmp_path / "text.json").write_text("no JSON\n")
    assert "is no JSON" in refusal(lambda: read_points(tmp_path / "text.json"))
    assert "is not there" in refusal(lambda: read_points(tmp_path / "none.json"), FileNotFoundError)
    assert "neither an evaluation nor a run" in refusal(lambda: read_points(tmp_path), FileNotFoundError)
    written(tmp_path / "config.json", {"broadsight": {"task": "segment"}})
    assert "--task segment" in refusal(lambda: read_points(tmp_path))
    assert "choose latency_ms" in refusal(lambda: read_points(tmp_path, "flops"))


def test_plot():
    measured = [Point("a", 10e9, 60), Point("b", 20e9, 55), Point("c", 30e9, 80)]
    both = fronts([*measured, Point("d", 5e9, 79, "paper")], "macs")
    (panel,) = plot_fronts({"": both}).axes
    steps = [[list(pair) for pair in line.get_xydata()] for line in panel.lines]
    assert steps == [[[10, 60], [30, 80], [30, 80]], [[5, 79], [30, 79]]]  # to the costliest of all
    assert panel.lines[0].get_drawstyle() == "steps-post" and panel.lines[1].get_linestyle() == "--"
    alphas = [marks.get_alpha() for marks in panel.collections]
    assert alphas == [1.0, 0.3, 1.0, 1.0]  # b is pale
    assert {text.get_text() for text in panel.texts} == {"a", "b", "c", "d"}
    timed = fronts([Point("a", 1.0, 60, low=0.9, high=1.3), Point("b", 50.0, 70)])
    two = plot_fronts({"one": timed, "two": both})
    assert [panel.get_xlabel() for panel in two.axes] == ["latency, ms per image", "MACs, G"]
    assert two.axes[0].get_xscale() == "log" and two.axes[1].get_xscale() == "linear"
    assert all(plot_fronts({x: fronts(points((0, 50)), x)}) for x in AXES)
    # names do not cover each other
    crowd = [Point(f"model {i}", 10 + 0.01 * i, 50 - 0.01 * i) for i in range(40)]
    apart = [Point("cheap", 1, 40), Point("dear", 20, 90)]
    figure = plot_fronts({"": fronts([*crowd, *apart])})
    figure.draw_without_rendering()
    texts = figure.axes[0].texts
    names = [text.get_text() for text in texts]
    assert {"cheap", "dear", "model 0"} <= set(names) and len(names) < 20
    boxes = [Text.get_window_extent(text) for text in texts]  # without the lines to their points
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
