"""A module does not carry the name of a name that its package exports lazily.

`hp_platform.lazy.attach` answers for what a package lacks. Once a module `show` is loaded, the package has an attribute `show`,
the module, and the exported function of that name is out of reach.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from lint.violation import Violation


def check(root: Path) -> Iterator[Violation]:
    """Modules in the way of names in the tables that packages give to `attach`."""
    for init in sorted(root.glob("packages/*/src/**/__init__.py")):
        for line, name in exported(ast.parse(init.read_text(encoding="utf-8"))):
            for module in (init.parent / f"{name}.py", init.parent / name):
                if module.is_file() or (module / "__init__.py").is_file():
                    yield Violation(
                        module,
                        0,
                        "lazy-name",
                        f"the module has the name of {name!r}, which {init.parent.name} exports lazily (line {line})",
                        "loading the module makes it the package's attribute, and hides what is exported",
                        "give the module another name, or export the module itself (its place is '.')",
                    )


def exported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of every lazily exported name, but for modules that are exported themselves."""
    tables = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "attach"):
            continue
        for arg in call.args:
            table = tables.get(arg.id) if isinstance(arg, ast.Name) else arg
            if isinstance(table, ast.Dict):
                for key, place in zip(table.keys, table.values, strict=True):
                    is_module = isinstance(place, ast.Constant) and place.value == "."
                    if isinstance(key, ast.Constant) and isinstance(key.value, str) and not is_module:
                        yield key.lineno, key.value
