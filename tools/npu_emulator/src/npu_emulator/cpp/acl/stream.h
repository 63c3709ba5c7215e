// A stream: a queue with a thread of its own, which runs work in the order of its arrival.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace npu_emulator {

class Stream {
 public:
  Stream(int device, int32_t id) : device(device), id(id) {}
  ~Stream();  // runs what is queued, then ends the thread

  // Work is skipped once the process has failed; a task always runs (events must complete in any case).
  void enqueue_work(std::function<void()> work);
  void enqueue_task(std::function<void()> task);
  void synchronize();
  bool idle();

  const int device;
  const int32_t id;

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool busy_ = false;
  bool closing_ = false;
  std::thread thread_;  // started by the first task: torch_npu creates pools of streams and uses few
};

}  // namespace npu_emulator
