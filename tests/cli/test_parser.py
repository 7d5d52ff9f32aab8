"""All options of all commands, walked by their declarations: wrong values, and options that would be ignored."""

import json
import os
from typing import get_args

import pytest

from broadsight import options
from broadsight.cli.main import COMMANDS, main
from broadsight.cli.parser import request_of
from fuzz import command_lines

from ..training.small_runs import leave_run


def typed(argv: list[str]) -> tuple[int | None, str, str]:
    """The exit code, and what is printed, of a command line; no work is done."""
    with command_lines.without_work():
        return command_lines.run(argv)


# 29 is no factor of the number of values, so that all of these come
@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_values__one_line_and_exit_2(command, step):
    for argv in list(command_lines.lines(command))[::step]:
        code, out, err = typed(argv)
        command_lines.judge(argv, code, err)
        offline = code == 1 and "weights of hf-hub:a/b cannot be had" in err  # whether there is such a model is unknown
        assert offline or code in (None, 0, 2), (argv, code, err)  # nothing else that is typed fails while working
        assert code != 2 or out == "", (argv, out)


@pytest.mark.parametrize(
    "text",
    [b"", b"\xff\xfe\x00", b"a: [", b"[1,2]", b"epochs: -1", b"nope: 1", b"a: &a [*a]", b"set: 5", b"seed: 1e309"],
)
def test_config__one_line(text, tmp_path):
    (tmp_path / "run.yaml").write_bytes(text)
    code, out, err = typed(["train", "--config", str(tmp_path / "run.yaml")])
    command_lines.judge(["train"], code, err)
    assert (code, out) == (2, "")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_config__that_would_be_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for given in (["--config", str(tmp_path / "pipe")], [f"--config={tmp_path / 'pipe'}"]):
        code, _, err = typed(["train", *given])
        assert code == 2 and "is a pipe, not a file; expected a YAML file" in err


# ---- options that would be ignored


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, str]:
    """Folders of a classifier, a detector, a segmenter and a pose model; nobody opens their weights."""
    folder = tmp_path_factory.mktemp("runs")
    found = {"classify": str(leave_run(folder / "classify")[0])}
    for task, head in (("detect", "retinanet"), ("segment", "upernet"), ("keypoints", "simple_baseline")):
        (folder / task).mkdir()
        settings = dict(head=head, data="scenes", model="test_resnet", pool=None, broadcast=None, seed=0)
        about = {"broadsight": {"task": task, "settings": settings}}
        (folder / task / "config.json").write_text(json.dumps(about))
        found[task] = str(folder / task)
    return found


def given(command: str, name: str) -> list[str]:
    """An option with a value that it can have."""
    one = request_of(COMMANDS[command]).settings()[name]
    if one.kind is bool:
        return [one.flag if not one.default else one.flag.replace("--", "--no-", 1)]
    if one.pairs:
        return [one.flag, "depth=2"]
    numbers = int in (one.kind, *get_args(one.kind)) or float in (one.kind, *get_args(one.kind))
    return [one.flag, "1" if numbers else "val" if name == "part" else "0.5"]


FOR = {  # what holds of a run of each task, by what options are for
    "classify": {"classifiers", "DATA that is named"},
    "detect": {options.DENSE_RUNS, options.WHOLE_IMAGES, options.SCORED},
    "segment": {options.DENSE_RUNS, options.WHOLE_IMAGES, options.SEGMENTERS},
    "keypoints": {options.DENSE_RUNS},
}


@pytest.mark.parametrize("task", FOR)
@pytest.mark.parametrize("command", ["eval", "predict"])
def test_option__counts_or_is_refused(command, task, runs):
    refused, names = set(), {one.name: one for one in request_of(COMMANDS[command]).settings().values() if one.how.of}
    for name, one in names.items():
        code, out, err = typed([command, runs[task], *given(command, name)])
        if err.startswith(f"broadsight: {one.flag} is for "):
            assert (code, out) == (2, "") and err.endswith("; leave it out\n")
            refused.add(name)
    assert refused == {name for name, one in names.items() if not FOR[task] & set(one.how.of)}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("eval test_vit DATA --epsilons 1", "--epsilons is for --suite fgsm; which is not given"),
        ("eval test_vit DATA --suite fgsm --severities 1", "--severities is for --suite corruptions"),
        ("eval test_vit DATA --suite salient --dino-checkpoint x", "--dino-checkpoint is for --saliency dino"),
        ("eval detect --part train", "--part is for DATA that is named"),
        ("eval classify --no-pretrained", "--pretrained is for timm names"),
        ("eval test_vit --pretrained --checkpoint x.pth", "--pretrained together with --checkpoint"),
        ("predict classify a.png --threshold 0.5", "--threshold is for runs that score what they find"),
        ("predict segment a.png --threshold 0.5", "--threshold is for runs that score what they find"),
        ("predict keypoints a.png --scales 1,2", "--scales is for dense runs that look at whole images"),
        ("predict detect a.png --slide", "--slide is for runs of --task segment"),
        ("predict detect a.png --top 5", "--top is for classifiers"),
        ("export test_vit --max-drop 1", "--max-drop is for --int8; which is not given"),
        ("export test_vit --calibration-images 128", "--calibration-images is for --int8"),
        ("export detect --int8", "--int8 is for classifiers; this run is of --task detect"),
        ("export test_vit --ort-web x", "--ort-web is for --format web; this is --format onnx"),
        ("export classify --no-pretrained", "--pretrained is for timm names"),
        ("bench test_vit --artefacts x", "--artefacts is for exported runtimes"),
        ("bench test_vit --no-start-up", "--start-up is for exported runtimes"),
        ("bench test_vit --growth-from 512", "--growth-from is for several sizes"),
        ("bench test_vit@32 --size 64", "--size is for models that bring no size of their own"),
        ("bench test_resnet --pool map --head-only --broadcast cb", "--broadcast is for whole models"),
        ("explain test_vit --kinds attention --class 3 --no-pretrained", "--class is for the kind gradcam"),
        ("explain classify --no-pretrained", "--pretrained is for timm names"),
        ("analyze list --samples 3", "--samples: analyze list shows all measures alone"),
        ("analyze front classify --samples 3", "--samples is for models that are shown images"),
        ("gallery classify --no-pretrained", "--pretrained is for timm names"),
        ("app classify --no-pretrained", "--pretrained is for timm names"),
        ("train scenes:8 --set mixup_prob=0.5", "mixup_prob=0.5 is for mixup or cutmix above 0"),
        ("train scenes:8 --out", "expected one argument"),
        ("predict classify a.png --csv=", "--csv is empty; expected print CSV"),
        ("train --data x", "DATA comes without --"),
    ],
)
def test_option__that_would_be_ignored(line, words, runs, tmp_path):
    argv = [runs.get(word, str(tmp_path) if word == "DATA" else word) for word in line.split()]
    code, out, err = typed(argv)
    assert (code, out) == (2, "") and err.startswith("broadsight: ") and words in err and err.count("\n") == 1


def test_option__that_is_set_to_what_it_is_anyway_in_a_file(tmp_path, capsys):
    assert main(["bench", "test_vit", "--print_config"]) == 0
    (tmp_path / "bench.yaml").write_text(capsys.readouterr().out)
    assert typed(["bench", "--config", str(tmp_path / "bench.yaml")])[0] is None


def test_twin__is_refused_before_the_first_is_trained(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("broadsight.training.run.prepare", lambda *_: pytest.fail("begun"))
    for twin in ("gap --task detect", "none", "map --pool map"):
        assert main(["train", "scenes:8", "--model", "test_resnet", "--twin", *twin.split()]) == 2
        assert "twin" in (err := capsys.readouterr().err) or "unknown pool 'none'" in err
