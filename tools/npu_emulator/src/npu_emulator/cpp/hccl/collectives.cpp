// Collectives. Each one is an exchange: every rank sends every rank the header of its operation, with the bytes
// that this peer needs, and compares the headers that it gets. Ranks that run different operations fail at once.
#include "collectives.h"

#include <cstring>

#include "reduction.h"

namespace npu_emulator {
namespace {

struct Bytes {
  const void* data = nullptr;
  size_t size = 0;
};
using BytesForPeer = std::function<Bytes(uint32_t peer)>;

Header header_of(const char* operation, uint64_t count = 0, int data_type = 0, int reduction = 0, int root = 0) {
  Header header{};
  std::strncpy(header.operation, operation, sizeof header.operation - 1);
  header.count = count;
  header.data_type = data_type;
  header.reduction = reduction;
  header.root = root;
  header.channel = Channel::kCollective;
  return header;
}

bool same(const Header& a, const Header& b) {
  return !std::strcmp(a.operation, b.operation) && a.count == b.count && a.data_type == b.data_type &&
         a.reduction == b.reduction && a.root == b.root;
}

std::string describe(const Header& header) {
  return std::string(header.operation) + "(count=" + std::to_string(header.count) +
         ", data_type=" + std::to_string(header.data_type) + ", reduction=" + std::to_string(header.reduction) +
         ", root=" + std::to_string(header.root) + ")";
}

std::string exchange(Communicator* comm, const Header& header, const BytesForPeer& bytes_for, std::vector<Message>& received) {
  for (uint32_t step = 0; step < comm->size; ++step) {
    const uint32_t peer = (comm->rank + step) % comm->size;  // not everybody to rank 0 first
    const Bytes bytes = bytes_for(peer);
    std::string error = comm->mailbox.send(peer, header, bytes.data, bytes.size);
    if (!error.empty()) return error;
  }
  received.resize(comm->size);
  for (uint32_t peer = 0; peer < comm->size; ++peer) {
    std::string error = comm->mailbox.receive(peer, Channel::kCollective, received[peer]);
    if (!error.empty()) return error + " in " + describe(header);
    if (!same(header, received[peer].header))
      return "mismatched collectives: rank " + std::to_string(comm->rank) + " runs " + describe(header) + " while rank " +
             std::to_string(peer) + " runs " + describe(received[peer].header);
  }
  return "";
}

std::string reduce_received(const std::vector<Message>& received, void* result, uint64_t count, HcclDataType type, HcclReduceOp op) {
  std::vector<const void*> parts;
  for (const Message& message : received) parts.push_back(message.payload.data());
  return reduce(parts, result, count, type, op);
}

// `displacement` elements of `type` behind `base`.
char* at(void* base, uint64_t displacement, HcclDataType type) { return static_cast<char*>(base) + displacement * size_of(type); }
const char* at(const void* base, uint64_t displacement, HcclDataType type) {
  return static_cast<const char*>(base) + displacement * size_of(type);
}

// The caller's count arrays are only valid during the call.
std::vector<uint64_t> copy_counts(const void* counts, HcclComm handle) {
  const auto* first = static_cast<const uint64_t*>(counts);
  return std::vector<uint64_t>(first, first + communicator_of(handle)->size);
}

}  // namespace

std::string meet(Communicator* comm, const char* name) {
  std::vector<Message> received;
  return exchange(comm, header_of(name), [](uint32_t) { return Bytes{}; }, received);
}

}  // namespace npu_emulator

using namespace npu_emulator;

extern "C" {

HcclResult HcclBarrier(HcclComm handle, aclrtStream stream) {
  auto* comm = communicator_of(handle);
  return submit(comm, stream, [=] { return meet(comm, "barrier"); });
}

HcclResult HcclAllReduce(void* input, void* output, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm handle,
                         aclrtStream stream) {
  auto* comm = communicator_of(handle);
  return submit(comm, stream, [=]() -> std::string {
    std::vector<Message> received;
    const Bytes all{input, count * size_of(type)};
    std::string error = exchange(comm, header_of("all_reduce", count, type, op), [&](uint32_t) { return all; }, received);
    return error.empty() ? reduce_received(received, output, count, type, op) : error;
  });
}

HcclResult HcclReduce(void* input, void* output, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                      HcclComm handle, aclrtStream stream) {
  auto* comm = communicator_of(handle);
  return submit(comm, stream, [=]() -> std::string {
    std::vector<Message> received;
    auto bytes_for = [&](uint32_t peer) { return peer == root ? Bytes{input, count * size_of(type)} : Bytes{}; };
    std::string error = exchange(comm, header_of("reduce", count, type, op, static_cast<int>(root)), bytes_for, received);
    return error.empty() && comm->rank == root ? reduce_received(received, output, count, type, op) : error;
  });
}

HcclResult HcclReduceScatter(void* input, void* output, uint64_t count, HcclDataType type, HcclReduceOp op, HcclComm handle,
                             aclrtStream stream) {
  auto* comm = communicator_of(handle);
  return submit(comm, stream, [=]() -> std::string {
    std::vector<Message> received;
    auto bytes_for = [&](uint32_t peer) { return Bytes{at(input, peer * count, type), count * size_of(type)}; };
    std::string error = exchange(comm, header_of("reduce_scatter", count, type, op), bytes_for, received);
    return error.empty() ? reduce_received(received, output, count, type, op) : error;
  });
}

HcclResult HcclReduceScatterV(void* input, const void* counts, const void* displacements, void* output, uint64_t count,
                              HcclDataType type, HcclReduceOp op, HcclComm handle, aclrtStream stream) {
  auto* comm = communicator_of(handle);
  return submit(comm, stream, [=, sizes = copy_counts(counts, handle), starts = copy_counts(displacements, handle)]() -> std::string {
    uint64_t total = 0;
    for (uint64_t size : sizes) total += size;
    std::vector<Message> received;
    auto bytes_for = [&](uint32_t peer) { return Bytes{at(input, starts[peer], type), sizes[peer] * size_of(type)}; };
    std::string error = exchange(comm, header_of("reduce_scatter_v", total, type, op), bytes_for, received);
    if (!error.empty()) return error;
    for (const Message& message : received)
      if (message.payload.size() != count * size_of(type)) return "reduce_scatter_v: ranks disagree on the counts";
    return reduce_received(received, output, count, type, op);
  });
}

HcclResult HcclAllGather(void* input, void* output, uint64_t count, HcclDataType type, HcclComm handle, aclrtStream stream) {
  auto* comm = communicator_of(handle);
  return submit(comm, stream, [=]() -> std::string {
    std::vector<Message> received;
    const Bytes all{input, count * size_of(type)};
    std::string error = exchange(comm, header_of("all_gather", count, type), [&](uint32_t) { return all; }, received);
    if (!error.empty()) return error;
    for (uint32_t peer = 0; peer < comm->size; ++peer)
      std::memcpy(at(output, peer * count, type), received[peer].payload.data(), received[peer].payload.size());
    return "";
  });
}

HcclResult HcclAllGatherV(void* input, uint64_t count, void* output, const void* counts, const void* displacements,
                          HcclDataType type, HcclComm handle, aclrtStream stream) {
  auto* comm = communicator_of(handle);
  return submit(comm, stream, [=, sizes = copy_counts(counts, handle), starts = copy_counts(displacements, handle)]() -> std::string {
    std::vector<Message> received;
    const Bytes all{input, count * size_of(type)};
    std::string error = exchange(comm, header_of("all_gather_v", 0, type), [&](uint32_t) { return all; }, received);
    if (!error.empty()) return error;
    for (uint32_t peer = 0; peer < comm->size; ++peer) {
      if (received[peer].payload.size() != sizes[peer] * size_of(type)) return "all_gather_v: ranks disagree on the counts";
      std::memcpy(at(output, starts[peer], type), received[peer].payload.data(), received[peer].payload.size());
    }
    return "";
  });
}

HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle, aclrtStream stream) {
  auto* comm = communicator_of(handle);
  return submit(comm, stream, [=]() -> std::string {
    std::vector<Message> received;
    auto bytes_for = [&](uint32_t) { return comm->rank == root ? Bytes{buffer, count * size_of(type)} : Bytes{}; };
    std::string error = exchange(comm, header_of("broadcast", count, type, 0, static_cast<int>(root)), bytes_for, received);
    if (error.empty() && comm->rank != root) std::memcpy(buffer, received[root].payload.data(), received[root].payload.size());
    return error;
  });
}

HcclResult HcclScatter(void* input, void* output, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle,
                       aclrtStream stream) {
  auto* comm = communicator_of(handle);
  return submit(comm, stream, [=]() -> std::string {
    std::vector<Message> received;
    auto bytes_for = [&](uint32_t peer) {
      return comm->rank == root ? Bytes{at(input, peer * count, type), count * size_of(type)} : Bytes{};
    };
    std::string error = exchange(comm, header_of("scatter", count, type, 0, static_cast<int>(root)), bytes_for, received);
    if (error.empty()) std::memcpy(output, received[root].payload.data(), received[root].payload.size());
    return error;
  });
}

HcclResult HcclAlltoAll(const void* input, uint64_t count, HcclDataType type, const void* output, uint64_t, HcclDataType,
                        HcclComm handle, aclrtStream stream) {
  auto* comm = communicator_of(handle);
  return submit(comm, stream, [=]() -> std::string {
    std::vector<Message> received;
    auto bytes_for = [&](uint32_t peer) { return Bytes{at(input, peer * count, type), count * size_of(type)}; };
    std::string error = exchange(comm, header_of("all_to_all", count, type), bytes_for, received);
    if (!error.empty()) return error;
    for (uint32_t peer = 0; peer < comm->size; ++peer)
      std::memcpy(at(const_cast<void*>(output), peer * count, type), received[peer].payload.data(), received[peer].payload.size());
    return "";
  });
}

HcclResult HcclAlltoAllV(const void* input, const void* send_counts, const void* send_displacements, HcclDataType send_type,
                         const void* output, const void* receive_counts, const void* receive_displacements,
                         HcclDataType receive_type, HcclComm handle, aclrtStream stream) {
  auto* comm = communicator_of(handle);
  return submit(comm, stream, [=, send_sizes = copy_counts(send_counts, handle), send_starts = copy_counts(send_displacements, handle),
                               receive_sizes = copy_counts(receive_counts, handle),
                               receive_starts = copy_counts(receive_displacements, handle)]() -> std::string {
    std::vector<Message> received;
    auto bytes_for = [&](uint32_t peer) { return Bytes{at(input, send_starts[peer], send_type), send_sizes[peer] * size_of(send_type)}; };
    std::string error = exchange(comm, header_of("all_to_all_v", 0, send_type), bytes_for, received);
    if (!error.empty()) return error;
    for (uint32_t peer = 0; peer < comm->size; ++peer) {
      const size_t expected = receive_sizes[peer] * size_of(receive_type);
      if (received[peer].payload.size() != expected)
        return "all_to_all_v: rank " + std::to_string(peer) + " sends " + std::to_string(received[peer].payload.size()) +
               " bytes, rank " + std::to_string(comm->rank) + " expects " + std::to_string(expected);
      std::memcpy(at(const_cast<void*>(output), receive_starts[peer], receive_type), received[peer].payload.data(), expected);
    }
    return "";
  });
}
}
