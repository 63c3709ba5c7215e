"""How often each emulated operator ran."""

from collections import Counter

calls: Counter[str] = Counter()
