#include "cpu/common/errors.h"

#include <c10/util/Exception.h>

#include <sstream>

namespace oper {
namespace {

std::string joined(ErrorParts parts) {
  std::ostringstream text;
  for (const ErrorPart& part : parts) text << part;
  return text.str();
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const ErrorPart& part) {
  switch (part.kind_) {
    case ErrorPart::kText: return out << part.text_;
    case ErrorPart::kSigned: return out << part.signed_;
    case ErrorPart::kUnsigned: return out << part.unsigned_;
    case ErrorPart::kReal: return out << part.real_;
    case ErrorPart::kType: return out << part.type_;
    case ErrorPart::kDevice: return out << part.device_;
    case ErrorPart::kSizes: return out << part.sizes_;
  }
  return out;
}

void throw_value_error(ErrorParts parts) { C10_THROW_ERROR(ValueError, joined(parts)); }
void throw_type_error(ErrorParts parts) { C10_THROW_ERROR(TypeError, joined(parts)); }
void throw_index_error(ErrorParts parts) { C10_THROW_ERROR(IndexError, joined(parts)); }
void throw_runtime_error(ErrorParts parts) { C10_THROW_ERROR(Error, joined(parts)); }

}  // namespace oper
