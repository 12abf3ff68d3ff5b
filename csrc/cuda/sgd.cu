// fw_sgd: torch.optim.SGD with coupled weight decay; with or without a momentum buffer (optimizer.h).
#include "optimizer.h"

namespace {

template <bool kMomentum>
struct Sgd {
  static constexpr int kStates = kMomentum ? 1 : 0;
  float momentum, one_minus_dampening;
  bool nesterov, first_step;

  __device__ __forceinline__ void element(const Range& range, float& p, float g, float& buffer, float&) const {
    g += range.weight_decay * p;
    if constexpr (kMomentum) {
      buffer = first_step ? g : momentum * buffer + one_minus_dampening * g;
      g = nesterov ? g + momentum * buffer : buffer;
    }
    p -= range.lr * g;
  }
};

}  // namespace

FW_API int fw_sgd(float* master, uint16_t* remainder, float* momentum_buffer, const void* grad, int grad_dtype, const fw_copies* copies,
                  const fw_range* ranges, int64_t n_ranges, double momentum, double dampening, int nesterov, int first_step,
                  const float* grad_factor, void* stream) {
  const Shard shard{
      master,     remainder, {momentum_buffer, nullptr}, grad, grad_dtype, copies ? copies->data : nullptr, copies ? copies->dtype : 0,
      grad_factor};
  const float mu = static_cast<float>(momentum), kept = static_cast<float>(1 - dampening);
  if (momentum_buffer) return run_optimizer(shard, copies, ranges, n_ranges, Sgd<true>{mu, kept, nesterov != 0, first_step != 0}, stream);
  if (momentum != 0) return FW_INVALID;
  return run_optimizer(shard, copies, ranges, n_ranges, Sgd<false>{mu, kept, false, false}, stream);
}
