"""Run all checks over the repository, print what they found; exit status 1 if that is anything."""

import sys
from pathlib import Path

from lint import arrows, helper_names, lazy_names, shared_code, top_level

CHECKS = (shared_code.check, arrows.check, helper_names.check, lazy_names.check, top_level.check)


def main(root: Path) -> int:
    """Check the repository at `root`."""
    violations = [violation for check in CHECKS for violation in check(root)]
    for violation in violations:
        print(violation.render(root))
    print(f"lint: {len(violations)} found")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[2]))
