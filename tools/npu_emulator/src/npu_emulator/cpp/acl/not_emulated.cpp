// Symbols that torch_npu links and that nothing here emulates. This file includes no ACL header on purpose:
// the linker asks for the names only, and a call must fail whatever its arguments are.
#include <cstdio>
#include <cstdlib>

namespace {

constexpr int kFeatureNotSupported = 207000;  // ACL_ERROR_RT_FEATURE_NOT_SUPPORT

int not_emulated(const char* name) {
  std::fprintf(stderr, "npu_emulator: %s is called but not emulated\n", name);
  if (std::getenv("NPU_EMULATOR_ABORT")) std::abort();  // for a stack trace
  return kFeatureNotSupported;
}

}  // namespace

#define FAILS(name) extern "C" int name() { return not_emulated(#name); }
#define IGNORED(name) extern "C" int name() { return 0; }

// Profiling and dumps: called while torch_npu is imported, without effect on results.
IGNORED(MsprofGetHashId)
IGNORED(MsprofRegisterCallback)
IGNORED(MsprofReportAdditionalInfo)
IGNORED(MsprofReportApi)
IGNORED(MsprofReportCompactInfo)
IGNORED(MsprofSysCycleTime)
IGNORED(aclmdlInitDump)
IGNORED(aclmdlSetDump)
IGNORED(aclmdlFinalizeDump)
IGNORED(rtDevBinaryRegister)
IGNORED(rtFunctionRegister)

// Device binaries, virtual memory (expandable segments) and memory shared between processes.
FAILS(aclrtBinaryGetFunction)
FAILS(aclrtBinaryLoadFromData)
FAILS(aclrtGetFunctionAddr)
FAILS(aclrtReserveMemAddress)
FAILS(aclrtReleaseMemAddress)
FAILS(aclrtMallocPhysical)
FAILS(aclrtFreePhysical)
FAILS(aclrtMapMem)
FAILS(aclrtUnmapMem)
FAILS(aclrtMemExportToShareableHandle)
FAILS(aclrtMemImportFromShareableHandle)
FAILS(aclrtMemSetPidToShareableHandle)
FAILS(rtGetC2cCtrlAddr)
FAILS(rtKernelLaunch)
