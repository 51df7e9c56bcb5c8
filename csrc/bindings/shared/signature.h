#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

namespace moe::bindings {

/// Arguments of a bound function as Python writes them, in place of a `py::arg` for each:
/// names, defaults (literals) behind "=", and "*" before those that are given by name alone.
///
///     module.def("crc32c", &crc32c, Signature("data, isa=None, crc=0"));
class Signature {
 public:
  explicit Signature(const std::string& text) {
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = std::min(text.find(", ", begin), text.size());
      const std::string argument = text.substr(begin, end - begin);
      const size_t equal = std::min(argument.find('='), argument.size());
      arguments_.push_back({argument.substr(0, equal), argument.substr(equal)});
      begin = end + 2;
    }
  }

  /// Adds the arguments to a function that is being bound.
  /// @throws std::logic_error  They are not as many as the function has.
  void add_to(pybind11::detail::function_record* record) const {
    using pybind11::detail::process_attribute;
    size_t num_named = record->is_method ? 1 : 0;
    for (const Argument& argument : arguments_)
      num_named += argument.name != "*" ? 1 : 0;
    if (num_named != record->nargs_pos)
      throw std::logic_error(std::string(record->name) + ": expected names of " +
                             std::to_string(record->nargs_pos) + " arguments, got " +
                             std::to_string(num_named));
    for (const auto& [name, value] : arguments_) {
      const pybind11::arg named(name.c_str());
      if (name == "*")
        process_attribute<pybind11::kw_only>::init({}, record);
      else if (value.empty())
        process_attribute<pybind11::arg>::init(named, record);
      else
        process_attribute<pybind11::arg_v>::init(named = literal(value.substr(1)), record);
    }
  }

 private:
  struct Argument {
    std::string name;
    std::string value;  ///< default behind "=", or ""
  };

  static pybind11::object literal(const std::string& text) {
    return pybind11::module_::import("ast").attr("literal_eval")(text);
  }

  std::vector<Argument> arguments_;
};

}  // namespace moe::bindings

namespace pybind11::detail {

template <>
struct process_attribute<moe::bindings::Signature>
    : process_attribute_default<moe::bindings::Signature> {
  static void init(const moe::bindings::Signature& signature, function_record* record) {
    signature.add_to(record);
  }
};

}  // namespace pybind11::detail
