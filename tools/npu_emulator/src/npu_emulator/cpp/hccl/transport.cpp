#include "transport.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <stdexcept>

#include "../settings.h"

namespace npu_emulator {
namespace {

using Clock = std::chrono::steady_clock;
constexpr uint32_t kUnknownRank = ~0u;

std::chrono::seconds time_limit() {
  static const std::chrono::seconds limit(setting("NPU_EMULATOR_HCCL_TIMEOUT_S", 60));
  return limit;
}

struct Address {
  sockaddr_un socket{};
  socklen_t length;

  Address(const std::string& name, uint32_t rank) {
    const std::string text = "npu_emulator/" + name + "/" + std::to_string(rank);
    if (text.size() + 1 > sizeof socket.sun_path) throw std::runtime_error("communicator name is too long: " + name);
    socket.sun_family = AF_UNIX;
    std::memcpy(socket.sun_path + 1, text.data(), text.size());  // a leading zero byte means: abstract namespace
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&socket); }
};

bool write_all(int connection, const void* data, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t step = ::send(connection, static_cast<const char*>(data) + done, bytes - done, MSG_NOSIGNAL);
    if (step < 0 && errno == EINTR) continue;
    if (step <= 0) return false;
    done += static_cast<size_t>(step);
  }
  return true;
}

bool read_all(int connection, void* data, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t step = ::recv(connection, static_cast<char*>(data) + done, bytes - done, 0);
    if (step < 0 && errno == EINTR) continue;
    if (step <= 0) return false;
    done += static_cast<size_t>(step);
  }
  return true;
}

}  // namespace

Mailbox::Mailbox(const std::string& name, uint32_t rank, uint32_t size) : name_(name), rank_(rank) {
  const Address address(name, rank);
  listener_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  closing_ = ::eventfd(0, EFD_CLOEXEC);
  if (listener_ < 0 || closing_ < 0 || ::bind(listener_, address.get(), address.length) ||
      ::listen(listener_, static_cast<int>(size) + 8))
    throw std::runtime_error("cannot listen as rank " + std::to_string(rank) + ": " + std::strerror(errno));
  server_ = std::thread([this] { serve(); });
}

Mailbox::~Mailbox() {
  const uint64_t one = 1;
  if (::write(closing_, &one, sizeof one) == sizeof one) server_.join();
  else server_.detach();
  // What was sent stays readable for the peers after this.
  for (const auto& entry : outgoing_) ::close(entry.second);
  for (const auto& entry : incoming_) ::close(entry.first);
  ::close(listener_);
  ::close(closing_);
}

std::string Mailbox::connect_to(uint32_t rank) {
  const Address address(name_, rank);
  const auto give_up = Clock::now() + time_limit();
  for (;;) {
    const int connection = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connection >= 0 && !::connect(connection, address.get(), address.length)) {
      outgoing_[rank] = connection;
      return "";
    }
    ::close(connection);
    if (Clock::now() > give_up) return "rank " + std::to_string(rank_) + " cannot reach rank " + std::to_string(rank);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the peer has not created its communicator yet
  }
}

std::string Mailbox::send(uint32_t to, Header header, const void* payload, size_t bytes) {
  header.payload_bytes = bytes;
  header.sender = rank_;
  if (to == rank_) {
    const char* begin = static_cast<const char*>(payload);
    deliver({header, std::vector<char>(begin, begin + bytes)});
    return "";
  }
  if (!outgoing_.count(to)) {
    std::string error = connect_to(to);
    if (!error.empty()) return error;
  }
  const int connection = outgoing_[to];
  if (!write_all(connection, &header, sizeof header) || !write_all(connection, payload, bytes))
    return "rank " + std::to_string(to) + " is gone; rank " + std::to_string(rank_) + " cannot send " + header.operation;
  return "";
}

std::string Mailbox::receive(uint32_t from, Channel channel, Message& message) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto& queue = inbox_[{from, channel}];
  arrived_.wait_for(lock, time_limit(), [&] { return !queue.empty() || departed_.count(from); });
  if (queue.empty()) {
    const char* reason = departed_.count(from) ? " is gone" : " does not answer within NPU_EMULATOR_HCCL_TIMEOUT_S";
    return "rank " + std::to_string(from) + reason + "; rank " + std::to_string(rank_) + " waits for it";
  }
  message = std::move(queue.front());
  queue.pop_front();
  return "";
}

void Mailbox::deliver(Message message) {
  std::lock_guard<std::mutex> lock(mutex_);
  inbox_[{message.header.sender, message.header.channel}].push_back(std::move(message));
  arrived_.notify_all();
}

bool Mailbox::read_message(int connection) {
  Message message;
  if (!read_all(connection, &message.header, sizeof message.header)) return false;
  message.payload.resize(message.header.payload_bytes);
  if (!read_all(connection, message.payload.data(), message.payload.size())) return false;
  incoming_[connection] = message.header.sender;
  deliver(std::move(message));
  return true;
}

void Mailbox::serve() {
  for (;;) {
    std::vector<pollfd> waiting{{closing_, POLLIN, 0}, {listener_, POLLIN, 0}};
    for (const auto& entry : incoming_) waiting.push_back({entry.first, POLLIN, 0});
    if (::poll(waiting.data(), waiting.size(), -1) < 0) continue;
    if (waiting[0].revents) return;
    if (waiting[1].revents) {
      const int connection = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (connection >= 0) incoming_[connection] = kUnknownRank;
    }
    for (size_t i = 2; i < waiting.size(); ++i) {
      const int connection = waiting[i].fd;
      if (!waiting[i].revents || read_message(connection)) continue;
      std::lock_guard<std::mutex> lock(mutex_);
      departed_.insert(incoming_[connection]);
      incoming_.erase(connection);
      ::close(connection);
      arrived_.notify_all();
    }
  }
}

}  // namespace npu_emulator
