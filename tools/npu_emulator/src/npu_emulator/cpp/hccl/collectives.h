#pragma once
#include <string>

#include "communicator.h"

namespace npu_emulator {

// Returns when every rank of the communicator has called it with the same name.
std::string meet(Communicator* communicator, const char* name);

}  // namespace npu_emulator
