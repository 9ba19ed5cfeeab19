// The pool: every thread runs each work once, barriers order what is written, dispensers hand out each item once.

#include "pool.h"

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <vector>

using namespace pointsman;

namespace {

void check(bool holds, const char* what) {
  if (holds) return;
  std::printf("FAILED: %s\n", what);
  std::exit(1);
}

// Each stage reads what the other threads wrote in the stage before: a missing fence is a race that TSan reports.
void rotate_through_barriers(int num_threads) {
  Pool pool(num_threads);
  std::vector<long> cells(num_threads), next(num_threads);
  for (int step = 0; step < 200; step++) {
    pool.run([&](int thread) {
      for (int stage = 0; stage < 20; stage++) {
        next[thread] = cells[(thread + 1) % num_threads] + 1;
        pool.barrier();
        cells[thread] = next[thread];
        pool.barrier();
      }
    });
  }
  for (long cell : cells) check(cell == 200 * 20, "each stage added one to what the neighbour had");
}

void hand_out_everything_once(int num_threads) {
  Pool pool(num_threads);
  for (int step = 1; step < 9; step++) {
    Dispenser dispenser;
    std::vector<int> taken(1001);
    pool.run([&](int) {
      for (int first, last; dispenser.take(step, (int)taken.size(), &first, &last);)
        for (int i = first; i < last; i++) taken[i]++;
    });
    for (int count : taken) check(count == 1, "each item is handed out once");
  }
}

// Pauses longer than the spinning, so that the helpers have gone to sleep.
void wake_sleepers(int num_threads) {
  Pool pool(num_threads);
  int calls = 0;
  std::vector<int> seen(num_threads);
  for (; calls < 20; calls++) {
    timespec pause = {0, 2000000};
    nanosleep(&pause, nullptr);
    pool.run([&](int thread) { seen[thread]++; });
  }
  for (int count : seen) check(count == calls, "a sleeping thread wakes for every run");
}

// Whoever throws, the caller gets it when all have returned, and the next run finds nothing left of it.
void hand_on_exceptions(int num_threads) {
  Pool pool(num_threads);
  for (int thrower = 0; thrower < num_threads; thrower++) {
    std::vector<int> seen(num_threads);
    bool is_told = false;
    try {
      pool.run([&](int thread) {
        seen[thread]++;
        if (thread >= thrower) throw std::runtime_error("no");
      });
    } catch (const std::runtime_error&) {
      is_told = true;
    }
    check(is_told, "an exception of any thread comes to the caller");
    for (int count : seen) check(count == 1, "all threads have run");
    pool.run([&](int thread) { seen[thread]++; });
    for (int count : seen) check(count == 2, "the next run is as any");
  }
}

}  // namespace

int main() {
  for (int num_threads : {1, 2, 3, 5}) {
    rotate_through_barriers(num_threads);
    hand_out_everything_once(num_threads);
    wake_sleepers(num_threads);
    hand_on_exceptions(num_threads);
  }
  Pool unused(4);  // ends without ever having run
  std::printf("ok\n");
}
