// Data types and reductions of HCCL.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "third_party/hccl/inc/hccl/hccl.h"

namespace npu_emulator {

size_t size_of(HcclDataType type);

// result = parts[0] (op) parts[1] (op) ..., in rank order, so results do not change between runs.
// float16 and bfloat16 are accumulated in float32 and rounded once. Returns what went wrong, or "".
std::string reduce(const std::vector<const void*>& parts, void* result, size_t count, HcclDataType type, HcclReduceOp op);

}  // namespace npu_emulator
