// CANN libraries that torch_npu links and whose symbols come from elsewhere: only their names must exist.
extern "C" int npu_emulator_placeholder;
int npu_emulator_placeholder = 0;
