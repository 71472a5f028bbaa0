// Which pointers may be redirected.
#pragma once

namespace amanda {

// Whether a function's code lies in a library in `folder`.
bool lies_in(const void* address, const char* folder);

// Whether the page of an address can be written; the last answer is kept.
bool is_writable_page(const void* address);

}  // namespace amanda
