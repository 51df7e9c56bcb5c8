#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "bindings/shared/tensor_view.h"
#include "core/dtype.h"
#include "ops/dispatch.h"
#include "ops/endpoint_base.h"
#include "ops/plan.h"

// The tensors of a call as nobody has checked them: a decode step takes longer to check them one by
// one than its rows take to travel. Where a glance does not show that they pass every rule of
// moe_comm/ep/validation.py, those rules decide, and word what is wrong.

namespace moe::bindings {

namespace py = pybind11;

/// A routing map as the list that dispatch takes, with the weights of its choices.
struct ListedChoices {
  int64_t num_topk = 1;            ///< the most of a token
  std::vector<int64_t> topk_idx;   ///< [num_tokens, num_topk], ascending, then -1
  std::vector<std::byte> weights;  ///< weights of these, 0 at a -1; empty for none
};

/// @param map    bool `[num_tokens, num_experts]`
/// @param probs       number for each place of @p map, of any type; empty for none
/// @param least_topk  Columns of the list at least
ListedChoices list_choices(const TensorView& map, const TensorView& probs, int64_t least_topk = 1);

/// The tensors of a dispatch.
struct DispatchTensors {
  int32_t row_type = 0;  ///< DLPack's
  TensorView rows;
  TensorView scales;  ///< scale factors of rows that are quantized already; else empty
  TensorView choices;
  TensorView weights;
  /// Memory that choices and weights lie in; may be null.
  std::shared_ptr<const ListedChoices> listed;
};

/// Nothing where a glance does not suffice.
/// @param topk_idx  A bool one is a routing map: @p topk_weights has a number for each of its
/// places.
/// @param options   Options of the call; its plan, if the dispatch is cached.
std::optional<DispatchTensors> see_dispatch(const ops::EndpointBase& endpoint,
                                            py::handle x,
                                            py::handle topk_idx,
                                            py::handle topk_weights,
                                            const ops::DispatchParams& options);

/// The tensors of a combine.
struct CombineTensors {
  DType dtype = DType::kBFloat16;
  TensorView rows;
  TensorView weights;
  TensorView row_weights;  ///< pulled; else empty
  TensorView out;          ///< empty for none
};

/// Nothing where a glance does not suffice; no weights are pulled.
std::optional<CombineTensors> see_combine(const ops::EndpointBase& endpoint,
                                          const ops::PlanHeader& plan,
                                          py::handle expert_out,
                                          py::handle topk_weights,
                                          py::handle out);

}  // namespace moe::bindings
