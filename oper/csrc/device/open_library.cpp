// Opening a library of kernels.

#include "device/open_library.h"

#include <dlfcn.h>
#include <elf.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "cpu/common/errors.h"
#include "oper/cuda/launchers.h"

namespace oper {
namespace {

// A library that was copied in part ends the process where it is opened. Linkers write the table of
// sections last.
void check_whole(const std::string& path) {
  std::error_code failed;
  const uintmax_t size = std::filesystem::file_size(path, failed);
  Elf64_Ehdr header = {};
  std::ifstream file(path, std::ios::binary);
  if (failed || !file) return;  // which the loader says better
  file.read(reinterpret_cast<char*>(&header), sizeof(header));
  const uintmax_t needed = header.e_shoff + uintmax_t{header.e_shnum} * header.e_shentsize;
  OPER_CHECK(file && needed <= size, path, " is cut off: it has ", size, " bytes; copy it again");
}

}  // namespace

OpenLibrary::OpenLibrary(const std::string& path, const char* what, const char* interface,
                         int64_t number)
    : what(what) {
  check_whole(path);
  handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  OPER_CHECK(handle, "cannot load ", what, ": ", dlerror());
  InterfaceNumber* number_of_library = nullptr;
  find(interface, number_of_library);
  OPER_CHECK(number_of_library() == number, path, " is of another version; build it again");
}

void* OpenLibrary::symbol(const char* name) const {
  void* const found = dlsym(handle, name);
  OPER_CHECK(found, "the library of ", what, " has no ", name,
             ": it is of another version; build it again");
  return found;
}

}  // namespace oper
