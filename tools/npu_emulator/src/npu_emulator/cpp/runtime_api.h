// What libascendcl.so offers to libhccl.so and to the Python kernels beside the ACL functions.
// A C interface, so that the two libraries need not share one C++ runtime.
#pragma once

#define NPU_EMULATOR_API extern "C"

// Runs task(argument) on the stream's thread, behind the work that the stream already has.
// The task runs even after a failure: it must free its argument and asks npu_emulator_failed() itself.
NPU_EMULATOR_API void npu_emulator_enqueue(void* stream, void (*task)(void*), void* argument);

// Makes the stream sleep, behind the work that it already has.
NPU_EMULATOR_API void npu_emulator_enqueue_delay(void* stream, long microseconds);

// Work that fails on a stream cannot return a code to its caller. As on hardware, the failure is kept,
// later work is skipped, and every later synchronization reports it.
NPU_EMULATOR_API void npu_emulator_fail(const char* message);
NPU_EMULATOR_API int npu_emulator_failed();
