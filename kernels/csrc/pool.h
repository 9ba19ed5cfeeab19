// The step's threads: the caller and its helpers, which spin for a moment, then give the core away, then sleep.
//
// At most 20 us of spinning: on two cores the HTTP thread wants one of them. Work is handed out in chunks, so that a
// helper that lost its core delays its chunk only.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace pointsman {

class Pool {
 public:
  explicit Pool(int num_threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return num_threads_; }

  // Calls work(thread) on all threads, thread 0 being the caller's, and returns when all have returned.
  void run(const std::function<void(int)>& work);

  // Within run(): nobody passes before all have come. What was written before is seen behind it.
  void barrier();

 private:
  void serve(int thread);

  const int num_threads_;
  std::vector<std::thread> helpers_;
  const std::function<void(int)>* work_ = nullptr;
  bool is_closing_ = false;
  alignas(64) std::atomic<int> epoch_{0};     // of run()s
  alignas(64) std::atomic<int> num_done_{0};  // helpers that returned from this one
  alignas(64) std::atomic<int> num_waiting_{0};
  alignas(64) std::atomic<int> generation_{0};  // of barriers
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
