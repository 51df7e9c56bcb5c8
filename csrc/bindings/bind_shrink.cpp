#include "bindings/bind_shrink.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/shared/native_group.h"

namespace moe::bindings {

namespace py = pybind11;

namespace {

py::tuple to_tuple(const group::ShrinkDecision& decision) {
  return py::make_tuple(decision.failed_ranks, decision.survivors, decision.completed_epochs);
}

py::tuple shrink_agree(NativeGroup& native,
                       std::vector<int> failed_ranks,
                       std::string call,
                       std::string agreed,
                       std::string problem,
                       bool needs_majority) {
  group::ShrinkAgreement::Arguments arguments{std::move(failed_ranks),
                                              std::move(call),
                                              std::move(agreed),
                                              std::move(problem),
                                              needs_majority};
  group::ShrinkDecision decision;
  {
    const py::gil_scoped_release no_gil;
    decision = native.group->shrink_agreement().agree(arguments, signal_check());
  }
  return to_tuple(decision);
}

py::list shrink_gather(NativeGroup& native, const std::string& payload) {
  std::vector<std::string> payloads;
  {
    const py::gil_scoped_release no_gil;
    payloads = native.group->shrink_agreement().all_gather(payload, signal_check());
  }
  py::list gathered;
  for (const auto& item : payloads)
    gathered.append(py::bytes(item));
  return gathered;
}

py::object shrink_finish(NativeGroup& native, bool has_group) {
  std::optional<group::ShrinkDecision> decision;
  {
    const py::gil_scoped_release no_gil;
    decision = native.group->shrink_agreement().finish(has_group, signal_check());
  }
  return decision ? py::object(to_tuple(*decision)) : py::none();
}

}  // namespace

void bind_shrink(py::class_<NativeGroup, std::shared_ptr<NativeGroup>>& group) {
  group
      .def("shrink_agree",
           &shrink_agree,
           py::arg("failed_ranks"),
           py::arg("call"),
           py::arg("agreed"),
           py::arg("problem"),
           py::arg("needs_majority"))
      .def("shrink_gather", &shrink_gather, py::arg("payload"))
      .def("shrink_finish", &shrink_finish, py::arg("has_group"))
      .def(
          "shrink_check",
          [](NativeGroup& self) { self.group->shrink_ballots().check_round(); },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "shrink_refuse",
          [](NativeGroup& self, const std::string& text, bool is_mistake) {
            return self.group->shrink_ballots().refuse(text, is_mistake);
          },
          py::arg("text"),
          py::arg("is_mistake"),
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace moe::bindings
