// Send and receive. HcclSend is synchronous (CANN documentation of HcclSend and HcclRecv: they "must be used in
// pairs", the sender waits until the paired receive has the data), so a send here ends with an acknowledgement.
// Code that relies on buffered sends hangs on hardware; here it fails after NPU_EMULATOR_HCCL_TIMEOUT_S.
#include <cstring>

#include "communicator.h"
#include "reduction.h"

namespace npu_emulator {
namespace {

Header header_of(const HcclSendRecvItem& item, Channel channel) {
  Header header{};
  std::strcpy(header.operation, "send");
  header.count = item.count;
  header.data_type = item.dataType;
  header.channel = channel;
  return header;
}

std::string send(const Transfer& transfer) {
  const auto& item = transfer.item;
  return transfer.communicator->mailbox.send(item.remoteRank, header_of(item, Channel::kPointToPoint), item.buf,
                                             item.count * size_of(item.dataType));
}

std::string receive(const Transfer& transfer) {
  const auto& item = transfer.item;
  auto& mailbox = transfer.communicator->mailbox;
  Message message;
  std::string error = mailbox.receive(item.remoteRank, Channel::kPointToPoint, message);
  if (!error.empty()) return error + " in recv";
  if (message.header.count != item.count || message.header.data_type != item.dataType)
    return "rank " + std::to_string(item.remoteRank) + " sends " + std::to_string(message.header.count) +
           " elements of data type " + std::to_string(message.header.data_type) + ", the receiver expects " +
           std::to_string(item.count) + " of data type " + std::to_string(item.dataType);
  std::memcpy(item.buf, message.payload.data(), message.payload.size());
  return mailbox.send(item.remoteRank, header_of(item, Channel::kAcknowledge), nullptr, 0);
}

std::string wait_for_receiver(const Transfer& transfer) {
  Message message;
  std::string error = transfer.communicator->mailbox.receive(transfer.item.remoteRank, Channel::kAcknowledge, message);
  return error.empty() ? "" : error + " in send";
}

}  // namespace

std::string run_transfers(const std::vector<Transfer>& transfers) {
  struct Phase {
    HcclSendRecvType type;
    std::string (*step)(const Transfer&);
  };
  const Phase phases[] = {{HCCL_SEND, send}, {HCCL_RECV, receive}, {HCCL_SEND, wait_for_receiver}};
  for (const Phase& phase : phases)
    for (const Transfer& transfer : transfers)
      if (transfer.item.sendRecvType == phase.type) {
        std::string error = phase.step(transfer);
        if (!error.empty()) return error;
      }
  return "";
}

}  // namespace npu_emulator

using namespace npu_emulator;

extern "C" {

HcclResult HcclSend(void* buffer, uint64_t count, HcclDataType type, uint32_t to, HcclComm handle, aclrtStream stream) {
  return submit_transfers({{communicator_of(handle), {HCCL_SEND, buffer, count, type, to}}}, stream);
}

HcclResult HcclRecv(void* buffer, uint64_t count, HcclDataType type, uint32_t from, HcclComm handle, aclrtStream stream) {
  return submit_transfers({{communicator_of(handle), {HCCL_RECV, buffer, count, type, from}}}, stream);
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm handle, aclrtStream stream) {
  std::vector<Transfer> transfers;
  for (uint32_t i = 0; i < count; ++i) transfers.push_back({communicator_of(handle), items[i]});
  return submit_transfers(std::move(transfers), stream);
}
}
