"""Attributes that parameters have while a unit shards them."""

OWNER_MARK = "_hp_fsdp_owner"
"""Attribute of a sharded parameter that says who shards it. A plain text: it travels through pickles harmlessly."""
SUCCESSOR = "_hp_fsdp_successor"
"""Attribute of a parameter that was sharded, the whole one of before: the :class:`ManagedParameter` that took its place. A module
outside of the unit may still hold it (a tie), and is given the successor when it is sharded itself."""
STAYS = "_hp_fsdp_stays"
"""Attribute of a parameter that stays as it is and is in a unit. Another unit that holds it too leaves its gradients to operations."""
MAIN_GRAD = "main_grad"
"""Attribute of a sharded parameter that holds its gradient in the dtype of the reduction, if the policy asks for it."""
