// Device memory: host memory with one account per device.
#include <acl/acl.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "../settings.h"
#include "device.h"
#include "failure.h"
#include "stream.h"

namespace npu_emulator {
namespace {

constexpr size_t kDeviceAlignment = 512;
constexpr size_t kHostAlignment = 4096;
// Device memory is not zeroed on hardware; a fixed pattern makes a read of fresh memory visible.
constexpr int kFreshMemory = 0xCB;

struct Block {
  size_t bytes;
  int device;
};

std::mutex memory_mutex;
auto& device_blocks = *new std::map<const char*, Block>;
auto& pinned_blocks = *new std::map<const char*, Block>;
size_t used_bytes[kMaxDevices];

size_t device_bytes() {
  static const size_t bytes = static_cast<size_t>(setting("NPU_EMULATOR_MEMORY_MB", 65536)) << 20;
  return bytes;
}

// The block that holds `address`, or null. The caller holds the mutex.
const Block* find(const std::map<const char*, Block>& blocks, const void* address) {
  const char* byte = static_cast<const char*>(address);
  auto next = blocks.upper_bound(byte);
  if (next == blocks.begin()) return nullptr;
  --next;
  return byte < next->first + next->second.bytes ? &next->second : nullptr;
}

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  return find(pinned_blocks, address) != nullptr;
}

}  // namespace
}  // namespace npu_emulator

using namespace npu_emulator;

extern "C" {

aclError aclrtMalloc(void** address, size_t bytes, aclrtMemMallocPolicy) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  const int device = current_device_or_zero();
  if (used_bytes[device] + bytes > device_bytes())
    return refuse(ACL_ERROR_RT_MEMORY_ALLOCATION, "device memory is exhausted; NPU_EMULATOR_MEMORY_MB is the limit");
  if (posix_memalign(address, kDeviceAlignment, bytes ? bytes : kDeviceAlignment)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  std::memset(*address, kFreshMemory, bytes);
  device_blocks[static_cast<char*>(*address)] = {bytes, device};
  used_bytes[device] += bytes;
  return ACL_SUCCESS;
}
aclError aclrtMallocAlign32(void** address, size_t bytes, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(address, bytes, policy);
}

aclError aclrtFree(void* address) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  auto found = device_blocks.find(static_cast<char*>(address));
  if (found == device_blocks.end()) return refuse(ACL_ERROR_RT_PARAM_INVALID, "free of an unknown device pointer");
  used_bytes[found->second.device] -= found->second.bytes;
  device_blocks.erase(found);
  std::free(address);
  return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total_bytes) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  *total_bytes = device_bytes();
  *free_bytes = device_bytes() - used_bytes[current_device_or_zero()];
  return ACL_SUCCESS;
}

aclError aclrtMallocHost(void** address, size_t bytes) {
  if (posix_memalign(address, kHostAlignment, bytes ? bytes : 1)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
  std::lock_guard<std::mutex> lock(memory_mutex);
  pinned_blocks[static_cast<char*>(*address)] = {bytes, 0};
  return ACL_SUCCESS;
}
aclError aclrtFreeHost(void* address) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  pinned_blocks.erase(static_cast<char*>(address));
  std::free(address);
  return ACL_SUCCESS;
}

aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* attributes) {
  std::memset(attributes, 0, sizeof *attributes);
  std::lock_guard<std::mutex> lock(memory_mutex);
  const Block* block = find(device_blocks, address);
  attributes->location.type = block ? ACL_MEM_LOCATION_TYPE_DEVICE : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  attributes->location.id = block ? block->device : 0;
  return ACL_SUCCESS;
}

aclError aclrtMemcpy(void* to, size_t, const void* from, size_t bytes, aclrtMemcpyKind) {
  if (bytes) std::memmove(to, from, bytes);
  return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void* to, size_t, const void* from, size_t bytes, aclrtMemcpyKind kind, aclrtStream stream) {
  if (!bytes) return ACL_SUCCESS;
  auto* queue = static_cast<Stream*>(stream);
  if (kind == ACL_MEMCPY_HOST_TO_DEVICE && !is_pinned(from)) {
    // Pageable memory is staged: the caller may change it as soon as this function returns.
    auto staged = std::make_shared<std::string>(static_cast<const char*>(from), bytes);
    queue->enqueue_work([=] { std::memmove(to, staged->data(), staged->size()); });
    return ACL_SUCCESS;
  }
  queue->enqueue_work([=] { std::memmove(to, from, bytes); });
  if (kind == ACL_MEMCPY_DEVICE_TO_HOST && !is_pinned(to)) return aclrtSynchronizeStream(stream);  // pageable: blocks
  return ACL_SUCCESS;
}

aclError aclrtMemset(void* address, size_t, int32_t value, size_t bytes) {
  std::memset(address, value, bytes);
  return ACL_SUCCESS;
}
aclError aclrtMemsetAsync(void* address, size_t, int32_t value, size_t bytes, aclrtStream stream) {
  static_cast<Stream*>(stream)->enqueue_work([=] { std::memset(address, value, bytes); });
  return ACL_SUCCESS;
}
}
