"""The real torch_npu package over an emulated CANN, for tests on a machine without an NPU.

=====================  ==========================================================================================
`build`                compiles `cpp/` against the headers of the installed torch_npu (`python -m npu_emulator.build`)
`_compiler`            finds the C++ compiler
`_libraries`           where the compiled libraries lie, whether they are current, how they are loaded
`_activation`          called at Python's start when NPU_EMULATOR=1; prepares `import torch_npu`
`kernels`              CPU kernels for aten and for the fused npu:: operators, over NPU memory
=====================  ==========================================================================================

Importing this package changes nothing. README.md says how to use it and what it cannot prove.
"""
