// Checks whether a pointer may be redirected.
#pragma once

namespace amanda {

// Returns true if a function's code is in a library in `folder`.
bool lies_in(const void* address, const char* folder);

// Returns true if the page of an address is writable; the last answer is cached.
bool is_writable_page(const void* address);

}  // namespace amanda
