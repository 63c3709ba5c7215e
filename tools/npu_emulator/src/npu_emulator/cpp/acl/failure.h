// Error texts and the asynchronous failure of the process.
#pragma once
#include <acl/acl.h>

namespace npu_emulator {

// Remembers `message` for aclGetRecentErrMsg (torch_npu appends it to its exception) and returns `code`.
aclError refuse(aclError code, const char* message);

// ACL_SUCCESS, or the error that every synchronization reports once work on a stream has failed.
aclError failure_status();

}  // namespace npu_emulator
