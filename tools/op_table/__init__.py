"""The table of operations in the docs: which placements each rule takes, what it gives, and what it moves for that."""
