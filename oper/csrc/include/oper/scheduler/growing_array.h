// GrowingArray: plain records in one piece that begins on a cache line, and grows without a copy
// where the system can move its pages instead.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>

namespace oper {

template <typename T>
class GrowingArray {
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);

 public:
  GrowingArray() = default;
  GrowingArray(GrowingArray&& other) noexcept { swap(other); }
  GrowingArray& operator=(GrowingArray&& other) noexcept {
    swap(other);
    return *this;
  }
  GrowingArray(const GrowingArray&) = delete;
  GrowingArray& operator=(const GrowingArray&) = delete;
  ~GrowingArray() { std::free(memory_); }

  size_t size() const { return size_; }
  T& operator[](size_t n) { return records_[n]; }
  const T& operator[](size_t n) const { return records_[n]; }
  T* begin() { return records_; }
  T* end() { return records_ + size_; }

  // Append `count` records as T{} is.
  void extend(size_t count) {
    if (size_ + count > capacity_) reserve(size_ + count);
    for (; count; --count) new (records_ + size_++) T{};
  }

 private:
  static constexpr size_t kLine = 64;

  static size_t to_line(const void* memory) {
    return (kLine - reinterpret_cast<uintptr_t>(memory) % kLine) % kLine;
  }

  void reserve(size_t needed) {
    const size_t capacity = needed > 2 * capacity_ ? needed : 2 * capacity_;
    const size_t before = memory_ ? to_line(memory_) : 0;
    auto* const memory = static_cast<char*>(std::realloc(memory_, capacity * sizeof(T) + kLine));
    if (!memory) throw std::bad_alloc();
    const size_t now = to_line(memory);
    if (now != before) std::memmove(memory + now, memory + before, size_ * sizeof(T));
    memory_ = memory;
    records_ = reinterpret_cast<T*>(memory + now);
    capacity_ = capacity;
  }

  void swap(GrowingArray& other) {
    std::swap(memory_, other.memory_);
    std::swap(records_, other.records_);
    std::swap(size_, other.size_);
    std::swap(capacity_, other.capacity_);
  }

  char* memory_ = nullptr;
  T* records_ = nullptr;
  size_t size_ = 0, capacity_ = 0;
};

}  // namespace oper
