#include "failure.h"

#include <atomic>
#include <cstdio>
#include <mutex>
#include <string>

#include "../runtime_api.h"

namespace npu_emulator {
namespace {

thread_local std::string recent_message;
std::atomic<bool> failed{false};
std::mutex failure_mutex;
// Leaked on purpose, like every global with a destructor here: stream threads outlive static destruction.
std::string& failure_message = *new std::string;

}  // namespace

aclError refuse(aclError code, const char* message) {
  recent_message = message;
  return code;
}

aclError failure_status() {
  if (!failed) return ACL_SUCCESS;
  std::lock_guard<std::mutex> lock(failure_mutex);
  return refuse(ACL_ERROR_RT_INTERNAL_ERROR, failure_message.c_str());
}

}  // namespace npu_emulator

using namespace npu_emulator;

void npu_emulator_fail(const char* message) {
  std::fprintf(stderr, "npu_emulator: %s\n", message);
  std::lock_guard<std::mutex> lock(failure_mutex);
  if (!failed) failure_message = message;  // the first failure is the cause, later ones follow from it
  failed = true;
}

int npu_emulator_failed() { return failed; }

extern "C" const char* aclGetRecentErrMsg() { return recent_message.empty() ? nullptr : recent_message.c_str(); }
