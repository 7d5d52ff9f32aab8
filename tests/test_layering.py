"""Which file may import which: the arrows point one way. Read from the source, so that lazy imports count too."""

import ast
import sys
from collections.abc import Set
from functools import cache
from pathlib import Path

import pytest

import broadsight

ROOT = Path(broadsight.__file__).parent
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))

# What a part may import of the package (a part is a folder or a file of the package) and beside the standard library.
# `cli` wires everything; whoever needs the models as objects receives them, except for those that are about ours.
EVERYBODYS = {"errors"}  # imports nothing of ours, and may be imported by all
INSIDE = {
    "layers": {"layers"},
    "errors": set(),
    "checkpoint": set(),
    "surgery": set(),
    "weights": {"dry_run", "given_weights", "models", "surgery", "train"},
    "models": {"broadcasting", "checkpoint", "dense", "layers", "models", "pooling", "surgery"},
    "pooling": {"layers", "pyramid", "surgery"},
    "pyramid": {"dry_run"},
    "dry_run": set(),
    "branch_structure": {"layers"},
    "branches": {"branch_structure", "dry_run", "layers"},
    "broadcasting": {"branch_structure", "branches", "layers", "surgery"},
    "analysis": {"analysis", "branch_structure", "data", "drawing", "dry_run", "evaluate", "layers", "models"},
    "explain": {"analysis", "branch_structure", "dense", "dry_run", "evaluate", "explain", "layers"},
    "drawing": set(),
    "losses": {"given_weights", "layers", "models"},
    "fusion": {"layers", "surgery"},
    "seeds": set(),
    "provenance": set(),
    "data": {"data", "seeds"},
    "dense": {"data", "dense", "drawing", "dry_run", "layers", "pooling", "pyramid"},
    "train": {"checkpoint", "data", "dense", "drawing", "dry_run", "losses", "models", "seeds", "train"},
    "evaluate": {"branch_structure", "branches", "data", "dry_run", "evaluate", "given_weights", "pyramid", "seeds"},
    "report": {"drawing", "report"},
    "given_weights": {"checkpoint"},
    "packaged_weights": {"checkpoint", "drawing"},
    "run_request": {"broadcasting", "data", "dense", "models", "pooling", "provenance", "train"},
    "training_parts": {"data", "dry_run", "given_weights", "models", "pooling", "run_request", "seeds", "train"},
    "dense_training": {
        "data",
        "dense",
        "dry_run",
        "given_weights",
        "models",
        "run_request",
        "seeds",
        "train",
        "training_parts",
    },
    "training": {
        "dense_training",
        "dry_run",
        "pooling",
        "reporting",
        "run_request",
        "train",
        "training_parts",
    },
    "dense_run": {"data", "dense", "dense_training", "dry_run", "given_weights", "models", "run_request", "train"},
    "dense_evaluating": {"data", "dense", "dense_run", "dense_training", "provenance", "report", "train"},
    "dense_predicting": {"data", "dense", "dense_run", "dense_training", "drawing", "provenance"},
    "dense_commands": {
        "command_line",
        "data",
        "dense_evaluating",
        "dense_predicting",
        "dense_run",
        "evaluation_commands",
        "predicting",
        "report",
        "terminal",
        "train",
    },
    "classifier": {"data", "dry_run", "given_weights", "models", "packaged_weights", "pooling", "run_request", "train"},
    "evaluation_tasks": {"classifier", "data", "evaluate", "train"},
    "evaluating": {"benchmark", "classifier", "data", "evaluate", "evaluation_tasks", "macs"},
    "evaluation_record": {"benchmark", "data", "evaluate", "evaluating", "provenance", "report", "terminal"},
    "reporting": {
        "classifier",
        "data",
        "dense_evaluating",
        "evaluate",
        "evaluating",
        "evaluation_record",
        "evaluation_tasks",
        "report",
        "run_request",
        "seeds",
        "train",
    },
    "predicting": {"classifier", "data", "drawing", "evaluate", "provenance"},
    "analysis_subjects": {"classifier", "data", "dense_run", "dense_training", "train"},
    "analysis_pictures": {"analysis", "analysis_subjects", "data", "evaluation_tasks"},
    "analyzing": {"analysis", "analysis_pictures", "analysis_subjects", "benchmark", "data", "predicting"},
    "analysis_fronts": {
        "analysis",
        "analysis_pictures",
        "analysis_subjects",
        "analyzing",
        "benchmark",
        "classifier",
        "data",
        "evaluate",
        "evaluating",
        "evaluation_tasks",
        "predicting",
        "verify",
    },
    "analysis_record": {"analysis_subjects", "analyzing", "drawing", "provenance"},
    "explanation_files": {"classifier", "data", "drawing", "explain", "predicting", "provenance"},
    "explaining": {"classifier", "data", "explain", "explanation_files", "predicting"},
    "gallery": {"classifier", "data", "drawing", "explain", "explaining", "explanation_files"},
    "demo": {
        "classifier",
        "data",
        "demo",
        "dense",
        "dense_predicting",
        "dense_run",
        "drawing",
        "dry_run",
        "evaluating",
        "explain",
        "macs",
        "pooling",
        "predicting",
        "report",
        "rounds",
        "train",
    },
    "macs": {"dry_run"},
    "export": {"__init__", "checkpoint", "data", "dense_run", "dense_training", "export", "fusion", "layers"},
    "export_subjects": {"checkpoint", "classifier", "data", "evaluation_tasks", "export", "predicting", "provenance"},
    "export_dense": {"data", "dense_run", "export", "export_subjects", "layers", "train"},
    "export_int8": {
        "classifier",
        "data",
        "dry_run",
        "evaluate",
        "evaluation_tasks",
        "export",
        "export_subjects",
        "exported_runtimes",
        "exporting",
    },
    "exporting": {"drawing", "dry_run", "export", "export_subjects", "machine", "rounds"},
    "benchmark_settings": {"layers", "pooling"},
    "exported_runtimes": {"benchmark_settings", "export"},
    "start_up": {"benchmark_settings", "contenders", "export", "exported_runtimes", "fusion", "models"},
    "contenders": {
        "benchmark_settings",
        "broadcasting",
        "exported_runtimes",
        "fusion",
        "layers",
        "losses",
        "macs",
        "pooling",
        "release",
    },
    "rounds": set(),
    "machine": {"__init__", "contenders", "provenance"},
    "call_cost": {"machine"},
    "benchmark": {
        "benchmark_settings",
        "call_cost",
        "contenders",
        "drawing",
        "exported_runtimes",
        "machine",
        "rounds",
        "start_up",
    },
    "benchmark_report": {"benchmark", "benchmark_settings", "drawing"},
    "published_accuracy": {"models", "verify"},
    "accuracy_plot": {
        "benchmark",
        "benchmark_report",
        "benchmark_settings",
        "contenders",
        "drawing",
        "published_accuracy",
    },
    "growth": {"benchmark", "benchmark_report", "contenders", "drawing", "rounds"},
    "release": {"checkpoint", "layers", "models", "surgery"},
    "map_tables": {"layers", "macs", "pooling"},
    "broadcast_tables": {"layers", "macs", "map_tables"},
    "dense_tables": {"dense", "layers", "macs", "map_tables"},
    "verify": {"__init__", "broadcast_tables", "dense_tables", "layers", "macs", "map_tables", "models"},
    "command_line": {"data", "models", "train"},
    "terminal": set(),
    "evaluation_commands": {
        "classifier",
        "command_line",
        "data",
        "dense_commands",
        "evaluate",
        "evaluating",
        "evaluation_record",
        "evaluation_tasks",
        "predicting",
        "report",
        "reporting",
        "run_request",
        "terminal",
        "train",
    },
    "analysis_commands": {
        "analysis",
        "analysis_fronts",
        "analysis_record",
        "analysis_subjects",
        "analyzing",
        "command_line",
        "data",
        "drawing",
        "evaluation_commands",
        "predicting",
        "run_request",
        "terminal",
        "train",
    },
    "explain_commands": {
        "classifier",
        "command_line",
        "data",
        "evaluation_commands",
        "explaining",
        "explanation_files",
        "predicting",
        "run_request",
        "terminal",
        "train",
    },
    "gallery_commands": {
        "classifier",
        "command_line",
        "data",
        "evaluation_commands",
        "explain_commands",
        "explaining",
        "gallery",
        "terminal",
        "train",
    },
    "export_commands": {
        "__init__",
        "benchmark",
        "classifier",
        "command_line",
        "evaluation_commands",
        "explain_commands",
        "export_dense",
        "export_int8",
        "export_subjects",
        "exporting",
        "predicting",
        "terminal",
        "train",
    },
    "app_commands": {"command_line", "demo", "evaluation_commands", "predicting", "terminal", "train"},
    "cli": {
        "__init__",
        "accuracy_plot",
        "analysis_commands",
        "app_commands",
        "benchmark",
        "benchmark_report",
        "command_line",
        "drawing",
        "evaluation_commands",
        "explain_commands",
        "export_commands",
        "gallery_commands",
        "growth",
        "macs",
        "release",
        "terminal",
        "train",
        "training",
        "verify",
    },
    "__init__": {"models"},
    "__main__": {"cli"},
}
OUTSIDE = {
    "layers": {"torch", "timm"},
    "errors": set(),
    "checkpoint": {"torch", "safetensors"},
    "surgery": {"torch", "timm"},
    "weights": {"torch", "timm"},
    "models": {"torch", "timm"},
    "pooling": {"torch", "timm"},
    "pyramid": {"torch"},
    "dry_run": {"torch"},
    "branch_structure": {"torch"},
    "branches": {"torch", "timm"},
    "broadcasting": {"torch"},
    "analysis": {"matplotlib", "numpy", "timm", "torch"},
    "explain": {"PIL", "numpy", "torch"},
    "drawing": {"matplotlib"},
    "losses": {"torch", "timm"},
    "fusion": {"torch", "timm"},
    "seeds": {"numpy", "torch"},
    "provenance": set(),
    "data": {"PIL", "numpy", "timm", "torch", "torchvision", "yaml"},
    "train": {
        "accelerate",
        "jsonargparse",
        "matplotlib",
        "numpy",
        "psutil",
        "rich",
        "safetensors",
        "timm",
        "torch",
        "torchmetrics",
        "yaml",
    },
    "dense": {
        "PIL",
        "faster_coco_eval",
        "numpy",
        "pycocotools",
        "scipy",
        "segmentation_models_pytorch",
        "timm",
        "torch",
        "torchvision",
        "transformers",
    },
    "evaluate": {"PIL", "numpy", "timm", "torch"},
    "report": {"PIL"},
    "given_weights": {"torch"},
    "packaged_weights": {"safetensors", "timm", "torch"},
    "run_request": {"timm", "torch"},
    "training_parts": {"accelerate", "timm", "torch"},
    "dense_training": {"accelerate", "torch"},
    "training": {"accelerate", "torch"},
    "dense_run": {"PIL", "numpy", "torch"},
    "dense_evaluating": {"PIL", "numpy", "torch"},
    "dense_predicting": {"PIL", "torch"},
    "dense_commands": {"rich", "torch"},
    "classifier": {"timm", "torch"},
    "evaluation_tasks": {"numpy"},
    "evaluating": {"numpy", "torch"},
    "evaluation_record": {"rich"},
    "reporting": {"PIL", "torch"},
    "predicting": {"rich", "torch"},
    "analysis_subjects": {"torch"},
    "analysis_pictures": {"PIL", "torch"},
    "analyzing": set(),
    "analysis_fronts": set(),
    "analysis_record": {"matplotlib"},
    "explanation_files": {"PIL", "numpy", "torch"},
    "explaining": {"PIL", "torch"},
    "gallery": set(),
    "demo": {"PIL", "fastapi", "gradio", "h11", "timm", "torch", "uvicorn"},
    "macs": {"torch", "timm"},
    "export": {"PIL", "executorch", "nncf", "numpy", "onnx", "onnxruntime", "openvino", "timm", "torch"},
    "export_subjects": {"numpy", "torch"},
    "export_dense": {"PIL", "numpy", "torch"},
    "export_int8": {"numpy", "torch"},
    "exporting": {"numpy", "torch"},
    "benchmark_settings": {"torch"},
    "exported_runtimes": {"executorch", "numpy", "safetensors", "torch"},
    "start_up": {"executorch", "numpy", "onnxruntime", "openvino", "safetensors", "torch"},
    "published_accuracy": {"timm", "yaml"},
    "accuracy_plot": {"matplotlib"},
    "contenders": {"torch", "timm"},
    "rounds": set(),
    "machine": {"torch", "timm"},
    "call_cost": {"torch"},
    "benchmark": {"torch", "timm"},
    "benchmark_report": {"rich", "matplotlib"},
    "growth": {"rich", "matplotlib"},
    "release": {"torch", "safetensors"},
    "map_tables": {"torch", "timm"},
    "broadcast_tables": {"torch"},
    "dense_tables": {"torch"},
    "verify": {"torch", "timm", "rich", "yaml"},
    "command_line": {"jsonargparse", "yaml"},
    "terminal": {"rich"},
    "evaluation_commands": {"rich", "torch"},
    "analysis_commands": {"rich", "timm"},
    "explain_commands": {"rich", "torch"},
    "gallery_commands": {"torch"},
    "export_commands": {"timm", "torch"},
    "app_commands": {"torch"},
    "cli": {"torch", "timm", "rich", "jsonargparse"},
    "__init__": set(),
    "__main__": set(),
}
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}


def part(file: str) -> str:
    return file.partition("/")[0].removesuffix(".py")


@cache
def modules(file: str, source: str | None = None) -> frozenset[str]:
    """Absolute names of all that a file imports, the imported names included: they may be modules."""
    tree = ast.parse((ROOT / file).read_text("utf-8") if source is None else source)
    package = ["broadsight", *Path(file).parts[:-1]]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = node.args[0].value if isinstance(node.args[0], ast.Constant) else "?"
            found.add("broadsight" + name if name.startswith(".") else name)
    return frozenset(found)


def parts_of_ours(names: Set[str]) -> set[str]:
    """Parts of the package among absolute names; `from . import x` is `__init__` unless x is a file or folder."""
    parts = set()
    for name in names:
        top, *rest = name.split(".")
        if top == "broadsight":
            known = rest and ((ROOT / rest[0]).is_dir() or (ROOT / f"{rest[0]}.py").exists())
            parts.add(rest[0] if known else "__init__")
    return parts


def test_modules__sees_every_way_to_import():
    source = """
import timm.models, os
from . import __version__
def late():
    from .macs import count
    from ..layers.folding import fold
    import_module(".models", __package__)
    importlib.import_module("matplotlib.figure")
"""
    assert modules("models/x.py", source) == {
        "timm.models",
        "os",
        "broadsight.models.__version__",
        "broadsight.models.macs.count",
        "broadsight.layers.folding.fold",
        "broadsight.models",
        "matplotlib.figure",
    }
    assert parts_of_ours(modules("models/x.py", source)) == {"models", "layers"}
    assert parts_of_ours(modules("cli.py", "from . import __version__, benchmark")) == {"__init__", "benchmark"}


def test_table__names_every_part():
    assert {part(file) for file in FILES} == INSIDE.keys() == OUTSIDE.keys()


@pytest.mark.parametrize("file", FILES)
def test_imports__point_one_way(file):
    assert parts_of_ours(modules(file)) <= INSIDE[part(file)] | EVERYBODYS


@pytest.mark.parametrize("file", FILES)
def test_imports__known_libraries_alone(file):
    libraries = {name.partition(".")[0] for name in modules(file)} - {"broadsight", "?"}
    assert libraries - set(sys.stdlib_module_names) <= OUTSIDE[part(file)]


@pytest.mark.parametrize("file", [file for file in FILES if part(file) == "layers"])
def test_layers__know_no_registry(file):
    timm_modules = {name for name in modules(file) if name.startswith("timm")}
    assert {name for name in timm_modules if not name.startswith("timm.layers.")} == set()


@pytest.mark.parametrize("file", FILES)
def test_timm__private_modules_in_one_file_alone(file):
    private = {name for name in modules(file) if name.startswith("timm.") and "._" in name}
    assert (private != set()) == (file == "models/_backbone.py")
    assert all(name.startswith("timm.models._") for name in private)


@pytest.mark.parametrize("file", FILES)
def test_names__say_what_a_file_is_for(file):
    assert FORBIDDEN_NAMES.isdisjoint({Path(file).stem.strip("_"), *Path(file).parts[:-1]})


def test_imports__by_computed_name_in_the_package_alone():
    assert [file for file in FILES if "?" in modules(file)] == ["__init__.py"]  # its public names load on first use


def test_models__import_no_other_model():
    for file in (file for file in FILES if part(file) == "models" and not Path(file).name.startswith("_")):
        ours = {name.split(".")[2] for name in modules(file) if name.startswith("broadsight.models.")}
        assert all(name.startswith("_") for name in ours), file
