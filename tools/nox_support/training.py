"""Which environment the training job needs, read from the options that are passed on to it."""

from collections.abc import Sequence


def environment_for(options: Sequence[str]) -> str:
    """The environment for `hyper-parallel train <options>`: torch, unless a platform or device says otherwise.

    The options are not checked here: the trainer does, and says what is wrong with them.
    """
    if value_of("--platform", options) == "mindspore":
        return "mindspore"
    if value_of("--device", options) == "npu":
        return "npu"
    return "torch"


def value_of(name: str, options: Sequence[str]) -> str | None:
    """The last value of an option, written `--name value` or `--name=value`."""
    found = None
    for position, option in enumerate(options):
        if option == name and position + 1 < len(options):
            found = options[position + 1]
        elif option.startswith(f"{name}="):
            found = option.removeprefix(f"{name}=")
    return found
