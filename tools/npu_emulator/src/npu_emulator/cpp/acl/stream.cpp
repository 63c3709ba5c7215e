#include "stream.h"

#include <acl/acl.h>

#include <atomic>
#include <chrono>
#include <set>

#include "../runtime_api.h"
#include "device.h"
#include "failure.h"

namespace npu_emulator {

Stream::~Stream() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Stream::enqueue_task(std::function<void()> task) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  queue_.push_back(std::move(task));
  changed_.notify_all();
}

void Stream::enqueue_work(std::function<void()> work) {
  enqueue_task([work = std::move(work)] {
    if (!npu_emulator_failed()) work();
  });
}

void Stream::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    auto task = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    task();
    task = nullptr;  // destroy what the task captured before the stream counts as idle
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !busy_;
}

void Stream::synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return queue_.empty() && !busy_; });
}

namespace {

std::mutex streams_mutex;
std::set<Stream*>& streams = *new std::set<Stream*>;
std::atomic<int32_t> next_id{1};

aclError synchronize_device(int device) {
  std::set<Stream*> snapshot;
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    snapshot = streams;
  }
  for (Stream* stream : snapshot)
    if (stream->device == device) stream->synchronize();
  return failure_status();
}

}  // namespace
}  // namespace npu_emulator

using namespace npu_emulator;

void npu_emulator_enqueue(void* stream, void (*task)(void*), void* argument) {
  if (stream)
    static_cast<Stream*>(stream)->enqueue_task([=] { task(argument); });
  else
    task(argument);
}

void npu_emulator_enqueue_delay(void* stream, long microseconds) {
  if (stream)
    static_cast<Stream*>(stream)->enqueue_work([=] { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); });
}

extern "C" {

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  auto* created = new Stream(current_device_or_zero(), next_id++);
  std::lock_guard<std::mutex> lock(streams_mutex);
  streams.insert(created);
  *stream = created;
  return ACL_SUCCESS;
}
aclError aclrtCreateStream(aclrtStream* stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }

aclError aclrtDestroyStream(aclrtStream stream) {
  auto* destroyed = static_cast<Stream*>(stream);
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    if (!streams.erase(destroyed)) return refuse(ACL_ERROR_RT_PARAM_INVALID, "destroy of an unknown stream");
  }
  delete destroyed;
  return ACL_SUCCESS;
}
aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }

aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = stream ? static_cast<Stream*>(stream)->id : 0;
  return ACL_SUCCESS;
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
  if (stream) static_cast<Stream*>(stream)->synchronize();
  return failure_status();
}
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) { return aclrtSynchronizeStream(stream); }
aclError aclrtSynchronizeDevice() { return synchronize_device(current_device_or_zero()); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  const bool idle = !stream || static_cast<Stream*>(stream)->idle();
  *status = idle ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

// Settings of a stream without a counterpart here.
aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }
aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }
aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t* flag) {
  *flag = 0;
  return ACL_SUCCESS;
}
}
