#include "communicator.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <set>
#include <thread>

#include "../runtime_api.h"
#include "../settings.h"

namespace npu_emulator {

uint64_t Communicator::take_ticket() {
  std::lock_guard<std::mutex> lock(mutex_);
  return issued_++;
}

void Communicator::wait_turn(uint64_t ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return finished_ == ticket; });
}

void Communicator::end_turn() {
  std::lock_guard<std::mutex> lock(mutex_);
  ++finished_;
  changed_.notify_all();
}

void Communicator::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return finished_ == issued_; });
}

namespace {

std::atomic<bool> failed{false};

// Makes every operation late, so that a program which does not wait for it reads old memory.
void sleep_delay() {
  static const long longest = setting("NPU_EMULATOR_DELAY_US", 0);
  if (longest <= 0) return;
  // Never shorter than half: a test that relies on the delay must not pass by luck.
  thread_local std::minstd_rand random{std::random_device{}()};
  std::uniform_int_distribution<long> part(longest / 2, longest);
  std::this_thread::sleep_for(std::chrono::microseconds(part(random)));
}

struct Turn {
  Communicator* communicator;
  uint64_t ticket;
};

struct Job {
  std::vector<Turn> turns;
  Operation operation;
};

void run_job(void* argument) {
  std::unique_ptr<Job> job(static_cast<Job*>(argument));
  for (const Turn& turn : job->turns) turn.communicator->wait_turn(turn.ticket);
  if (!npu_emulator_failed()) {
    sleep_delay();
    const std::string error = job->operation();
    if (!error.empty()) {
      npu_emulator_fail(("HCCL: " + error).c_str());
      failed = true;
    }
  }
  for (const Turn& turn : job->turns) turn.communicator->end_turn();  // also after a failure: others wait
}

void start(const std::set<Communicator*>& communicators, aclrtStream stream, Operation operation) {
  auto job = std::make_unique<Job>();
  for (Communicator* communicator : communicators) job->turns.push_back({communicator, communicator->take_ticket()});
  job->operation = std::move(operation);
  npu_emulator_enqueue(stream, run_job, job.release());
}

void start_transfers(std::vector<Transfer> transfers, aclrtStream stream) {
  std::set<Communicator*> communicators;
  for (const Transfer& transfer : transfers) communicators.insert(transfer.communicator);
  start(communicators, stream, [transfers = std::move(transfers)] { return run_transfers(transfers); });
}

// An entry of a group: either an operation of one communicator, or transfers.
struct Grouped {
  aclrtStream stream;
  Communicator* communicator;
  Operation operation;
  std::vector<Transfer> transfers;
};
thread_local int group_depth = 0;
thread_local std::vector<Grouped> group;

void end_group() {
  std::vector<Grouped> entries;
  entries.swap(group);
  for (size_t i = 0; i < entries.size(); ++i) {
    if (entries[i].operation) {
      start({entries[i].communicator}, entries[i].stream, std::move(entries[i].operation));
      continue;
    }
    // Neighbouring transfers on one stream run together, also those of different communicators: in a ring, every
    // rank waits for its neighbour to receive.
    std::vector<Transfer> together = std::move(entries[i].transfers);
    while (i + 1 < entries.size() && !entries[i + 1].operation && entries[i + 1].stream == entries[i].stream) {
      ++i;
      together.insert(together.end(), entries[i].transfers.begin(), entries[i].transfers.end());
    }
    start_transfers(std::move(together), entries[i].stream);
  }
}

}  // namespace

HcclResult submit(Communicator* communicator, aclrtStream stream, Operation operation) {
  if (group_depth) group.push_back({stream, communicator, std::move(operation), {}});
  else start({communicator}, stream, std::move(operation));
  return HCCL_SUCCESS;
}

HcclResult submit_transfers(std::vector<Transfer> transfers, aclrtStream stream) {
  if (group_depth) group.push_back({stream, nullptr, nullptr, std::move(transfers)});
  else start_transfers(std::move(transfers), stream);
  return HCCL_SUCCESS;
}

HcclResult asynchronous_error() { return failed ? HCCL_E_PARA : HCCL_SUCCESS; }

}  // namespace npu_emulator

using namespace npu_emulator;

extern "C" {

HcclResult HcclGroupStart() {
  ++group_depth;
  return HCCL_SUCCESS;
}
HcclResult HcclGroupEnd() {
  if (--group_depth == 0) end_group();
  return HCCL_SUCCESS;
}
}
