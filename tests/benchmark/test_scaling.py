"""Exponents from known costs. How fast anything really is, no test may say: the clock is replaced."""

import dataclasses
import json
import math
from itertools import pairwise

import pytest

from broadsight.benchmark import run as benchmark
from broadsight.benchmark.run import Report, Settings
from broadsight.benchmark.scaling import Exponent, Growth, exponents, measure, plot, render, slope
from broadsight.benchmark.timing import Summary
from broadsight.cli import main as cli
from tests.refusals import refused

from .conftest import MACHINE, row, shown

SETTINGS = Settings(batch=1, rounds=3, warmup=1)
SIZES = ((32, 32), (48, 64), (96, 96))


@pytest.fixture
def calls(monkeypatch) -> list:
    """Calls that are kept instead of timed: 1e-6 * pixels ** 1.2 s of wall and 1e-7 * pixels ** 1.5 s of CPU time."""
    found = []

    def timed(candidate, settings):
        found.append((candidate, settings))
        pixels = math.prod(settings.size)
        return benchmark._Sample(1e-6 * pixels**1.2, 1e-7 * pixels**1.5, 0)

    monkeypatch.setattr(benchmark, "_timed", timed)
    return found


def report(size, wall, **figures) -> Report:
    """One candidate with the given milliseconds of every round."""
    one = row("a", "eager", wall, None, **dict(params=5_000_000, macs=1000, peak_bytes=100) | figures)
    return Report(MACHINE | dict(rounds_completed=len(wall)), Settings(batch=1, size=size, rounds=len(wall)), [one])


def test_slope__of_an_exact_power_is_its_exponent():
    pixels = [512 * 512, 768 * 768, 1024 * 1024, 1333 * 800]
    assert slope(pixels, [3e-5 * count**1.2 for count in pixels]) == pytest.approx(1.2, abs=1e-12)
    assert slope(pixels, [7] * 4) == pytest.approx(0, abs=1e-12)
    # least squares: (0, 0), (1, 1), (2, 3) in powers of ten: (1 * 1.667 + 1 * 1.333) / 2
    assert slope([1, 10, 100], [1, 10, 1000]) == pytest.approx(1.5)
    assert slope([], []) is None and slope([4], [1.0]) is None
    assert slope([800, 800], [1.0, 2.0]) is None  # an image and itself lying down
    assert slope([4, 8], [0.0, 1.0]) is None


def test_exponents__median_of_the_rounds_and_where_it_lies():
    rounds = (1, 10, 1)
    reports = [report((side, side), [slow * side**2.4 for slow in rounds]) for side in (512, 768, 1024)]
    (found,) = exponents(reports, 512)
    assert (found.time.value, found.time.low, found.time.high) == pytest.approx((1.2, 1.2, 1.2))
    powers = (1.4, 1.0, 1.1)
    reports = [
        report((s, s), [(s * s) ** power for power in powers], cpu=[1.0 * s * s] * 3, peak_bytes=s**4, macs=s**3)
        for s in (512, 768, 1024)
    ]
    (found,) = exponents(reports, 512)
    assert (found.time.value, found.time.low, found.time.high) == pytest.approx((1.1, 1.0, 1.4))
    assert (found.cpu_time.value, found.memory.value, found.macs.value) == pytest.approx((1, 2, 1.5))
    assert found.memory.low == found.memory.high == found.memory.value
    assert (found.model, found.runtime, found.params) == ("a", "eager", 5_000_000)
    sides = (256, 511, 512, 1024)
    reports = [report((side, side), [max(side, 512) ** 2.0]) for side in sides]  # of which small ones do not count
    assert exponents(reports, 512)[0].time.value == pytest.approx(1)
    assert 0.5 < exponents(reports, 256)[0].time.value < 0.95
    reports = [report(size, [1.0 * size[0] * size[1]]) for size in ((600, 400), (400, 700), (2048, 128), (64, 64))]
    assert exponents(reports, 512)[0].time.value == pytest.approx(1)  # pixels decide, not sides: 280,000 and 262,144
    assert exponents(reports[:2], 512)[0].time is None


def test_measure__every_round_runs_every_model_at_every_size(calls):
    growth = measure(["test_resnet", "test_vit"], SETTINGS, ((32, 32), (64, 64)), growth_from=32)
    order = [f"{candidate.name.removeprefix('test_')} {settings.size[0]}" for candidate, settings in calls]
    every = ["resnet 32", "vit 32", "resnet 64", "vit 64"]
    assert order[:4] == every  # warming up
    assert [order[4:][i : i + 4] for i in (0, 4, 8)] == [every, every[1:] + every[:1], every[2:] + every[:2]]
    assert [report.settings.size for report in growth.reports] == [(32, 32), (64, 64)]
    assert [[row.model for row in report.rows] for report in growth.reports] == [["test_resnet", "test_vit"]] * 2
    for found in growth.rows:
        assert (found.time.value, found.time.low, found.cpu_time.value) == pytest.approx((1.2, 1.2, 1.5))
    small, large = (report.rows[0] for report in growth.reports)
    assert large.macs > 3.5 * small.macs and large.peak_bytes > 3.5 * small.peak_bytes
    assert growth.rows[0].macs.value == pytest.approx(math.log(large.macs / small.macs, 4))
    assert growth.rows[0].memory.value == pytest.approx(math.log(large.peak_bytes / small.peak_bytes, 4))
    assert [row.ratio for row in growth.reports[1].rows] == [Summary(1.0, 1.0, 0.0)] * 2  # to the first at this size
    growth = measure(["test_resnet"], SETTINGS, SIZES, growth_from=64)
    data = json.loads(json.dumps(dataclasses.asdict(growth)))
    assert Growth.from_dict(data) == growth
    assert growth.rows[0].time is None and data["rows"][0]["time"] is None  # one size of 64x64 or more
    assert data.keys() == {"growth_from", "rows", "reports"} and len(data["reports"]) == 3


def test_measure__a_model_at_many_sizes_holds_its_weights_once(calls):
    measure(["test_resnet", "test_vit"], dataclasses.replace(SETTINGS, rounds=1, warmup=0), ((32, 32), (64, 64)))
    of = {(candidate.name, settings.size[0]): candidate.model for candidate, settings in calls}
    for name, different in (("test_resnet", set()), ("test_vit", {"pos_embed"})):
        small, large = (dict(of[name, side].named_parameters()) for side in (32, 64))
        apart = {key for key in small if small[key].data_ptr() != large[key].data_ptr()}
        assert apart == different and of[name, 32] is not of[name, 64]
    assert of["test_vit", 32].pos_embed.shape != of["test_vit", 64].pos_embed.shape


def test_measure__a_step_of_progress_is_a_call_at_the_smallest_size(calls):
    steps = []
    measure(["test_resnet"], SETTINGS, SIZES, progress=lambda *step: steps.append(step))
    total = 3 + 1 + (1 + 3 + 9) * (1 + 3 + 1)
    assert {of for _, of, _ in steps} == {total} and (steps[0][0], steps[-1][0]) == (0, total)
    ahead = [after - before for (before, *_), (after, *_) in pairwise(steps)]
    assert ahead == [1] * 4 + [1, 3, 9] + [1, 3, 9] + [3, 9, 1] + [9, 1, 3] + [1, 3, 9]
    assert steps[2][2] == "building test_resnet at 96x96" and steps[-2][2].endswith("(eager) at 96x96")


def test_measure__refuses_before_anything_is_timed(calls):
    words = "nest_tiny cannot be built for 64x96; it is made for 224x224"
    refused(words, measure, ["test_resnet", "nest_tiny"], SETTINGS, ((224, 224), (64, 96)))
    words = r"test_vit failed while being prepared: .* \(65\) should be divisible"
    refused(words, measure, ["test_vit"], SETTINGS, ((64, 64), (64, 65)), error=RuntimeError)
    assert calls == []


def powers(*, growth_from: int = 512) -> Growth:
    reports = [
        report((side, side), [side * side / 1e4 * slow for slow in (0.9, 1, 1.1)], peak_bytes=side * side * 40)
        for side in (256, 512, 1024)
    ]
    return Growth(growth_from, exponents(reports, growth_from), reports)


def test_render__time_memory_and_exponents():
    text = shown(render(powers()))
    cells = next(line for line in text.splitlines() if line.strip().startswith("a ")).split()
    times = ["6.6", "±10%", "2.6", "26.2", "±10%", "10.5", "104.9", "±10%", "41.9"]
    assert cells == ["a", "5.00", *times, "1.00", "1.00", "1.00", "0.00"]
    assert "batch 1 at 256x256, 512x512, 1024x1024, fp32" in text and "from 512x512 up" in text
    row = dataclasses.replace(powers().rows[0], time=Exponent(1.1, 1.02, 1.256))
    assert "1.10 (1.02 to 1.26)" in shown(render(dataclasses.replace(powers(), rows=[row])))
    text = shown(render(powers(growth_from=1000)))
    assert next(line for line in text.splitlines() if line.strip().startswith("a ")).split()[-4:] == ["-"] * 4


def test_plot__exponents_stand_in_the_legend(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    path = tmp_path / "growth.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot(powers(), path)
        drawn = path.read_text()
        assert drawn.count(">a: 1.00<") == 2 and "1024x1024" in drawn
        plot(powers(growth_from=1000), path)
        assert path.read_text().count(">a: -<") == 2
    with pytest.raises(ValueError, match="expected a name ending in png, svg, pdf"):
        plot(powers(), tmp_path / "growth.txt")
    assert list(tmp_path.iterdir()) == [path]


def run(capsys, *argv: str) -> tuple[int, str, str]:
    return cli.main(["bench", *argv]), *capsys.readouterr()


def test_bench__several_sizes(calls, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    image, file = tmp_path / "growth.svg", tmp_path / "growth.json"
    quick = ["--batch", "1", "--rounds", "2", "--warmup", "0", "--growth-from", "32"]
    files = ["--plot", str(image), "--json", str(file)]
    code, out, err = run(capsys, "test_resnet", "--size", "32, 48x64,96", *quick, *files)
    assert (code, err) == (0, "") and "48x64" in out and "1.20" in out and "1.50" in out
    assert "<svg" in image.read_text()
    record = json.loads(file.read_text())
    assert record.pop("command").startswith("broadsight bench test_resnet --size '32, 48x64,96'")
    growth = Growth.from_dict(record)
    assert [found.settings.size for found in growth.reports] == list(SIZES) and growth.growth_from == 32
    assert growth.rows[0].time.value == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("64,12by4", "--size 64,12by4; expected pixels such as 224 or, height first, 224x320; several by commas"),
        ("64,,32", "--size 64,,32; expected pixels"),
        ("64,-32", "--size 64,-32; expected pixels"),
        ("64,0", "size=(0, 0); expected two positive numbers"),
        ("64,64x64", "size 64x64 is given twice; expected different sizes"),
    ],
)
def test_bench__wrong_sizes(size, message, calls, capsys):
    code, out, err = run(capsys, "test_resnet", "--size", size)
    assert (code, out, calls) == (2, "", []) and err.startswith(f"broadsight: {message}") and err.count("\n") == 1
