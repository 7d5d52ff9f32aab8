"""Fronts of points that are given, and points from files as other commands write them."""

import itertools
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from matplotlib.text import Text

from broadsight.analysis.front_points import AXES, Point, competitor_points, find_tables, paper_points, read_points
from broadsight.analysis.measures.front import fronts, fronts_over, pareto_front, plot_fronts
from broadsight.benchmark import run as benchmark
from broadsight.benchmark.candidates import Settings
from broadsight.benchmark.timing import Summary
from broadsight.papers.tables import published
from tests.training.small_runs import refusal

GIVEN = yaml.safe_load(Path(__file__).with_name("front.yaml").read_text("utf-8"))
ROWS, EVALUATION = GIVEN["catalogue"], GIVEN["evaluation"]


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
    quartiles = 9.5, 12.0  # none below the fastest
    assert mine == Point("mine", 10.0, 56.0, "ours", "scenes:60, val", *quartiles, conditions, size=96)
    assert other.size is None
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
    assert small == Point("small", 10.0, None, "ours", "", 9.0, 11.0, conditions, "small", 224)
    assert read_points(tmp_path / "bench.json", "macs")[0].x == 8
    assert read_points(tmp_path / "bench.json", "parameters")[0].low is None
    other = {**BENCH, "settings": BENCH["settings"] | {"size": [64, 32]}}
    sizes = {"growth_from": 512, "rows": [], "reports": [BENCH, other]}
    found = read_points(written(tmp_path / "sizes.json", sizes))
    assert [(point.label, point.size) for point in found][::3] == [("small at 224x224", 224), ("small at 64x32", 45)]
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
    takes = {"input_size": [3, 48, 48]}
    written(tmp_path / "config.json", {"architecture": "test_resnet", "pretrained_cfg": takes, "broadsight": run})
    lines = [{"kind": "updates", "loss": 1.0}, {"kind": "epoch", "val_top1": 60.0}, {"kind": "epoch", "val_top1": 58.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = read_points(tmp_path, "parameters")
    assert found == Point(tmp_path.name, 1000.0, 60.0, "ours", "flowers, val", size=48)
    assert read_points(tmp_path)[0].x is None
    measured = {"title": "resnet-map", "macs": 5, "latency_ms": Summary(10.0, 1.0, 0.2), "parameters": None}
    (found,) = read_points(tmp_path, measured=measured)
    assert (found.label, found.x, found.low, found.high) == ("resnet-map", 10.0, 9.0, 11.0)
    assert read_points(tmp_path, "macs", measured)[0].x == 5
    for takes in ({"input_size": "big"}, {"input_size": 3}, "big"):
        written(tmp_path / "config.json", {"pretrained_cfg": takes, "broadsight": run})
        assert "holds a damaged run" in refusal(lambda: read_points(tmp_path))
    written(tmp_path / "config.json", {"broadsight": run})
    (tmp_path / "metrics.jsonl").unlink()
    assert read_points(tmp_path, "parameters")[0].accuracy is None  # not evaluated yet
    written(tmp_path / "evaluation.json", EVALUATION)
    assert read_points(tmp_path)[0].label == "mine"


def test_published_figures(tmp_path):
    small, large, unknown = paper_points(ROWS, "macs")
    assert small == Point("small", 0.5e9, 73.1, "paper", "ImageNet-1K", conditions="as published", size=224)
    assert large.x is None and unknown.accuracy is None
    assert [point.x for point in paper_points(ROWS, "parameters")] == pytest.approx([5.4e6, 50e6, 9e6])
    assert read_points(written(tmp_path / "list.json", ROWS), "macs") == [small, large, unknown]
    found = fronts(paper_points(ROWS, "parameters"), "parameters")
    assert [point.label for point in found.fronts[0].best] == ["small", "large"]
    assert found.notes == ("left out, published accuracy unknown: unknown",)


def test_tables_of_competitors__as_printed():
    """Numbers typed once more from the papers, and those of ours that other files repeat."""
    tables = find_tables("all")
    counts = {name: len(table["rows"]) for name, table in tables.items()}
    assert counts == {"map": 31, "map-scaled": 26, "map-sizes": 12, "map-pools": 10, "map-steps": 16, "map-ga": 4} | {
        "emsnet": 24, "emsnet-latency": 11, "mat": 47, "partialformer": 72
    }  # fmt: skip
    for name, x, label, size, cost, accuracy, ours in GIVEN["printed"]:
        found = [(p.size, p.x, p.accuracy) for p in competitor_points([tables[name]], x) if p.label == label]
        assert (size, pytest.approx(cost), accuracy) in found, (name, label)
        assert all(p.highlight == ours for p in competitor_points([tables[name]], x) if p.label == label)
    timed = competitor_points([tables["emsnet-latency"]])
    ems = [(p.machine, p.x) for p in timed if p.label == "EMSNet-XTiny"]
    assert ems == [("Core i5-6600", 70.3), ("Tesla V100", 0.57)] and len(timed) == 22
    assert competitor_points([tables["mat"]]) == []  # no times are printed
    assert {p.x for p in competitor_points([tables["map-sizes"]], "parameters")} == {None}
    # what the static tables print of the same models, rounded
    for table, pattern in (("emsnet", "EMSNet"), ("mat", "MAT"), ("partialformer", "PartialFormer")):
        rows = [dict(zip(tables[table]["columns"], row, strict=True)) for row in tables[table]["rows"]]
        ours = [row for row in rows if row["model"].startswith(pattern)]
        printed = published()[table]["models"]
        assert [row["top1"] for row in ours] == [row["top1"] for row in printed]
        for row, other in zip(ours, printed, strict=True):
            near = [abs(float(row[key]) - float(other[key])) for key in ("params", "macs")]
            assert near[0] <= 0.5 and near[1] <= 0.05 + 1e-9, row


def test_tables_of_competitors__fronts_of_their_own_and_what_is_refused():
    tables = find_tables(("map", "emsnet-latency", "mat"))

    def points(x):
        return [Point("mine", 5.0, 99.0, size=96), *competitor_points(tables.values(), x)]

    found = fronts_over(points)
    machines = [f"latency_ms, {name} as published" for name in ("RTX 3090", "Core i5-6600", "Tesla V100")]
    assert list(found) == ["latency_ms", *machines, "macs", "parameters"]
    assert [one.data for one in found["latency_ms"].fronts] == [""]  # what was measured here, alone
    (i5,) = found[machines[1]].fronts
    assert [point.label for point in i5.best] == ["EdgeViT-XXS", "ConvNeXt", "EdgeViT-XS"]
    assert [one.title for one in found["macs"].fronts][1:] == [
        f"published accuracy, ImageNet-1K ({source})" for source in ("MAP, Table 3", "thesis, Tables 3.6 and 3.8")
    ] + ["published accuracy, ImageNet-1K (thesis, Table 4.4)"]
    best = [point.label for point in found["macs"].fronts[3].best]
    assert [label for label in best if label.startswith("MAT")] == ["MAT-1", "MAT-2", "MAT-3", "MAT-4", "MAT-5"]
    both = fronts([Point("a", 1.0, 60, "paper", "x", machine="m"), Point("b", 2.0, 50, "paper", "x", machine="n")])
    assert [[point.label for point in one.best] for one in both.fronts] == [["a"], ["b"]]
    assert find_tables(()) == {}
    said = refusal(lambda: find_tables("partialforme"))
    assert said.startswith("unknown table of competitors 'partialforme'; did you mean 'partialformer'? expected one of")
    said = refusal(lambda: find_tables(("map", "mat"), "latency_ms"))
    assert said.startswith("competitors=mat prints no times; take x=macs or parameters, or map, map-scaled, map-si")
    assert "unknown table of competitors 3" in refusal(lambda: find_tables(3))


def test_plot__radius_follows_the_size_of_images():
    ours = [Point(f"at {size}", x, 60 + x, size=size) for x, size in ((1.0, 224), (2.0, 448), (3.0, None))]
    own = Point("own", 4.0, 50, "paper", "table", highlight=True, size=16)
    figure = plot_fronts({"": fronts([*ours, own])})
    marks = figure.axes[0].collections
    areas = {float(one.get_offsets()[0][0]): float(one.get_sizes()[0]) for one in marks}
    assert areas == {1.0: 42.0, 2.0: 168.0, 3.0: 14.0, 4.0: 6.0}  # the last is small, yet not invisible
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words[2:] == ["filled: of the paper itself", "pixels not given", "16 pixels", "224 pixels", "448 pixels"]
    assert (marks[-1].get_facecolor() == marks[-1].get_edgecolor()).all()  # others of a paper are hollow
    alike = plot_fronts({"": fronts([Point("a", 1.0, 60, size=320), Point("b", 2.0, 70, size=320)])})
    assert {float(one.get_sizes()[0]) for one in alike.axes[0].collections} == {42.0}
    assert len(alike.legends[0].get_texts()) == 1


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
