// "aclop" operators: the few that torch_npu launches from C++ without passing the dispatcher, where the Python
// kernels of this package sit. Anything else fails loudly.
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../half.h"
#include "failure.h"

struct aclTensorDesc {
  aclDataType type;
  std::vector<int64_t> sizes;
  aclFormat format;
  std::string name;
  const void* constant = nullptr;
};
struct aclDataBuffer {
  void* data;
  size_t bytes;
};
struct aclopAttr {};

namespace npu_emulator {
namespace {

size_t size_of(aclDataType type) {
  switch (type) {
    case ACL_FLOAT: case ACL_INT32: case ACL_UINT32: return 4;
    case ACL_FLOAT16: case ACL_BF16: case ACL_INT16: case ACL_UINT16: return 2;
    case ACL_INT64: case ACL_UINT64: case ACL_DOUBLE: case ACL_COMPLEX64: return 8;
    case ACL_COMPLEX128: return 16;
    default: return 1;
  }
}

template <class T>
T load(const void* data, size_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * sizeof(T), sizeof(T));
  return value;
}
template <class T>
void store(void* data, size_t index, T value) {
  std::memcpy(static_cast<char*>(data) + index * sizeof(T), &value, sizeof(T));
}

double read(const void* data, aclDataType type, size_t index) {
  switch (type) {
    case ACL_FLOAT: return load<float>(data, index);
    case ACL_DOUBLE: return load<double>(data, index);
    case ACL_FLOAT16: return from_float16(load<uint16_t>(data, index));
    case ACL_BF16: return from_bfloat16(load<uint16_t>(data, index));
    case ACL_INT64: return static_cast<double>(load<int64_t>(data, index));
    case ACL_INT32: return load<int32_t>(data, index);
    case ACL_INT16: return load<int16_t>(data, index);
    case ACL_INT8: return load<int8_t>(data, index);
    case ACL_UINT8: return load<uint8_t>(data, index);
    case ACL_BOOL: return load<uint8_t>(data, index) != 0;
    default: std::fprintf(stderr, "npu_emulator: aclop reads data type %d\n", type); std::abort();
  }
}

void write(void* data, aclDataType type, size_t index, double value) {
  switch (type) {
    case ACL_FLOAT: return store(data, index, static_cast<float>(value));
    case ACL_DOUBLE: return store(data, index, value);
    case ACL_FLOAT16: return store(data, index, to_float16(static_cast<float>(value)));
    case ACL_BF16: return store(data, index, to_bfloat16(static_cast<float>(value)));
    case ACL_INT64: return store(data, index, static_cast<int64_t>(value));
    case ACL_INT32: return store(data, index, static_cast<int32_t>(value));
    case ACL_INT16: return store(data, index, static_cast<int16_t>(value));
    case ACL_INT8: return store(data, index, static_cast<int8_t>(value));
    case ACL_UINT8: return store(data, index, static_cast<uint8_t>(value));
    case ACL_BOOL: return store(data, index, static_cast<uint8_t>(value != 0));
    default: std::fprintf(stderr, "npu_emulator: aclop writes data type %d\n", type); std::abort();
  }
}

// One input or output of an operator.
struct Operand {
  const aclTensorDesc* description;
  const aclDataBuffer* buffer;

  void* data() const { return buffer->data ? buffer->data : const_cast<void*>(description->constant); }
  size_t count() const {
    size_t product = 1;
    for (int64_t size : description->sizes) product *= static_cast<size_t>(size);
    return product;
  }
  size_t element_size() const { return size_of(description->type); }
  double get(size_t index) const { return read(data(), description->type, index); }
  void set(size_t index, double value) const { write(data(), description->type, index, value); }
};

void fill(const Operand& output, double value) {
  for (size_t i = 0; i < output.count(); ++i) output.set(i, value);
}

void cast(const Operand& input, const Operand& output) {
  for (size_t i = 0; i < output.count(); ++i) output.set(i, input.get(i));
}

// paddings[2 * d] elements stand before the input in dimension d.
void pad(const Operand& input, const Operand& paddings, double value, const Operand& output) {
  fill(output, value);
  const auto& from = input.description->sizes;
  const auto& to = output.description->sizes;
  const size_t bytes = output.element_size();
  for (size_t i = 0; i < input.count(); ++i) {
    size_t rest = i, offset = 0, stride = 1;
    for (size_t d = from.size(); d-- > 0;) {
      const size_t coordinate = rest % static_cast<size_t>(from[d]);
      rest /= static_cast<size_t>(from[d]);
      offset += (coordinate + static_cast<size_t>(paddings.get(2 * d))) * stride;
      stride *= static_cast<size_t>(to[d]);
    }
    std::memcpy(static_cast<char*>(output.data()) + offset * bytes, static_cast<const char*>(input.data()) + i * bytes, bytes);
  }
}

bool run(const std::string& name, const std::vector<Operand>& inputs, const Operand& output) {
  if (name == "Fill") fill(output, inputs[1].get(0));
  else if (name == "Cast") cast(inputs[0], output);
  else if (name == "ZerosLike") std::memset(output.data(), 0, output.count() * output.element_size());
  else if (name == "Identity" || name == "TensorMove") std::memmove(output.data(), inputs[0].data(), output.count() * output.element_size());
  else if (name == "PadV3") pad(inputs[0], inputs[1], inputs.size() > 2 ? inputs[2].get(0) : 0, output);
  else return false;
  return true;
}

}  // namespace
}  // namespace npu_emulator

using namespace npu_emulator;

extern "C" {

aclTensorDesc* aclCreateTensorDesc(aclDataType type, int rank, const int64_t* sizes, aclFormat format) {
  return new aclTensorDesc{type, std::vector<int64_t>(sizes, sizes + (rank > 0 ? rank : 0)), format, "", nullptr};
}
void aclDestroyTensorDesc(const aclTensorDesc* description) { delete description; }
aclError aclSetTensorFormat(aclTensorDesc*, aclFormat) { return ACL_SUCCESS; }
aclError aclSetTensorShape(aclTensorDesc*, int, const int64_t*) { return ACL_SUCCESS; }
aclError aclSetTensorPlaceMent(aclTensorDesc*, aclMemType) { return ACL_SUCCESS; }
aclError aclSetTensorConst(aclTensorDesc* description, void* data, size_t) {
  description->constant = data;
  return ACL_SUCCESS;
}
void aclSetTensorDescName(aclTensorDesc* description, const char* name) { description->name = name; }
aclDataType aclGetTensorDescType(const aclTensorDesc* description) { return description->type; }
aclFormat aclGetTensorDescFormat(const aclTensorDesc* description) { return description->format; }
size_t aclGetTensorDescNumDims(const aclTensorDesc* description) { return description->sizes.size(); }
aclError aclGetTensorDescDimV2(const aclTensorDesc* description, size_t index, int64_t* size) {
  *size = description->sizes[index];
  return ACL_SUCCESS;
}

aclDataBuffer* aclCreateDataBuffer(void* data, size_t bytes) { return new aclDataBuffer{data, bytes}; }
aclError aclDestroyDataBuffer(const aclDataBuffer* buffer) {
  delete buffer;
  return ACL_SUCCESS;
}

// No operator above reads an attribute: Cast takes its type from the output.
aclopAttr* aclopCreateAttr() { return new aclopAttr; }
void aclopDestroyAttr(const aclopAttr* attributes) { delete attributes; }
aclError aclopSetAttrInt(aclopAttr*, const char*, int64_t) { return ACL_SUCCESS; }
aclError aclopSetAttrBool(aclopAttr*, const char*, uint8_t) { return ACL_SUCCESS; }
aclError aclopSetAttrFloat(aclopAttr*, const char*, float) { return ACL_SUCCESS; }
aclError aclopSetAttrDataType(aclopAttr*, const char*, aclDataType) { return ACL_SUCCESS; }
aclError aclopSetAttrString(aclopAttr*, const char*, const char*) { return ACL_SUCCESS; }
aclError aclopSetAttrListInt(aclopAttr*, const char*, int, const int64_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListFloat(aclopAttr*, const char*, int, const float*) { return ACL_SUCCESS; }
aclError aclopSetAttrListBool(aclopAttr*, const char*, int, const uint8_t*) { return ACL_SUCCESS; }
aclError aclopSetAttrListListInt(aclopAttr*, const char*, int, const int*, const int64_t* const[]) { return ACL_SUCCESS; }

aclError aclopCompileAndExecute(const char* name, int input_count, const aclTensorDesc* const input_descriptions[],
                                const aclDataBuffer* const input_buffers[], int, const aclTensorDesc* const output_descriptions[],
                                aclDataBuffer* const output_buffers[], const aclopAttr*, aclopEngineType, aclopCompileType,
                                const char*, aclrtStream stream) {
  // In stream order: run behind everything the stream has. The caller frees the descriptions on return,
  // so the host waits and the operator runs here.
  if (aclError error = aclrtSynchronizeStream(stream)) return error;
  std::vector<Operand> inputs;
  for (int i = 0; i < input_count; ++i) inputs.push_back({input_descriptions[i], input_buffers[i]});
  if (run(name, inputs, {output_descriptions[0], output_buffers[0]})) return ACL_SUCCESS;
  std::fprintf(stderr, "npu_emulator: aclop %s (%d inputs) is not emulated\n", name, input_count);
  if (std::getenv("NPU_EMULATOR_ABORT")) std::abort();
  return refuse(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "this aclop is not emulated");
}

aclError aclopCompileAndExecuteV2(const char* name, int input_count, aclTensorDesc* input_descriptions[],
                                  aclDataBuffer* input_buffers[], int output_count, aclTensorDesc* output_descriptions[],
                                  aclDataBuffer* output_buffers[], aclopAttr* attributes, aclopEngineType engine,
                                  aclopCompileType compile, const char* path, aclrtStream stream) {
  return aclopCompileAndExecute(name, input_count, input_descriptions, input_buffers, output_count, output_descriptions,
                                output_buffers, attributes, engine, compile, path, stream);
}
}
