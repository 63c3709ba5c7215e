"""Every rule fires on what it is for, and only on that."""

import ast

import pytest

from lint import rules

REFUSED = {
    "in-place-method": [
        "x.add_(y)",
        "self.weight.zero_()",
        "p.data.copy_(q)",
        "torch.nn.init.normal_(w)",
        "platform_like.add_(x, y)",
        "xs[0].mul_(2)",
    ],
    "out-argument": [
        "matmul(a, b, out=c)",
        "x.sum(0, out=y)",
        "np.add(a, b, out=a)",
    ],
    "augmented-assignment": [
        "x += y",
        "self.total -= 1",
        "xs[0] *= 2",
        "x @= y",
        "x |= y",
    ],
    "framework-branch": [
        "if platform.platform_type == 'torch': pass",
        "if self.platform.platform_type is PlatformType.MINDSPORE: pass",
        "if platform.platform_type.value != 'mindspore': pass",
        "if platform.name == 'mindspore': pass",
        "if get_platform().name == 'torch': pass",
        "flag = mesh.device_type in ('cuda', 'npu')",
        "if 'npu' == device_type: pass",
        "if x.device.type == 'cuda': pass",
        "if device_type.startswith('npu'): pass",
        "if mesh.device_type.split(':')[0] == 'cuda': pass",
        "match device_type:\n    case 'cpu': pass\n    case 'cuda' | 'npu': pass",
    ],
    "framework-import": [
        "torch = importlib.import_module('torch')",
        "import_module('mindspore.nn')",
        "__import__('torch_npu')",
    ],
    "device-module": [
        "torch.cuda.synchronize()",
        "torch.npu.Stream()",
        "# as torch.cuda does",
        "'''See torch.npu.'''",
    ],
}

ALLOWED = [
    "platform.add_(x, y)",
    "self.platform.copy_(x, y)",
    "self._platform.fill_(x, 0)",
    "mesh.platform.foreach_mul_(xs, 2)",
    "get_platform().zero_(x)",
    "clip_grad_norm_(parameters, 1.0)",
    "self.__enter__()",
    "x = x + y",
    "x: int = 1",
    "all_gather(x, group=g, out=buffer)",
    "collectives.reduce_scatter_tensor(x, out=buffer)",
    "platform.cat(xs, out=buffer)",
    "self.comm.launch(x, out=buffer)",
    "Options(steps=3, out=folder)",
    "dataclasses.replace(options, out=folder)",
    "x.requires_grad_(False)",
    "if platform.supports('coalesced'): pass",
    "if mesh.device_type == other.device_type: pass",
    "if name == 'torch': pass",
    "if mesh.device_type == 'cpu': pass",
    "import_module(name)",
    "import_module('hp_platform.torch')",
    "# torch_cuda is a word",
]


def fired(source: str) -> set[str]:
    tree = ast.parse(source)
    found = [finding for rule in rules.TREE_RULES for finding in rule(tree)]
    return {finding.rule for finding in (*found, *(f for rule in rules.TEXT_RULES for f in rule(source)))}


def test_every_rule_has_cases() -> None:
    assert set(REFUSED) == rules.RULE_NAMES


@pytest.mark.parametrize(
    ("rule", "source"), [(rule, source) for rule, cases in REFUSED.items() for source in cases]
)
def test_refuses(rule: str, source: str) -> None:
    assert rule in fired(source)


@pytest.mark.parametrize("source", ALLOWED)
def test_allows(source: str) -> None:
    assert fired(source) == set()


def test_a_finding_says_what_to_write_instead() -> None:
    (finding,) = rules.in_place_method(ast.parse("\nself.weight.add_(y)"))
    assert finding.line == 2
    assert finding.what == "self.weight.add_(...) looks like an in-place method of a tensor"
    assert "MindSpore on CPU ignores in-place arithmetic silently" in finding.why
    assert finding.instead.startswith("platform.add_(self.weight, ...)")

    (finding,) = rules.augmented_assignment(ast.parse("x -= y"))
    assert finding.instead == "x = x - y, or platform.add_"
