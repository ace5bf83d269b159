// Copies of weights in huge pages, which need a twentieth of the TLB entries.
//
// ONNX Runtime reads weights in the mapped file, in pages of 4 KiB. Copies share slabs, since most matrices are smaller
// than a huge page; a slab is freed with its last copy.
#pragma once

#include <cstddef>
#include <memory>

namespace onward {

// A copy of `size` bytes, aligned to a cache line; callers that pass the same bytes of the same place share one. If the
// bytes are a mapped file's, their pages are released: a later read loads them from the file again. Throws
// `std::bad_alloc`.
std::shared_ptr<const void> make_resident(const void* bytes, size_t size);

// The same for rows of `width` bytes, `pitch` bytes apart in the copy.
std::shared_ptr<const void> make_resident(const void* bytes, size_t width, size_t num_rows, size_t pitch);

}  // namespace onward
