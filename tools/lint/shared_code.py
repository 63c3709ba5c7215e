"""Runs the rules over shared code: all code that exists once for every framework."""

import ast
from collections.abc import Iterator
from pathlib import Path

from lint import exemptions, rules
from lint.violation import Violation

# Code that is written for one framework, or that only tests use.
ROOMS_OF_ONE_FRAMEWORK = ("hp_platform/torch", "hp_platform/mindspore", "hp_platform/testing")
ADAPTERS = frozenset({"_torch", "_mindspore"})
"""Names of files or folders in a package that belong to one framework."""


def check(root: Path) -> Iterator[Violation]:
    """All violations under `packages/*/src`, except in the rooms of one framework."""
    for source in sorted(root.glob("packages/*/src/**/*.py")):
        if not any(f"/src/{room}/" in source.as_posix() for room in ROOMS_OF_ONE_FRAMEWORK):
            yield from check_file(source)


def check_file(path: Path) -> Iterator[Violation]:
    """All violations in one file, exemptions applied. An adapter file may be in place, but names no device's module."""
    source = path.read_text(encoding="utf-8")
    findings = [finding for rule in rules.TEXT_RULES for finding in rule(source)]
    if not ADAPTERS.intersection((*path.parent.parts, path.stem)):
        tree = ast.parse(source, filename=str(path))
        findings += [finding for rule in rules.TREE_RULES for finding in rule(tree)]
    if "/src/hp_platform/" in path.as_posix():
        # hp_platform itself has to choose a framework and a device by name.
        findings = [finding for finding in findings if finding.rule != "framework-branch"]
    for found in exemptions.apply(findings, source):
        yield Violation(path, found.line, found.rule, found.what, found.why, found.instead)
