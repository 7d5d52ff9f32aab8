"""STViT against tensors computed by an independent implementation in float64."""

import pytest
import torch

import broadsight
from broadsight.models import STViT

IO = {
    "stvit_tiny_io_224x224": "stvit_tiny_weights",
    "stvit_tiny_io_200x168": "stvit_tiny_weights",
    "stvit_tiny_iter2_io_200x136": "stvit_tiny_weights",
    "stvit_tiny_ls_io_128x96": "stvit_tiny_ls_weights",
}


def build(config: dict) -> STViT:
    return STViT(
        dims=config["embed_dim"],
        depths=config["depths"],
        heads=config["num_heads"],
        cells=config["stoken_size"],
        iterations=config["n_iter"],
        mlp_ratio=config["mlp_ratio"],
        projection=config["projection"],
        qkv_bias=config["qkv_bias"],
        layer_scale=[1e-6 if scaled else None for scaled in config["layerscale"]],
        num_classes=config["num_classes"],
        in_chans=config["in_chans"],
    )


def released(tensors: dict) -> dict:
    return {key.removeprefix("sd."): value for key, value in tensors.items() if key.startswith("sd.")}


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5 * max(1.0, expected.abs().max().item()))


def assert_gradient_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    # Some gradients are exactly zero (a bias before a norm): the last term allows for their rounding.
    assert (got.reshape(expected.shape) - expected).abs().max() <= 5e-4 * expected.abs().max() + 1e-6


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("io", IO)
def test_golden_inference(golden, io, fused):
    tensors, config = golden(io)
    model = broadsight.load_release(build(config), released(golden(IO[io])[0])).eval()
    model = broadsight.fuse(model) if fused else model
    seen = {}
    modules = {"stem": model.stem, "s1b1_attn_out": model.stages[0].blocks[0].attn}
    modules |= {f"merge{i}": model.stages[i].downsample for i in (1, 2, 3)}
    modules |= {f"stage{i + 1}": model.stages[i] for i in range(4)}
    for name, module in modules.items():
        module.register_forward_hook(lambda _, inputs, output, name=name: seen.update({name: (inputs, output)}))
    with torch.no_grad():
        features = model.forward_features(tensors["input"])
        assert_close(model.forward_head(features), tensors["logits"])
        if "feat.pooled" in tensors:
            assert_close(model.forward_head(features, pre_logits=True), tensors["feat.pooled"])
    inputs, output = seen.pop("s1b1_attn_out")
    if "feat.s1b1_attn_in" in tensors:
        assert_close(inputs[0], tensors["feat.s1b1_attn_in"])
    residual = inputs[1] if len(inputs) > 1 else 0  # the sum with the residual is fused into the layer
    assert_close(output - residual, tensors["feat.s1b1_attn_out"])
    checked = [name for name in seen if f"feat.{name}" in tensors]
    assert len(checked) >= 2
    for name in checked:
        assert_close(seen[name][1], tensors[f"feat.{name}"])


def test_golden_training_step(golden):
    tensors, config = golden("stvit_tiny_train_72x56")
    model = broadsight.load_release(build(config), released(golden("stvit_tiny_weights")[0])).train()
    images = tensors["input"].requires_grad_()
    logits = model(images)
    assert_close(logits, tensors["logits"])
    (logits * tensors["cotangent"]).sum().backward()
    assert_gradient_close(images.grad, tensors["grad_input"])
    gradients = {f"grad.{STViT.released_name(name)}": p.grad for name, p in model.named_parameters()}
    buffers = {f"after.{STViT.released_name(name)}": b for name, b in model.named_buffers()}
    stored = {key for key in tensors if key.startswith(("grad.", "after."))}
    assert len(stored) > 100 and stored <= gradients.keys() | buffers.keys()
    for key in stored & gradients.keys():
        assert_gradient_close(gradients[key], tensors[key])
    for key in stored & buffers.keys():
        torch.testing.assert_close(buffers[key], tensors[key], rtol=1e-4, atol=1e-5)
