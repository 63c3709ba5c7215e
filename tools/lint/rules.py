"""The rules of shared code, each a function from the parsed source to what it refuses.

[Note: what a lint cannot know] A lint sees names, not types. It takes a receiver for the platform, or for a collective,
by its name (PLATFORM_NAMES, COLLECTIVE_NAMES), and takes everything else for a tensor. Where that is wrong, the line says
so itself: `# lint: allow in-place-method: a list, not a tensor` (see `exemptions`).
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

# A platform by its name, whatever it hangs on: platform, self.platform, mesh._platform, get_platform().
PLATFORM_NAMES = frozenset({"platform", "_platform", "get_platform"})
# The functions that take `out=` because a collective writes into a given buffer by contract.
COLLECTIVE_NAMES = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "scatter",
)
# What holds collectives as attributes: `collectives.anything(out=...)`.
COLLECTIVE_RECEIVERS = frozenset({"collectives", "comm", "_comm"})

NAMES_OF_FRAMEWORKS_AND_DEVICES = frozenset({"torch", "mindspore", "cuda", "npu"})
# Expressions that hold the name of a framework or device: platform.platform_type, mesh.device_type, x.device.type.
NAME_HOLDERS = re.compile(r"(^|_)(platform_type|platform_name|device_type|device_name|backend_name)$")
DEVICE_MODULE = re.compile(r"\btorch\s*\.\s*(cuda|npu)\b")

# In-place by name, but they set a flag and no number: they work on both frameworks.
FLAG_SETTERS = frozenset({"requires_grad_"})

SILENT = "MindSpore on CPU ignores in-place arithmetic silently: the tensor keeps its old value"


@dataclass(frozen=True)
class Finding:
    """What one rule refuses in one place."""

    line: int
    rule: str
    what: str
    why: str
    instead: str


def in_place_method(tree: ast.AST) -> Iterator[Finding]:
    """`x.add_(y)`: a method that ends in one underscore, on anything but the platform."""
    for call, method in _method_calls(tree):
        name, receiver = method.attr, method.value
        in_place = name.endswith("_") and not name.endswith("__") and name not in FLAG_SETTERS
        if in_place and not is_platform(receiver):
            text = ast.unparse(receiver)
            yield Finding(
                call.lineno,
                "in-place-method",
                f"{text}.{name}(...) looks like an in-place method of a tensor",
                SILENT,
                f"platform.{name}({text}, ...), or the function without the underscore and its result",
            )


def out_argument(tree: ast.AST) -> Iterator[Finding]:
    """`matmul(a, b, out=c)`: only the platform and collectives write into a given buffer."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if any(keyword.arg == "out" for keyword in call.keywords) and not _may_take_out(call.func):
            text = ast.unparse(call.func)
            yield Finding(
                call.lineno,
                "out-argument",
                f"{text}(..., out=...) writes into a tensor that was given",
                SILENT,
                "use the result, or platform.copy_(target, result); collectives may take out=",
            )


def augmented_assignment(tree: ast.AST) -> Iterator[Finding]:
    """`x += y`: in place for a tensor and a new object for a number; shared code does not lean on the difference."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign):
            target, value = ast.unparse(node.target), ast.unparse(node.value)
            operator = ast.unparse(ast.BinOp(ast.Name("x"), node.op, ast.Name("y")))[2:-2]
            yield Finding(
                node.lineno,
                "augmented-assignment",
                f"{target} {operator}= {value} is in place if {target} is a tensor",
                SILENT,
                f"{target} = {target} {operator} {value}, or platform.{_in_place_function(node.op)}",
            )


def framework_branch(tree: ast.AST) -> Iterator[Finding]:
    """`if platform.platform_type == "torch"`, also with `in`, `is`, `match` and `startswith`."""
    for node in ast.walk(tree):
        for named in _compared_with_a_name(node):
            yield Finding(
                named.lineno,
                "framework-branch",
                f"a branch on the name of a framework or device: {ast.unparse(named)}",
                "an algorithm is written once for all frameworks; what differs belongs into the platform",
                'platform.supports("..."), or a function of the platform or of its device handle',
            )


def framework_import(tree: ast.AST) -> Iterator[Finding]:
    """`import_module("torch")`: an import that the import contracts cannot see."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if _last_name(call.func) in {"import_module", "__import__"} and call.args:
            module = call.args[0]
            if isinstance(module, ast.Constant) and isinstance(module.value, str):
                name = module.value.split(".")[0]
                if name in {"torch", "torch_npu", "mindspore"}:
                    yield Finding(
                        call.lineno,
                        "framework-import",
                        f"imports {module.value} by its name",
                        "frameworks are imported in hp_platform/torch, hp_platform/mindspore, and adapters named _torch and _mindspore only",
                        "a function of the platform",
                    )


def device_module(source: str) -> Iterator[Finding]:
    """`torch.cuda` or `torch.npu`, in code, comments and docstrings alike."""
    for number, line in enumerate(source.splitlines(), start=1):
        if found := DEVICE_MODULE.search(line):
            yield Finding(
                number,
                "device-module",
                f"names {found.group()}",
                "what is special to a device stands in the device modules of hp_platform",
                "platform.device(), the handle of the device in use",
            )


TREE_RULES = (in_place_method, out_argument, augmented_assignment, framework_branch, framework_import)
TEXT_RULES = (device_module,)
RULE_NAMES = frozenset(rule.__name__.replace("_", "-") for rule in (*TREE_RULES, *TEXT_RULES))


def is_platform(receiver: ast.expr) -> bool:
    """Whether an expression is taken for the platform, by its last name."""
    return _last_name(receiver) in PLATFORM_NAMES


def _method_calls(tree: ast.AST) -> Iterator[tuple[ast.Call, ast.Attribute]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node, node.func


def _last_name(expression: ast.expr) -> str:
    """`c` of `a.b.c`, of `c` and of `a.b.c()`; empty for anything else."""
    match expression:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=function):
            return _last_name(function)
    return ""


def _may_take_out(function: ast.expr) -> bool:
    if isinstance(function, ast.Attribute):
        receiver = function.value
        if is_platform(receiver) or _last_name(receiver) in COLLECTIVE_RECEIVERS:
            return True
    name = _last_name(function)
    # A class is not a tensor function, and replace makes a dataclass anew: there `out` is a field.
    return name[:1].isupper() or name == "replace" or name.lstrip("_").startswith(COLLECTIVE_NAMES)


def _in_place_function(operator: ast.operator) -> str:
    return {ast.Add: "add_", ast.Sub: "add_", ast.Mult: "mul_"}.get(type(operator), "copy_")


def _compared_with_a_name(node: ast.AST) -> Iterator[ast.expr]:
    """The comparison at `node` (not below it), if it compares a holder of a name with the name of a framework or device."""
    match node:
        case ast.Compare(left=left, comparators=comparators) as comparison:
            sides = [left, *comparators]
            if any(map(_holds_a_name, sides)) and any(map(_is_a_name, sides)):
                yield comparison
        case ast.Match(subject=subject, cases=cases) if _holds_a_name(subject):
            parts = [part for case in cases for part in ast.walk(case.pattern)]
            if any(isinstance(part, ast.expr) and _is_a_name(part) for part in parts):
                yield subject
        case (
            ast.Call(
                func=ast.Attribute(value=holder, attr="startswith" | "endswith"), args=[name, *_]
            ) as call
        ):
            if _holds_a_name(holder) and _is_a_name(name):
                yield call


def _holds_a_name(expression: ast.expr) -> bool:
    match expression:
        case ast.Attribute(value=value, attr="name" | "value" | "type"):
            # platform.name, platform.platform_type.value, x.device.type
            last = _last_name(value)
            return last in PLATFORM_NAMES or last == "device" or _holds_a_name(value)
        case ast.Call(func=ast.Attribute(value=value, attr="lower" | "split")):
            return _holds_a_name(value)
        case ast.Subscript(value=value):
            return _holds_a_name(value)
    return bool(NAME_HOLDERS.search(_last_name(expression)))


def _is_a_name(expression: ast.expr) -> bool:
    match expression:
        case ast.Constant(value=str(text)):
            return text.split(":")[0] in NAMES_OF_FRAMEWORKS_AND_DEVICES
        case ast.Attribute(value=value, attr=member):
            return _last_name(value) == "PlatformType" and member.isupper()
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            return any(map(_is_a_name, parts))
    return False
