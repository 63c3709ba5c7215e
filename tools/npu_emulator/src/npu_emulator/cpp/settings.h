// Environment variables of the emulation. README.md lists them for users.
#pragma once
#include <cstdlib>

namespace npu_emulator {

inline long setting(const char* name, long fallback) {
  const char* text = std::getenv(name);
  return text && *text ? std::strtol(text, nullptr, 10) : fallback;
}

}  // namespace npu_emulator
