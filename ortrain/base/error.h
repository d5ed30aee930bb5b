// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <source_location>
#include <sstream>
#include <stdexcept>
#include <string>

#include "ortrain/base/printable.h"

namespace ortrain {

// Base of everything the engine throws. Layers add a frame in front of the message with
// `with_context`, they do not write a new message. Messages are printable: names of files and
// graphs can neither steer a terminal nor break a decoder.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message) : std::runtime_error(printable(message)) {}
};

// A graph or file that breaks a rule of the format.   Python: ortrain.InvalidModelError(ValueError)
class InvalidModelError : public Error {
  using Error::Error;
};
// Shapes or ranks that do not fit.                     Python: ortrain.ShapeError(ValueError)
class ShapeError : public Error {
  using Error::Error;
};
// Element types that do not fit.                       Python: ortrain.DTypeError(TypeError)
class DTypeError : public Error {
  using Error::Error;
};
// A label or index outside of its range.               Python: IndexError
class IndexError : public Error {
  using Error::Error;
};
// Valid, but not supported here.                       Python: ortrain.UnsupportedError(NotImplementedError)
class UnsupportedError : public Error {
  using Error::Error;
};
// A result that is not a number, with ORTRAIN_CHECK_NAN. Python: ortrain.NanError(ArithmeticError)
class NanError : public Error {
  using Error::Error;
};
// A device that is missing or wrong.                   Python: ortrain.DeviceError(RuntimeError)
class DeviceError : public Error {
  using Error::Error;
};
// A file that cannot be opened, read or written.      Python: OSError
class FileError : public Error {
  using Error::Error;
};
// No memory.                                           Python: MemoryError
class OutOfMemoryError : public Error {
  using Error::Error;
};
// A mistake of ours.                                   Python: ortrain.InternalError(RuntimeError)
class InternalError : public Error {
  using Error::Error;
};

// str("axis ", 3, " of ", 2) -> "axis 3 of 2"
template <typename... Parts>
std::string str(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// Throws InternalError with the place of the call when `condition` is false.
void check(bool condition, const char* message,
           std::source_location where = std::source_location::current());

// Runs `body`; any ortrain error leaves with `context` in front of its message, its type kept.
[[noreturn]] void rethrow_with_context(const std::string& context);

template <typename Body>
auto with_context(const std::string& context, Body&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const Error&) {
    rethrow_with_context(context);
  }
}

}  // namespace ortrain
