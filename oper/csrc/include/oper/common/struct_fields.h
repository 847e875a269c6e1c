// The fields of a struct as text, "int64 rows, uint64 reciprocal", by which Python finds that it
// declares the struct as the kernels do (oper/base/native.py).
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace oper {

// Text of a struct whose fields are added in order; all of them must be, and leave no gaps:
//
//     Fields<Point>().add("x", &Point::x).add("y", &Point::y).text()
template <typename Struct>
class Fields {
 public:
  template <typename T>
  Fields& add(const char* name, T Struct::* field) {
    const Struct example{};
    const auto* const first = reinterpret_cast<const char*>(&example);
    if (reinterpret_cast<const char*>(&(example.*field)) != first + bytes_) fail(name);
    text_ += (bytes_ ? ", " : "") + type_name<T>() + " " + name;
    bytes_ += sizeof(T);
    return *this;
  }

  const std::string& text() const {
    if (bytes_ != sizeof(Struct)) fail("the end");
    return text_;
  }

 private:
  // The name that NumPy has for a type.
  template <typename T>
  static std::string type_name() {
    static_assert(std::is_arithmetic_v<T>);
    const std::string kind = std::is_floating_point_v<T> ? "float"
                             : std::is_signed_v<T>       ? "int"
                                                         : "uint";
    return kind + std::to_string(8 * sizeof(T));
  }

  [[noreturn]] static void fail(const std::string& where) {
    throw std::logic_error("a field is missing before " + where);
  }

  std::string text_;
  size_t bytes_ = 0;
};

}  // namespace oper
