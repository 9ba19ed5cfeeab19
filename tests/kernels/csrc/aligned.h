// An array of zeros on a 64-byte line, as the kernels want weights and scratch.
#pragma once

#include <new>
#include <vector>

template <typename T>
struct LineAllocator {
  typedef T value_type;

  LineAllocator() {}
  template <typename U>
  LineAllocator(const LineAllocator<U>&) {}

  T* allocate(size_t n) { return (T*)::operator new(n * sizeof(T), std::align_val_t(64)); }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }

  template <typename U>
  bool operator==(const LineAllocator<U>&) const { return true; }
  template <typename U>
  bool operator!=(const LineAllocator<U>&) const { return false; }
};

template <typename T>
using Aligned = std::vector<T, LineAllocator<T>>;
