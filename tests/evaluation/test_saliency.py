"""Saliency: Grad-CAM and attention against slow computations by hand, and the scenes' own parts."""

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from broadsight.data.loading import Batch, Transforms
from broadsight.data.normalising import Normalise
from broadsight.data.scenes import Scenes, draw_scene
from broadsight.data.view import Grey, View
from broadsight.evaluation.saliency import Dino, GradCam, SceneSaliency, from_name
from broadsight.runs.classifier import Classifier
from broadsight.surgery.pooling import swap_pool

from ..refusals import refused


def classifier_of(model, size=32):
    transforms = Transforms(size, crop_pct=1.0)
    return Classifier("it", "it", model, transforms, None, Normalise(transforms.mean, transforms.std), {})


def batch_of(images, indices=None):
    keys = tuple((0, i, i) for i in (range(len(images)) if indices is None else indices))
    return Batch(images, torch.zeros(len(images), dtype=torch.int64), keys, ())


def cam_by_hand(model, module, images, as_map, classes=None):
    """One image at a time, one channel at a time, with the gradient of the whole model."""
    kept = []
    handle = module.register_forward_hook(lambda module, inputs, output: kept.append(output) or output.retain_grad())
    maps = []
    for image in images:
        image = image[None].clone().requires_grad_()
        logits = model(image)[0]
        best = int(logits.argmax()) if classes is None else max(classes, key=lambda one: logits[one].item())
        logits[best].backward()
        activation, gradient = as_map(kept[-1])[0], as_map(kept[-1].grad)[0]  # C h w
        maps.append(sum(g.mean() * a for g, a in zip(gradient, activation, strict=True)).clamp(min=0).detach())
    handle.remove()
    model.zero_grad()
    return F.interpolate(torch.stack(maps)[:, None], images.shape[-2:], mode="bilinear", align_corners=False)[:, 0]


def close_to(found, expected):
    assert expected.amax((1, 2)).min() > 0
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * float(expected.max()))


class Plain(nn.Module):
    """Says nothing of its maps."""

    num_classes = 4

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 3, 2, 1), nn.Conv2d(6, 8, 3, 2, 1)
        self.act, self.fc = nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.act(self.last(self.act(self.first(x)))).mean((2, 3)))


def made(name):
    torch.manual_seed(3)
    if name == "plain":
        model: nn.Module = Plain()
    elif name in ("map", "gap"):
        options = dict(groups=2, tokens=1, dim=24, heads=4) if name == "map" else {}
        model = swap_pool("test_resnet", name, **options, num_classes=10)
    else:
        model = timm.create_model(name, num_classes=10)
    path, size, as_map = {
        "plain": ("act", (32, 32), lambda x: x),
        "map": ("head.merge", (64, 64), lambda x: x),  # of several levels, merged
        "gap": ("backbone.layer4", (64, 64), lambda x: x),
        "test_resnet": ("layer4", (64, 64), lambda x: x),
        # the class token answers: the last block's other tokens are of no use to it
        "test_vit": ("blocks.4", (48, 80), lambda x: x[:, 1:].mT.unflatten(2, (3, 5))),
        # an average answers; a register comes before the patches
        "test_vit2": ("blocks.7", (48, 80), lambda x: x[:, 1:].mT.unflatten(2, (3, 5))),
        "test_mambaout": ("stages", (64, 64), lambda x: x.permute(0, 3, 1, 2)),
    }[name]
    return model.eval(), model.get_submodule(path), size, as_map


@pytest.mark.parametrize("name", ["plain", "test_resnet", "test_vit", "test_vit2", "test_mambaout", "map", "gap"])
def test_gradcam__by_hand(name):
    model, place, size, as_map = made(name)
    images = torch.randn(3, 3, *size)
    expected = cam_by_hand(model, place, images, as_map)
    saliency = GradCam(classifier_of(model))
    with torch.no_grad():
        found = saliency(images, batch_of(images))
        assert found.shape == (3, *size) and not found.requires_grad
        assert close_to(found, expected)
        model.requires_grad_(False)  # as classifiers are opened
        assert torch.allclose(saliency(images[1:], batch_of(images[1:])), found[1:], atol=1e-4)
    assert all(parameter.grad is None for parameter in model.parameters()) and not model.training


def test_gradcam__of_the_classes_that_compete_and_of_small_images_an_earlier_map():
    model, place, size, as_map = made("test_resnet")
    images, kept = torch.randn(3, 3, *size), [2, 7]
    found = GradCam(classifier_of(model), np.array(kept))(images)
    assert close_to(found, cam_by_hand(model, place, images, as_map, kept))
    saliency = GradCam(classifier_of(model))
    for size, place in ((32, model.layer3), (64, model.layer4)):
        images = torch.randn(2, 3, size, size)
        assert close_to(saliency(images, batch_of(images)), cam_by_hand(model, place, images, as_map))


def test_gradcam__of_a_map_that_is_overwritten_or_none():
    class Doubles(Plain):
        in_place = True

        def forward(self, x):
            x = self.act(self.last(self.first(x)))
            x = x.mul_(2) if self.in_place else x * 2
            return self.fc(x.mean((2, 3)))

    model, images = Doubles(), torch.randn(2, 3, 32, 32)
    found = GradCam(classifier_of(model))(images, batch_of(images))
    model.in_place = False
    assert close_to(found, GradCam(classifier_of(model))(images, batch_of(images)))
    gradcam = GradCam(classifier_of(nn.Flatten()))
    refused("finds no feature map in Flatten that its answers depend on; use another", gradcam, torch.randn(1, 3, 8, 8))


def attention_by_hand(model, images):
    """Of the class token in the last block, over the patches, mean over heads."""
    seen = []
    attention = model.blocks[-1].attn
    handle = attention.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model.eval().forward_features(images)
        handle.remove()
        tokens, heads = seen[0], attention.num_heads
        width = tokens.shape[2] // heads
        query, key, _ = (tokens @ attention.qkv.weight.T + attention.qkv.bias).chunk(3, -1)
        rows = []
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            scores = torch.einsum("bc,bnc->bn", query[:, 0, part], key[..., part]) / width**0.5
            rows.append(scores.exp() / scores.exp().sum(1, keepdim=True))
    return torch.stack(rows).mean(0)[:, 1:]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(32, 32), (48, 32), (40, 33)])
def test_dino__by_hand(size, channels):
    model = timm.create_model("test_vit", num_classes=0)
    for parameter in model.blocks[-1].attn.parameters():
        nn.init.normal_(parameter, std=0.3)  # or the attention would be nearly even
    model.pretrained_cfg = {**model.pretrained_cfg, "mean": (0.1, 0.2, 0.3), "std": (0.3, 0.4, 0.5)}
    photos = torch.randint(0, 256, (2, channels, *size), dtype=torch.uint8)
    mean, std = (torch.tensor(model.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    images = (photos / 255 - mean) / std
    grid = [-(-side // 16) for side in size]
    images = F.interpolate(images, [16 * n for n in grid], mode="bicubic", antialias=True)
    weights = attention_by_hand(model, images).unflatten(1, grid)
    assert weights.std() > 1e-3
    expected = F.interpolate(weights[:, None], size, mode="bilinear", align_corners=False)[:, 0]
    others = torch.full((2, channels, *size), 5.0)  # as another model would have them normalised
    for block in model.blocks:
        for block.attn.fused_attn in (False, True):
            assert torch.allclose(Dino(model)(others, batch_of(photos)), expected, atol=1e-6)
    assert Dino(model).about == "class-token attention of VisionTransformer"


def test_dino__weights(tmp_path, monkeypatch):
    trained = timm.create_model("test_vit", num_classes=0)
    torch.save(trained.state_dict(), tmp_path / "dino.pth")
    images = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
    saliency = Dino("test_vit", checkpoint=tmp_path / "dino.pth")
    assert torch.equal(saliency.attention(images), Dino(trained).attention(images))
    torch.save({"a": torch.zeros(1)}, tmp_path / "other.pth")
    for model, file, kind, message in (
        ("test_vit", "other.pth", ValueError, "weights of another model"),
        ("test_vit", "nowhere.pth", FileNotFoundError, "is not a file"),
        ("test_resnet", "dino.pth", ValueError, "give a ViT, such as vit_small"),
        (timm.create_model("test_vit2"), "dino.pth", ValueError, "no class token"),
        ("vit_smal", "dino.pth", ValueError, "'vit_smal' is no model of timm's"),
    ):
        refused(message, Dino, model, checkpoint=tmp_path / file, error=kind)

    def offline(*args, **kwargs):
        raise OSError("We couldn't connect to 'https://huggingface.co'\nand so on")

    monkeypatch.setattr(timm, "create_model", offline)
    refused(r"the weights of .*dino cannot be had: We couldn't connect", Dino, error=RuntimeError)


@pytest.fixture(scope="module")
def scenes():
    return Scenes(12, size=64, seed=5, split="val")


def test_scene_saliency__is_the_salient_part_then_the_object(scenes):
    saliency = SceneSaliency(scenes, Transforms(64, crop_pct=1.0))
    maps = saliency(torch.zeros(12, 3, 64, 64), batch_of(torch.zeros(12)))
    assert maps.shape == (12, 64, 64) and maps.dtype == torch.float32
    for index, found in enumerate(maps.numpy()):
        drawn = [draw_scene(index, size=64, seed=5, split="val", without=what) for what in (None, "salient", "other")]
        changed, others = ((drawn[0].image != one.image).any(2) for one in drawn[1:])
        assert changed.any() and (found[changed] == 2).all()
        assert ((found > 0) == drawn[0].masks[0]).all() and (found == 1).any()
        assert (found[others & drawn[0].masks[0]] == 1).all()


def test_scene_saliency__goes_the_way_of_the_image(scenes):
    """Cropped, halved, and of some of the scenes in grey; not where it is unknown which scenes these are."""

    def seen(transforms, indices, source=scenes):
        images = torch.zeros(len(indices), transforms.channels, transforms.size, transforms.size)
        return SceneSaliency(source, transforms)(images, batch_of(images, indices))

    drawn = [scenes.scene(index) for index in range(12)]
    full = [np.where(scene.parts[0] == 1, 2, scene.masks[0].astype(int)) for scene in drawn]
    chosen = (2, 0, 7)
    cropped, halved = seen(Transforms(48, crop_pct=0.75), chosen), seen(Transforms(32, crop_pct=1.0), chosen)
    for place, index in enumerate(chosen):
        assert np.array_equal(cropped[place], full[index][8:56, 8:56])
        assert np.array_equal(halved[place], full[index][1::2, 1::2])
    source = View(Grey(View(scenes, np.array([9, 4, 1]))), np.array([2, 0]))
    maps = seen(Transforms(64, 1, (0.5,), (0.5,), crop_pct=1.0), (0, 1), source)
    assert np.array_equal(maps[0], full[1]) and np.array_equal(maps[1], full[9])

    class Reversed(Grey):
        def name(self, index):
            return self.source.name(len(self) - 1 - index)

    refused("saliency of the scenes needs scenes as data; use gradcam or dino", SceneSaliency, [1], Transforms(64))
    refused("Reversed numbers its scenes in a way of its own", SceneSaliency, Reversed(scenes), Transforms(64))


def test_from_name(scenes, tmp_path):
    subject = classifier_of(Plain())
    given = (("scenes", scenes), ("gradcam", scenes), (None, Grey(scenes)), (None, [1, 2]))
    found = [type(from_name(name, subject, source)) for name, source in given]
    assert found == [SceneSaliency, GradCam, SceneSaliency, GradCam]
    options = dict(error=FileNotFoundError, checkpoint=tmp_path / "dino.pth")
    refused(r"dino\.pth is not a file", from_name, "dino", subject, scenes, **options)  # it was looked for
    (tmp_path / "mine.py").write_text("LEVEL = 3\ndef flat(images, batch):\n    return images[:, 0] * 0 + LEVEL\n")
    mine = from_name(f"{tmp_path / 'mine.py'}:flat", subject, scenes)
    assert mine(torch.zeros(1, 3, 2, 2), None).tolist() == [[[3, 3], [3, 3]]]
    assert from_name("torch:relu", subject, scenes) is torch.relu
    refused(r"nowhere\.py is not a file", from_name, "nowhere.py:flat", subject, scenes, error=FileNotFoundError)
    said = "a checkpoint is for the saliency dino, not for gradcam"
    refused(said, from_name, "gradcam", subject, scenes, checkpoint="x.pth")
    (tmp_path / "bad.py").write_text("import nowhere\n")
    for name, message in (
        ("gradcm", "unknown saliency 'gradcm'; did you mean 'gradcam'. choose scenes, gradcam, dino, or your own as f"),
        ("x", "unknown saliency 'x'; choose scenes"),
        (f"{tmp_path}/mine.py:round", "the saliency .*mine.py:round cannot be loaded: .*round"),
        (f"{tmp_path}/bad.py:flat", "cannot be loaded: No module named 'nowhere'"),
        (f"{tmp_path}/mine.py:LEVEL", "is a int; expected a function"),
        ("no_such_module:flat", "cannot be loaded: No module named 'no_such_module'"),
        ("torch:flat", "cannot be loaded: .*flat"),
    ):
        refused(message, from_name, name, subject, scenes)
