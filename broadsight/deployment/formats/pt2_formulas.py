"""Formulas of open sizes in PT2 archives: torch evaluates them as Python, so they are parsed and looked at first."""

import ast
import re

LONGEST, MOST_DIGITS, HIGHEST = 20_000, 20, 8  # characters, digits of a number, exponent

SYMBOL = re.compile(r"[a-z]{1,4}\d{1,6}")
ASSUMED = {"positive", "integer", "nonnegative", "nonzero", "real", "finite", "extended_real", "negative", "zero"}
POWERS = {"Pow", "PowByNatural", "FloatPow"}
FUNCTIONS = {"Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Max", "Min", "Not", "And", "Or", "Where", "Mod"}
FUNCTIONS |= {"Equality", "Unequality", "StrictLessThan", "LessThan", "StrictGreaterThan", "GreaterThan", "Identity"}
FUNCTIONS |= {"Eq", "Ne", "Lt", "Le", "Gt", "Ge", "FloorDiv", "ModularIndexing", "PythonMod", "CleanDiv", "CeilDiv"}
FUNCTIONS |= {"CeilToInt", "FloorToInt", "TruncToInt", "TruncToFloat", "RoundToInt", "RoundDecimal", "ToFloat"}
FUNCTIONS |= {"IntTrueDiv", "FloatTrueDiv", "floor", "ceiling", "max", "min", *POWERS}
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.USub, ast.Not, ast.And, ast.Or)
ARITHMETIC += (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Load)  # and what these stand in
ARITHMETIC += (ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare)
ARGUMENT = re.compile(r"L\['[A-Za-z_]\w*'\]\.size\(\)\[\d\]")


def check_expression(text: str) -> None:
    """Refuse a formula that is more than arithmetic of sizes, such as "Add(Symbol('s0', positive=True), Integer(1))".

    Raises:
        ValueError: With the formula's beginning.
    """
    checked: set[ast.AST] = set()  # beside what holds them
    powers = 0
    for node in ast.walk(_parsed(text)):
        if node in checked or isinstance(node, ARITHMETIC):
            continue
        if isinstance(node, ast.Constant) and _is_number(node.value):
            continue
        if isinstance(node, ast.Name) and (node.id in ("true", "false", "True", "False") or SYMBOL.fullmatch(node.id)):
            continue
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS):
            raise _refused(text)
        checked |= {node.func, *node.keywords, *(keyword.value for keyword in node.keywords)}
        for keyword in node.keywords:
            if keyword.arg not in ASSUMED or not isinstance(getattr(keyword.value, "value", None), bool):
                raise _refused(text)
        if node.func.id == "Symbol":
            name = getattr(node.args[0], "value", None) if len(node.args) == 1 else None
            if not (isinstance(name, str) and SYMBOL.fullmatch(name)):
                raise _refused(text)
            checked.add(node.args[0])
        if node.func.id in POWERS:
            powers += 1
            if powers > 3 or len(node.args) != 2 or not _is_small(node.args[1]):
                raise _refused(text)


def check_guard(text: str) -> None:
    """Refuse a guard that is more than arithmetic of an image's sides, such as "L['x'].size()[2] % 32 == 0"."""
    if not isinstance(text, str):
        raise _refused(str(text))
    check_expression(ARGUMENT.sub("s1", text))


def _parsed(text: str) -> ast.AST:
    if len(text) > LONGEST or not text.isascii() or "\n" in text:
        raise _refused(text)
    try:
        return ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _refused(text) from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and len(str(value)) <= MOST_DIGITS


def _is_small(node: ast.AST) -> bool:
    """Whether an exponent is a small whole number, plain or wrapped in Integer()."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Integer" and node.args:
        node = node.args[0]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) <= HIGHEST


def _refused(text: str) -> ValueError:
    return ValueError(f"its formula {text[:60]!r} is more than arithmetic of sizes")
