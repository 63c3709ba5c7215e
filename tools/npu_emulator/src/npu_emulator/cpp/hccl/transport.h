// Messages between the processes of one host.
//
// Each rank listens on a Unix socket in Linux's abstract namespace, and opens one connection per peer to send.
// The namespace has no files: nothing is left behind, however a process ends. A thread per mailbox always reads,
// so that two ranks which send large messages to each other cannot block each other.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace npu_emulator {

enum class Channel : uint32_t { kCollective, kPointToPoint, kAcknowledge };

// Describes an operation. Ranks compare these, so a field is zero where ranks may differ.
struct Header {
  char operation[24];
  uint64_t count;
  int32_t data_type;
  int32_t reduction;
  int32_t root;
  Channel channel;
  uint64_t payload_bytes;  // differs between ranks; not compared
  uint32_t sender;         // not compared
  uint32_t padding;
};

struct Message {
  Header header;
  std::vector<char> payload;
};

class Mailbox {
 public:
  Mailbox(const std::string& name, uint32_t rank, uint32_t size);
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;

  // Both return an empty string, or what went wrong.
  std::string send(uint32_t to, Header header, const void* payload, size_t bytes);
  std::string receive(uint32_t from, Channel channel, Message& message);

 private:
  using Key = std::pair<uint32_t, Channel>;

  std::string connect_to(uint32_t rank);
  void serve();
  bool read_message(int connection);
  void deliver(Message message);

  const std::string name_;
  const uint32_t rank_;
  int listener_ = -1;
  int closing_ = -1;  // eventfd that ends the serving thread
  std::map<uint32_t, int> outgoing_;
  std::map<int, uint32_t> incoming_;  // connection -> rank at the other end; used by the serving thread only

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<Key, std::deque<Message>> inbox_;
  std::set<uint32_t> departed_;
  std::thread server_;
};

}  // namespace npu_emulator
