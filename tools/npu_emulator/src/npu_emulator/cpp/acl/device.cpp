// Devices, contexts and process-wide options of the emulated CANN runtime.
#include "device.h"

#include <acl/acl.h>
#include <acl/acl_op_compiler.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

#include "../settings.h"
#include "failure.h"

namespace npu_emulator {
namespace {

constexpr int kNoDevice = -1;
thread_local int current_device = kNoDevice;  // ACL keeps the current device per thread

}  // namespace

int device_count() {
  static const int count = static_cast<int>(std::clamp(setting("NPU_EMULATOR_DEVICES", 8), 0L, long{kMaxDevices}));
  return count;
}

int current_device_or_zero() { return current_device == kNoDevice ? 0 : current_device; }

}  // namespace npu_emulator

using namespace npu_emulator;

extern "C" {

aclError aclInit(const char*) { return ACL_SUCCESS; }
aclError aclFinalize() { return ACL_SUCCESS; }
void aclAppLog(aclLogLevel, const char*, const char*, uint32_t, const char*, ...) {}

const char* aclrtGetSocName() {
  const char* name = std::getenv("NPU_EMULATOR_SOC");
  return name && *name ? name : "Ascend910B1";
}

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = static_cast<uint32_t>(device_count());
  return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= device_count())
    return refuse(ACL_ERROR_RT_INVALID_DEVICEID, "invalid device id; NPU_EMULATOR_DEVICES says how many there are");
  current_device = device;
  return ACL_SUCCESS;
}
aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }

aclError aclrtGetDevice(int32_t* device) {
  if (current_device == kNoDevice) return refuse(ACL_ERROR_RT_CONTEXT_NULL, "no device set on this thread");
  *device = current_device;
  return ACL_SUCCESS;
}

// A context is the device index plus one, so that no context is a null pointer.
aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (current_device == kNoDevice) return refuse(ACL_ERROR_RT_CONTEXT_NULL, "no device set on this thread");
  *context = reinterpret_cast<aclrtContext>(static_cast<intptr_t>(current_device) + 1);
  return ACL_SUCCESS;
}
aclError aclrtSetCurrentContext(aclrtContext context) {
  current_device = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
  return ACL_SUCCESS;
}
aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return ACL_SUCCESS;
}

aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t* value) {
  *value = 24;  // cores of an Ascend910B1; asked for by torch_npu's device properties
  return ACL_SUCCESS;
}
aclError aclrtDeviceCanAccessPeer(int32_t* allowed, int32_t, int32_t) {
  *allowed = 1;
  return ACL_SUCCESS;
}
aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }
aclError aclrtDeviceGetBareTgid(int32_t* pid) {
  *pid = getpid();
  return ACL_SUCCESS;
}

// Options that are stored and given back, and settings without a counterpart here.
static std::mutex options_mutex;
static auto& options = *new std::map<int, int64_t>;

aclError aclrtSetSysParamOpt(aclSysParamOpt key, int64_t value) {
  std::lock_guard<std::mutex> lock(options_mutex);
  options[key] = value;
  return ACL_SUCCESS;
}
aclError aclrtCtxSetSysParamOpt(aclSysParamOpt key, int64_t value) { return aclrtSetSysParamOpt(key, value); }
aclError aclrtGetSysParamOpt(aclSysParamOpt key, int64_t* value) {
  std::lock_guard<std::mutex> lock(options_mutex);
  auto found = options.find(key);
  *value = found == options.end() ? 0 : found->second;
  return ACL_SUCCESS;
}
aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }
size_t aclGetCompileoptSize(aclCompileOpt) { return 256; }
aclError aclGetCompileopt(aclCompileOpt, char* value, size_t bytes) {
  std::memset(value, 0, bytes);
  return ACL_SUCCESS;
}
aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }

aclError aclrtProcessReport(int32_t) {  // torch_npu polls this for host callbacks; there are none
  usleep(1000);
  return ACL_ERROR_RT_THREAD_SUBSCRIBE;
}
}
