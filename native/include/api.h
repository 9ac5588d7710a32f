// The C ABI of moet's native library: what is exported, and how an error leaves it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>

#define MOET_API extern "C" __attribute__((visibility("default")))

namespace moet {

// Runs `body`; an exception becomes -1 and its text in err (NUL-terminated, cut to err_len). Nothing is ever thrown across the ABI.
template <typename F>
int guarded(char* err, size_t err_len, F&& body) noexcept {
  try {
    body();
    return 0;
  } catch (const std::exception& e) {
    if (err && err_len) std::snprintf(err, err_len, "%s", e.what());
  } catch (...) {
    if (err && err_len) std::snprintf(err, err_len, "unknown C++ exception");
  }
  return -1;
}

}  // namespace moet
