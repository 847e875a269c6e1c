// Checks whose failure Python raises as ValueError, TypeError, IndexError or RuntimeError:
//
//   OPER_CHECK_VALUE(size > 0, "size: expected 1 or more, got ", size);
//
// They replace TORCH_CHECK_VALUE and its variants. A function of its own makes the text, because
// the code that torch generates at each of some 230 checks took a tenth of the extension's compile
// time.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <ostream>
#include <string>
#include <string_view>

namespace oper {

// A piece of an error's text. It points to its value, which must outlive it.
class ErrorPart {
 public:
  ErrorPart(std::string_view text) : kind_(kText), text_(text) {}
  ErrorPart(const std::string& text) : ErrorPart(std::string_view(text)) {}
  ErrorPart(const char* text) : ErrorPart(std::string_view(text)) {}
  ErrorPart(std::signed_integral auto number) : kind_(kSigned), signed_(number) {}
  ErrorPart(std::unsigned_integral auto number) : kind_(kUnsigned), unsigned_(number) {}
  ErrorPart(std::floating_point auto number) : kind_(kReal), real_(number) {}
  ErrorPart(at::ScalarType type) : kind_(kType), type_(type) {}
  ErrorPart(at::Device device) : kind_(kDevice), device_(device) {}
  ErrorPart(at::IntArrayRef sizes) : kind_(kSizes), sizes_(sizes) {}

  friend std::ostream& operator<<(std::ostream& out, const ErrorPart& part);

 private:
  enum Kind { kText, kSigned, kUnsigned, kReal, kType, kDevice, kSizes };
  Kind kind_;
  union {
    std::string_view text_;
    int64_t signed_;
    uint64_t unsigned_;
    double real_;
    at::ScalarType type_;
    at::Device device_;
    at::IntArrayRef sizes_;
  };
};

using ErrorParts = std::initializer_list<ErrorPart>;

[[noreturn]] void throw_value_error(ErrorParts parts);
[[noreturn]] void throw_type_error(ErrorParts parts);
[[noreturn]] void throw_index_error(ErrorParts parts);
[[noreturn]] void throw_runtime_error(ErrorParts parts);

}  // namespace oper

#define OPER_CHECK_OR(fail, condition, ...) \
  do {                                      \
    if (!(condition)) [[unlikely]]          \
      ::oper::fail({__VA_ARGS__});          \
  } while (false)

#define OPER_CHECK(condition, ...) OPER_CHECK_OR(throw_runtime_error, condition, __VA_ARGS__)
#define OPER_CHECK_VALUE(condition, ...) OPER_CHECK_OR(throw_value_error, condition, __VA_ARGS__)
#define OPER_CHECK_TYPE(condition, ...) OPER_CHECK_OR(throw_type_error, condition, __VA_ARGS__)
#define OPER_CHECK_INDEX(condition, ...) OPER_CHECK_OR(throw_index_error, condition, __VA_ARGS__)
