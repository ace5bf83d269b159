// What follows a product, in the same operator.
#pragma once

namespace onward {

enum class Activation {
  kNone,
  kGelu,
  kSwiGlu,  // columns are gates, then as many ups: silu(gate) · up
};

}  // namespace onward
