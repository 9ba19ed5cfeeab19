// test_attend.cpp's checks, of amx_attend().
#include "amx_attend.h"

#include <stdlib.h>

#include "cpu.h"

namespace pointsman {
namespace {

// As a thread of a step calls it.
void enter_and_attend(const AttendCall& call) {
#if !defined(PM_EMULATE_AMX)
  if (!can_run("amx")) abort();
#endif
  enter_tiles();
  amx_attend(call);
  leave_tiles();
}

}  // namespace
}  // namespace pointsman

#define attend enter_and_attend
#define kAttendScratchBytes kAmxAttendScratchBytes
#include "test_attend.cpp"
