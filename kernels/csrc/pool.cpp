#include "pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <stdexcept>
#include <system_error>
#include <utility>

namespace pointsman {

namespace {

constexpr int kSpins = 400;  // of about 40 ns: a stage's threads end within a few microseconds of each other

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void futex_wait(std::atomic<uint32_t>* word, uint32_t value) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}

// Waits within a step, where what it waits for is being computed: gives the core away, does not sleep.
template <class Condition>
void spin_until(Condition is_met) {
  for (int spins = 0; !is_met();) {
    if (++spins < kSpins)
      relax();
    else
      sched_yield();
  }
}

}  // namespace

Pool::Pool(int num_threads) : num_threads_(num_threads) {
  try {
    helpers_.reserve(num_threads - 1);
    for (int thread = 1; thread < num_threads; thread++) helpers_.emplace_back([this, thread] { serve(thread); });
  } catch (const std::system_error&) {
    close();  // those that have started: a thread that nobody joins ends the process
    throw std::runtime_error("The system starts no more threads for the kernels; ask for fewer.");
  } catch (...) {
    close();
    throw;
  }
}

Pool::~Pool() { close(); }

void Pool::close() {
  is_closing_ = true;
  epoch_.fetch_add(1, std::memory_order_release);
  futex_wake_all(&epoch_);
  for (std::thread& helper : helpers_) helper.join();
}

void Pool::run(const std::function<void(int)>& work) {
  work_ = &work;
  num_done_.store(0, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  if (num_threads_ > 1) futex_wake_all(&epoch_);
  call(0);
  spin_until([this] { return num_done_.load(std::memory_order_acquire) == num_threads_ - 1; });
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void Pool::call(int thread) {
  try {
    (*work_)(thread);
  } catch (...) {
    std::lock_guard<std::mutex> hold(failure_lock_);
    if (!failure_) failure_ = std::current_exception();
  }
}

void Pool::serve(int thread) {
  for (uint32_t seen = 0;; seen++) {
    for (int spins = 0; epoch_.load(std::memory_order_acquire) == seen;) {
      if (++spins < kSpins)
        relax();
      else
        futex_wait(&epoch_, seen);
    }
    if (is_closing_) return;
    call(thread);
    num_done_.fetch_add(1, std::memory_order_release);
  }
}

void Pool::barrier() {
  if (num_threads_ == 1) return;
  uint32_t generation = generation_.load(std::memory_order_relaxed);
  if (num_waiting_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
    num_waiting_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_release);
    return;
  }
  spin_until([this, generation] { return generation_.load(std::memory_order_acquire) != generation; });
}

}  // namespace pointsman
