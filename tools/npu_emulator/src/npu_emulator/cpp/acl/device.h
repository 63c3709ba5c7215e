// The devices of this process.
#pragma once

namespace npu_emulator {

constexpr int kMaxDevices = 64;

int device_count();
int current_device_or_zero();  // torch_npu allocates on some threads before it sets a device there

}  // namespace npu_emulator
