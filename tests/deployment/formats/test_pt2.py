"""PT2 archives that do more than hold a model: refused before torch sees them, whatever torch would make of them."""

import contextlib
import io
import json
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch

from broadsight.deployment import FORMATS, capture, open_artefact
from broadsight.deployment.formats.pt2 import (
    CONFIGS,
    CONSTANTS,
    MODEL,
    SAMPLES,
    WEIGHTS,
    check_expression,
    check_guard,
    clean,
)
from tests.deployment.tiny import described
from tests.refusals import refused


class Payload:
    """What a pickle runs: it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(3, 2)
        self.register_buffer("shift", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.fc(x.mean((2, 3))) + self.shift


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """An exported model as bytes by entry."""
    torch.manual_seed(0)
    program = capture(Tiny().eval(), (3, 8, 8))
    path = tmp_path_factory.mktemp("pt2") / "net.pt2"
    FORMATS["pt2"].write(program, described(8, classes=None), path)
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def written(path, entries, root="net", kind=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, content in entries.items():
            archive.writestr(f"{root}/{name}" if root else name, content)
    return path


def pickled(mark):
    buffer = io.BytesIO()
    torch.save({"x": Payload(mark)}, buffer)
    return buffer.getvalue()


def with_json(entries, place, change):
    content = json.loads(entries[place])
    change(content)
    return {**entries, place: json.dumps(content).encode()}


def through_config(entries, folder, tensor, name, content):
    """A tensor that is said to be pickled, in an entry of its own."""
    pickled = dict(use_pickle=True, path_name=name, tensor_meta=None)
    (config,) = (place for place, below in CONFIGS.items() if below == folder)
    entries = {**entries, f"{folder}{name}": content}
    return with_json(entries, config, lambda said: said["config"][tensor].update(pickled))


def through_program(change):
    """What `change` makes of the program, for a mark in the file system."""
    return lambda entries, mark: with_json(entries, MODEL, lambda program: change(program, str(mark)))


def formulas(program, mark):
    for value in program["graph_module"]["graph"]["tensor_values"].values():
        for side in value["sizes"]:
            if "as_expr" in side:
                side["as_expr"]["expr_str"] = f"__import__('os').mkdir({mark!r}) or Integer(2)"


def through_guards(entries, mark):
    samples = io.BytesIO()
    torch.save(((torch.zeros(2, 3, 8, 8),), {}), samples)
    guard = f"__import__('os').path.isdir({str(mark)!r}) or __import__('os').mkdir({str(mark)!r}) is None"
    entries = {**entries, SAMPLES: samples.getvalue()}
    return with_json(entries, MODEL, lambda program: program.update(guards_code=[guard]))


def operators(program, mark):
    inputs = [dict(name="", arg=dict(as_string=mark), kind=1)]
    program["graph_module"]["graph"]["nodes"][0].update(target="torch.os.mkdir", inputs=inputs)


def files(program, mark):
    names = dict(filename=dict(as_string=mark), shared=dict(as_bool=True), size=dict(as_int=6))
    inputs = [dict(name=name, arg=arg, kind=1) for name, arg in names.items()]
    mean = next(node for node in program["graph_module"]["graph"]["nodes"] if "mean" in node["target"])
    mean.update(target="torch.ops.aten.from_file.default", inputs=inputs)


def through_names(entries, mark):
    line = f"x=None):\n    __import__('os').mkdir({str(mark)!r})\n    return\ndef f(y"
    return {**entries, MODEL: json.dumps(json.loads(entries[MODEL])).replace('"x"', json.dumps(line)).encode()}


COMPILED = {"data/aotinductor/model/a.wrapper.so": b"\x7fELF", "data/aotinductor/model/a.wrapper_metadata.json": b"{}"}


def of_constants(name, content):
    return lambda entries, mark: through_config(entries, CONSTANTS, "shift", name, content(mark))


def instead(place, content=pickled):
    return lambda entries, mark: {**entries, place: content(mark)}


ROUTES = {
    "weights": lambda entries, mark: through_config(entries, WEIGHTS, "fc.weight", "weight_9", pickled(mark)),
    "constants": of_constants("tensor_9", pickled),
    "objects": of_constants("opaque_obj_9", lambda mark: pickle.dumps(Payload(mark))),
    "script objects": of_constants("custom_obj_9", lambda mark: pickle.dumps(Payload(mark))),
    "samples": instead(SAMPLES),
    "old weights": instead(f"{WEIGHTS}model.pt"),
    "old constants": instead(f"{CONSTANTS}model.pt"),
    "formulas": through_program(formulas),
    "guards": through_guards,
    "operators": through_program(operators),
    "names": through_names,
    "files": through_program(files),
    "compiled code": lambda entries, mark: entries | COMPILED,
}
HARMLESS = {"script objects", "compiled code"}  # of torch's own accord


def test_sound__opens_and_holds_no_pickle(sound, tmp_path):
    session = open_artefact(written(tmp_path / "net.pt2", sound))
    assert session(np.zeros((5, 3, 8, 8), np.float32))["logits"].shape == (5, 2)
    refused("images of shape", session, np.zeros((5, 3, 9, 8), np.float32))
    assert sound[SAMPLES] == b"" and not any(b'pickle": true' in one for one in sound.values())
    assert b"stack_trace" not in sound[MODEL] and os.getcwd().encode() not in sound[MODEL]
    torch.export.load(tmp_path / "net.pt2").module()(torch.zeros(1, 3, 8, 8))  # others read it as they always have


@pytest.mark.parametrize("route", ROUTES)
def test_routes__are_refused_before_torch_sees_them(sound, tmp_path, route, monkeypatch):
    mark = tmp_path / "mark"
    path = written(tmp_path / "net.pt2", ROUTES[route](sound, mark))
    monkeypatch.setattr(torch.export, "load", lambda *_, **__: pytest.fail("torch saw it"))
    refused(r"net\.pt2 cannot be opened: ", open_artefact, path)
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("route", [route for route in ROUTES if route not in HARMLESS])
def test_routes__are_real(sound, tmp_path, route):
    """Torch itself executes them, so that the test above refuses what is dangerous."""
    path = written(tmp_path / "net.pt2", ROUTES[route](sound, tmp_path / "mark"))
    with contextlib.suppress(Exception):  # after the fact
        torch.export.load(path).module()(torch.zeros(1, 3, 8, 8))
    if not (tmp_path / "mark").exists():
        pytest.skip(f"torch {torch.__version__} does not execute it any more")


def test_archives__of_another_shape_doubled_and_of_tensors_larger_than_they_are(sound, tmp_path):
    path = tmp_path / "net.pt2"
    old = {"version": b"8.8", "serialized_exported_program.json": b"{}", "serialized_state_dict.pt": pickled(path)}
    twice = {**sound, "MODELS/model.json": sound[MODEL]}
    for entries, options in (
        (old, dict(root="")),
        (twice, {}),
        (sound, dict(kind=zipfile.ZIP_DEFLATED)),
        ({**sound, "archive_format": b"zip"}, {}),
        ({**sound, "net/inner.pt2": b"PK"}, {}),
        ({**sound, "extra/../../x.json": b""}, {}),
        ({name: value for name, value in sound.items() if name != MODEL}, {}),
        ({**sound, MODEL: b"[" * 100_000}, {}),
    ):
        refused(r"net\.pt2 cannot be opened: ", open_artefact, written(path, entries, **options))
    with zipfile.ZipFile(path, "w") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        for _ in range(2):
            archive.writestr("net/archive_format", "pt2")
    refused("holds archive_format twice", open_artefact, path)
    path.write_bytes(b"PK\x03\x04" + b"\0" * 100)
    refused("no archive of torch", open_artefact, path)
    # Another archive before the true one, which readers may find by its beginning; ours is written anew.
    evil = written(tmp_path / "evil.pt2", ROUTES["samples"](sound, tmp_path / "mark")).read_bytes()
    path.write_bytes(evil + written(path, sound).read_bytes())
    assert open_artefact(path)(np.zeros((1, 3, 8, 8), np.float32))["logits"].shape == (1, 2)
    assert not (tmp_path / "mark").exists()

    def change(config):
        config["config"]["fc.weight"]["tensor_meta"] |= dict(sizes=[{"as_int": 10**6}] * 2, strides=[{"as_int": 0}] * 2)

    written(path, with_json(sound, f"{WEIGHTS}model_weights_config.json", change))
    refused("larger than what is stored", open_artefact, path)


def test_formulas():
    for text in (
        "Add(FloorDiv(Add(Symbol('s53', positive=True, integer=True), Integer(-1)), Integer(2)), Integer(1))",
        "StrictLessThan(Mul(Integer(2), Symbol('s0', positive=True)), Pow(Symbol('s1'), Integer(2)))",
        "s0 // 4 + 1",
    ):
        check_expression(text)
    check_guard("(L['x'].size()[0] % (L['x'].size()[0]*(1 + (((-1) + L['x'].size()[3]) // 4)))) != 0")
    for text in (
        *("__import__('os')", "Symbol('s0').__class__", "Symbol('x; y')", "().__class__"),
        *("Pow(Integer(9), Pow(Integer(9), Integer(99)))", "9**9**9"),
        "Integer(" + "9" * 100 + ")",
        *("sympify('1')", "lambda: 1", "[s0 for s0 in s1]", "f'{s0}'", "(s0 := 1)", "s0\nimport os"),
        "(" * 1000 + "s0" + ")" * 1000,
        *("Symbol('s0', positive=print(1))", "Symbol(*s0)", "L['x'].numpy()", "L['x\"];'].size()[0] == 1"),
    ):
        for check in (check_expression, check_guard):
            with pytest.raises(ValueError, match="more than arithmetic"):
                check(text)


def test_mutations__never_reach_torch_as_something_else(sound, tmp_path):
    """Every text in the program, replaced: refused, or as harmless as before."""
    random, text = np.random.default_rng(0), json.dumps(json.loads(sound[MODEL]))
    for _ in range(300):
        place = int(random.integers(len(text)))
        changed = text[:place] + str(random.choice(list("'\";(){}[]\\n._x9:/"))) + text[place + 1 :]
        try:
            clean(io.BytesIO(written(tmp_path / "net.pt2", {**sound, MODEL: changed.encode()}).read_bytes()))
        except ValueError as error:
            assert "\n" not in str(error)
