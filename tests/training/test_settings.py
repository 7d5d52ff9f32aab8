"""Arguments that the data or other options decide are refused before anything is written, wherever they are given."""

import pytest
import torch

from broadsight.cli.main import main
from broadsight.training.parts import check_passes, opening
from broadsight.training.recipes import find
from broadsight.training.run import train

from .dense_runs import ask_dense
from .runs import small

POOL = dict(pool="map", pool_args=dict(groups=2, tokens=1, dim=24))
CLASSIFIERS = {
    "--model-args num_classes=7; leave it out: the classes of DATA": dict(model_args=dict(num_classes=7)),
    "--model-args checkpoint_path=x; leave it out: --init": dict(model_args=dict(checkpoint_path="x")),
    "--model-args pretrained=True; leave it out: --pretrained": dict(model_args=dict(pretrained=True)),
    "--model-args features_only=True;": dict(model_args=dict(features_only=True)),
    "--model-args pretrained_cfg=": dict(model_args=dict(pretrained_cfg=dict(num_classes=7))),
    "--model-args in_chans=4; images have": dict(model_args=dict(in_chans=4)),
    "--model-args in_chans=True; images have": dict(model_args=dict(in_chans=True)),
    "--pool-args num_classes=7;": dict(pool="map", pool_args=dict(POOL["pool_args"], num_classes=7)),
    "--pool-args num_classes=8;": dict(pool="map", pool_args=dict(pool_options=dict(num_classes=8))),
    "--pool-args light=True; leave it out: a light": dict(pool="map", pool_args=dict(light=True)),
    "--broadcast-args num_classes: there is no such argument": dict(broadcast="cb", broadcast_args=dict(num_classes=7)),
    "--set drop_path=0.5 and --model-args drop_path_rate=0.1 are the same": dict(
        changes=dict(drop_path=0.5), model_args=dict(drop_path_rate=0.1)
    ),
    # What no table names
    "--model-args gives the model 'scriptable', which a stored": dict(model_args=dict(scriptable=True)),
    "the model does not take images of 32 pixels: .*; see --size": dict(
        model_args=dict(img_size=64, dynamic_img_size=False)
    ),
}


@pytest.mark.parametrize("message", CLASSIFIERS)
def test_classifier__refused_and_nothing_left(message, images, tmp_path):
    with pytest.raises(ValueError, match=f"^{message}") as refused:
        train(small(images, tmp_path / "run", **CLASSIFIERS[message]))
    assert not (tmp_path / "run").exists() and "\n" not in str(refused.value)


def test_dense__refused_and_nothing_left(tmp_path):
    for place, given, reason in (
        ("model_args", dict(num_classes=7), "the classes of DATA"),
        ("model_args", dict(in_chans=2), "images have 1 channel"),
        ("head_args", dict(num_classes=7), "the classes of DATA"),
        ("head_args", dict(image_size=[32, 32]), "--size decides it"),
        ("head_args", dict(num_keypoints=3), "the keypoints of DATA"),
        ("head_args", dict(backbone="resnet18"), "--model, --head and --neck"),
        ("neck_args", dict(num_classes=7), "the classes of DATA"),
    ):
        for head in ("retinanet", "mask_rcnn", "semantic_fpn", "simple_baseline"):
            with pytest.raises(ValueError, match=f"^--{place.replace('_', '-')} {next(iter(given))}=.*{reason}"):
                train(ask_dense(head, tmp_path / "run", neck="map", **{place: given}))
    assert not (tmp_path / "run").exists()


def test_command_config_and_recipe(images, tmp_path, capsys, monkeypatch):
    common = ["train", str(images), "--model", "test_vit", "--size", "32", "--out", str(tmp_path / "run")]
    (tmp_path / "options.yaml").write_text("model_args: [num_classes=7]\n")
    for options in (["--model-args", "num_classes=7"], ["--config", str(tmp_path / "options.yaml")]):
        assert main([*common, *options]) == 2
        said = capsys.readouterr().err
        assert said == "broadsight: --model-args num_classes=7; leave it out: the classes of DATA decide it\n"
    assert not (tmp_path / "run").exists()
    entry = find("scenes")
    monkeypatch.setattr("broadsight.training.recipes.find", lambda name: entry)
    monkeypatch.setitem(entry.model_args, "num_classes", 7)
    with pytest.raises(ValueError, match="--model-args num_classes=7"):
        train(small(images, tmp_path / "run", model=None, recipe="scenes"))


def test_checks__leave_the_model_as_it_was():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.BatchNorm1d(12), torch.nn.Linear(12, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    check_passes(model, torch.zeros(1, 3, 2, 2), 4, 2)
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match=r"answers \(1, 4\), expected \(1, 5\)"):
        check_passes(model, torch.zeros(1, 3, 2, 2), 5, 2)
    config = dict(architecture="test_resnet", num_classes=4, model_args={}, pretrained_cfg={})
    with pytest.raises(ValueError, match=r"could not be opened again: 1.bias would be another"):
        opening(config, model)
