// Memory whose size follows the step: 64-byte aligned, grown, never shrunk, zero at first.
#pragma once

#include <stdint.h>

#include <cstdlib>
#include <cstring>
#include <new>

namespace pointsman {

template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count) { grow(count); }
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept : data_(other.data_), count_(other.count_) {
    other.data_ = nullptr;
    other.count_ = 0;
  }

  // Makes room for so many; what was there is gone if it had to move.
  void grow(int64_t count) {
    if (count <= count_) return;
    int64_t bytes = (count * (int64_t)sizeof(T) + 63) / 64 * 64;
    T* data = static_cast<T*>(std::aligned_alloc(64, bytes));
    if (!data) throw std::bad_alloc();
    std::memset(static_cast<void*>(data), 0, bytes);
    std::free(data_);
    data_ = data;
    count_ = count;
  }

  // A copy of values[0, count), followed by zeros up to `room`.
  void assign(const T* values, int64_t count, int64_t room) {
    grow(room);
    std::memcpy(data_, values, count * sizeof(T));
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](int64_t i) { return data_[i]; }
  const T& operator[](int64_t i) const { return data_[i]; }
  bool is_empty() const { return count_ == 0; }

 private:
  T* data_ = nullptr;
  int64_t count_ = 0;
};

}  // namespace pointsman
