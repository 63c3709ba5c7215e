// Creating, asking and destroying communicators.
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <exception>
#include <random>

#include "../runtime_api.h"
#include "collectives.h"
#include "communicator.h"

using namespace npu_emulator;

namespace {

HcclResult create(const std::string& name, uint32_t size, uint32_t rank, HcclComm* handle) {
  try {
    *handle = new Communicator(name, rank, size);
    return HCCL_SUCCESS;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "npu_emulator: %s\n", error.what());
    return HCCL_E_SYSCALL;
  }
}

}  // namespace

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo* info) {
  std::memset(info, 0, sizeof *info);
  std::random_device random;
  std::snprintf(info->internal, 64, "%d_%08x%08x", getpid(), random(), random());
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo* info, uint32_t rank, HcclComm* handle) {
  if (HcclResult error = create(info->internal, size, rank, handle)) return error;
  const std::string error = meet(communicator_of(*handle), "init");
  if (error.empty()) return HCCL_SUCCESS;
  std::fprintf(stderr, "npu_emulator: HCCL: %s\n", error.c_str());
  return HCCL_E_TIMEOUT;
}
HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo* info, uint32_t rank, const HcclCommConfig*,
                                      HcclComm* handle) {
  return HcclCommInitRootInfo(size, info, rank, handle);
}

HcclResult HcclCreateSubCommConfig(HcclComm* parent, uint32_t size, uint32_t*, uint64_t id, uint32_t rank, HcclCommConfig*,
                                   HcclComm* handle) {
  Communicator* whole = communicator_of(*parent);
  const int generation = whole->generations[id]++;
  // Members do not meet here: pairs for point-to-point are created one after another, in an order that differs
  // between ranks, and would wait in a ring.
  return create(whole->name + "." + std::to_string(id) + "." + std::to_string(generation), size, rank, handle);
}

HcclResult HcclCommDestroy(HcclComm handle) {
  communicator_of(handle)->drain();
  delete communicator_of(handle);
  return HCCL_SUCCESS;
}

HcclResult HcclGetCommName(HcclComm handle, char* name) {
  std::snprintf(name, COMM_NAME_MAX_LENGTH, "%s", communicator_of(handle)->name.c_str());
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankSize(HcclComm handle, uint32_t* size) {
  *size = communicator_of(handle)->size;
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankId(HcclComm handle, uint32_t* rank) {
  *rank = communicator_of(handle)->rank;
  return HCCL_SUCCESS;
}
HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
  *error = asynchronous_error();
  return HCCL_SUCCESS;
}
const char* HcclGetErrorString(HcclResult code) {
  return code == HCCL_E_PARA ? "operation failed, see the npu_emulator line above" : "npu_emulator error";
}
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }
uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }
}
