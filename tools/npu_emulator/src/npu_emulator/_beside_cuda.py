"""Lets torch_npu load beside a torch that is built for CUDA, on a machine where pip finds no other.

[Note: what stands in the way] An accelerator's allocator registers the keys of its settings with torch while its library
loads, and torch throws at a key that it has already. Two keys of torch_npu 2.13 are also keys of CUDA, whose library
comes with torch and so registers first; the exception leaves a static initialiser, which ends the process. Nothing
else collides: torch_npu links to libraries that both builds of torch have. So CUDA gives up the two keys before torch_npu
loads. They still reach the allocator that is used, torch_npu's; CUDA has no device in the process, see `hide_devices`.

torch has no call that removes a key. The set of keys is a `std::unordered_set<std::string>&` that torch hands out for
registration, and torch's libraries export the set's own functions, which are called here by their names in C++. A
function of our own in C++ would need the standard library that torch was compiled with, and zig's compiler has another one.
"""

import ctypes
import os
from pathlib import Path

_STRING = "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
_SET = (
    f"_ZNSt10_HashtableI{_STRING}S5_SaIS5_ENSt8__detail9_IdentityESt8equal_toIS5_ESt4hashIS5_ENS7_18_Mod_range_hashingE"
    "NS7_20_Default_ranged_hashENS7_20_Prime_rehash_policyENS7_17_Hashtable_traitsILb1ELb1ELb1EEEE"
)
_KEYS = "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11Ev"
_FIND = f"{_SET}4findERKS5_"
_ERASE = f"{_SET}5eraseENS7_20_Node_const_iteratorIS5_Lb1ELb1EEE"

# What CUDAAllocatorConfig::getKeys() and NPUAllocatorConfig::getKeys() have in common.
_SHARED_KEYS = (b"pinned_reserve_segment_size_mb", b"per_process_memory_fraction")


class _String(ctypes.Structure):
    """libstdc++'s `std::string`, enough of it to be read."""

    _fields_ = (("data", ctypes.c_char_p), ("length", ctypes.c_size_t), ("room", ctypes.c_char * 16))


def hide_devices() -> None:
    """Leave this process and its children without CUDA devices: torch_npu refuses to load where torch has another."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def release_keys(torch_folder: Path) -> None:
    """Take the keys that torch_npu needs from CUDA's allocator. [Note: what stands in the way]

    Raises:
        ImportError: torch does not export what is called here.
    """
    # A library is searched together with those that it needs, so this one stands for all of torch's.
    torch = ctypes.CDLL(str(torch_folder / "lib" / "libtorch_python.so"))
    try:
        keys, find, erase = torch[_KEYS], torch[_FIND], torch[_ERASE]
    except AttributeError as error:
        raise ImportError(
            f"torch_npu does not load beside this build of torch for CUDA ({error}); install torch+cpu"
        ) from None
    keys.restype = find.restype = erase.restype = ctypes.c_void_p
    find.argtypes = (ctypes.c_void_p, ctypes.POINTER(_String))
    erase.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    registered = keys()
    for key in _SHARED_KEYS:
        node = find(registered, ctypes.byref(_String(key, len(key))))
        if node:
            erase(registered, node)
