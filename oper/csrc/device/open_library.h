// A library of kernels that is opened while the process runs, and stays so.
#pragma once

#include <cstdint>
#include <string>

namespace oper {

class OpenLibrary {
 public:
  // `what` is in it, as errors say. RuntimeError where it cannot be loaded, is cut off, or its
  // function `interface` gives another number than this one: it was built from other sources.
  OpenLibrary(const std::string& path, const char* what, const char* interface, int64_t number);

  // Finds a function by its name; RuntimeError where there is none.
  template <typename Function>
  void find(const char* name, Function*& function) const {
    function = reinterpret_cast<Function*>(symbol(name));
  }

 private:
  void* symbol(const char* name) const;

  void* handle;
  const char* what;
};

}  // namespace oper
