"""Operations on plain tensors that MindSpore's CPU build has no kernel for, or one that rounds float64, composed of others.

They take the arguments of the rules. Each is tested against numpy (tests/mindspore_only). Constants are tensors of the dtype:
a Python float would be rounded to float32.
"""
