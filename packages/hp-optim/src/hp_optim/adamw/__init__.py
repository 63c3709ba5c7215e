"""AdamW. Read :mod:`optimizer` (the class), :mod:`member` (one parameter), :mod:`rows` (flat ones), :mod:`replicas` (divided ones)."""
