// fw_lion: the sign of an interpolation between momentum and gradient (optimizer.h).
#include "optimizer.h"

namespace {

struct Lion {
  static constexpr int kStates = 1;
  float beta1, one_minus_beta1, beta2, one_minus_beta2;

  __device__ __forceinline__ void element(const Range& range, float& p, float g, float& m, float&) const {
    p -= range.lr * range.weight_decay * p;
    const float direction = beta1 * m + one_minus_beta1 * g;
    p -= range.lr * static_cast<float>((direction > 0.0f) - (direction < 0.0f));
    m = beta2 * m + one_minus_beta2 * g;
  }
};

}  // namespace

FW_API int fw_lion(float* master, uint16_t* remainder, float* exp_avg, const void* grad, int grad_dtype, const fw_copies* copies,
                   const fw_range* ranges, int64_t n_ranges, double beta1, double beta2, const float* grad_factor, void* stream) {
  const Shard shard{
      master, remainder, {exp_avg, nullptr}, grad, grad_dtype, copies ? copies->data : nullptr, copies ? copies->dtype : 0, grad_factor};
  const Lion rule{static_cast<float>(beta1), static_cast<float>(1 - beta1), static_cast<float>(beta2), static_cast<float>(1 - beta2)};
  return run_optimizer(shard, copies, ranges, n_ranges, rule, stream);
}
