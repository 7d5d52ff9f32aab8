"""Folders that strangers wrote: nothing is fetched, nothing is read elsewhere, what is wrong is said in one line."""

import json
import os
import re
import shutil
import socket

import pytest
import timm
import torch

from broadsight.cli.main import main
from broadsight.models import from_run as _stored
from broadsight.runs.classifier import open_classifier
from broadsight.runs.dense_model import open_dense
from broadsight.weights.loading import load_teacher
from fuzz import run_folders
from fuzz.watching import CANARY, Violation, refused
from tests.refusals import refused as refused_call

from ..training.small_runs import fill, leave_run, refusal

NAMES = ("hf-hub:stranger/model", "hf_hub:stranger/model", "local-dir:x", "https://example.org/x", "../x", "no such")

REFUSED = r"names the model|expected a name, not a place"


@pytest.fixture
def offline(monkeypatch):
    """Everything that would go to the internet, by name; nothing gets there."""
    asked = []

    def ask(*arguments, **_):
        if "127.0.0.1" not in str(arguments):  # where `app` looks for a free port
            asked.append(arguments[:2])
        raise OSError("offline in this test")

    monkeypatch.setattr(socket.socket, "connect", ask)
    monkeypatch.setattr(socket, "getaddrinfo", ask)
    for place in ("timm.models._hub.hf_hub_download", "timm.models._helpers.torch.load"):
        monkeypatch.setattr(place, ask)
    return asked


def hostile(folder, config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    kind = {"dense_model": "dense", "edited": "edited"}.get(config["architecture"], "plain")
    (folder / "model.safetensors").write_bytes(run_folders._weights(kind))
    return folder


def refusal_to_open(folder, dense: bool = False) -> str:
    return refusal(lambda: (open_dense if dense else open_classifier)(folder, device="cpu"))


def changed(config, *path, value):
    return run_folders._with(config, path, value)


def test_sound_folders__are_opened(tmp_path):
    images = torch.zeros(1, 3, 32, 32)
    for name in ("PLAIN", "EDITED"):
        folder = hostile(tmp_path / name, getattr(run_folders, name))
        ours = open_classifier(folder, device="cpu").model
        timms = timm.create_model(f"local-dir:{folder}", pretrained=True)
        for other in (timms.eval(), load_teacher(folder).eval()):
            assert torch.equal(ours(images), other(images))
        assert ours.pretrained_cfg["mean"] == (0.5,) * 3
    dense = open_dense(hostile(tmp_path / "dense", run_folders.DENSE), device="cpu")
    assert dense.classes == ("a", "b") and dense.model.pretrained_cfg["input_size"] == (3, 32, 32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["PLAIN", "EDITED", "DENSE"])
def test_names__only_registered_ones(tmp_path, offline, kind, name):
    place = ("architecture",) if kind == "PLAIN" else ("model_args", "backbone")
    folder = hostile(tmp_path / "run", changed(getattr(run_folders, kind), *place, value=name))
    said = refusal_to_open(folder, kind == "DENSE")
    assert re.search(REFUSED, said) and "config.json" in said and "\n" not in said
    if kind != "PLAIN":  # as timm reads the folder
        refused_call(REFUSED, timm.create_model, f"local-dir:{folder}")
    assert not offline


@pytest.mark.parametrize(
    "key", ["checkpoint_path", "cache_dir", "pretrained_cfg_overlay", "pretrained", "features_only"]
)
def test_arguments__none_that_load_anything(tmp_path, offline, key):
    value = {"file": str(tmp_path / "x.pth")} if "cfg" in key else str(tmp_path / "x.pth")
    torch.save({}, tmp_path / "x.pth")
    places = {"PLAIN": [()], "EDITED": [(), ("pool_args",)], "DENSE": [("backbone_args",), ("head_args",)]}
    for number, (kind, path) in enumerate((kind, path) for kind, paths in places.items() for path in paths):
        config = changed(getattr(run_folders, kind), "model_args", *path, key, value=value)
        assert key in refusal_to_open(hostile(tmp_path / str(number), config), kind == "DENSE")
    assert not offline


def test_sources_of_weights__are_left_out(tmp_path, offline):
    said = dict(url="https://example.org/x", file="/etc/passwd", source="hf-hub", custom_load=True)
    said |= dict(hf_hub_id="stranger/model")
    config = run_folders.PLAIN | dict(pretrained_cfg=run_folders.CFG | said)
    model = open_classifier(hostile(tmp_path / "run", config), device="cpu").model
    assert not {"url", "file", "hf_hub_id", "source"} & model.pretrained_cfg.keys() and not offline


def test_size__a_model_that_is_not_of_its_weights(tmp_path):
    sizes = {
        "its weights have": changed(run_folders.PLAIN, "model_args", "channels", value=[4096] * 4),
        "256 at most": changed(run_folders.PLAIN, "model_args", "layers", value=[10**6] * 4),
        "whole number from 0 to 1,000,000": run_folders.PLAIN | dict(num_classes=10**12),
    }
    for number, (words, config) in enumerate(sizes.items()):
        assert words in refusal_to_open(hostile(tmp_path / str(number), config))
    (tmp_path / "0" / "config.json").open("wb").truncate(2**30)  # a file with a hole
    assert "has 1,073,741,824 bytes" in refusal_to_open(tmp_path / "0")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs on this system")
def test_files__of_the_folder_itself(tmp_path):
    folder, _ = leave_run(tmp_path / "run")
    for name in ("config.json", "model.safetensors"):
        copy = shutil.copytree(folder, tmp_path / f"link-{name}")
        (copy / name).rename(tmp_path / name)
        (copy / name).symlink_to(tmp_path / name)
        assert "outside of its folder" in refusal(lambda copy=copy: open_classifier(copy))
        (copy / name).unlink()
        os.mkfifo(copy / name)
        assert "\n" not in refusal(lambda copy=copy: open_classifier(copy), FileNotFoundError)
    (folder / "best.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("best.safetensors")  # a neighbour
    open_classifier(folder, device="cpu")


def test_commands__fetch_nothing(tmp_path, offline, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = str(fill(tmp_path / "data", a=2, b=2))
    image = str(next((tmp_path / "data" / "a").iterdir()))
    plain, edited, stranger = run_folders.PLAIN, run_folders.EDITED, "hf-hub:stranger/model"
    configs = [
        plain | dict(architecture=stranger),
        changed(edited, "model_args", "backbone", value=stranger),
        changed(edited, "model_args", "checkpoint_path", value="https://example.org/x.pth"),
        changed(run_folders.DENSE, "model_args", "backbone", value=stranger),
        changed(plain, "broadsight", "settings", "data", value="hfds/stranger/data"),
        changed(plain, "broadsight", "settings", "model", value=stranger),
        changed(plain, "broadsight", "settings", value=[]),
        changed(plain, "broadsight", "recipe", value={"teacher": stranger, "distill": "soft"}),
    ]
    for number, config in enumerate(configs):
        run = str(hostile(tmp_path / f"run{number}", config))
        commands = [["train", "--resume", "--out", run, "--device", "cpu"]]
        if number < 7:  # a teacher is for training alone
            commands += [["eval", run], ["report", run]]
        if number < 4:  # what the model itself is
            commands += [["predict", run, image], ["export", run, "--format", "pt2", "--out", "x.pt2"]]
            commands += [["explain", run, image], ["analyze", run, "--measure", "spectrum"], ["app", run]]
            teacher = ["distill=soft", f"teacher={run}"]
            commands += [["train", data, "--model", "test_resnet", "--set", *teacher, "--out", f"t{number}"]]
        for command in commands:
            code = main(command)
            said = capsys.readouterr().err.strip()
            assert code in (1, 2) and said.count("\n") == 0 and "Traceback" not in said, (command, code, said)
            assert not offline, (command, offline)


def test_harness__hears_what_must_not_happen(tmp_path):
    (tmp_path / CANARY).write_text("")
    for call in (lambda: (tmp_path / CANARY).read_text(), lambda: os.system("true"), lambda: {}["x"]):
        with pytest.raises(Violation):
            refused(call)
    assert refused(lambda: int("x")) and refused(lambda: 1) is None


def test_known_arguments__of_every_family():
    families = {timm.models.model_entrypoint(name).__module__: name for name in timm.list_models()}
    for name in families.values():
        known = _stored._known(name)
        assert {"num_classes", "in_chans", "drop_rate"} <= known and not known & _stored.SOURCES, name
