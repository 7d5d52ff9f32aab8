"""The command line: what it prints, where, and with which exit code."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from broadsight import __version__
from broadsight.benchmark import run as benchmark
from broadsight.benchmark.bench import settings_of
from broadsight.benchmark.request import Request
from broadsight.cli.main import COMMANDS, main
from broadsight.cli.parser import description, request_of
from broadsight.inspection.precision import DTYPES
from broadsight.layers.context_broadcast import KINDS
from broadsight.papers import verify as verification
from broadsight.surgery.pooling import POOLS

QUICK = ["--batch", "2", "--size", "32", "--rounds", "1", "--warmup", "0"]


@pytest.fixture
def run(capsys, monkeypatch):
    """Run a command in this process: (exit code, stdout, stderr)."""
    monkeypatch.setattr(benchmark, "GEMM_SIZES", (64,))

    def call(*argv: str) -> tuple[int, str, str]:
        code = main([*argv])
        return code, *capsys.readouterr()

    return call


def shell(*argv: str, **options) -> subprocess.CompletedProcess:
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120) | options
    return subprocess.run([sys.executable, "-m", "broadsight", *argv], **options)


def never(*arguments, **options):
    raise AssertionError("this must not run")


# ---- help, version, wrong usage


@pytest.mark.parametrize("argv", [["--help"], ["bench", "--help"], ["bench", "x", "--batch", "many"]])
def test_help_and_mistakes__need_neither_torch_nor_timm(argv):
    done = shell(*argv, env=os.environ | {"PYTHONPROFILEIMPORTTIME": "1"})
    modules = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "jsonargparse" in modules and not {"torch", "timm", "matplotlib"} & modules


@pytest.mark.parametrize("command", COMMANDS)
def test_help__describes_command_and_options(command, run):
    code, out, err = run(command, "--help")
    assert (code, err) == (0, "") and f"usage: broadsight {command}" in out
    words = " ".join(out.split())
    kind = request_of(COMMANDS[command])
    assert description(kind) in words and "<function" not in words
    for one in kind.settings().values():
        assert one.how.help in words
        assert one.how.positional or one.flag in out
    assert description(kind) in " ".join(run("--help")[1].split())


def test_no_arguments_and_version(run):
    code, out, err = run()
    assert (code, out) == (2, "") and err.startswith("usage: broadsight")
    done = shell("--version")
    assert run("--version") == (done.returncode, done.stdout, done.stderr) == (0, f"broadsight {__version__}\n", "")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("benhc", "unknown command 'benhc'; did you mean 'bench'? expected one of models, verify, bench"),
        ("xyzzy", "unknown command 'xyzzy'; expected one of models, verify, bench"),
        ("--nonsense", "unrecognized arguments: --nonsense; see `broadsight --help`"),
        ("bench", "bench needs MODEL: timm models"),
        (
            "bench x --bacth 4",
            "unrecognized arguments: --bacth 4 (did you mean --batch?); see `broadsight bench",
        ),
        ("bench x --batch many", "--batch: expected a whole number, got many; see `broadsight bench --help`"),
        ("bench x --batch", "argument --batch: expected one argument"),
        ("bench x --precision int3", "--precision: expected some of 'auto', 'fp32', 'bf16', 'fp16', joined by"),
        ("bench x --size 12by4", "--size 12by4; expected pixels such as 224 or, height first, 224x320"),
        ("bench x --config missing.yaml", "--config missing.yaml: there is no such file; expected a YAML file"),
        ("bench x --json no/such/folder.json", "cannot write 'no/such/folder.json': there is no folder"),
        ("bench x --plot .", "cannot write '.': it is a folder"),
        ("bench x --plot x.jpg", "cannot plot to 'x.jpg'; expected a name ending in png, svg, pdf"),
        ("bench x --batch 0", "--batch 0; expected 1 or more"),
        ("bench x --runtime eager,magic", "unknown runtime 'magic'; expected one of eager, compile"),
        ("bench x --pool gap,mapp", "unknown pool 'mapp'; did you mean 'map'? expected one of map, map-light, ga, cap"),
        ("bench x --against y.py", "against a file without head_only; only pools are compared so"),
        ("bench map_resnet50 --head-only --against y.py", "y.py is not a file; expected a Python file that defines"),
        ("bench test_resnet --head-only", "test_resnet has no pool of ours to run alone; choose one (--pool map)"),
        ("bench map_mobilenetv1 --pool map", "map_mobilenetv1 has its own pool; name a plain backbone beside pools"),
        ("bench x --pool map-light --train", "a light pool with train=True"),
        ("bench test_resne", "unknown model 'test_resne'; nearest: test_resnet"),
        ("models --all", "--all without a PATTERN; expected one"),
        ("models stvit_smal", "no model matches 'stvit_smal'; nearest: stvit_small"),
        ("verify stvit --all", "--all together with stvit; expected one of the two"),
        ("convert", "convert needs SOURCE: checkpoint"),
        ("convert x.pth", "convert needs TARGET: safetensors file"),
        ("convert x.pth y.safetensors --overwite", "unrecognized arguments: --overwite (did you mean --overwrite?)"),
        ("convert x.pth y.safetensors", "x.pth is not a file; give the path of a released checkpoint"),
        ("convert x.pth y.pth", "cannot convert to y.pth; expected a name ending in .safetensors"),
        ("convert x.pth no/y.safetensors", "cannot write 'no/y.safetensors': there is no folder"),
    ],
)
def test_wrong_usage__one_line_and_exit_2(argv, expected, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*argv.split())
    assert (code, out) == (2, "")
    assert err.startswith(f"broadsight: {expected}") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


# ---- what can go wrong while working


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (RuntimeError("it\nbroke"), 1, "broadsight: it broke; --debug shows where\n"),
        (AssertionError(), 1, "broadsight: AssertionError; --debug shows where\n"),
        (ValueError("size is odd"), 2, "broadsight: size is odd\n"),
        (FileNotFoundError("no such folder"), 2, "broadsight: no such folder\n"),
        (KeyboardInterrupt(), 130, "broadsight: interrupted\n"),
    ],
)
def test_errors__one_line_and_their_exit_code(error, code, line, run, monkeypatch):
    def fails(*arguments) -> None:
        raise error

    monkeypatch.setattr(benchmark, "measure", fails)
    assert run("bench", "test_resnet") == (code, "", line)
    got, out, err = run("bench", "test_resnet", "--debug")
    assert (got, out) == (code, "") and err.startswith("Traceback") and "in fails" in err


@pytest.mark.parametrize(
    "argv", [["bench", "x", "--print_config"], pytest.param(["models", "mat_1"], marks=pytest.mark.slow)]
)
def test_broken_pipe__exits_quietly(argv):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        done = shell(*argv, stdout=closed)
    assert (done.returncode, done.stderr) == (0, "")


# ---- models


def test_models__lists_ours_and_with_all_those_of_timm(run):
    code, out, err = run("models", "[mp]*[t_]?[10]")
    assert (code, err) == (0, "") and all(name in out for name in ("mat_1", "partialformer_b0"))
    assert "stvit" not in out and "…" not in out
    code, out, err = run("models", "stvit_small", "--json")
    (row,) = json.loads(out)
    assert (code, err, row["model"], row["family"]) == (0, "", "stvit_small", "stvit")
    code, out, _ = run("models", "test_resnet", "--all", "--json")
    (other,) = json.loads(out)
    assert code == 0 and (other["model"], other["source"], other["paper_top1"]) == ("test_resnet", "timm", None)
    assert other["params"] > 1e5 and other["macs"] > 1e6
    keys = {"model", "family", "params", "macs", "paper_params_m", "paper_macs_g", "paper_top1", "source"}
    assert keys <= row.keys() and keys <= other.keys()
    code, _, err = run("models", "test_resnet")
    assert code == 2 and err.startswith("broadsight: no model matches 'test_resnet'") and "--all searches timm" in err


# ---- verify


def test_verify__table_summary_and_unknown_families(run):
    code, out, err = run("verify", "stvit")
    assert (code, err) == (0, "") and "stvit_small" in out and out.splitlines()[-1].endswith(" 0 miss")
    code, out, err = run("verify", "resnext")
    assert (code, out) == (2, "") and err.startswith("broadsight: ") and err.count("\n") == 1
    assert all(family in err for family in ("resnext", "stvit", "emsnet", "mat", "partialformer"))


def test_verify__json_is_every_check_and_only_a_miss_fails(run, monkeypatch):
    first, *rest = verification.verify(["partialformer"])
    for status, expected in (("match", 0), ("explained", 0), ("miss", 1)):
        checks = [dataclasses.replace(first, status=status), *rest]
        monkeypatch.setattr(verification, "verify", lambda families, _, checks=checks: never() if families else checks)
        code, out, _ = run("verify")
        assert code == expected and out.splitlines()[-1].endswith(f" {expected} miss")
        every = json.loads(json.dumps([dataclasses.asdict(check) for check in checks]))
        for option in ([], ["--all"]):
            code, out, err = run("verify", "--json", *option)
            assert (code, err, json.loads(out)) == (expected, "", every)


# ---- bench


def test_bench__defaults_are_those_of_the_settings_and_it_shows_a_table_and_files(run, tmp_path):
    assert settings_of(Request(["x"])) == benchmark.Settings()
    out = run("bench", "--help")[1]
    assert all(name in out for name in (*benchmark.RUNTIMES, *DTYPES, *POOLS, *KINDS))
    pytest.importorskip("matplotlib")
    json_file, plot_file = tmp_path / "out.json", tmp_path / "out.svg"
    files = "--json", str(json_file), "--plot", str(plot_file)
    code, out, err = run("bench", "test_resnet", "test_vit", *QUICK, *files)
    assert (code, err) == (0, "")
    assert all(word in out for word in ("test_resnet", "test_vit", "batch 2 at 32x32")) and "…" not in out
    assert [row["model"] for row in json.loads(json_file.read_text())["rows"]] == ["test_resnet", "test_vit"]
    assert "<svg" in plot_file.read_text() and sorted(tmp_path.iterdir()) == [json_file, plot_file]


def test_bench__pools_alone_against_a_loop_over_the_groups_and_json_alone(run):
    rival = str(Path(__file__).parents[2] / "benchmarks" / "per_group_map.py")
    code, out, err = run("bench", "test_resnet", "--pool", "ga, map", "--head-only", "--against", rival, *QUICK)
    assert (code, err) == (0, "") and "speed-up" in out
    assert "pools alone, inference" in out and "test_resnet + map, per_group_map" in out
    code, out, err = run("bench", "test_resnet", *QUICK, "--train", "--json")
    record = json.loads(out)
    assert (code, err) == (0, "")
    assert record.pop("command") == " ".join(["broadsight bench test_resnet", *QUICK, "--train --json"])
    report = benchmark.Report.from_dict(record)
    assert report.settings == benchmark.Settings(batch=2, size=(32, 32), rounds=1, warmup=0, train=True)
    assert [row.model for row in report.rows] == ["test_resnet"]


def test_bench__outputs_are_checked_before_the_work(run, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "measure", never)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = run("bench", "test_resnet", "--plot", str(tmp_path / "x.png"))
    assert (code, err) == (2, 'broadsight: plotting needs matplotlib; run: pip install "broadsight[plot]"\n')
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # permissions do not stop root, who may run the tests
    code, _, err = run("bench", "test_resnet", "--json", "x.json")
    assert code == 2 and "cannot write 'x.json': permission denied" in err


def test_bench__config_file_and_command_line(run, tmp_path, monkeypatch):
    code, out, _ = run("bench", "test_resnet", "--channels-last", "--size", "64x96", "--print_config")
    config = yaml.safe_load(out)
    assert code == 0 and config["channels_last"] is True and config["size"] == "64x96"
    file = tmp_path / "bench.yaml"
    file.write_text(yaml.safe_dump(config | {"runtime": "eager, compile", "threads": 2}))
    asked = []

    def record(models, settings, progress) -> None:
        asked.append((models, settings))
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "measure", record)
    run("bench", "--config", str(file))
    run("bench", "--config", str(file), "test_vit", "--no-channels-last", "--threads", "1")
    settings = benchmark.Settings(size=(64, 96), channels_last=True, runtimes=("eager", "compile"), threads=2)
    assert asked[0] == (["test_resnet"], settings)
    assert asked[1] == (["test_vit"], dataclasses.replace(settings, channels_last=False, threads=1))
    file.write_text("batchy: 4\n")
    code, _, err = run("bench", "x", "--config", str(file))
    assert code == 2 and "'batchy'" in err and "did you mean --batch?" in err and err.count("\n") == 1


# ---- convert


def test_convert__says_what_it_wrote_and_overwrites_if_asked(run, tmp_path):
    checkpoint, target = tmp_path / "model.pth.tar", tmp_path / "model.safetensors"
    content = dict(state_dict={"a.weight": torch.ones(2, 3), "a.bias": torch.ones(2)}, epoch=3, optimizer=[])
    torch.save(content, checkpoint)
    code, out, err = run("convert", str(checkpoint), str(target))
    assert (code, err) == (0, "")
    assert out == f"{target}: 2 tensors, {target.stat().st_size:,} bytes; left out: optimizer\n"
    assert load_file(target).keys() == {"a.weight", "a.bias"}
    code, out, err = run("convert", str(checkpoint), str(target))
    assert (code, out) == (2, "")
    assert err == f"broadsight: {target} exists; choose another name or give --overwrite\n"
    target.write_text("an old one")
    assert run("convert", str(checkpoint), str(target))[0] == 2 and target.read_text() == "an old one"
    assert run("convert", str(checkpoint), str(target), "--overwrite")[0] == 0
    assert load_file(target).keys() == {"a.weight", "a.bias"}
    target.unlink()
    checkpoint.write_bytes(b"no weights at all")
    code, out, err = run("convert", str(checkpoint), str(target))
    assert (code, out) == (1, "") and err.count("\n") == 1
    assert err.startswith(f"broadsight: {checkpoint} cannot be loaded as a file of tensors only (")
    assert list(checkpoint.parent.iterdir()) == [checkpoint]
