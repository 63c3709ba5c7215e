// Events: a record raises the generation that is asked for, the stream's thread raises the one that is done.
#include <acl/acl.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "../runtime_api.h"
#include "failure.h"
#include "stream.h"

namespace npu_emulator {
namespace {

using Clock = std::chrono::steady_clock;

// Shared with queued tasks, since torch_npu may destroy an event that a stream still waits for.
struct EventState {
  std::mutex mutex;
  std::condition_variable reached;
  uint64_t recorded = 0;
  uint64_t done = 0;
  Clock::time_point time;

  uint64_t record() {
    std::lock_guard<std::mutex> lock(mutex);
    return ++recorded;
  }
  uint64_t last_record() {
    std::lock_guard<std::mutex> lock(mutex);
    return recorded;
  }
  void complete(uint64_t generation) {
    std::lock_guard<std::mutex> lock(mutex);
    time = Clock::now();
    // Records on two streams may complete in either order; `done` must never go back.
    done = std::max(done, generation);
    reached.notify_all();
  }
  void wait(uint64_t generation) {
    std::unique_lock<std::mutex> lock(mutex);
    // After a failure the record may sit behind work that never ends: look up now and then.
    while (done < generation && !npu_emulator_failed()) reached.wait_for(lock, std::chrono::milliseconds(20));
  }
};

struct Event {
  std::shared_ptr<EventState> state = std::make_shared<EventState>();
};

std::shared_ptr<EventState> state_of(aclrtEvent event) { return static_cast<Event*>(event)->state; }

}  // namespace
}  // namespace npu_emulator

using namespace npu_emulator;

extern "C" {

aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) {
  *event = new Event;
  return ACL_SUCCESS;
}
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flag) { return aclrtCreateEventWithFlag(event, flag); }

aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<Event*>(event);
  return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  auto state = state_of(event);
  const uint64_t generation = state->record();
  auto complete = [state, generation] { state->complete(generation); };
  if (stream)
    static_cast<Stream*>(stream)->enqueue_task(complete);
  else
    complete();
  return ACL_SUCCESS;
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  auto state = state_of(event);
  const uint64_t generation = state->last_record();  // later records do not count
  auto wait = [state, generation] { state->wait(generation); };
  if (stream)
    static_cast<Stream*>(stream)->enqueue_work(wait);
  else
    wait();
  return ACL_SUCCESS;
}

aclError aclrtSynchronizeEvent(aclrtEvent event) {
  auto state = state_of(event);
  state->wait(state->last_record());
  return failure_status();
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  auto state = state_of(event);
  std::lock_guard<std::mutex> lock(state->mutex);
  *status = state->done >= state->recorded ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  *milliseconds = std::chrono::duration<float, std::milli>(state_of(end)->time - state_of(start)->time).count();
  return ACL_SUCCESS;
}

aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }
}
