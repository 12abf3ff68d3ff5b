// fw_adamw: decoupled weight decay, moments, bias correction, in one pass (optimizer.h).
#include "optimizer.h"

namespace {

struct AdamW {
  static constexpr int kStates = 2;
  float one_minus_beta1, beta2, one_minus_beta2, eps;

  __device__ __forceinline__ void element(const Range& range, float& p, float g, float& m, float& v) const {
    p -= range.lr * range.weight_decay * p;
    m += one_minus_beta1 * (g - m);
    v = beta2 * v + one_minus_beta2 * g * g;
    p -= range.lr / range.bias_correction1 * m / (sqrtf(v) / range.bias_correction2_sqrt + eps);
  }
};

}  // namespace

FW_API int fw_adamw(float* master, uint16_t* remainder, float* exp_avg, float* exp_avg_sq, const void* grad, int grad_dtype,
                    const fw_copies* copies, const fw_range* ranges, int64_t n_ranges, double beta1, double beta2, double eps,
                    const float* grad_factor, void* stream) {
  const Shard shard{
      master, remainder, {exp_avg, exp_avg_sq}, grad, grad_dtype, copies ? copies->data : nullptr, copies ? copies->dtype : 0, grad_factor};
  const AdamW rule{static_cast<float>(1 - beta1), static_cast<float>(beta2), static_cast<float>(1 - beta2), static_cast<float>(eps)};
  return run_optimizer(shard, copies, ranges, n_ranges, rule, stream);
}
