// The step's threads: the caller and its helpers, which spin for a moment, then give the core away, then sleep.
//
// At most 20 us of spinning: on two cores the HTTP thread wants one of them. Work is handed out in chunks, so that a
// helper that lost its core delays its chunk only.
#pragma once

#include <stdint.h>

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace pointsman {

// A process that forks has no helpers in the child: there the pool must not be used.
class Pool {
 public:
  // Throws std::runtime_error where the system refuses a thread.
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return num_threads_; }

  // Calls work(thread) on all threads, thread 0 being the caller's, and returns when all have returned. Throws what one
  // of them threw; work that waits at barriers must not throw, for the others would wait forever.
  void run(const std::function<void(int)>& work);

  // Within run(): nobody passes before all have come. What was written before is seen behind it.
  void barrier();

 private:
  void serve(int thread);
  void call(int thread);
  void close();

  const int num_threads_;
  std::vector<std::thread> helpers_;
  const std::function<void(int)>* work_ = nullptr;
  bool is_closing_ = false;
  std::mutex failure_lock_;
  std::exception_ptr failure_;  // the first of this run
  // Unsigned: there are hundreds of barriers a step, so that the counters come round within hours.
  alignas(64) std::atomic<uint32_t> epoch_{0};  // of run()s
  alignas(64) std::atomic<int> num_done_{0};    // helpers that returned from this one
  alignas(64) std::atomic<int> num_waiting_{0};
  alignas(64) std::atomic<uint32_t> generation_{0};  // of barriers
};

// Hands out 0, step, 2 * step ... to whoever asks.
struct alignas(64) Dispenser {
  std::atomic<int> next{0};

  // The next chunk as [*first, *last), or false when there is none left of n.
  bool take(int step, int n, int* first, int* last) {
    *first = next.fetch_add(step, std::memory_order_relaxed);
    *last = *first + step < n ? *first + step : n;
    return *first < n;
  }
};

}  // namespace pointsman
