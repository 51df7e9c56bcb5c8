# What tests run and import, all of which `test_programs` builds. A source distribution has none.
add_custom_target(test_programs)

# moe_comm_add_program(name objects...): tests/cpp/name.cpp, linked from what moe_comm_add_objects()
# names.
function(moe_comm_add_program name)
  list(TRANSFORM ARGN REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>" OUTPUT_VARIABLE objects)
  add_executable(${name} EXCLUDE_FROM_ALL "${PROJECT_SOURCE_DIR}/tests/cpp/${name}.cpp" ${objects})
  moe_comm_configure(${name})
  target_compile_options(${name} PRIVATE -O1)
  target_link_libraries(${name} PRIVATE Threads::Threads)
  add_dependencies(test_programs ${name})
endfunction()

foreach(name socket_rail group_leaves group_evicts group_gathers mesh_leaves group_recovers)
  moe_comm_add_program(${name} moe_comm_common moe_comm_rows)
endforeach()
moe_comm_add_program(region_pool)
target_sources(region_pool PRIVATE "${PROJECT_SOURCE_DIR}/csrc/nvshmem/region_pool.cpp")

# What only tests call of the CPU backend. setup.py puts this module into tests/.
set(sources "${PROJECT_SOURCE_DIR}/tests/cpp/host_testing.cpp"
  "${PROJECT_SOURCE_DIR}/tests/cpp/host_testing_kernels.cpp")
moe_comm_unite(host_testing ${sources})
moe_comm_add_bindings(moe_comm_host_testing ${sources})
moe_comm_add_module(_host_testing moe_comm_host_testing)
set_target_properties(_host_testing PROPERTIES EXCLUDE_FROM_ALL TRUE)
add_dependencies(test_programs _host_testing)

# The CPU backend with more formats in its table than the package has.
moe_comm_add_objects(moe_comm_more_wire_formats
  "${PROJECT_SOURCE_DIR}/tests/cpp/more_wire_formats.cpp")
moe_comm_add_module(_host_more_wire_formats moe_comm_host_bindings moe_comm_more_wire_formats)
get_target_property(sources _host_more_wire_formats SOURCES)
list(TRANSFORM sources REPLACE "^(.*:moe_comm_common>)$"
  "$<FILTER:\\1,EXCLUDE,/layout/wire_format>")
set_target_properties(_host_more_wire_formats PROPERTIES SOURCES "${sources}" OUTPUT_NAME _host
  LIBRARY_OUTPUT_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}/more_wire_formats"
  EXCLUDE_FROM_ALL TRUE)
add_dependencies(test_programs _host_more_wire_formats)

# Heap and sockets under sanitizers, which not every compiler brings: the tests that run these
# programs build them.
if(NOT MOE_COMM_SANITIZE)
  moe_comm_glob(sources core/*.cpp heap/*.cpp group/socket_rail.cpp)
  foreach(sanitizer thread address,undefined)
    string(REPLACE "," "_" suffix ${sanitizer})
    add_library(moe_comm_heap_${suffix} OBJECT ${sources})
    moe_comm_configure(moe_comm_heap_${suffix} ${sanitizer})
    foreach(name heap_stress mesh_stress socket_rail)
      add_executable(${name}_${suffix} EXCLUDE_FROM_ALL
        "${PROJECT_SOURCE_DIR}/tests/cpp/${name}.cpp" $<TARGET_OBJECTS:moe_comm_heap_${suffix}>)
      moe_comm_configure(${name}_${suffix} ${sanitizer})
      target_link_libraries(${name}_${suffix} PRIVATE Threads::Threads)
    endforeach()
  endforeach()
endif()

# Programs that run on the emulator.
foreach(name emulator_kernels emulator_memory emulator_streams)
  set(objects moe_comm_simt moe_comm_common moe_comm_rows)
  if(name STREQUAL "emulator_streams")
    list(PREPEND objects moe_comm_runtime moe_comm_kernels)
  endif()
  moe_comm_add_program(${name} ${objects})
  moe_comm_use_simt(${name})
endforeach()

# Copies of the sources that the catalogue has faults for, with all of them in (fault_catalogue.py).
set(catalogue_folder "${PROJECT_SOURCE_DIR}/tests/schedules")
set(copies_folder "${CMAKE_CURRENT_BINARY_DIR}/faults")
file(GLOB catalogue CONFIGURE_DEPENDS "${catalogue_folder}/faults/*.txt")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${catalogue})
set(faulty_files)
foreach(part ${catalogue})
  file(STRINGS "${part}" places REGEX "^@@ ")
  list(APPEND faulty_files ${places})
endforeach()
list(TRANSFORM faulty_files REPLACE "^@@ " "")
list(REMOVE_DUPLICATES faulty_files)
list(TRANSFORM faulty_files PREPEND "${PROJECT_SOURCE_DIR}/csrc/" OUTPUT_VARIABLE originals)
list(TRANSFORM faulty_files PREPEND "${copies_folder}/" OUTPUT_VARIABLE copies)
add_custom_command(OUTPUT ${copies}
  COMMAND Python::Interpreter "${catalogue_folder}/fault_catalogue.py" "${PROJECT_SOURCE_DIR}/csrc"
    "${copies_folder}"
  DEPENDS ${catalogue} ${originals} "${catalogue_folder}/fault_catalogue.py"
  COMMENT "Writing faults into copies of the sources" VERBATIM)
add_custom_target(moe_comm_copies DEPENDS ${copies})
# A copy is compiled as its original is.
foreach(file ${faulty_files})
  foreach(property LANGUAGE UNITY_GROUP COMPILE_OPTIONS)
    get_source_file_property(value "${PROJECT_SOURCE_DIR}/csrc/${file}" ${property})
    if(value)
      set_source_files_properties("${copies_folder}/${file}" PROPERTIES ${property} "${value}")
    endif()
  endforeach()
endforeach()

# moe_comm_put_faults(target): headers with faults come before those without, and what is slow to
# compile is optimized less: programs that run for a second have no use for more.
function(moe_comm_put_faults target)
  target_include_directories(${target} BEFORE PRIVATE "${copies_folder}" "${PROJECT_SOURCE_DIR}/tests")
  # Lines of the catalogue are indented as they like.
  target_compile_options(${target} PRIVATE -O1 -Wno-misleading-indentation)
  add_dependencies(${target} moe_comm_copies)
endfunction()

# moe_comm_add_faulty_objects(name sources...): moe_comm_add_objects(), with faults.
function(moe_comm_add_faulty_objects name)
  set(sources)
  foreach(source ${ARGN})
    file(RELATIVE_PATH file "${PROJECT_SOURCE_DIR}/csrc" "${source}")
    if(file IN_LIST faulty_files)
      list(APPEND sources "${copies_folder}/${file}")
    else()
      list(APPEND sources "${source}")
    endif()
  endforeach()
  moe_comm_add_objects(${name} ${sources})
  moe_comm_use_simt(${name})
  moe_comm_put_faults(${name})
endfunction()

# Kernels, for programs that compare the bytes they make.
moe_comm_glob(sources core/*.cpp layout/*.cpp cpu/row_kernels.cpp cpu/strided_copy.cpp cpu/this_machine.cpp kernels/combine.cu
  kernels/dispatch.cu kernels/strided_copy.cu kernels/weighted_gradient.cu simt/direct_memory.cpp
  simt/fiber.cpp simt/grid.cpp simt/scheduler.cpp)
moe_comm_add_faulty_objects(moe_comm_faulty ${sources})
foreach(name dispatch_kernel kernel_rows)
  moe_comm_add_program(${name} moe_comm_faulty moe_comm_rows)
endforeach()
target_sources(kernel_rows PRIVATE "${PROJECT_SOURCE_DIR}/tests/cpp/kernel_copies.cpp")
target_sources(dispatch_kernel PRIVATE "${PROJECT_SOURCE_DIR}/tests/schedules/spec.cpp")

# Operations on a device whose callers have streams, with faults in the phase that receives late.
moe_comm_add_faulty_objects(moe_comm_faulty_runtime ${MOE_COMM_RUNTIME_SOURCES})
moe_comm_add_program(stream_callers moe_comm_faulty_runtime moe_comm_kernels moe_comm_simt
  moe_comm_common moe_comm_rows)
foreach(name dispatch_kernel kernel_rows stream_callers)
  moe_comm_use_simt(${name})
  moe_comm_put_faults(${name})
endforeach()

# The whole, with every access checked: headers of tests/schedules/checked come before those of csrc,
# and files of tests/schedules are in the place of those that are left out. Host and kernels have words
# of their own for the order of an access.
file(GLOB kernel_checker CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/schedules/*.cpp")
set(host_checker ${kernel_checker})
list(FILTER host_checker INCLUDE REGEX "/host_[^/]*$")
moe_comm_unite(kernel_checker ${kernel_checker})
moe_comm_unite(host_checker ${host_checker})
set(sources ${MOE_COMM_COMMON_SOURCES} ${MOE_COMM_KERNEL_SOURCES} ${MOE_COMM_SIMT_SOURCES})
moe_comm_glob(replaced core/sync.cpp cpu/this_machine.cpp simt/direct_memory.cpp simt/nic.cpp
  simt/shared_regions.cpp)
list(REMOVE_ITEM sources ${replaced})
moe_comm_add_faulty_objects(moe_comm_checked ${sources} ${kernel_checker})
target_include_directories(moe_comm_checked BEFORE PRIVATE
  "${PROJECT_SOURCE_DIR}/tests/schedules/checked")
add_executable(schedules EXCLUDE_FROM_ALL
  $<TARGET_OBJECTS:moe_comm_checked> $<TARGET_OBJECTS:moe_comm_rows>)
set_target_properties(schedules PROPERTIES LINKER_LANGUAGE CXX)
moe_comm_configure(schedules)
moe_comm_use_simt(schedules)
add_dependencies(test_programs schedules)

# What runs on CUDA, over a runtime and a driver of the tests' own, with kernels on the emulator.
if(MOE_COMM_HAS_CUDA)
  moe_comm_add_program(worst_driver moe_comm_cuda moe_comm_runtime moe_comm_kernels moe_comm_simt
    moe_comm_common moe_comm_rows)
  file(GLOB stand_in CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/cpp/cuda_stand_in*.cpp")
  moe_comm_unite(stand_in ${stand_in})
  target_sources(worst_driver PRIVATE ${stand_in})
  target_include_directories(worst_driver SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  moe_comm_use_simt(worst_driver)
endif()
