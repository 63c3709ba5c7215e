#include "reduction.h"

#include <algorithm>
#include <cstdint>

#include "../half.h"

namespace npu_emulator {
namespace {

template <class T>
struct Plain {
  using Stored = T;
  using Computed = T;
  static T load(T value) { return value; }
  static T store(T value) { return value; }
};
struct Float16 {
  using Stored = uint16_t;
  using Computed = float;
  static float load(uint16_t value) { return from_float16(value); }
  static uint16_t store(float value) { return to_float16(value); }
};
struct Bfloat16 {
  using Stored = uint16_t;
  using Computed = float;
  static float load(uint16_t value) { return from_bfloat16(value); }
  static uint16_t store(float value) { return to_bfloat16(value); }
};

template <class T>
T combine(T a, T b, HcclReduceOp op) {
  switch (op) {
    case HCCL_REDUCE_SUM: return static_cast<T>(a + b);
    case HCCL_REDUCE_PROD: return static_cast<T>(a * b);
    case HCCL_REDUCE_MAX: return std::max(a, b);
    default: return std::min(a, b);
  }
}

template <class Format>
void reduce_as(const std::vector<const void*>& parts, void* result, size_t count, HcclReduceOp op) {
  using Stored = typename Format::Stored;
  for (size_t i = 0; i < count; ++i) {
    auto total = Format::load(static_cast<const Stored*>(parts[0])[i]);
    for (size_t r = 1; r < parts.size(); ++r)
      total = combine<typename Format::Computed>(total, Format::load(static_cast<const Stored*>(parts[r])[i]), op);
    static_cast<Stored*>(result)[i] = Format::store(total);
  }
}

}  // namespace

size_t size_of(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT16: case HCCL_DATA_TYPE_UINT16: case HCCL_DATA_TYPE_FP16: case HCCL_DATA_TYPE_BFP16: return 2;
    case HCCL_DATA_TYPE_INT32: case HCCL_DATA_TYPE_UINT32: case HCCL_DATA_TYPE_FP32: return 4;
    case HCCL_DATA_TYPE_INT64: case HCCL_DATA_TYPE_UINT64: case HCCL_DATA_TYPE_FP64: return 8;
    case HCCL_DATA_TYPE_INT128: return 16;
    default: return 1;
  }
}

std::string reduce(const std::vector<const void*>& parts, void* result, size_t count, HcclDataType type, HcclReduceOp op) {
  if (op > HCCL_REDUCE_MIN) return "HCCL has no reduction " + std::to_string(op) + " (only sum, prod, max, min)";
  // The types that the CANN 8.5 documentation of HcclAllReduce lists for Atlas A2 and A3.
  switch (type) {
    case HCCL_DATA_TYPE_INT8: reduce_as<Plain<int8_t>>(parts, result, count, op); return "";
    case HCCL_DATA_TYPE_INT16: reduce_as<Plain<int16_t>>(parts, result, count, op); return "";
    case HCCL_DATA_TYPE_INT32: reduce_as<Plain<int32_t>>(parts, result, count, op); return "";
    case HCCL_DATA_TYPE_INT64: reduce_as<Plain<int64_t>>(parts, result, count, op); return "";
    case HCCL_DATA_TYPE_FP32: reduce_as<Plain<float>>(parts, result, count, op); return "";
    case HCCL_DATA_TYPE_FP16: reduce_as<Float16>(parts, result, count, op); return "";
    case HCCL_DATA_TYPE_BFP16: reduce_as<Bfloat16>(parts, result, count, op); return "";
    default: return "HCCL does not reduce data type " + std::to_string(type);
  }
}

}  // namespace npu_emulator
