"""The page and what it is made of, without a framework: both must know every rule and name that the packages know."""

from hp_dtensor import _names
from hp_dtensor.rules import RULES
from op_table import page, table
from op_table.argued import ARGUED, reason

HINT = "make it anew with `nox -s op-table`"


def test_every_rule_is_measured_or_has_a_reason() -> None:
    missing = page.missing(table.read("torch")["rules"])
    assert not missing, f"not in the table of torch: {', '.join(sorted(missing))}; {HINT}"


def test_no_rule_is_left_that_is_gone() -> None:
    for framework in table.FRAMEWORKS:
        rules = table.read(framework)["rules"]
        assert set(rules) == set(RULES), HINT
        assert {name: entry["family"] for name, entry in rules.items()} == {
            name: table.family(name) for name in RULES
        }, HINT


def test_functions_are_those_of_the_tables_of_names() -> None:
    known = {*_names.functions(), *_names.in_place()}
    listed = {
        (rule, name) for rule, entry in table.read("torch")["rules"].items() for name in entry["functions"]
    }
    gone = listed - known
    assert not gone, f"no longer named: {sorted(gone)}; {HINT}"
    primitives = set(_names.primitives())
    told = {
        (rule, name)
        for rule, entry in table.read("mindspore")["rules"].items()
        for name in entry["functions"]
        if not name.startswith("Tensor.")
    }
    assert told == primitives, HINT


def test_the_page_is_made_of_what_is_kept() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), HINT


def test_every_reason_is_needed_and_hides_only_what_could_stay() -> None:
    hidden = [
        (rule, row["call"], given)
        for rule, entry in table.read("torch")["rules"].items()
        for row in entry["calls"]
        for given in row["argued"]
    ]
    assert all(reason(*one) is not None for one in hidden), HINT
    idle = [entry.why for entry in ARGUED if not any(entry.is_for(*one) for one in hidden)]
    assert not idle, f"these reasons hide nothing: {idle}; remove them, or {HINT}"
    rules = {rule for entry in ARGUED for rule in entry.rules}
    assert rules <= {rule for rule, *_ in hidden}, f"without a hidden combination: {rules}"


def test_a_reason_is_for_the_combinations_that_it_names() -> None:
    assert reason("nansum", "nansum(5x3, 0)", "P") is not None
    assert reason("nansum", "nansum(5x3, 0)", "S(0)") is None
    assert reason("embedding", "embedding(8, 5x3)", "S(0), R") is None


def test_a_rule_without_calls_and_without_a_reason_is_found() -> None:
    rules = dict(table.read("torch")["rules"])
    del rules["matmul"]
    rules["sum"] = {**rules["sum"], "calls": []}
    assert page.missing(rules) == {"matmul", "sum"}


def test_a_row_marks_what_could_have_stayed() -> None:
    entry = {"family": "reduction", "functions": ["f", "f_", "__f__"]}
    call = {
        "call": "f(5x3)",
        "tensors": 1,
        "kept": [["S(0)", "P"]],
        "moved": [["S(1)", "R", 50, True], ["P", "R", 100, False]],
    }
    tables = {
        "torch": {"rules": {"sum": {**entry, "calls": [call]}}},
        "mindspore": {"rules": {"sum": {**entry, "functions": [], "calls": []}}},
    }
    text = page.page(tables)
    row = r"| `sum` | `f`, `f_`, `__f__` | no | `f(5x3)` | S(0) → P<br>S(1) → R 50% \*<br>P → R 100% |"
    assert row in text.splitlines()
    assert "On this page: 1 combination." in text
