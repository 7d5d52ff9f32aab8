"""Models whose memory came empty, as from `to_empty`: once their weights are loaded, they answer as ever."""

import os

import pytest
import timm
import torch
from torch import nn

from broadsight import add_context_broadcast, swap_pool
from broadsight.dense.build import build
from broadsight.layers.buffers import restore_buffers
from broadsight.losses import MultiTokenDistillationLoss
from broadsight.models import FAMILIES
from broadsight.runs.folder import save
from tests.compare import assert_close, randomize
from tests.zoo import FASTER_VIT, HAS_FASTER_VIT, marked

NAMES = timm.list_models(module=list(FAMILIES))
SMALL = dict(groups=2, tokens=1, dim=24)
# One block of each model or stage, for images of few pixels; the others are small as they are.
SWIN = dict(depths=(1, 1, 1, 1), img_size=64, window_size=2)
SHALLOW = {
    ("map_deit",): dict(depth=4),
    ("cap_deit", "vit", "deit", "localvit", "map_vit"): dict(depth=1),
    ("map_pit", "cap_pit"): dict(depth=(1, 1, 1), img_size=64),
    ("map_resmlp", "cap_resmlp"): dict(img_size=64),
    ("map_faster",): dict(depths=(1, 1, 1, 1), img_size=64, window=2),
    ("map_maxvit",): dict(depths=(1, 1, 1, 1), img_size=64),
    ("swin",): SWIN,
    ("map_resnet", "cap_resnet", "map_mobilenet"): {},
}
# Of each kind one that is quickly built and run; the others have the same modules, and take part in `make test-slow`.
SOON = ("stvit_small", "emsnet_xxtiny", "mat_1", "partialformer_b0", "map_deit_small", "map_mobilenetv1", "map_pit_s")
SOON += ("map_maxvit_tiny", "cap_deit_small", "vit_tiny_cb", "vit_tiny_cb_s", "vit_small_cb_gate_both", "pvt_v2_b0_cb")
SOON += (
    "pvt_small",
    "localvit_tiny",
    "swin_isotropic_norpe",
    "deit_tiny_distilled_cb",
    "twins_pcpvt_small_cb",
    "swin_tiny_cb",
)
LATER = [name for name in NAMES if name not in SOON]


def small(name: str, **options) -> nn.Module:
    """A registered model with few blocks and classes."""
    known = next((v for names, v in SHALLOW.items() if name.startswith(names)), dict(depths=(1, 1, 1, 1)))
    return timm.create_model(name, num_classes=3, **known, **options)


def spoil(model: nn.Module, kept: bool = True) -> None:
    """What memory may hold that nobody has written, here nothing right; `kept`: also what state dicts hold."""
    stored = set(model.state_dict())
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if kept or name not in stored:
                tensor.fill_(float("nan") if tensor.is_floating_point() else -(2**30))


def check(make, images: torch.Tensor) -> None:
    """Through the meta device a model comes back from its weights alone, and by timm's own call."""
    torch.manual_seed(0)
    model = randomize(make()).eval()
    with torch.device("meta"):
        again = make()
    again = again.to_empty(device="cpu").eval()
    spoil(again)
    again.load_state_dict(model.state_dict())
    with torch.inference_mode():
        expected = model(images)
        assert expected.isfinite().all()
        assert_close(again(images), expected, tolerance=1e-5)
        spoil(again, kept=False)
        restore_buffers(again)  # what timm's reinit_non_persistent_buffers and transformers do
        assert_close(again(images), expected, tolerance=1e-5)


@pytest.mark.parametrize("name", marked(NAMES, slow=LATER))
def test_registered__come_back_from_empty_memory(name):
    check(lambda: small(name), torch.randn(1, 3, 64, 64))


def test_registered__all_say_how_to_restore_their_buffers():
    for name in (name for name in LATER if name != FASTER_VIT or HAS_FASTER_VIT):
        with torch.device("meta"):
            model = small(name)
        for place, module in model.named_modules():
            computed = [getattr(module, key) for key in module._non_persistent_buffers_set]
            wanting = any(buffer is not None and buffer.numel() for buffer in computed)
            assert not wanting or hasattr(module, "init_non_persistent_buffers"), f"{name}: {place}"


NECK = dict(dim=24, groups=1, tokens=4, gram=True)
EDITED = {
    "pool": lambda: swap_pool("test_resnet", "map", num_classes=3, **SMALL),
    "broadcast": lambda: add_context_broadcast(timm.create_model("swin_tiny_patch4_window7_224", **SWIN), "cb"),
    "both": lambda: timm.create_model("edited", backbone="test_vit", pool="map", pool_args=SMALL, broadcast="cb"),
    "fixed size": lambda: swap_pool("test_vit", "gap", img_size=64),
    "dense": lambda: build("semantic_fpn", "test_resnet", 3, class_weights=(1.0, 2.0, 3.0)),
    "dense neck": lambda: build("semantic_fpn", "test_resnet", 3, neck="tokens", neck_args=NECK),
}


@pytest.mark.parametrize("make", EDITED.values(), ids=EDITED)
def test_edited__come_back_from_empty_memory(make):
    check(make, torch.randn(1, 3, 64, 64))


def test_parts__class_weights_anchors_and_scales_come_back():
    with torch.device("meta"):
        model = build("semantic_fpn", "test_resnet", 3, class_weights=(1.0, 2.0, 3.0))
        detector = build("retinanet", "test_resnet", 3)
    model = model.to_empty(device="cpu")
    spoil(model)
    restore_buffers(model)
    assert model.class_weights.tolist() == [1.0, 2.0, 3.0]
    # torchvision keeps anchors in plain attributes; it makes them on the CPU whatever the default device is.
    assert not any(anchors.is_meta for anchors in detector.anchor_generator.cell_anchors)
    images = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    loss = MultiTokenDistillationLoss("ce", timm.create_model("test_resnet"), normalization=images)
    expected = [buffer.clone() for buffer in (loss.scale, loss.shift)]
    for buffer in (loss.scale, loss.shift):
        buffer.fill_(float("nan"))
    loss.init_non_persistent_buffers()
    assert torch.equal(loss.scale, expected[0]) and torch.equal(loss.shift, expected[1])


@pytest.mark.parametrize(
    "name", ["stvit_small", "emsnet_xxtiny", "mat_1", "partialformer_b0", "map_deit_small", "swin_tiny_cb_s", "pool"]
)
def test_transformers__gives_the_same_logits(name, tmp_path, monkeypatch):
    """One model of every family, and an edited one, in memory that is never zero by chance."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    model = randomize(EDITED[name]() if name in EDITED else small(name)).eval()
    images = torch.randn(1, 3, 64, 64)
    save(model, tmp_path / "saved")
    empty_like = torch.empty_like

    def spoilt(*args, **options):
        made = empty_like(*args, **options)
        return made if made.is_meta else made.fill_(float("nan") if made.is_floating_point() else -(2**30))

    folder = tmp_path / "saved"
    for again in ("first", "second")[: 1 + (name in EDITED)]:  # transformers' own saving comes in between
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty_like", spoilt)
            loaded = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
        with torch.inference_mode():
            assert_close(loaded(images).logits, model(images), tolerance=1e-5)
        if name in EDITED:
            folder = tmp_path / again
            loaded.save_pretrained(folder)
