"""PT2: torch's own archive of an exported program, run by torch; what lies inside is looked at before torch sees it.
torch.export.load unpickles, evaluates formulas of open sizes, executes guards, loads compiled code and calls operators
by any name. Here every entry, name, operator and formula is one that exported models need, or it is refused."""

import ast
import io
import json
import math
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from ..agreement import listed
from ..session import KEY, Description, Session
from . import Format, described, register

DESCRIPTION = f"{KEY}.json"  # its name inside the archive
MODEL, WEIGHTS, CONSTANTS = "models/model.json", "data/weights/", "data/constants/"
SAMPLES = "data/sample_inputs/model.pt"
CONFIGS = {f"{WEIGHTS}model_weights_config.json": WEIGHTS, f"{CONSTANTS}model_constants_config.json": CONSTANTS}
PLAIN = {"archive_format": rb"pt2", "archive_version": rb"0", "byteorder": rb"little"}
PLAIN |= {".data/version": rb"\d{1,4}\n?", "version": rb"\d{1,4}\n?", ".data/serialization_id": rb"\d{1,64}"}
PLAIN |= {".format_version": rb"\d{1,4}\n?", ".storage_alignment": rb"\d{1,8}\n?"}
NEEDED = (MODEL, *CONFIGS, "archive_format", "archive_version")
KNOWN = {*PLAIN, *NEEDED, SAMPLES}
PAYLOAD = re.compile(r"data/(weights/weight|constants/tensor)_\d+")
EXTRA = re.compile(r"extra/\w+\.json")
UNREADABLE = (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, OverflowError, OSError, ValueError)
LARGEST = 2**28  # bytes of a description

NAME, PATH = re.compile(r"[A-Za-z_]\w{0,199}"), re.compile(r"[\w.]{0,400}")
ATEN = re.compile(r"torch\.ops\.aten\.([A-Za-z]\w*|__(?:and|or|xor)__|_\w+)\.\w+")
# Of the operators for torch's own use, those that programs hold; of the others, those that touch files or memory.
INTERNAL = {"_assert_scalar", "_assert_tensor_metadata", "_assert_async", "_to_copy", "_softmax", "_log_softmax"}
INTERNAL |= {"_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_native_batch_norm_legit_no_training"}
UNSAFE = {"from_file", "save", "load", "set_", "set_data", "resize_", "resize", "eval", "warn", "print", "open"}
ON_SIZES = "add sub mul floordiv truediv mod neg and_ or_ not_ getitem eq ne lt le gt ge"
OPERATORS = {f"_operator.{name}" for name in ON_SIZES.split()}
OPERATORS |= {f"torch.sym_{name}" for name in ("not", "max", "min", "int", "float", "ite", "sum", "sqrt")}
OPERATORS |= {f"math.{name}" for name in ("ceil", "floor", "trunc", "sqrt")}
OPERATORS |= {f"torch.ops.torchvision.{name}.default" for name in ("nms", "roi_align", "deform_conv2d")}
# Which operators take words, and which words.
WORDED = {"_assert_scalar", "_assert_async", "pad", "gelu", "div", "div_", "einsum", "meshgrid", "conv1d", "conv2d"}
WORD = re.compile(r"[a-z_]{0,20}|[A-Za-z,.\-> ]{1,60}")
KINDS = "tensor tensors optional_tensor optional_tensors int ints float floats bool bools none name expr string device"
KINDS += " sym_int sym_ints sym_float sym_floats sym_bool sym_bools layout memory_format scalar_type"
VALUES = {f"as_{kind}" for kind in KINDS.split()}
NAMED = {"name", "as_name", "parameter_name", "buffer_name", "tensor_constant_name", "fqn"}
LOOKED_AT = {"target", "as_string", "in_spec", "out_spec", "forward_arg_names"}  # already, where they stand
BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 2, 7: 4, 8: 8, 12: 1, 13: 2}  # of a number, by torch's code for its type
NOT_FINITE = ("Infinity", "-Infinity", "NaN")  # as JSON has no such numbers, torch writes their names
TREES = (None, "builtins.tuple", "builtins.list", "builtins.dict")

# Formulas of open sizes, which torch evaluates as Python.
LONGEST, MOST_DIGITS, HIGHEST = 20_000, 20, 8  # characters, digits of a number, exponent
SYMBOL = re.compile(r"[a-z]{1,4}\d{1,6}")
ARGUMENT = re.compile(r"L\['[A-Za-z_]\w*'\]\.size\(\)\[\d\]")
ASSUMED = {"positive", "integer", "nonnegative", "nonzero", "real", "finite", "extended_real", "negative", "zero"}
POWERS = {"Pow", "PowByNatural", "FloatPow"}
FUNCTIONS = "Symbol Integer Float Rational Add Mul Max Min Not And Or Where Mod Identity Eq Ne Lt Le Gt Ge Equality"
FUNCTIONS += " Unequality StrictLessThan LessThan StrictGreaterThan GreaterThan FloorDiv ModularIndexing PythonMod"
FUNCTIONS += " CleanDiv CeilDiv CeilToInt FloorToInt TruncToInt TruncToFloat RoundToInt RoundDecimal ToFloat IntTrueDiv"
CALLED = {*FUNCTIONS.split(), "FloatTrueDiv", "floor", "ceiling", "max", "min", *POWERS}
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.USub, ast.Not, ast.And, ast.Or)
ARITHMETIC += (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Load)  # and what these stand in
ARITHMETIC += (ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare)


@register
class PT2(Format):
    name, files, runtime = "pt2", (".pt2",), "torch.export"
    guarded = True
    precisions = ("fp32", "bf16", "fp16")

    def write(self, program: ExportedProgram, description: Description, path: Path) -> None:
        """One archive, which holds no pickle and nothing about this machine."""
        archive = io.BytesIO()
        torch.export.save(program, archive, extra_files={DESCRIPTION: description.to_json()})
        archive.seek(0)
        try:
            whole, _ = clean(archive, own=True)
        except ValueError as error:
            raise ValueError(f"torch {torch.__version__} writes what cannot be opened safely: {error}") from None
        path.write_bytes(whole.getbuffer())

    def load(self, path: Path, threads: int | None) -> Session:
        archive, beside = clean(path)
        description = described(beside, DESCRIPTION)
        program: Any = torch.export.load(archive)
        # Stored without an example, which would be pickled; with one, torch keeps checking sizes as it was captured.
        program.example_inputs = ((torch.empty(1, *description.shape, device="meta"),), {})
        module = program.module()
        if threads is not None:
            torch.set_num_threads(threads)  # in the whole process

        def run(images: np.ndarray) -> list[np.ndarray]:
            with torch.no_grad():
                return [one.numpy() for one in listed(module(torch.from_numpy(images)))]

        return Session(description, run, description.precision)


class Refused(ValueError):
    """An archive that holds more than a model."""


def clean(archive: str | Path | io.BytesIO, *, own: bool = False) -> tuple[io.BytesIO, dict[str, str]]:
    """An archive, as torch.export.save writes it, of the same model that holds nothing to execute, and the files beside
    the model by name. `own`: it was written here just now, and pickled sample inputs are left out, not refused."""
    root, entries = _entries(archive)
    if entries.get(SAMPLES) and not own:
        raise Refused("it holds pickled sample inputs, which could run code; export the model again")
    entries[SAMPLES] = b""
    for name, pattern in PLAIN.items():
        if name in entries and not re.fullmatch(pattern, entries[name]):
            raise Refused(f"its {name} is {entries[name][:20]!r}")
    if missing := [name for name in NEEDED if name not in entries]:
        raise Refused(f"it holds no {missing[0]}")
    for place in (*CONFIGS, MODEL):
        try:
            if len(entries[place]) > LARGEST:
                raise ValueError
            content = json.loads(entries[place])
        except (ValueError, RecursionError) as error:
            raise Refused(f"its {place} is damaged ({type(error).__name__})") from None
        if not isinstance(content, dict):
            raise Refused(f"its {place} is damaged")
        if place == MODEL:
            _check_program(content)
        else:
            _check_payloads(content, CONFIGS[place], entries)
        entries[place] = json.dumps(content).encode()
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w", zipfile.ZIP_STORED) as target:
        for name, content in entries.items():
            target.writestr(zipfile.ZipInfo(f"{root}/{name}"), content)
    found.seek(0)
    extra = [name for name in entries if EXTRA.fullmatch(name)]
    try:
        return found, {name.removeprefix("extra/"): entries[name].decode() for name in extra}
    except UnicodeDecodeError:
        raise Refused(f"its {' or '.join(extra)} is damaged") from None


def _entries(archive: str | Path | io.BytesIO) -> tuple[str, dict[str, bytes]]:
    """The name of the archive's one folder, and what is in it, each entry known by its name and stored as it is."""
    found, root = dict[str, bytes](), ""
    try:
        with zipfile.ZipFile(archive) as source:
            for entry in source.infolist():
                folder, _, name = entry.filename.partition("/")
                root = root or folder
                pickled = "pickled " if name.endswith((".pt", ".pkl")) or "_obj_" in name else ""
                if folder != root or not (name in KNOWN or PAYLOAD.fullmatch(name) or EXTRA.fullmatch(name)):
                    raise Refused(f"it holds a {pickled}entry {entry.filename[:80]!r}, which is not part of a model")
                if name in found:
                    raise Refused(f"it holds {name} twice")
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                    raise Refused(f"its entry {name} is compressed, as torch writes none")
                found[name] = source.read(entry)
    except Refused:
        raise
    except UNREADABLE as error:
        raise Refused(f"it is no archive of torch ({next(iter(str(error).splitlines()), 'damaged')})") from None
    return root, found


def _check_payloads(config: dict[str, Any], below: str, entries: dict[str, bytes]) -> None:
    """Tensors lie in entries of their own as plain numbers, all of them."""
    if config.keys() != {"config"} or not isinstance(config["config"], dict):
        raise Refused(f"what it says of {below} is damaged")
    for name, said in config["config"].items():
        try:
            meta, entry = said["tensor_meta"], f"{below}{said['path_name']}"
            if said["use_pickle"] is not False:
                raise Refused(f"{name[:80]!r} in it is pickled, which could run code")
            if not PATH.fullmatch(name) or not PAYLOAD.fullmatch(entry) or entry not in entries:
                raise Refused(f"{name[:80]!r} in it lies in {said['path_name']!r}, which is no entry of tensors")
            for value in (*meta["sizes"], *meta["strides"], meta["storage_offset"]):
                if type(value["as_int"]) is not int or len(value) != 1:
                    raise TypeError
            numbers = math.prod(side["as_int"] for side in meta["sizes"])
            steps = [stride["as_int"] for stride in meta["strides"]]
            if min([*steps, meta["storage_offset"]["as_int"], numbers]) < 0 or meta["layout"] != 7:
                raise Refused(f"{name[:80]!r} in it has no plain layout")
            if numbers * BYTES[meta["dtype"]] > len(entries[entry]) or meta["device"]["type"] != "cpu":
                raise Refused(f"{name[:80]!r} in it is larger than what is stored of it")
        except (KeyError, TypeError, AttributeError) as error:
            raise Refused(f"what it says of {name[:80]!r} is damaged ({type(error).__name__})") from None


def _check_program(program: dict[str, Any]) -> None:
    """The graph, its formulas and names; what only developers read is emptied."""
    try:
        if not set(program["verifiers"]) <= {"TRAINING", "ATEN"}:
            raise Refused(f"it wants to be verified by {program['verifiers']!r}")
        for guard in program.get("guards_code") or []:
            check_guard(guard)
        module = program["graph_module"]
        module["metadata"], graph = {}, module["graph"]
        if module.get("treespec_namedtuple_fields") or graph.get("custom_obj_values"):
            raise Refused("it holds objects beside tensors")
        for node in graph["nodes"]:
            node["metadata"] = {}
            _check_node(node)
        for signature in filter(None, (call["signature"] for call in module["module_call_graph"])):
            for key in ("in_spec", "out_spec"):
                _check_tree(json.loads(signature[key])[1])
            if not all(NAME.fullmatch(name) for name in signature["forward_arg_names"] or []):
                raise Refused("it names arguments by what is no name")
        _walk({**program, "guards_code": [], "verifiers": [], "torch_version": None}, "")
    except (KeyError, TypeError, AttributeError, IndexError, json.JSONDecodeError, RecursionError) as error:
        raise Refused(f"its {MODEL} is damaged ({type(error).__name__})") from None


def _check_node(node: dict[str, Any]) -> None:
    target = node["target"]
    aten = ATEN.fullmatch(target)
    name = aten[1] if aten else ""
    internal = name.startswith("_") and not name.startswith("__") and name not in INTERNAL
    if target not in OPERATORS and (not aten or internal or name in UNSAFE):
        raise Refused(f"it calls {target[:80]!r}, which is no operator of a model")
    for given in node["inputs"]:
        said = given["arg"].get("as_string")
        message = said is not None and given["name"] == "assert_msg" and len(said) < 5000
        if said is not None and (name not in WORDED or not (message or WORD.fullmatch(said))):
            raise Refused(f"it gives {target[:80]!r} the text {said[:40]!r}")


def _check_tree(spec: dict[str, Any]) -> None:
    if spec["type"] not in TREES:
        raise Refused(f"it takes or gives a {str(spec['type'])[:80]!r}; expected tensors, tuples, lists and dicts")
    keys = json.loads(spec["context"] or "null")
    if keys and not all(isinstance(key, str) and NAME.fullmatch(key) for key in keys):
        raise Refused("it takes or gives what has no name")
    for child in spec["children_spec"]:
        _check_tree(child)


def _walk(value: Any, key: str) -> None:
    """Whatever text there is must be a name, a formula, or one of those that were looked at already."""
    if isinstance(value, dict):
        for name, below in value.items():
            if not isinstance(name, str) or not PATH.fullmatch(name) or (name.startswith("as_") and name not in VALUES):
                raise Refused(f"it holds {name[:80]!r}, which no model needs")
            _walk(below, name)
    elif isinstance(value, list):
        for below in value:
            _walk(below, key)
    elif isinstance(value, str):
        if key == "expr_str":
            check_expression(value)
        elif key in NAMED and not PATH.fullmatch(value):
            raise Refused(f"it calls something {value[:80]!r}, which is no name")
        elif key in ("as_float", "as_floats") and value not in NOT_FINITE:
            raise Refused(f"it gives {value[:40]!r} as a number")
        elif key == "type" and value != "cpu":
            raise Refused(f"it wants the device {value[:40]!r}; expected cpu")
        elif key not in {*NAMED, *LOOKED_AT, "as_float", "as_floats", "type"}:
            raise Refused(f"it says {key}={value[:40]!r}, which no model needs")


def check_guard(text: Any) -> None:
    """Refuse a guard that is more than arithmetic of an image's sides, such as "L['x'].size()[2] % 32 == 0"."""
    check_expression(ARGUMENT.sub("s1", text) if isinstance(text, str) else f"no text: {text}")


def check_expression(text: str) -> None:
    """Refuse a formula that is more than arithmetic, such as "Add(Symbol('s0', positive=True), Integer(1))" is."""
    if not _is_arithmetic(text):
        raise Refused(f"its formula {text[:60]!r} is more than arithmetic of sizes")


def _is_arithmetic(text: str) -> bool:
    if len(text) > LONGEST or not text.isascii() or "\n" in text:
        return False
    try:
        formula = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    checked, powers = set[ast.AST](), 0  # nodes, beside what holds them
    for node in ast.walk(formula):
        if node in checked or isinstance(node, ARITHMETIC):
            continue
        number = node.value if isinstance(node, ast.Constant) else None
        if isinstance(number, int | float) and len(str(number)) <= MOST_DIGITS:
            continue
        if isinstance(node, ast.Name) and (node.id in ("true", "false", "True", "False") or SYMBOL.fullmatch(node.id)):
            continue
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLED):
            return False
        checked |= {node.func, *node.keywords, *(keyword.value for keyword in node.keywords)}
        for keyword in node.keywords:
            if keyword.arg not in ASSUMED or not isinstance(getattr(keyword.value, "value", None), bool):
                return False
        if node.func.id == "Symbol":
            name = getattr(node.args[0], "value", None) if len(node.args) == 1 else None
            if not (isinstance(name, str) and SYMBOL.fullmatch(name)):
                return False
            checked.add(node.args[0])
        powers += node.func.id in POWERS
        if node.func.id in POWERS and (powers > 3 or len(node.args) != 2 or not _is_small(node.args[1])):
            return False
    return True


def _is_small(node: ast.AST) -> bool:
    """Whether an exponent is a small whole number, plain or wrapped in Integer()."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Integer" and node.args:
        node = node.args[0]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) <= HIGHEST
