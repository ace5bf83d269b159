// Every kernel by four threads, for two callers at once, as many rounds as the argument says: a program for
// ThreadSanitizer, which ONNX Runtime and Python are not built for. The threads are lent as a session lends its own.
// Exits with 1 where a caller gets other bits than one thread gives, or copies of weights are not shared as they should.

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "attention.h"
#include "float_linear.h"
#include "int4_linear.h"
#include "linear.h"
#include "lookup.h"
#include "resident.h"
#include "rows.h"

namespace {

using Floats = std::vector<float>;

constexpr int kThreads = 4;
constexpr int kCallers = 2;

// Takes indices one after the other, as a session's threads do; `context` says how many threads there are.
void lend(void* context, void (*fn)(void*, size_t), size_t count, void* data) {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t index = next++; index < count; index = next++) fn(data, index);
  };
  std::vector<std::thread> others;
  for (int i = 1; i < *static_cast<int*>(context); ++i) others.emplace_back(work);
  work();
  for (auto& other : others) other.join();
}

template <typename Number>
std::vector<Number> draw(size_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::vector<Number> numbers(count);
  if constexpr (sizeof(Number) == 4) {
    std::normal_distribution<float> normal;
    for (auto& number : numbers) number = normal(generator);
  } else {
    for (auto& number : numbers) number = static_cast<Number>(generator());
  }
  return numbers;
}

template <typename Number>
void attend(const onward::Parallel& parallel, uint32_t seed, int64_t count, Floats* results) {
  constexpr int64_t kBatch = 3, kHeads = 4, kKvHeads = 2, kDim = 64, kCapacity = 300;
  const onward::AttentionShape shape{kBatch, count, kCapacity, kHeads, kKvHeads, kDim, kCapacity, 0, 0.125f, true};
  auto keys = draw<Number>(kBatch * kKvHeads * kCapacity * kDim, seed + 1);
  auto values = draw<Number>(keys.size(), seed + 2);
  const Floats query = draw<float>(kBatch * count * kHeads * kDim, seed + 3);
  const Floats new_keys = draw<float>(kBatch * count * kKvHeads * kDim, seed + 4);
  const Floats scales(kKvHeads * kDim, 0.02f), turns = draw<float>(kCapacity * kDim / 2, seed + 5);
  const std::vector<int32_t> last = {kCapacity - 1, 150, 99};
  Floats output(query.size());
  onward::AttentionTensors<Number> tensors{};
  tensors.query = query.data();
  tensors.key = tensors.value = new_keys.data();
  tensors.query_stride = kHeads * kDim;
  tensors.key_stride = kKvHeads * kDim;
  tensors.past_key = keys.data();
  tensors.past_value = values.data();
  if constexpr (sizeof(Number) == 1) tensors.key_scales = tensors.value_scales = scales.data();
  tensors.last = last.data();
  tensors.cosines = tensors.sines = turns.data();
  tensors.output = output.data();
  onward::attend(parallel, shape, tensors);
  results->insert(results->end(), output.begin(), output.end());
  results->insert(results->end(), keys.begin(), keys.end());
}

// What all kernels give, one after the other, of numbers that `seed` decides.
Floats compute(int threads, uint32_t seed) {
  constexpr int64_t kRows = 70, kInner = 512, kOuter = 330, kGated = 320;
  const onward::Parallel parallel{&threads, lend};
  const Floats rows = draw<float>(kRows * kInner, seed + 6), bias = draw<float>(kOuter, seed + 7);
  Floats results, output(kRows * kOuter);
  const auto keep = [&](const Floats& found) { results.insert(results.end(), found.begin(), found.end()); };

  if (onward::can_multiply_floats()) {
    const Floats weights = draw<float>(kInner * kOuter, seed + 8);
    const auto copy = onward::make_resident(weights.data(), weights.size() * sizeof(float));
    const onward::FloatProduct product{kInner, kOuter, bias.data(), true};
    const onward::FloatMatrix<float> matrix{product, static_cast<const float*>(copy.get()), kInner};
    onward::multiply(parallel, rows.data(), kRows, matrix, output.data());
    keep(output);
    std::vector<onward::Bfloat16> halves(weights.size());
    for (size_t i = 0; i < halves.size(); ++i)
      std::memcpy(&halves[i], reinterpret_cast<const char*>(&weights[i]) + sizeof halves[i], sizeof halves[i]);
    const onward::FloatMatrix<onward::Bfloat16> half{product, halves.data(), kInner};
    onward::multiply(parallel, rows.data(), kRows, half, output.data());
    keep(output);
  }
  if (onward::can_multiply()) {
    const auto panels = draw<int8_t>((kOuter + 31) / 32 * 32 * kInner, seed + 9);
    const Floats scales = draw<float>(kOuter, seed + 10);
    std::vector<int32_t> offsets(kOuter);
    onward::Int8Matrix bytes{panels.data(), kInner, kOuter, scales.data(), bias.data(), offsets.data(), {}};
    onward::sum_columns(bytes, 128, offsets.data());
    const onward::Rounding rounding{1.0f / 127, 128};
    onward::multiply(parallel, rows.data(), kRows, rounding, bytes, output.data());
    keep(output);
    bytes.num_columns = kGated, bytes.activation = onward::Activation::kSwiGlu;
    onward::multiply(parallel, rows.data(), kRows, rounding, bytes, output.data());
    keep(output);
    const auto codes = draw<uint8_t>((kOuter + 15) / 16 * 16 * kInner / 2, seed + 11);
    const std::vector<uint16_t> halves((kOuter + 15) / 16 * 16 * kInner / 32, 0x2E66);  // 0.1
    onward::Int4Matrix nibbles{codes.data(), halves.data(), kInner, kOuter, nullptr, {}};
    onward::multiply(parallel, rows.data(), kRows, nibbles, output.data());
    keep(output);
    std::vector<int64_t> ids(kRows);
    Floats found(kRows * kInner);
    for (int64_t row = 0; row < kRows; ++row) ids[row] = 7 * row % kGated;
    onward::look_up(parallel, ids.data(), kRows, bytes, found.data());
    keep(found);
    onward::look_up(parallel, ids.data(), kRows, nibbles, found.data());
    keep(found);
    nibbles.num_columns = kGated, nibbles.activation = onward::Activation::kSwiGlu;
    onward::multiply(parallel, rows.data(), kRows, nibbles, output.data());
    keep(output);
  }
  if (onward::can_compute_rows()) {
    Floats sums(rows.size()), normed(rows.size()), gated(rows.size() / 2);
    const onward::Addition addition{rows.data(), rows.data(), sums.data(), kRows, kInner};
    onward::add_rms_norm(parallel, addition, rows.data(), 1e-5f, normed.data());
    keep(normed);
    onward::add_layer_norm(parallel, addition, rows.data(), rows.data(), 1e-5f, normed.data());
    keep(normed);
    onward::swiglu(parallel, rows.data(), kRows, kInner / 2, gated.data());
    keep(gated);
  }
  if (onward::can_attend()) {
    for (const int64_t count : {1, 40, 100}) {  // K is read as it lies, packed, and in tiles
      attend<float>(parallel, seed, count, &results);
      attend<int8_t>(parallel, seed, count, &results);
    }
  }
  return results;
}

}  // namespace

// Whether equal bytes share a copy, and changed ones at their place get a new one.
bool shares_copies() {
  Floats weights = draw<float>(1 << 14, 0);
  const auto make = [&] { return onward::make_resident(weights.data(), 1024, 64, 1088); };
  const auto first = make(), second = make();
  weights.back() += 1;
  const auto other = make();
  return first == second && other != first && static_cast<const float*>(other.get())[63 * 272 + 255] == weights.back();
}

int main(int, char** arguments) {
  const int num_rounds = std::atoi(arguments[1]);
  // Callers' numbers differ: what one writes into the other's memory is seen, even where ThreadSanitizer sees no write,
  // as of those with a mask.
  std::vector<Floats> expected;
  for (int caller = 0; caller < kCallers; ++caller) expected.push_back(compute(1, 100 * caller));
  std::atomic<int> num_wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&, caller] {
      for (int round = 0; round < num_rounds; ++round) {
        const Floats found = compute(kThreads, 100 * caller);
        num_wrong += found.size() != expected[caller].size() ||
                     std::memcmp(found.data(), expected[caller].data(), found.size() * sizeof(float)) != 0;
      }
    });
  }
  for (auto& caller : callers) caller.join();
  std::printf("%zu numbers, %d of %d rounds wrong\n", expected[0].size(), num_wrong.load(), kCallers * num_rounds);
  return num_wrong != 0 || !shares_copies();
}
