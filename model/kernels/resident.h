// Weights copied into huge pages, where reading them takes a twentieth of the entries of the processor's page tables.
//
// ONNX Runtime leaves what a file stores where the system maps the file, in pages of 4 KiB. Copies of one session lie
// behind each other in slabs, as most matrices are smaller than a huge page; a slab goes with the last copy in it.
#pragma once

#include <cstddef>
#include <memory>

namespace onward {

// A copy of `size` bytes, which begins at a cache line. Where the bytes are a mapped file's, their pages are given back:
// whoever reads them there again has them read from the file again. Throws `std::bad_alloc`.
std::shared_ptr<const void> make_resident(const void* bytes, size_t size);

// The same for rows of `width` bytes each, which begin `pitch` bytes apart in the copy.
std::shared_ptr<const void> make_resident(const void* bytes, size_t width, size_t num_rows, size_t pitch);

}  // namespace onward
