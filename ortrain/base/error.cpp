// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"

namespace ortrain {

void check(bool condition, const char* message, std::source_location where) {
  if (condition) return;
  throw InternalError(
      str("internal error: ", message, " (", where.file_name(), ":", where.line(), ")"));
}

namespace {

// A frame that is there already is not put in front again.
std::string framed(const std::string& context, const Error& error) {
  const std::string message = error.what();
  return message.starts_with(printable(context)) ? message : context + message;
}

}  // namespace

void rethrow_with_context(const std::string& context) {
  // Called inside a catch block: the current exception is the one to extend.
  try {
    throw;
  } catch (const InvalidModelError& error) {
    throw InvalidModelError(framed(context, error));
  } catch (const ShapeError& error) {
    throw ShapeError(framed(context, error));
  } catch (const DTypeError& error) {
    throw DTypeError(framed(context, error));
  } catch (const IndexError& error) {
    throw IndexError(framed(context, error));
  } catch (const UnsupportedError& error) {
    throw UnsupportedError(framed(context, error));
  } catch (const DeviceError& error) {
    throw DeviceError(framed(context, error));
  } catch (const FileError& error) {
    throw FileError(framed(context, error));
  } catch (const OutOfMemoryError& error) {
    throw OutOfMemoryError(framed(context, error));
  } catch (const InternalError& error) {
    throw InternalError(framed(context, error));
  } catch (const Error& error) {
    throw Error(framed(context, error));
  }
}

}  // namespace ortrain
