// A communicator, and the order in which its operations run.
#pragma once
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "third_party/hccl/inc/hccl/hccl.h"
#include "transport.h"

namespace npu_emulator {

// [Note: turns] A communicator runs one operation at a time, in the order in which the host issued them,
// whatever streams they are on. Otherwise two streams would race for one mailbox, and ranks would pair
// different operations. An operation takes its ticket on the host and waits for its turn on the stream.
class Communicator {
 public:
  Communicator(const std::string& name, uint32_t rank, uint32_t size)
      : name(name), rank(rank), size(size), mailbox(name, rank, size) {}

  uint64_t take_ticket();
  void wait_turn(uint64_t ticket);
  void end_turn();
  void drain();  // until every issued operation has ended

  const std::string name;
  const uint32_t rank;
  const uint32_t size;
  Mailbox mailbox;

  // How many sub-communicators each id has named; an id that is used again must not meet the old sockets.
  std::map<uint64_t, int> generations;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t issued_ = 0;
  uint64_t finished_ = 0;
};

inline Communicator* communicator_of(HcclComm handle) { return static_cast<Communicator*>(handle); }

// What an operation reports: "" or what went wrong.
using Operation = std::function<std::string()>;

// Runs `operation` on the stream, in the communicator's order, after a delay of up to NPU_EMULATOR_DELAY_US.
// In a group (HcclGroupStart) it is kept until the group ends.
HcclResult submit(Communicator* communicator, aclrtStream stream, Operation operation);

// One send or receive.
struct Transfer {
  Communicator* communicator;
  HcclSendRecvItem item;
};
// Runs the transfers together: all are started before one is waited for. Kept in a group like `submit`.
HcclResult submit_transfers(std::vector<Transfer> transfers, aclrtStream stream);
std::string run_transfers(const std::vector<Transfer>& transfers);

// The error that the watchdog of torch_npu asks for.
HcclResult asynchronous_error();

}  // namespace npu_emulator
