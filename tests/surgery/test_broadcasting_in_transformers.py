"""Context broadcasting in models of transformers: ViLT against a forward pass by hand, with and without padding."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from broadsight import add_context_broadcast
from broadsight.layers.context_broadcast import KINDS, context_broadcast
from tests.compare import assert_close, randomize
from tests.refusals import refused

transformers = pytest.importorskip("transformers", reason='needs transformers: pip install "broadsight[hf]"')

TINY: dict[str, Any] = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
TINY |= dict(image_size=32, patch_size=8)
LAYERS = [f"vilt.encoder.layer.{i}" for i in range(2)]
POSITIONS = ("front", "mid", "end")


@pytest.fixture
def vilt() -> nn.Module:
    config = transformers.ViltConfig(**TINY, vocab_size=20, max_position_embeddings=9, num_labels=3)
    return randomize(transformers.ViltForQuestionAnswering(config)).double().eval()


@pytest.fixture
def inputs() -> dict[str, Tensor]:
    return dict(input_ids=torch.randint(2, 20, (2, 6)), pixel_values=torch.randn(2, 3, 32, 32).double())


def fill(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        if name.endswith("context_broadcast.scale"):
            parameter.data = torch.linspace(-1, 1, len(parameter), dtype=parameter.dtype)
    return model


def padded(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    ids = nn.functional.pad(inputs["input_ids"], (0, 3))
    return inputs | dict(input_ids=ids, attention_mask=(ids > 0).long())


def answer(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    torch.manual_seed(3)  # it draws the order of the patches
    return model(**inputs).logits


def by_hand(model: nn.Module, inputs: dict[str, Tensor], kind: str, branch: str, position: str) -> Tensor:
    """Of each layer the equations; context is the mean of the tokens of text and image that are not padding."""
    inner, patches = model.vilt, torch.ones(2, 32, 32)
    torch.manual_seed(3)
    told = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    x, mask = inner.embeddings(inputs["input_ids"], told, None, inputs["pixel_values"], patches, None, None)
    valid = mask.bool()

    def context(x: Tensor, here: str, where: str) -> Tensor:
        if branch not in (here, "both") or where != position:
            return x
        m = torch.stack([one[keep].mean(0, keepdim=True) for one, keep in zip(x, valid, strict=True)])
        s = torch.linspace(-1, 1, x.shape[2], dtype=x.dtype)
        return {"cb": (x + m) / 2, "scaled": x + s * m, "gate": x * (m + 1), "hybrid": x * m + (x + m) / 2}[kind]

    added = torch.zeros(mask.shape).double().masked_fill(~valid, -torch.inf)[:, None, None]
    for layer in inner.encoder.layer:
        core, out = layer.attention.attention, layer.attention.output.dense
        y = context(layer.layernorm_before(x), "attn", "front")
        x = x + context(out(context(core(y, added)[0], "attn", "mid")), "attn", "end")
        y = context(layer.layernorm_after(x), "mlp", "front")
        y = context(layer.intermediate.intermediate_act_fn(layer.intermediate.dense(y)), "mlp", "mid")
        x = x + context(layer.output.dense(y), "mlp", "end")
    return model.classifier(inner.pooler(inner.layernorm(x)))


CASES = [(kind, "mlp", "end") for kind in KINDS] + [("scaled", "both", position) for position in POSITIONS]
CASES += [("gate", "attn", position) for position in POSITIONS]


@pytest.mark.parametrize(("kind", "branch", "position"), CASES)
def test_vilt__is_the_forward_pass_by_hand(vilt, inputs, kind, branch, position):
    plain = deepcopy(vilt)
    model = fill(add_context_broadcast(vilt, kind, branch, position))
    for given in (inputs, padded(inputs)):
        expected = by_hand(plain, given, kind, branch, position)
        assert not torch.allclose(expected, answer(plain, given), rtol=1e-3)
        assert_close(answer(model, given), expected, tolerance=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_vilt__padding_of_text_or_images_changes_no_answer(vilt, inputs, kind):
    model = fill(add_context_broadcast(vilt, kind, "both"))
    expected = answer(model, inputs)
    assert_close(answer(model, padded(inputs)), expected, tolerance=1e-9)
    narrow = {key: value[1:] for key, value in inputs.items()}
    narrow["pixel_values"] = narrow["pixel_values"][..., :16]
    narrow["pixel_mask"] = torch.ones(1, 32, 16)
    wide = inputs["pixel_values"].clone()
    wide[1, ..., 16:] = 0  # beside a wider image
    mask = torch.ones(2, 32, 32)
    mask[1, :, 16:] = 0
    both = answer(model, inputs | dict(pixel_values=wide, pixel_mask=mask))
    assert_close(both[1:], answer(model, narrow), tolerance=1e-9)
    assert_close(both[:1], expected[:1], tolerance=1e-9)


def test_vilt__keeps_keys_outputs_and_random_numbers_and_comes_back_from_a_folder(vilt, inputs, tmp_path):
    ids = torch.ones(1, 3)
    keys, expected, drawn = vilt.state_dict().keys(), answer(vilt, inputs), torch.get_rng_state()
    model = add_context_broadcast(vilt, kind="scaled")
    assert model is vilt and torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(answer(model, inputs), expected)
    scales = [f"{layer}.output.dense.context_broadcast.scale" for layer in LAYERS]
    assert sorted(model.state_dict().keys() - keys) == scales
    fill(model).save_pretrained(tmp_path)
    again = transformers.ViltForQuestionAnswering.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert again.state_dict().keys() == keys and not torch.equal(answer(again, inputs), answer(model, inputs))
    add_context_broadcast(again, kind="scaled").load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_close(answer(again, inputs), answer(model, inputs), tolerance=1e-12)
    assert torch.equal(answer(deepcopy(again), padded(inputs)), answer(again, padded(inputs)))
    refused("broadcasts context already", add_context_broadcast, again)
    layer = again.vilt.encoder.layer[0]
    refused("marks; create the model with attn_implementation=", layer, torch.ones(1, 4, 16), attention_mask="flex")
    refused(
        r"a mask of shape \[1, 3\] for tokens of \[1, 4, 16\]", context_broadcast, torch.ones(1, 4, 16), mask=ids > 0
    )


@torch.enable_grad()
def test_vilt__gradients_are_the_same_with_checkpointing(vilt, inputs):
    model, found = add_context_broadcast(vilt, kind="hybrid"), []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(dict(use_reentrant=False))
        again = deepcopy(model).train()
        answer(again, padded(inputs)).sum().backward()
        found.append([p.grad for p in again.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 20
    assert all(torch.allclose(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["ViT", "DeiT", "Beit"])
def test_image_models__have_context_after_each_mlp(name):
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**TINY)).eval()
    randomize(model)
    x, by_hooks = torch.randn(2, 3, 32, 32), deepcopy(model)
    plain = model(x).last_hidden_state
    for branch in ("mlp", "attn", "both"):
        for position in POSITIONS:
            scaled = add_context_broadcast(deepcopy(model), "scaled", branch, position)
            assert len(scaled.state_dict()) == len(model.state_dict()) + (4 if branch == "both" else 2)
            assert torch.equal(scaled(x).last_hidden_state, plain)
    last = [m for key, m in by_hooks.named_modules() if key.endswith(".mlp.fc2")]
    assert len(last) == 2
    for layer in last:
        layer.register_forward_hook(lambda m, inputs, y: (y + y.mean(1, keepdim=True)) / 2)
    expected = by_hooks(x).last_hidden_state
    assert_close(add_context_broadcast(model)(x).last_hidden_state, expected, tolerance=1e-5)
    assert not torch.allclose(expected, plain, rtol=1e-3)
