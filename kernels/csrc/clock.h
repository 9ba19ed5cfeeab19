// The time that phases are measured in.
#pragma once

#include <time.h>

namespace pointsman {

// Seconds since some moment.
inline double now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

}  // namespace pointsman
