/* Compiled once for every instruction set, with FW_ISA set to its name. */
#include "loops.h"

#include "flat_loops.h"
#include "layer_loops.h"
#include "optimizer_loops.h"
#include "quantize_loops.h"

namespace FW_ISA {

extern const Loops loops = {
    adamw,          lion,           sgd,              join_master,       square_sum,     cast,     quantize,       dequantize,
    add_dequantized, nf4_dequantize, rms_norm_forward, rms_norm_backward, add_rows,       rope,     swiglu_forward, swiglu_backward,
    cross_entropy,  move,
};

}  // namespace FW_ISA
