"""`# lint: allow <rule>: <reason>` on a line takes one finding of that rule from it.

The reason is not optional, and an exemption that exempts nothing is a finding itself, so none outlives its cause.
"""

import io
import re
import tokenize
from dataclasses import dataclass

from lint.rules import RULE_NAMES, Finding

COMMENT = re.compile(r"#\s*lint:\s*allow\b\s*(?P<rule>[\w-]*)\s*(:\s*(?P<reason>.*))?$")


@dataclass(frozen=True)
class Exemption:
    """A rule that a line is exempt from."""

    line: int
    rule: str


def apply(findings: list[Finding], source: str) -> list[Finding]:
    """The findings without the exempted ones, plus those about the exemptions themselves."""
    exemptions, kept = _read(source)
    for exemption in exemptions:
        covered = [f for f in findings if (f.line, f.rule) == (exemption.line, exemption.rule)]
        if covered:
            findings = [finding for finding in findings if finding not in covered]
        else:
            kept.append(
                _about(
                    exemption.line,
                    f"allows {exemption.rule}, but nothing here is refused by that rule",
                    "remove it",
                )
            )
    return sorted([*findings, *kept], key=lambda finding: finding.line)


def _read(source: str) -> tuple[list[Exemption], list[Finding]]:
    exemptions: list[Exemption] = []
    findings: list[Finding] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or not (found := COMMENT.match(token.string)):
            continue
        line, rule, reason = token.start[0], found["rule"], found["reason"]
        if rule not in RULE_NAMES:
            findings.append(
                _about(
                    line, f"allows {rule or 'nothing'}", f"name one rule of {', '.join(sorted(RULE_NAMES))}"
                )
            )
        elif not reason:
            findings.append(
                _about(line, f"allows {rule} without a reason", f"# lint: allow {rule}: <reason>")
            )
        else:
            exemptions.append(Exemption(line, rule))
    return exemptions, findings


def _about(line: int, what: str, instead: str) -> Finding:
    why = "an exemption says which rule it lifts and why, and goes when its cause goes"
    return Finding(line, "exemption", what, why, instead)
