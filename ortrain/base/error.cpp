// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"

namespace ortrain {

void check(bool condition, const char* message, std::source_location where) {
  if (condition) return;
  throw InternalError(
      str("internal error: ", message, " (", where.file_name(), ":", where.line(), ")"));
}

void rethrow_with_context(const std::string& context) {
  // Called inside a catch block: the current exception is the one to extend.
  try {
    throw;
  } catch (const InvalidModelError& error) {
    throw InvalidModelError(context + error.what());
  } catch (const ShapeError& error) {
    throw ShapeError(context + error.what());
  } catch (const DTypeError& error) {
    throw DTypeError(context + error.what());
  } catch (const IndexError& error) {
    throw IndexError(context + error.what());
  } catch (const UnsupportedError& error) {
    throw UnsupportedError(context + error.what());
  } catch (const DeviceError& error) {
    throw DeviceError(context + error.what());
  } catch (const FileError& error) {
    throw FileError(context + error.what());
  } catch (const OutOfMemoryError& error) {
    throw OutOfMemoryError(context + error.what());
  } catch (const InternalError& error) {
    throw InternalError(context + error.what());
  } catch (const Error& error) {
    throw Error(context + error.what());
  }
}

}  // namespace ortrain
