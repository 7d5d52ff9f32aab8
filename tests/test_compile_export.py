"""Compilers, exporters and tracers see the same function as eager mode; one small model of each family."""

import io
from copy import deepcopy

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.export import Dim
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

from broadsight.deployment import capture, prepare
from broadsight.deployment.formats.onnx import session_of, to_onnx
from broadsight.models import MAT, EMSNet, PartialFormer, STViT
from tests.compare import assert_all_close, assert_close, outputs_and_gradients, randomize
from tests.zoo import KINDS, shallow

STVIT = dict(layer_scale=(None, 0.5, None, 0.5), projection=24)
SMALL = {
    "stvit": lambda: STViT((16, 24, 32, 40), (1, 1, 1, 1), (1, 2, 2, 2), **STVIT),
    "emsnet": lambda: EMSNet((16, 24, 32, 64), (1, 1, 1, 1)),
    "mat": lambda: MAT(16, (1, 1, 1, 1), (2, 4), hidden=24),
    "partialformer": lambda: PartialFormer(16, (1, 1, 1, 1), (1, 2, 2, 4), hidden=24),
}


# The other reading of the families that have two, for what may tell them apart: gradients, compilers, runtimes.
EQUATIONS = {
    "stvit": lambda: STViT((16, 24, 32, 40), (1, 1, 1, 1), (1, 2, 2, 2), **STVIT, reading="equations"),
    "mat": lambda: MAT(16, (1, 1, 1, 1), (2, 4), hidden=24, reading="equations"),
    "partialformer": lambda: PartialFormer(16, (1, 1, 1, 1), (1, 2, 2, 4), hidden=24, reading="equations"),
}


@pytest.fixture(params=SMALL)
def family(request) -> str:
    return request.param


@pytest.fixture
def model(family) -> nn.Module:
    model = randomize(SMALL[family]()).double().eval()
    model.reset_classifier(5)
    return model


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def assert_compiles(model: nn.Module, x: Tensor, tolerance: float, **options) -> None:
    """One graph, and in it the outputs, gradients and statistics of eager mode."""
    torch._dynamo.reset()
    eager = deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, **options)
    expected, expected_gradients = outputs_and_gradients(eager, nn.Module.__call__, [x])
    got, gradients = outputs_and_gradients(model, lambda _, x: compiled(x), [x])
    assert_close(got[0], expected[0], tolerance=tolerance)
    largest = max(gradient.abs().max() for gradient in expected_gradients.values())
    for name, gradient in gradients.items():
        # Some gradients are zero in exact arithmetic (a bias before a norm): the last term is for their rounding.
        allowed = tolerance * (expected_gradients[name].abs().max() + 1e-3 * largest)
        assert (gradient - expected_gradients[name]).abs().max() <= allowed, name
    for (name, one), other in zip(model.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_compile__aot_eager_gives_values_and_gradients(model, training):
    assert_compiles(model.train(training), images(2, 3, 72, 80), 1e-9, backend="aot_eager")


@pytest.mark.slow
def test_compile__inference_under_no_grad_and_inductor_with_gradients(model):
    x = images(4, 3, 64, 64)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_close(compiled(x), model(x), tolerance=1e-9)
    assert_compiles(model.float().train(), images(2, 3, 72, 80).float(), 2e-3, backend="inductor")


def stored(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Written to a file and read again."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


# The other families' free sizes take as long as all other tests of this file; a fixed size is exported below for all.
# To write and read free sizes takes as long as to export them; a fixed size is stored below.
LATER = [("stvit", False), ("emsnet", False), ("partialformer", False), *((family, True) for family in SMALL)]


@pytest.mark.parametrize(
    ("family", "written"), [("mat", False), *(pytest.param(*case, marks=pytest.mark.slow) for case in LATER)]
)
def test_export__any_batch_and_size(model, written):
    program = capture(prepare(model), (3, 160, 224), any_size=True)
    exported = (stored(program) if written else program).module()
    for shape in [(1, 64, 64), (3, 65, 99), (2, 224, 224), (1, 512, 97), (1, 128, 480)]:
        x = images(shape[0], 3, *shape[1:])
        with torch.no_grad():
            assert_close(exported(x), model(x), f"output for {shape}", tolerance=1e-9)


def test_export__the_bare_model_for_any_batch(model):
    program = torch.export.export(model, (images(2, 3, 72, 80),), dynamic_shapes={"x": {0: Dim("batch", max=64)}})
    for batch in (1, 2, 5):
        x = images(batch, 3, 72, 80)
        with torch.no_grad():
            assert_close(program.module()(x), model(x), tolerance=1e-9)


class Maps(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> list[Tensor]:
        return self.model.forward_intermediates(x, intermediates_only=True)


@pytest.mark.slow
def test_export__small_sizes_and_features(model):
    """The last stage of an image below 33 pixels is one cell: a size of its own to an exporter, but no error."""
    x, larger = images(1, 3, 32, 32), images(2, 3, 96, 64)
    program = torch.export.export(model, (x,))
    exported = torch.export.export(Maps(model), (larger,)).module()
    with torch.no_grad():
        for one in (program.module(), stored(program).module()):
            assert_close(one(x), model(x), tolerance=1e-9)
        for got, one in zip(exported(larger), Maps(model)(larger), strict=True):
            assert_close(got, one, tolerance=1e-9)


@pytest.mark.slow
def test_onnx__gives_the_same_numbers(model, tmp_path):
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    runtime = pytest.importorskip("onnxruntime")
    model, x = model.float(), images(2, 3, 160, 224).float()
    sizes = {0: Dim("batch", max=64), 2: Dim("height", min=64, max=512), 3: Dim("width", min=64, max=512)}
    path = tmp_path / "model.onnx"
    torch.onnx.export(prepare(model), (x,), path, dynamo=True, dynamic_shapes={"x": sizes})
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for shape in [(2, 3, 160, 224), (1, 3, 97, 64)]:
        x = images(*shape).float()
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        with torch.no_grad():
            assert_close(torch.from_numpy(got), model(x), tolerance=1e-4)


@pytest.mark.parametrize("reading", [pytest.param("fitted", marks=pytest.mark.slow), "equations"])
@pytest.mark.parametrize("name", EQUATIONS)
def test_readings__learn_for_ten_steps_and_run_in_onnx(name, reading):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    torch.manual_seed(0)
    model = (SMALL if reading == "fitted" else EQUATIONS)[name]()
    model.reset_classifier(4)
    x, labels = images(16, 3, 96, 128).float(), torch.arange(16) % 4
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(10):
        loss = nn.functional.cross_entropy(model.train()(x), labels)
        optimizer.zero_grad()
        loss.backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == []
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    program = capture(prepare(model.eval()), (3, 96, 128))
    session = session_of(to_onnx(program, ["logits"]).SerializeToString(), threads=1)
    (got,) = session.run(None, {session.get_inputs()[0].name: x[:3].numpy()})
    with torch.no_grad():
        assert_close(torch.from_numpy(got), model(x[:3]), tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", EQUATIONS)
def test_readings__compile_in_one_graph(name):
    model = randomize(EQUATIONS[name]()).double().train()
    model.reset_classifier(5)
    assert_compiles(model, images(2, 3, 72, 80), 1e-9, backend="aot_eager")


def fx_arguments() -> dict:
    leaves, functions = timm.models.get_notrace_modules(), timm.models.get_notrace_functions()
    return dict(tracer_kwargs=dict(leaf_modules=leaves, autowrap_functions=functions, param_shapes_constant=True))


def test_fx__classifier(model):
    x = images(2, 3, 64, 80)
    for mode in (False, True):
        model.train(mode)
        (expected,), expected_gradients = outputs_and_gradients(model, nn.Module.__call__, [x])
        train_nodes, eval_nodes = get_graph_node_names(model, **fx_arguments())
        nodes = dict(train_return_nodes=[train_nodes[-1]], eval_return_nodes=[eval_nodes[-1]])
        traced = create_feature_extractor(deepcopy(model), **nodes, **fx_arguments()).train(mode)
        (got,), gradients = outputs_and_gradients(traced, lambda module, x: list(module(x).values()), [x])
        assert_all_close({"logits": got, **gradients}, {"logits": expected, **expected_gradients}, 1e-9)


@torch.no_grad()
def test_fx__stages_at_another_size(model):
    _, names = get_graph_node_names(model, **fx_arguments())
    ends = [[name for name in names if name.startswith(f"stages.{i}.")][-1] for i in range(4)]
    traced = create_feature_extractor(model, ends, **fx_arguments())
    for shape in [(2, 3, 64, 64), (1, 3, 75, 96)]:
        x = images(*shape)
        expected = model.forward_intermediates(x, intermediates_only=True)
        for got, one in zip(traced(x).values(), expected, strict=True):
            assert_close(got, one, tolerance=1e-9)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", ["fx", "hook"])
@torch.no_grad()
def test_fx__timm_feature_extraction(name, kind):
    models = []
    for options in ({}, dict(features_only=True, feature_cls=kind, out_indices=(0, 2))):
        torch.manual_seed(0)
        models.append(shallow(name, **options).eval())
    whole, graph = models
    assert graph.feature_info.channels() == [whole.feature_info[i]["num_chs"] for i in (0, 2)]
    x = torch.randn(1, 3, 64, 75)
    expected = whole.forward_intermediates(x, indices=(0, 2), intermediates_only=True)
    for got, one in zip(graph(x), expected, strict=True):
        assert_close(got, one, tolerance=1e-5)


def test_functional__a_gradient_for_each_image(model):
    x = images(3, 3, 40, 48)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], image: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (image[None],)).square().sum()

    each, of_images = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(None, 0))(parameters, x)
    for i in range(3):
        leaves = [x[i].clone().requires_grad_(), *model.parameters()]
        expected = torch.autograd.grad(model(leaves[0][None]).square().sum(), leaves, materialize_grads=True)
        for gradient, other in zip([of_images, *each.values()], expected, strict=True):
            assert_close(gradient[i], other, tolerance=1e-9)
